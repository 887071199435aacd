"""What the KV cache's own extensions tell the worker with a step, and the settings and protocol that both sides know.

The worker imports this module alone; the extensions themselves (`windows.py`, `states.py`, `tier.py`) run beside the
scheduler, and only in engines that need them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import msgspec

from kvern.request.step import ExtensionMessage, GrownTable


@dataclass(frozen=True)
class WindowLimits:
    """The number of keys that a query sees, its own included, the number of block tables, and the tokens of a step.

    `positions`: in a model whose layers all have a window, how many numbers the blocks of the prefix tree have; nothing
    is stored there. 0: they are blocks of the same pool.
    """

    window: int
    tables: int
    step_tokens: int
    positions: int = 0

    @property
    def held_tokens(self) -> int:
        """The most tokens that a request holds, beside parts of blocks at both ends."""
        return 2 * self.window + self.step_tokens


class WindowMessage(ExtensionMessage, frozen=True, array_like=True, gc=False):
    """New entries of the block tables of layers with a window."""

    extension: ClassVar[str] = "windows"

    grown: list[GrownTable]


NO_STATE = -1


class StateMessage(ExtensionMessage, frozen=True, array_like=True, gc=False):
    """The changes of states before a step.

    `copies` has (source, target) pairs, to be copied in this order; a source of NO_STATE means zeros. `given` has
    (row, state) pairs: the rows of requests that join or fork in this step.
    """

    extension: ClassVar[str] = "states"

    copies: list[tuple[int, int]]
    given: list[tuple[int, int]]


class BlockSave(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Keep the keys and values of `block` under `key`."""

    block: int
    key: bytes


class BlockLoad(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Write what is kept under `key` to `block`: one of the blocks of the load of this number, in their order."""

    load: int
    key: bytes
    block: int


class TierMessage(ExtensionMessage, frozen=True, array_like=True, gc=False):
    """Blocks to be saved before a step changes any, blocks to be loaded, and the loads that need no more reports."""

    extension: ClassVar[str] = "tier"

    saves: list[BlockSave]
    loads: list[BlockLoad]
    ended: list[int]


class EncodingStart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An image that is encoded from this step on: its width and height as a file, the bytes of its
    patches' pixels, and the places of its rows."""

    number: int
    key: bytes
    size: tuple[int, int]
    pixels: Any
    places: list[int]


class ImageMessage(ExtensionMessage, frozen=True, array_like=True, gc=False):
    """What is done about images before a step, in this order.

    `dropped` are given up, `begun` begin, and of the images of `parts` (number, count) so many parts are computed.
    The rows of those that are `ended` by that are written to their places, and the report has their numbers, each with
    what is wrong, if anything is.
    """

    extension: ClassVar[str] = "images"

    dropped: list[int]
    begun: list[EncodingStart]
    parts: list[tuple[int, int]]
    ended: list[int]


class TierIndex(Protocol):
    """Decides which blocks are kept, by their content keys.

    The scheduler calls it while it plans a step, so each method returns at once: it answers from an index in memory and
    asks no disk and no network. The index may be out of date: a key whose bytes are gone is a shorter load.
    """

    def put(self, key: bytes, block: int) -> bool:
        """Returns True to have `block`, which is written, saved; False if it is kept already or not wanted."""
        ...

    def acquire(self, keys: Iterable[bytes]) -> list[bytes]:
        """Returns the leading keys that are kept, up to the first that is not. They are kept until their release."""
        ...

    def release(self, keys: Sequence[bytes]) -> None:
        """Releases keys whose blocks have been loaded, or will not be."""
        ...

    def lose(self, keys: Sequence[bytes]) -> None:
        """The steps that were to save these have failed: they are not kept."""
        ...
