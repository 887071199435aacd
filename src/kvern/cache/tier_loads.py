"""Loads from a tier of the KV cache that are on their way, and what is known of a prompt when one is decided on."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

from kvern.cache.messages import NO_STATE, PageLoad, Part
from kvern.cache.radix import Node
from kvern.cache.windows import Blocks
from kvern.request.request import Request

LEFT_OUT = -1
"""A number in the place of a block that is not loaded."""


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
    ahead_of: str = ""
    """The request that will come, for which pages are loaded though nobody waits for them yet."""
    known: int = field(init=False)

    def __post_init__(self) -> None:
        self.known = len(self.path)

    def add(self, request: Request, block_size: int) -> None:
        """Another request waits for these pages."""
        self.waiting.append(request)
        self.lacking += max(0, -(-len(request.token_ids) // block_size) - self.known - len(self.blocks))

    def message(self, number: int, page: LoadedPage, page_blocks: int, windows: int, patience: float) -> PageLoad:
        """Returns the message of a part of a page of load `number`, with so many tables of blocks with windows."""
        own = range(page.end - page_blocks, page.end)
        blocks = [self.blocks[index - self.known] if index >= self.known else LEFT_OUT for index in own]
        left_out = (LEFT_OUT,) * windows
        columns = zip(*(self.windows[index] if index in page.windows else left_out for index in own), strict=True)
        tables = [blocks if page.part is Part.BLOCKS else [], *map(list, columns)]
        state = self.state if page.part is Part.STATE else NO_STATE
        draft = blocks if page.part is Part.DRAFT else []
        return PageLoad(number, page.key, tables, state, patience, draft, page.store)


MOST_AHEAD = 256
"""Requests that will come, of which it is remembered what was loaded for them."""


class LoadedSpans:
    """The tokens of the prompts of requests that wait, or will come, by the stores that have given them."""

    def __init__(self, stores: Sequence[str]) -> None:
        self._stores = stores
        self._spans: WeakKeyDictionary[Request, list[tuple[str, int, int]]] = WeakKeyDictionary()
        """The store, the first token that it gave, and the one after it."""
        self._ahead: dict[str, list[tuple[str, int, int]]] = {}

    def note(self, load: PendingLoad, count: int, block_size: int) -> None:
        """The first pages of a load have come: each gives the tokens from which no request could go on without it."""
        before = min(load.usable, load.known * block_size)
        pages = []
        for page in load.pages[:count]:
            after = max(before, page.end * block_size)
            pages.append((page.store, before, after))
            before = after
        for request in load.waiting:
            self._spans.setdefault(request, []).extend(pages)
        if load.ahead_of:
            self._ahead.setdefault(load.ahead_of, []).extend(pages)
            if len(self._ahead) > MOST_AHEAD:
                del self._ahead[next(iter(self._ahead))]

    def arrived(self, request: Request) -> None:
        """A request has come, for which pages may have been loaded before."""
        if (spans := self._ahead.pop(request.request_id, None)) is not None:
            self._spans[request] = spans

    def take(self, request: Request, cached: int) -> Mapping[str, int]:
        """Returns how many of a request's tokens that are cached each store gave, and forgets it."""
        loaded, reached = dict.fromkeys(self._stores, 0), 0
        for store, first, end in sorted(self._spans.pop(request, []), key=lambda span: span[1:]):
            loaded[store] += max(0, min(end, cached) - max(first, reached))
            reached = max(reached, end)
        return loaded


class KnownPrompt(NamedTuple):
    """The part of a request that the prefix tree has: `path`, and `usable` tokens, from which it can continue now.

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
    """Returns the work of requests after the loads that they wait for: a load that stands in line behind them has
    that time."""
    ends = [(load, (load.known + len(load.blocks)) * block_size) for load in loads]
    return [(end, len(request.token_ids)) for load, end in ends for request in load.waiting]
