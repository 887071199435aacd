"""Loads from a tier of the KV cache that are on their way, and what is known of a prompt when one is decided on."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvern.cache.messages import NO_STATE, Part
from kvern.cache.radix import Node
from kvern.cache.windows import Blocks
from kvern.request.request import Request


class LoadedPage(NamedTuple):
    """A part of a page that is to be loaded, the number of blocks up to its end, and the store that has it.

    `windows`: the numbers of the blocks of layers with a window that are loaded.
    """

    key: bytes
    part: Part
    end: int
    store: str
    windows: Sequence[int] = ()


@dataclass(eq=False)
class PendingLoad:
    """Pages that are being loaded to `blocks`, which follow `path`, whose nodes stay; no request has them yet.

    The first `known` blocks were in the tree, where a request could continue from `usable` tokens. `windows` has the
    blocks of layers with a window by their numbers.
    """

    namespace: bytes
    path: list[Node]
    usable: int
    edges: list[bytes]
    pages: list[LoadedPage]
    blocks: list[int]
    step: int
    waiting: list[Request]
    windows: dict[int, Blocks]
    state: int = NO_STATE
    lacking: int = 0
    """Blocks that the requests that wait need beside these."""
    known: int = field(init=False)

    def __post_init__(self) -> None:
        self.known = len(self.path)

    def add(self, request: Request, block_size: int) -> None:
        """Another request waits for these pages."""
        self.waiting.append(request)
        self.lacking += max(0, -(-len(request.token_ids) // block_size) - self.known - len(self.blocks))


class KnownPrompt(NamedTuple):
    """What the prefix tree has of a request: `path`, and `usable` tokens, from which it can continue now.

    `contents` has one integer for each position, `sources` the stores that have parts of pages, as far as was asked.
    """

    request: Request
    contents: Sequence[int]
    path: list[Node]
    usable: int
    sources: dict[tuple[bytes, Part], str | None]


def loaded_page(prompt: KnownPrompt, key: bytes, part: Part, end: int) -> LoadedPage:
    """A part of a page that a store has."""
    return LoadedPage(key, part, end, prompt.sources[key, part] or "")


def left_by(loads: Iterable[PendingLoad], block_size: int) -> list[tuple[int, int]]:
    """What the requests that wait for loads compute afterwards: a load that stands in line behind these has that
    time."""
    ends = [(load, (load.known + len(load.blocks)) * block_size) for load in loads]
    return [(end, len(request.token_ids)) for load, end in ends for request in load.waiting]
