"""Pages of a KV cache on an NVIDIA GPU: packed by kernels, and copied by the GPU's copy engines beside steps.

    save   the steps' stream packs pages to a ring on the device, in microseconds
           the shelf's thread has them copied from there to the host's memory, on a stream of its own
    load   a thread of a store has pages copied from the host's memory to a stage on the device, and unpacked from
           there, on the stage's stream, behind the steps before the load

The kernels sum what they copy, so that the host's processors do not read pages. A block that a load writes is in no
request's table before its event has been seen; a load that ended early is waited for by the stream of the steps.
"""

import ctypes
import logging
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, islice
from typing import Any, NamedTuple

import torch

from kvern.device.copies import copy_all
from kvern.device.pinned import Pinnable, Pins
from kvern.device.transfer import fetch, upload
from kvern.kernels.page_copy import PageTable, Rows, page_copy
from kvern.runner.memory import STAGE_BYTES, STAGES, STEPS_STAGE_BYTES
from kvern.runner.page_groups import HeadGroup
from kvern.tiers.page_memory import Parts, Piece
from kvern.tiers.pages import HEADER_BYTES

SMALLEST_CELL = 64 << 10
MASK = (1 << 64) - 1

logger = logging.getLogger("kvern")


@dataclass(frozen=True, eq=False)
class _Kind:
    """The pieces of a group of heads, by its number: the rows of one head, and its blocks.

    `payload`: the bytes of a head; `padded`: what these take where heads follow each other.
    """

    number: int
    group: HeadGroup
    rows: list[Rows]
    page_blocks: int
    payload: int
    padded: int

    @cached_property
    def heads(self) -> int:
        return len(self.group.kinds)

    @cached_property
    def word(self) -> int:
        """The bytes of a word of the kernel."""
        return self.rows[0].dtype.itemsize

    @cached_property
    def size(self) -> int:
        """The bytes of the payloads of a piece."""
        return self.payload if self.heads == 1 else self.heads * self.padded


@dataclass(eq=False)
class _Region:
    """Packed pieces in the ring, the event behind which they are there, and how many are still needed.

    `sums`: of all heads, int64 [pieces * heads].
    """

    start: int
    kind: _Kind
    packed: torch.cuda.Event
    sums: torch.Tensor
    needed: int


@dataclass(frozen=True, eq=False)
class _Packed:
    """Piece `number` of a region of the ring."""

    region: _Region
    number: int

    def __len__(self) -> int:
        return HEADER_BYTES + self.region.kind.size

    def head(self, number: int) -> "_Head":
        """See `Place`."""
        return _Head(self.region.kind)


@dataclass(frozen=True, eq=False)
class _Head:
    """A head of a packed piece, which is copied with it."""

    kind: _Kind

    def __len__(self) -> int:
        return HEADER_BYTES + self.kind.payload


@dataclass(frozen=True, eq=False)
class _Target:
    """The place of some heads of a piece, which are unpacked once the steps before the load have ended."""

    kind: _Kind
    heads: range
    blocks: Sequence[int]
    began: torch.cuda.Event

    def __len__(self) -> int:
        return HEADER_BYTES + (self.kind.size if len(self.heads) > 1 else self.kind.payload)

    def head(self, number: int) -> "_Target":
        """See `Place`."""
        return _Target(self.kind, self.heads[number : number + 1], self.blocks, self.began)


@dataclass(frozen=True, eq=False)
class _Stage:
    """Memory on the device for pages that are loaded, and the stream that fills and reads it."""

    memory: torch.Tensor
    stream: torch.cuda.Stream
    lock: threading.Lock


class _Copies:
    """Implements `Copies`, between two events."""

    def __init__(
        self,
        sums: torch.Tensor,
        numbers: Sequence[range],
        events: tuple[torch.cuda.Event, torch.cuda.Event],
        places: Sequence[Parts],
    ) -> None:
        """`sums`: on the host after the second event, with those of a piece at its numbers. `places`: of copies."""
        self._sums = sums
        self._numbers = numbers
        self._events = events
        self._places = places

    def is_done(self) -> bool:
        return bool(self._events[1].query())  # type: ignore[no-untyped-call]

    def sums(self) -> list[list[int]]:
        self._events[1].synchronize()
        found = [total & MASK for total in self._sums.tolist()]
        return [found[numbers.start : numbers.stop] for numbers in self._numbers]

    def seconds(self) -> float | None:
        return float(self._events[0].elapsed_time(self._events[1])) / 1000


class _Heads(NamedTuple):
    """Some heads of a piece, the byte of the device's memory where their payloads begin, and the piece's blocks."""

    kind: _Kind
    heads: range
    start: int
    blocks: Sequence[int]


def _form(piece: _Heads | _Target) -> tuple[int, int]:
    """The kind of pieces that one launch copies: its number, and that of their heads."""
    return piece.kind.number, len(piece.heads)


class Ring:
    """Offsets of regions of a piece of memory, which are given back in any order. One thread takes, any gives back."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._used: deque[tuple[int, int]] = deque()
        """(start, end), in order."""
        self._returned: set[int] = set()
        self._lock = threading.Lock()

    def take(self, count: int) -> int | None:
        """The start of a region of so many bytes, above 0; None: there is no room."""
        with self._lock:
            first, last = (self._used[0][0], self._used[-1][1]) if self._used else (0, 0)
            if not self._used or last > first:
                start = last if last + count <= self.size else 0
                fits = start + count <= (self.size if start or not self._used else first)
            else:
                start, fits = last, last + count <= first
            if not fits:
                return None
            self._used.append((start, start + count))
            return start

    def give_back(self, start: int) -> None:
        """The region that begins there is free."""
        with self._lock:
            self._returned.add(start)
            while self._used and self._used[0][0] in self._returned:
                self._returned.discard(self._used.popleft()[0])


class DeviceMover:
    """A mover of caches on one NVIDIA GPU. Implements `PageMover`."""

    sums = "SplitMix64"
    batch_bytes = STAGE_BYTES
    is_prompt = True

    def __init__(self, groups: Sequence[HeadGroup], page_blocks: Sequence[int], most_packed: int) -> None:
        """`page_blocks`: the blocks of a page of each group. `most_packed`: the bytes of pages in the ring."""
        self.groups = groups
        kinds = []
        for number, (group, count) in enumerate(zip(groups, page_blocks, strict=True)):
            payload = count * group.block_bytes
            rows = rows_of_heads(group.caches, count)
            kinds.append(_Kind(number, group, rows, count, payload, _aligned(payload, 16)))
        self._kinds = {id(kind.group): kind for kind in kinds}
        self._device = groups[0].caches[0].device
        self.cell: int | None = max(
            SMALLEST_CELL, _aligned(HEADER_BYTES + min(kind.size for kind in kinds), mmap.PAGESIZE)
        )
        size = max(most_packed, *(kind.heads * kind.padded for kind in kinds))
        self.room = size + HEADER_BYTES * (size // min(kind.padded for kind in kinds))
        self._ring = Ring(size)
        self._memory = torch.empty(_aligned(size, 16), dtype=torch.uint8, device=self._device)
        self._out: torch.cuda.Stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        largest = max(kind.heads * kind.padded for kind in kinds)
        self._stages: list[_Stage] = []
        """Each is used by one thread at a time; the last one is reserved for the thread that runs the steps."""
        for stage in (*[STAGE_BYTES] * STAGES, STEPS_STAGE_BYTES):
            stream: torch.cuda.Stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            memory = torch.empty(max(stage, largest), dtype=torch.uint8, device=self._device)
            self._stages.append(_Stage(memory, stream, threading.Lock()))
        self._turns = 0
        self._thread = threading.get_ident()
        self._written: dict[_Stage, torch.cuda.Event] = {}
        """The event after the last unpacking from each stage."""
        self._compile(kinds)

    def _compile(self, kinds: Iterable[_Kind]) -> None:
        """Launch each kernel, so that no request waits for a compiler."""
        for kind in kinds:
            sums = torch.zeros(1, dtype=torch.int64, device=self._device)
            table = self._tables([_Heads(kind, range(1), 0, [0] * kind.page_blocks)])[0]
            for packs in (True, False):
                page_copy(self._memory, kind.rows, table, sums, packs)

    def pin(self, store: Pinnable) -> Callable[[], None]:
        """See `PageMover`. It goes on in the background, some gigabytes a second; the store has what is pinned."""
        return weakref.finalize(self, Pins(store, self._device, "kv_tier host").end)

    def pack(self, group: HeadGroup, tables: Sequence[Sequence[int]]) -> Sequence[_Packed]:
        """See `PageMover`."""
        kind = self._kinds[id(group)]
        start = self._ring.take(len(tables) * kind.heads * kind.padded) if tables else None
        if start is None:
            return []
        try:
            return self._packed(kind, tables, start)
        except Exception as error:  # the device may be out of memory
            logger.warning("pages of the KV cache are not saved: %s", error)
            torch.cuda.current_stream(self._device).synchronize()
            self._ring.give_back(start)
            return []

    def _packed(self, kind: _Kind, tables: Sequence[Sequence[int]], start: int) -> Sequence[_Packed]:
        """Pack pieces to a region of the ring."""
        count = len(tables) * kind.heads
        sums = torch.zeros(count, dtype=torch.int64, device=self._device)
        heads, size = range(kind.heads), kind.heads * kind.padded
        [table] = self._tables([_Heads(kind, heads, start + at * size, blocks) for at, blocks in enumerate(tables)])
        page_copy(self._memory, kind.rows, table, sums, True)
        region = _Region(start, kind, self._event(), sums, len(tables))
        return [_Packed(region, number) for number in range(len(tables))]

    def places(self, group: HeadGroup, tables: Sequence[Sequence[int]]) -> Sequence[_Target]:
        """See `PageMover`."""
        kind, began = self._kinds[id(group)], self._event()
        return [_Target(kind, range(kind.heads), blocks, began) for blocks in tables]

    def settle(self, places: Sequence[Any], has_others: bool) -> None:
        """See `PageMover`."""
        if has_others:
            stream = torch.cuda.current_stream(self._device)
            for event in [*self._written.values()]:
                stream.wait_event(event)

    def buffer(self, piece: Piece) -> memoryview:
        """See `PageMemory`."""
        return torch.empty(len(piece.at), dtype=torch.uint8, pin_memory=True).numpy().data

    def read(self, pieces: Sequence[Piece], places: Sequence[Parts]) -> _Copies:
        """See `PageMemory`. It copies at the speed of the bus, with the copy engine."""
        packed: list[_Packed] = [piece.at for piece in pieces]
        base = self._memory.data_ptr()
        starts = [
            base + page.region.start + page.number * page.region.kind.heads * page.region.kind.padded for page in packed
        ]
        with torch.cuda.device(self._device), torch.cuda.stream(self._out):
            regions = [*dict.fromkeys(page.region for page in packed)]
            for region in regions:
                self._out.wait_event(region.packed)
            first = dict(zip(regions, accumulate((len(region.sums) for region in regions), initial=0), strict=False))
            began = self._event(timed=True)
            try:
                copy_payloads([*zip(places, starts, strict=True)], self._out, to_host=True)
                sums = fetch(torch.cat([region.sums for region in regions]))
            except BaseException:
                self._out.synchronize()  # the places may be used again now
                raise
            heads = [page.region.kind.heads for page in packed]
            begins = [first[page.region] + page.number * count for page, count in zip(packed, heads, strict=True)]
            numbers = [range(begin, begin + count) for begin, count in zip(begins, heads, strict=True)]
            return _Copies(sums, numbers, (began, self._event(timed=True)), places)

    def forget(self, pieces: Sequence[Piece]) -> None:
        """See `PageMemory`."""
        for piece in pieces:
            region = piece.at.region
            region.needed -= 1
            if not region.needed:
                self._ring.give_back(region.start)

    def write(self, pieces: Sequence[Piece], places: Sequence[Parts]) -> _Copies:
        """See `PageMemory`."""
        self._turns += 1
        is_steps = threading.get_ident() == self._thread
        stage = self._stages[-1 if is_steps else self._turns % STAGES]
        with stage.lock, torch.cuda.device(self._device), torch.cuda.stream(stage.stream):
            for event in dict.fromkeys(piece.at.began for piece in pieces):
                stage.stream.wait_event(event)
            began = self._event(timed=True)
            try:
                sums, numbers = self._unpack(stage, [piece.at for piece in pieces], places)
                found = fetch(sums)
            except BaseException:
                stage.stream.synchronize()  # the places, and the blocks, may be used again now
                raise
            return _Copies(found, numbers, (began, self._event(timed=True)), places)

    def _unpack(
        self, stage: _Stage, targets: Sequence[_Target], places: Sequence[Parts]
    ) -> tuple[torch.Tensor, Sequence[range]]:
        """Copy pieces to the stage and unpack them, as many at once as it holds.

        Returns the sums of all heads, int64, and which of them are each piece's.
        """
        batches: list[list[int]] = []
        found: list[_Heads] = []
        numbers = [range(0)] * len(targets)
        end, before = len(stage.memory) + 1, 0
        for place in sorted(range(len(targets)), key=lambda place: _form(targets[place])):
            target = targets[place]
            count, size = len(target.heads), len(target.heads) * target.kind.padded
            if end + size > len(stage.memory):
                batches.append([])
                end = 0
            batches[-1].append(place)
            numbers[place] = range(before, before + count)
            found.append(_Heads(target.kind, target.heads, end, target.blocks))
            end += size
            before += count
        sums = torch.zeros(before, dtype=torch.int64, device=self._device)
        memory = stage.memory.data_ptr()
        pieces = iter(found)
        tables = iter(self._tables(found, map(len, batches)))
        for batch in batches:
            copy_payloads(
                [(places[place], memory + next(pieces).start) for place in batch], stage.stream, to_host=False
            )
            for _, run in groupby(batch, lambda place: _form(targets[place])):
                first = next(run)
                kind = targets[first].kind
                page_copy(stage.memory, kind.rows, next(tables), sums[numbers[first].start :], packs=False)
        self._written[stage] = self._event()
        return sums, numbers

    def _tables(self, pieces: Sequence[_Heads], counts: Iterable[int] | None = None) -> Sequence[PageTable]:
        """Uploads what the kernel needs of pieces, of which so many belong to each batch: a table for each form of one.

        Those of a form follow each other.
        """
        words: list[int] = []
        runs: list[tuple[_Heads, int, int]] = []
        left = iter(pieces)
        for count in (len(pieces),) if counts is None else counts:
            for _, run in groupby(islice(left, count), _form):
                begin, of_run = len(words), [*run]
                for piece in of_run:
                    words += (piece.start // piece.kind.word, piece.heads.start, *piece.blocks)
                runs.append((of_run[0], begin, len(of_run)))
        sent = upload(words, torch.int64, self._device)
        return [
            PageTable(
                sent[begin : begin + count * (2 + first.kind.page_blocks)].view(count, -1),
                len(first.heads),
                first.kind.padded // first.kind.word,
            )
            for first, begin, count in runs
        ]

    def _event(self, timed: bool = False) -> torch.cuda.Event:
        """An event behind what the current stream has been given."""
        event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


def rows_of_heads(caches: Sequence[torch.Tensor], page_blocks: int) -> list[Rows]:
    """The rows of caches [stored, blocks, block_size, heads, head_dim] of one head's pages of `page_blocks` blocks."""
    widths = [cache.shape[4] * cache.element_size() for cache in caches]
    word = next(size for size in (8, 4, 1) if all(width % size == 0 for width in widths))
    dtype = {8: torch.int64, 4: torch.int32, 1: torch.uint8}[word]
    found: dict[tuple[int, int], list[list[int]]] = {}
    before = 0
    for cache, width in zip(caches, widths, strict=True):
        stored, block, token, head, _ = (stride * cache.element_size() for stride in cache.stride())
        tokens = cache.shape[2]
        for place in range(cache.shape[0]):
            segment = [cache.data_ptr() + place * stored, block // word, token // word, head // word, before // word]
            found.setdefault((width // word, tokens), []).append(segment)
            before += page_blocks * tokens * width
    device = caches[0].device
    return [
        Rows(
            upload([number for segment in segments for number in segment], torch.int64, device).view(-1, 5),
            *size,
            dtype,
        )
        for size, segments in found.items()
    ]


def copy_payloads(pages: Sequence[tuple[Parts, int]], stream: torch.cuda.Stream, *, to_host: bool) -> None:
    """Copies payloads between pages on the host, behind their headers, and addresses on the device."""
    pairs = []
    for parts, start in pages:
        skipped = HEADER_BYTES
        for part in parts:
            size = len(part) - skipped
            pairs.append((ctypes.addressof(ctypes.c_char.from_buffer(part)) + skipped, start, size))
            start += size
            skipped = 0
    copy_all(pairs, stream, to_host=to_host)


def _aligned(count: int, size: int) -> int:
    return -(-count // size) * size
