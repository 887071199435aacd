"""The messages of the KV cache's own extensions to the worker, and the settings and protocol that both sides know.

The worker imports this module alone; the extensions themselves (`windows.py`, `states.py`, `tier.py`) run beside the
scheduler, and only in engines that need them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Protocol

import msgspec

from kvern.request.step import ExtensionMessage, GrownTable
from kvern.request.store_figures import StoreFigures


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
ALL_STEPS = 1 << 62
"""The number of a step behind all others."""


class StateMessage(ExtensionMessage, frozen=True, array_like=True, gc=False):
    """The changes of states before a step.

    `copies` has (source, target) pairs, to be copied in this order; a source of NO_STATE means zeros. `given` has
    (row, state) pairs: the rows of requests that join or fork in this step.
    """

    extension: ClassVar[str] = "states"

    copies: list[tuple[int, int]]
    given: list[tuple[int, int]]


PAGE_TOKENS = 64
"""The tokens of a page of a tier, where blocks are not larger: pages have whole blocks."""


def blocks_of_page(block_size: int) -> int:
    """The number of blocks of a page."""
    return max(1, PAGE_TOKENS // block_size)


class Part(Enum):
    """A part of what the cache has of a page's tokens. Each is kept, found and loaded by itself, under the same key."""

    BLOCKS = "blocks"
    """Keys and values of layers without a window."""
    WINDOWS = "windows"
    """The blocks of layers with a window, in all of their block tables."""
    STATE = "state"
    """The state of layers after the last token."""
    DRAFT = "draft"
    """Keys and values of a draft model. A hit does without: they are computed again."""

    __hash__ = object.__hash__  # that of `Enum` takes ten times as long


class PageSave(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Keep parts of a page: `tables` has its blocks in each block table, or none of a table.

    `key` is the content key of its last block. `state` is its state; NO_STATE: none is kept. `draft`: the blocks whose
    keys of a draft model are kept.
    """

    key: bytes
    tables: list[list[int]]
    state: int = NO_STATE
    draft: list[int] = []


class PageLoad(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One part of a page of a load, which come in order.

    It is written to the blocks of `tables`, of which -1 are left out, to a `state`, or to blocks of a draft model's
    cache, `draft`. The load may take `patience` seconds in any case. `store` has it: distant stores are asked by the
    first rank alone.
    """

    load: int
    key: bytes
    tables: list[list[int]]
    state: int = NO_STATE
    patience: float = 0.0
    draft: list[int] = []
    store: str = ""


class TierMessage(ExtensionMessage, frozen=True, array_like=True, gc=False):
    """Pages to be saved before a step changes a block, pages to be loaded, and loads that need no more reports.

    `written` are pages that the step itself writes, to be saved once it has. If `awaited`, other ranks tell when they
    have saved theirs.
    A step that computes something also tells of which blocks that were loaded a draft model has keys now, `drafted`,
    and of which it has not, `undrafted`.
    """

    extension: ClassVar[str] = "tier"

    saves: list[PageSave]
    loads: list[PageLoad]
    ended: list[int]
    drafted: list[int] = msgspec.field(default_factory=list)
    undrafted: list[int] = msgspec.field(default_factory=list)
    written: list[PageSave] = msgspec.field(default_factory=list)
    awaited: bool = False


class EncodingStart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An image that is encoded from this step on: its width and height as a file, the bytes of its
    patches' pixels, and the places of its rows."""

    number: int
    key: bytes
    size: tuple[int, int]
    pixels: Any
    places: list[int]


class ImageMessage(ExtensionMessage, frozen=True, array_like=True, gc=False):
    """The work on images before a step, in this order.

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
    """Knows which parts of pages are kept, by their content keys, and whether loading them pays.

    The scheduler calls it while it plans a step, so each method returns at once: it asks no disk and no network. It may
    be wrong: a page that is not there, or comes too late, is a shorter load.
    """

    identity: bytes
    """The beginning of content keys: the model, its number formats, the size of blocks."""
    keeps_drafts: bool
    """There is a draft model whose keys are kept, `Part.DRAFT`."""

    def wants(self, key: bytes, part: Part) -> bool:
        """Returns whether a part that is written should be saved; False if it is kept already."""

    def source(self, key: bytes, part: Part) -> str | None:
        """Returns the name of the store from which a part would be loaded now; None: probably none has it."""

    def is_saving(self, key: bytes, part: Part) -> bool:
        """Returns whether a part that was to be saved is on its way to a store."""

    def others_saved(self) -> int:
        """Returns the step of the last message, of those that are awaited, whose pages all other ranks have saved."""

    def pays(
        self,
        pages: Sequence[tuple[str, Part]],
        start: int,
        end: int,
        ahead: Sequence[tuple[int, int]] = (),
        is_next: bool = True,
    ) -> bool:
        """Returns whether loading pages is faster than computing the tokens `start` to `end` of a prompt.

        `pages`: the stores that have them (`source`), and their parts. `ahead`: tokens of other prompts that are
        computed before, in which time pages may come, too. `is_next`: if it does not pay, they are computed now.
        """

    def patience(self, start: int, end: int) -> float:
        """Returns the seconds that a load of these tokens may take in any case, however short it should be."""

    def ask(self, pages: Iterable[tuple[bytes, Part]]) -> int | None:
        """Begins to ask distant stores for pages. Returns what `answered` takes; None: there is nothing to wait for."""

    def figures(self) -> dict[str, StoreFigures]:
        """Returns the figures of the stores by name."""

    def answered(self, question: int) -> bool:
        """Returns whether `source` knows what there is to know: answers have come, or they take too long."""
