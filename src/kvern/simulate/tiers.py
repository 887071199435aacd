"""KV tiers of simulated engines: the index and the shelf of a server, over stores that keep names of pages alone.

    TierTraffic --TierIndex--> Tier --> Shelf --lanes--> SimulatedStore     the least recently used pages are evicted
                                          |
                                     SimulatedMover                         moves nothing, which takes its time

What threads of the shelf do takes latency + bytes / bandwidth of the virtual clock, and is seen when that has passed.
"""

import heapq
import itertools
import mmap
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from kvern.cache.messages import PageSave, TierMessage, blocks_of_page
from kvern.errors import ConfigError
from kvern.request.step import ModelRunnerOutput, SchedulerOutput, StepResult
from kvern.runner.page_groups import HeadGroup
from kvern.runner.tier import Tier
from kvern.runner.tiered import TieredSteps, computing
from kvern.simulate.executor import Observe, Price, SimulatedExecutor, SimulatedStep, VirtualClock
from kvern.tiers.arena_layout import Layout
from kvern.tiers.host import SMALLEST_CELL, cell_for
from kvern.tiers.page_memory import Parts, Piece
from kvern.tiers.pages import HEADER_BYTES
from kvern.tiers.shelf import MOST_WRITING, Shelf
from kvern.tiers.shelved import Lane

HOST, PEER = "host", "peer"
SIMULATED = HOST, "disk"
"""Kinds of stores."""
BATCH_BYTES = 8 << 20
RING_BYTES = 2 << 30
"""The most bytes of pages that a GPU packs at once."""


class StoreSizes(msgspec.Struct, frozen=True):
    """A store: its bytes, and the seconds of a transfer, `latency` + bytes / `bandwidth`; who says so is `basis`."""

    name: str
    size: int
    latency: float
    bandwidth: float
    basis: str


class TierSizes(msgspec.Struct, frozen=True):
    """The stores of an engine, the nearest first. `identity`: of its pages, in hexadecimal digits."""

    stores: tuple[StoreSizes, ...]
    identity: str = "00" * 16


class PageSizes(msgspec.Struct, frozen=True):
    """The bytes of the KV cache: of a block and of a page, and of pages that wait for a store at once.

    `on_device`: a GPU's, which copies them beside its steps.
    """

    block: int
    page: int
    room: int
    on_device: bool


class ThreadedClock(VirtualClock):
    """A virtual clock with threads, whose calls are made when the time has passed that they take."""

    def __init__(self) -> None:
        super().__init__()
        self._due: list[tuple[float, int, float, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._begun: float | None = None
        """When the call began that is made now, unless it has waited for all that it moves."""

    def seen(self) -> float:
        """Returns the time as the caller sees it: a thread's until it has waited, or `now`."""
        return self.now if self._begun is None else self._begun

    def worked(self) -> None:
        """The call that is made now has waited for what it moves."""
        self._begun = None

    def call(self, begun: float, ended: float, call: Callable[[], None]) -> None:
        """A thread makes a call between two moments."""
        heapq.heappush(self._due, (ended, next(self._numbers), begun, call))

    def sleep(self, seconds: float) -> None:
        """Lets time pass."""
        self.reach(self.now + seconds)

    def reach(self, moment: float) -> None:
        """Lets time pass until a moment, unless that is over."""
        while self._due and self._due[0][0] <= moment:
            ended, _, begun, call = heapq.heappop(self._due)
            super().reach(ended)
            self._begun = begun
            call()
            self._begun = None
        super().reach(moment)


class VirtualLane(Lane):
    """Threads of a clock: each moves the bytes of a call, then those of the next."""

    def __init__(self, clock: ThreadedClock, speed: StoreSizes, name: str, threads: int) -> None:
        super().__init__(name, threads)
        self._clock, self._speed = clock, speed
        self._free = [0.0] * threads

    def submit(self, call: Callable[[], None], size: int = 0) -> None:
        """See `Lane`."""
        begun = max(self._clock.now, self._free[0])
        ended = begun + self._speed.latency + size / self._speed.bandwidth
        heapq.heapreplace(self._free, ended)
        self._clock.call(begun, ended, call)

    def end_with(self, call: Callable[[], None] | None) -> None:
        """See `Lane`: what is queued is not made any more."""


class _Page:
    """A page of a store: its header, and who reads it."""

    __slots__ = ("header", "name", "published", "readers")

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.header = memoryview(bytearray(HEADER_BYTES))
        self.readers = 0
        self.published = 0.0

    @property
    def parts(self) -> Sequence[memoryview]:
        return [self.header]


class SimulatedStore:
    """A store of `most` pages, of which it keeps the headers."""

    is_local = True
    has_whole_pages = True

    def __init__(self, most: int, page: int, clock: ThreadedClock) -> None:
        """`page`: the bytes of one."""
        self.evicted = 0
        """Pages that made room for others."""
        self.size = most * page
        self._most, self._clock = most, clock
        self._pages: OrderedDict[bytes, _Page] = OrderedDict()
        self._reserved = 0

    def has(self, names: Sequence[bytes]) -> list[bool]:
        return [name in self._pages for name in names]

    def get(self, names: Sequence[bytes], places: Sequence[memoryview]) -> list[bool]:
        self._clock.worked()
        found = []
        for name, place in zip(names, places, strict=True):
            page = self._pages.get(name)
            if page is not None:
                self._pages.move_to_end(name)
                place[:HEADER_BYTES] = page.header
            found.append(page is not None)
        return found

    def put(self, names: Sequence[bytes], places: Sequence[memoryview]) -> list[bool]:
        self._clock.worked()
        return [self._put(name, place) for name, place in zip(names, places, strict=True)]

    def _put(self, name: bytes, place: memoryview) -> bool:
        page = self._reserve(name)
        if page is None:
            return name in self._pages
        page.header[:] = place[:HEADER_BYTES]
        self._publish(page)
        return True

    def drop(self, names: Sequence[bytes]) -> None:
        for name in names:
            self._pages.pop(name, None)

    def close(self) -> None:
        """Nothing has to end."""

    def _reserve(self, name: bytes) -> _Page | None:
        """Makes room for a page; None: it is kept, or there is none."""
        if name in self._pages:
            self._pages.move_to_end(name)
            return None
        if len(self._pages) + self._reserved >= self._most:
            unused = next((other for other, page in self._pages.items() if not page.readers), None)
            if unused is None:
                return None
            del self._pages[unused]
            self.evicted += 1
        self._reserved += 1
        return _Page(name)

    def _publish(self, page: _Page) -> None:
        self._reserved -= 1
        page.published = self._clock.now
        self._pages.setdefault(page.name, page)

    def find(self, name: bytes, moment: float) -> _Page | None:
        """Returns a page that was there at a moment, as others see it who use nothing up."""
        page = self._pages.get(name)
        return None if page is None or page.published > moment else page


class SimulatedHost(SimulatedStore):
    """A store in the memory of the engine's process, as `HostStore`."""

    def lend(self, names: Sequence[bytes], lengths: Sequence[int]) -> list[_Page | None]:
        """See `DirectStore`."""
        found = [self._pages.get(name) for name in names]
        for page in found:
            if page is not None:
                page.readers += 1
                self._pages.move_to_end(page.name)
        return found

    def give_back(self, places: Sequence[_Page]) -> None:
        """See `DirectStore`."""
        for page in places:
            page.readers -= 1

    def reserve(self, name: bytes, length: int) -> _Page | None:
        """See `DirectStore`."""
        return self._reserve(name)

    def publish(self, place: _Page) -> None:
        """See `DirectStore`."""
        self._publish(place)

    def withdraw(self, place: _Page) -> None:
        """See `DirectStore`."""
        self._reserved -= 1


class SimulatedPeer(SimulatedStore):
    """The host memory of other engines, as `PeerStore`: it is read, and nothing of it is kept."""

    is_read_only = True

    def __init__(self, clock: ThreadedClock) -> None:
        super().__init__(0, 0, clock)
        self.hosts: list[SimulatedHost] = []

    def _seen(self, name: bytes) -> _Page | None:
        found = (host.find(name, self._clock.now) for host in self.hosts)
        return next((page for page in found if page is not None), None)

    def has(self, names: Sequence[bytes]) -> list[bool]:
        return [self._seen(name) is not None for name in names]

    def lend(self, names: Sequence[bytes], lengths: Sequence[int]) -> list[_Page | None]:
        """See `DirectStore`."""
        return [self._seen(name) for name in names]

    def give_back(self, places: Sequence[_Page]) -> None:
        """See `DirectStore`."""

    def reserve(self, name: bytes, length: int) -> _Page | None:
        """See `DirectStore`."""
        return None

    def publish(self, place: _Page) -> None:
        """See `DirectStore`."""

    def withdraw(self, place: _Page) -> None:
        """See `DirectStore`."""


class _Place(msgspec.Struct, frozen=True):
    """The blocks of a page, of which only the bytes count."""

    size: int

    def __len__(self) -> int:
        return self.size

    def head(self, number: int) -> "_Place":
        """See `Place`."""
        return self


class _HostCopies:
    """Copies that a thread makes, which waits for them."""

    def __init__(self, clock: ThreadedClock, pieces: Sequence[Piece]) -> None:
        self._clock, self._count = clock, len(pieces)

    def is_done(self) -> bool:
        return False

    def sums(self) -> list[list[int]]:
        self._clock.worked()
        return [[0]] * self._count

    def seconds(self) -> float | None:
        return None


class _DeviceCopies(_HostCopies):
    """Copies that a GPU makes beside its steps, one way after each other."""

    def __init__(self, clock: ThreadedClock, pieces: Sequence[Piece], begun: float, seconds: float) -> None:
        super().__init__(clock, pieces)
        self._seconds, self.ended = seconds, begun + seconds

    def is_done(self) -> bool:
        return self._clock.now >= self.ended

    def seconds(self) -> float | None:
        return self._seconds


class SimulatedMover:
    """Moves pages that are not there, between the KV cache and the host's memory."""

    sums = "none"
    cell: int | None = None
    groups: Sequence[HeadGroup]

    def __init__(self, sizes: PageSizes, clock: ThreadedClock, speed: StoreSizes) -> None:
        """`speed`: that of the way between a GPU and the host's memory."""
        self.groups = [HeadGroup(0, (), (b"keys and values",), True, sizes.block)]
        self.is_prompt = sizes.on_device
        self.room = sizes.room
        self.batch_bytes = BATCH_BYTES
        self._sizes = sizes
        self._clock, self._speed = clock, speed
        self._packed = 0
        self._free = {"in": 0.0, "out": 0.0}
        """When the copies of each way have ended."""

    def pin(self, store: object) -> Callable[[], None]:
        """See `PageMover`."""
        return lambda: None

    def pack(self, group: HeadGroup, tables: Sequence[Sequence[int]]) -> Sequence[_Place]:
        """See `PageMover`."""
        count = max(0, min(len(tables), (self.room - self._packed) // self._sizes.page))
        self._packed += count * self._sizes.page
        return self.places(group, tables[:count])

    def places(self, group: HeadGroup, tables: Sequence[Sequence[int]]) -> Sequence[_Place]:
        """See `PageMover`."""
        return [_Place(self._sizes.page)] * len(tables)

    def forget(self, pieces: Sequence[Piece]) -> None:
        """See `PageMemory`."""
        self._packed -= len(pieces) * self._sizes.page

    def settle(self, places: Sequence[Any], has_others: bool) -> None:
        """See `PageMover`."""

    def buffer(self, piece: Piece) -> memoryview:
        """See `PageMemory`."""
        return memoryview(bytearray(HEADER_BYTES))

    def read(self, pieces: Sequence[Piece], places: Sequence[Parts]) -> _HostCopies:
        """See `PageMemory`."""
        return self._copies(pieces, "out")

    def write(self, pieces: Sequence[Piece], places: Sequence[Parts]) -> _HostCopies:
        """See `PageMemory`."""
        return self._copies(pieces, "in")

    def _copies(self, pieces: Sequence[Piece], way: str) -> _HostCopies:
        if not self.is_prompt:
            return _HostCopies(self._clock, pieces)
        seconds = self._speed.latency + len(pieces) * self._sizes.page / self._speed.bandwidth
        found = _DeviceCopies(self._clock, pieces, max(self._clock.now, self._free[way]), seconds)
        self._free[way] = found.ended
        return found


def page_sizes(block_size: int, token_bytes: int, step_tokens: int, on_device: bool) -> PageSizes:
    """Returns the sizes of pages of an engine whose steps have at most so many tokens."""
    page = HEADER_BYTES + blocks_of_page(block_size) * block_size * token_bytes
    ring = max(page, min(RING_BYTES, 2 * step_tokens * token_bytes))
    room = ring + HEADER_BYTES * (ring // page) if on_device else MOST_WRITING
    return PageSizes(block_size * token_bytes, page, room, on_device)


def _pages_in(store: StoreSizes, pages: PageSizes) -> int:
    """Returns how many pages a store keeps; in an engine's memory they take whole cells."""
    if store.name != HOST:
        return store.size // pages.page
    align = mmap.PAGESIZE if pages.on_device else 1
    cell = max(SMALLEST_CELL, -(-pages.page // align) * align) if pages.on_device else cell_for(store.size)
    return Layout.of(store.size, cell, align).cells // -(-pages.page // cell)


def make_stores(sizes: TierSizes, pages: PageSizes, clock: ThreadedClock) -> dict[str, SimulatedStore]:
    """Returns the stores of a simulated engine. Raises ConfigError for stores that hold nothing."""
    stores: dict[str, SimulatedStore] = {}
    for store in sizes.stores:
        if store.name == PEER:
            stores[PEER] = SimulatedPeer(clock)
            continue
        most = _pages_in(store, pages)
        if not most:
            raise ConfigError(f"kv_tier {store.name} has {store.size} bytes, and a page takes {pages.page}")
        stores[store.name] = (SimulatedHost if store.name == HOST else SimulatedStore)(most, pages.page, clock)
    return stores


def make_tier(
    sizes: TierSizes, pages: PageSizes, block_size: int, clock: ThreadedClock, stores: Mapping[str, SimulatedStore]
) -> Tier:
    """Returns the tier of a simulated engine."""
    speeds = {store.name: store for store in sizes.stores}
    nearest = sizes.stores[0]

    def lane(name: str, threads: int) -> Lane:
        return VirtualLane(clock, speeds.get(name.rpartition("-")[0], nearest), name, threads)

    mover = SimulatedMover(pages, clock, speeds.get(HOST, nearest))
    shelf = Shelf(stores, clock.seen, mover, lane)
    return Tier(mover, shelf, bytes.fromhex(sizes.identity), block_size)


class TieredExecutor(SimulatedExecutor):
    """A simulated executor with a tier, whose copies steps wait for as those of a real one do."""

    def __init__(self, clock: VirtualClock, price: Price, observe: Observe, tier: Tier, on_device: bool) -> None:
        super().__init__(clock, price, observe)
        self.tier = self._tier = tier
        self._on_device = on_device
        self._written: dict[int, list[PageSave]] = {}
        """The pages that steps write which have not ended, by the numbers of the steps: they are saved at the end."""
        self._steps = TieredSteps(computing(partial(SimulatedExecutor.submit, self)), tier)

    def submit(self, output: SchedulerOutput) -> StepResult:
        """Begins a step, or what a tier does beside none."""
        message = output.message(TierMessage)
        if message is not None and message.written:
            self._written[output.step] = [*message.written]
            message.written.clear()
        return self._steps.execute(output)

    def end(self, output: SchedulerOutput, submitted: float) -> ModelRunnerOutput:
        """Ends the oldest step, which has written pages by then."""
        found = super().end(output, submitted)
        if (written := self._written.pop(output.step, None)) is not None:
            self._tier.save(written)
            self._tier.put()
        return found

    def has_ended(self, step: SimulatedStep) -> bool:
        """Returns whether the oldest step has ended: pages are saved while a GPU computes, which the host sees."""
        if not self._on_device:
            return True
        if self._drawn is None:
            self._drawn = self._seconds(step.output)
        return self._clock.now >= max(self.ended, step.submitted) + self._drawn
