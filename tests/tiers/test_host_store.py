"""Host memory: what fits, what is evicted, and an arena that outlives who wrote it."""

import mmap
import os
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from kvern.errors import ConfigError
from kvern.tiers.arena import ARENA, OwnedArena, host_size, map_arena, sized
from kvern.tiers.host import HostStore
from tests.support.page_stores import get, has, put
from tests.support.page_stores import name_of as page_name

SIZE = 200_000


def shared(size: int = SIZE) -> mmap.mmap:
    """Memory that outlives a store."""
    return mmap.mmap(-1, size)


def test_pages_of_all_sizes_come_back() -> None:
    store = HostStore(SIZE)
    for size in (1, 700, 1024, 1025, 40_000):
        number = size
        assert put(store, [number], size) == [True]
        assert get(store, [number], size) == [True]
        assert get(store, [number], size + 1) == [False]
    assert put(store, [2], 10 * SIZE) == [False]
    assert get(store, [1], 700) == [False], "of another size"


def test_the_least_recently_used_make_room() -> None:
    store = HostStore(SIZE)
    each = 16 << 10
    count = next(number for number in range(100) if store.evicted or not all(put(store, [number], each)))
    assert count > 5
    kept = [number for number in range(count) if has(store, [number])[0]]
    oldest = kept[0]
    assert get(store, [oldest], each) == [True]
    put(store, [1000], each)
    assert has(store, [oldest]) == [True] and has(store, [kept[1]]) == [False]


def test_another_engine_finds_what_is_whole() -> None:
    memory = shared()
    first = HostStore(SIZE, memory)
    assert put(first, range(8), 5000) == [True] * 8
    first.drop([b"\0" * 32])
    second = HostStore(SIZE, memory)
    assert get(second, range(8), 5000) == [True] * 8
    assert put(second, range(8, 60), 5000) == [True] * 52
    third = HostStore(SIZE, memory)
    assert third.pages == second.pages and third._pages.keys() == second._pages.keys()
    third.put([], [])
    assert sorted([*third._free, *(cell for page in third._pages.values() for cell in page.cells)]) == [
        *range(third._count)
    ]


def test_a_page_whose_write_did_not_end_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = shared()
    store = HostStore(SIZE, memory)
    put(store, [1], 5000)
    write = store._write_entry
    written: list[int] = []

    class Killed(BaseException):
        pass

    def until_killed(cell: int, entry: bytes) -> None:
        if len(written) == 2:
            raise Killed
        written.append(cell)
        write(cell, entry)

    monkeypatch.setattr(store, "_write_entry", until_killed)
    with pytest.raises(Killed):
        put(store, [2], 5000)
    again = HostStore(SIZE, memory)
    assert has(again, [1, 2]) == [True, False]
    assert get(again, [1], 5000) == [True]


@pytest.mark.parametrize("size", [700, 5000])
def test_a_flipped_bit_of_the_index_is_a_miss(size: int) -> None:
    """Whatever it is: other pages are read, and nothing is found under a wrong name."""
    dice = random.Random(1)
    memory = shared()
    first = HostStore(SIZE, memory)
    put(first, range(8), size)
    end = first._layout.first
    used = [place for place in range(end) if memory[place // 64 * 64 : place // 64 * 64 + 64].strip(b"\0")]
    for _ in range(200):
        place, bit = dice.choice(used), 1 << dice.randrange(8)
        memory[place] ^= bit
        kept = bytes(memory[:end])
        store = HostStore(SIZE, memory)
        found = get(store, range(8), size)
        assert sum(found) >= 7 or place < 64
        assert store._pages.keys() <= first._pages.keys()
        memory[:end] = kept
        memory[place] ^= bit


def test_cells_that_a_gpu_copies_from_are_whole_pages_of_memory() -> None:
    memory = shared()
    store = HostStore(SIZE, memory, 8192)
    assert put(store, [1], 5000) == [False], "no cell is ready"
    first, *others = store.parts(100_000)
    store.extend(first)
    assert put(store, range(12), 5000) == [True] * 12 and put(store, [40], 5000) == [False]
    assert not store.evicted, "there will be more cells"
    for part in others:
        store.extend(part)
    assert put(store, range(20), 5000) == [True] * 20 and put(store, [30], 20_000) == [True]
    again = HostStore(SIZE, memory, 8192)
    assert has(again, range(20)) == get(again, range(20), 5000) == [False] * 20
    again.extend(next(again.parts(100_000)))
    assert has(again, range(12)) == get(again, range(12), 5000) == [True] * 12 and has(again, [30]) == [False]
    for part in [*again.parts(100_000)][1:]:
        again.extend(part)
    assert get(again, range(20), 5000) == [True] * 20 and get(again, [30], 20_000) == [True]
    parts = [*again.parts(20_000)]
    assert {len(part) % 8192 for part in parts} == {0} and max(map(len, parts)) == 16384
    addresses = [np.frombuffer(part, np.uint8).ctypes.data for part in parts]
    assert {address % mmap.PAGESIZE for address in addresses} == {0}
    assert [right - left for left, right in pairwise(addresses)] == [len(part) for part in parts[:-1]]
    [lent] = again.lend([page_name(30)], [20_000])
    assert lent is not None and [len(part) for part in lent.parts] == [16384, 3616]
    assert any(lent.parts[0].obj is part.obj for part in parts)
    again.give_back([lent])


def test_an_arena_of_which_a_part_cannot_be_used_is_smaller() -> None:
    memory = shared()
    store = HostStore(SIZE, memory, 8192)
    for part in store.parts(100_000):
        store.extend(part)
    put(store, range(20), 5000)
    again = HostStore(SIZE, memory, 8192)
    again.extend(next(again.parts(100_000)))
    again.cut()
    assert has(again, range(20)) == [True] * 12 + [False] * 8
    assert put(again, range(30, 50), 5000) == [True] * 20 and again.evicted == 20
    assert again.pages == 12


def test_a_lent_page_is_not_evicted_and_a_reserved_one_is_not_found() -> None:
    store = HostStore(SIZE)
    put(store, [1], 40_000)
    [lent] = store.lend([page_name(1)], [40_000])
    assert lent is not None and store.lend([page_name(1)], [40_001]) == [None]
    reserved = store.reserve(page_name(2), 40_000)
    assert reserved is not None and has(store, [2]) == [False]
    for number in range(3, 30):
        put(store, [number], 40_000)
    assert get(store, [1], 40_000) == [True]
    store.give_back([lent])
    store.withdraw(reserved)
    assert has(store, [2]) == [False]
    for number in range(3, 30):
        put(store, [number], 40_000)
    assert has(store, [1]) == [False]
    assert store.reserve(page_name(29), 40_000) is None, "it is kept"


def test_another_size_or_garbage_begins_empty() -> None:
    memory = shared()
    put(HostStore(SIZE, memory), range(8), 5000)
    assert HostStore(SIZE // 2, memory).pages == 0
    memory[:] = random.Random(1).randbytes(SIZE)
    assert HostStore(SIZE, memory).pages == 0


def test_the_supervisors_memory_is_divided_among_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert map_arena(SIZE) is None
    path = tmp_path / "arena"
    path.touch()
    monkeypatch.setenv(ARENA, str(path))
    for part in range(2):
        memory = map_arena(SIZE, part, 2)
        assert memory is not None
        put(HostStore(len(memory), memory), [part], 5000)
    for part in range(2):
        memory = map_arena(SIZE, part, 2)
        assert memory is not None
        assert has(HostStore(len(memory), memory), [0, 1]) == [part == 0, part == 1]
    monkeypatch.setenv(ARENA, str(tmp_path / "missing"))
    assert map_arena(SIZE) is None


def test_a_size_is_given_or_a_share(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_size("host:1GB") == 10**9
    with pytest.raises(ConfigError, match=r"host:lots.*must be a number"):
        host_size("host:lots")
    with pytest.raises(ConfigError, match="give it"):
        HostStore(50)
    options = ("host", "disk:/a:1GB")
    assert sized(options, 40_000) == ("host:10000", "disk:/a:1GB")
    assert sized((*options, "host:2GB"), 40_000) == ("disk:/a:1GB", "host:2GB"), "a size says more than none"
    arena = OwnedArena()
    monkeypatch.setenv(ARENA, arena.path)
    assert sized(options, 40_960 * 4)[0] == "host:40960"
    assert map_arena(40_960) is not None
    assert sized(options, 7)[0] == "host:40960", "an engine that starts again has another size"
    arena.close()
    arena.close()
    assert map_arena(40_960) is None


def test_memory_of_pages_goes_back_to_the_system_and_is_not_taken_again_until_it_may() -> None:
    descriptor = os.memfd_create("pages")
    size, length = 4 << 20, 200_000
    os.ftruncate(descriptor, size)
    store = HostStore(size, mmap.mmap(descriptor, size))
    pages = {b"%032d" % number: bytes([number % 251 + 1]) * length for number in range(60)}
    names = [*pages]

    def held() -> int:
        return os.fstat(descriptor).st_blocks * 512

    def keep(some: Sequence[bytes]) -> None:
        assert all(store.put(some, [memoryview(pages[name]) for name in some]))

    keep(names[:12])
    before = held()
    store.drop(names[10:12])
    [lent] = store.lend(names[:1], [length])
    store.release(3 * length)
    assert held() <= before - 4 * length, "what was free and had memory goes, too"
    assert store.has(names[:10]) == [True, False, False, False, *[True] * 6], "the first is being read"
    assert store.evicted == 3
    store.give_back([lent])
    left = held()
    for name in names[10:]:
        keep([name])
    assert store.pages == 7 and held() <= left + (1 << 18), "others make room, and cells without memory stay so"
    for name in [found for found in names if store.has([found])[0]]:
        place = bytearray(length)
        assert store.get([name], [memoryview(place)]) == [True] and place == pages[name]
    store.release(0)
    keep(names)
    assert store.pages == size // length
    store.release(size)
    assert store.pages == 0 and held() < 1 << 18
    assert store.put(names[:1], [memoryview(pages[names[0]])]) == [False], "none until it may"
    os.close(descriptor)
