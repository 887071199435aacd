"""The host memory of other engines: what they have is found, and what they overwrite meanwhile is a miss."""

import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvern import EngineConfig
from kvern.errors import ConfigError
from kvern.tiers.arena import ARENA, ARENAS, OwnedArena, map_arena, siblings
from kvern.tiers.arena_layout import ENTRY_BYTES, HEAD_BYTES, Layout
from kvern.tiers.host import HostStore
from kvern.tiers.peer import UNPIN_SECONDS, PeerStore, RemoteArena
from kvern.tiers.shelf import Shelf
from tests.support.page_stores import get, has, name_of, page_of, put
from tests.support.served import eventually
from tests.support.stores import Clock, fill, load

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory in /proc")
SIZE = 256 << 10


@pytest.fixture
def arena(monkeypatch: pytest.MonkeyPatch) -> Iterator[OwnedArena]:
    """The memory of this engine; that of others is made with the same model."""
    owned = OwnedArena("model")
    monkeypatch.setenv(ARENA, owned.path)
    monkeypatch.setenv(ARENAS, owned.list_path)
    yield owned
    owned.close()


@pytest.fixture
def other(arena: OwnedArena) -> Iterator[OwnedArena]:
    """The memory of another engine."""
    owned = OwnedArena("model")
    yield owned
    owned.close()


def host(owned: OwnedArena, monkeypatch: pytest.MonkeyPatch, cell: int | None = None, ranks: int = 1) -> HostStore:
    """The store of the engine whose memory this is; with `ranks` that of the last."""
    with monkeypatch.context() as patch:
        patch.setenv(ARENA, owned.path)
        memory = map_arena(SIZE, ranks - 1, ranks)
    assert memory is not None
    store = HostStore(len(memory), memory, cell)
    for part in store.parts(3 * (cell or 0)) if cell else ():
        store.extend(part)
    return store


def peer(clock: Clock | None = None, **options: object) -> PeerStore:
    return PeerStore(0, 1, clock=clock or Clock(), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("cell", [None, 4096])
def test_what_others_keep_is_found_until_they_evict_it(
    other: OwnedArena, monkeypatch: pytest.MonkeyPatch, cell: int | None
) -> None:
    store, reader = host(other, monkeypatch, cell), peer()
    assert has(reader, [1]) == [False]
    assert put(store, range(5), 9000) == [True] * 5
    assert has(reader, range(6)) == [True] * 5 + [False]
    assert get(reader, range(6), 9000) == [True] * 5 + [False]
    assert get(reader, [1], 8999) == [False], "another length"
    put(store, range(5, 100), 9000)
    kept = has(store, range(100))
    assert not all(kept) and has(reader, range(100)) == kept
    assert get(reader, range(100), 9000) == kept
    assert put(reader, [200]) == [False]


def test_pages_in_pieces_are_read_whole(other: OwnedArena, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of all sizes come and go, so that the cells of a page lie apart."""
    store, reader, chance = host(other, monkeypatch), peer(), random.Random(5)
    lengths: dict[int, int] = {}
    pieces = 0
    for number in range(400):
        lengths[number] = chance.randrange(1, 40_000)
        assert put(store, [number], lengths[number]) == [True]
        if chance.random() < 0.3:
            store.drop([name_of(chance.randrange(number + 1))])
        asked = chance.randrange(number + 1)
        expected = has(store, [asked])
        assert has(reader, [asked]) == expected and get(reader, [asked], lengths[asked]) == expected
        [lent] = reader.lend([name_of(asked)], [lengths[asked]])
        pieces = max(pieces, 0 if lent is None else len(lent.parts))
    assert pieces > 3


def test_a_page_that_is_overwritten_while_it_is_read_is_a_miss(
    other: OwnedArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, reader = host(other, monkeypatch), peer()
    put(store, [1], 9000)
    assert has(reader, [1]) == [True]
    [lent] = reader.lend([name_of(1)], [9000])
    assert lent is not None and b"".join(lent.parts) == page_of(name_of(1), 9000)
    put(store, range(2, 60), 9000)
    assert b"".join(lent.parts) != page_of(name_of(1), 9000), "the bytes change, which the sum of a page tells"
    assert reader.lend([name_of(1)], [9000]) == [None]


def test_a_long_log_is_followed_in_parts_and_one_that_was_overwritten_from_its_beginning(
    other: OwnedArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = host(other, monkeypatch)
    count = Layout.of(SIZE, 1024, 1).cells
    put(store, range(3 * count), 800)
    late = peer()
    assert has(late, range(3 * count)) == has(store, range(3 * count))
    monkeypatch.setattr("kvern.tiers.peer.MOST_FOLLOWED", 7)
    assert all(has(peer(), range(3 * count - 10, 3 * count))), "however much is to be followed"


def test_engines_come_and_go(arena: OwnedArena, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    reader = peer(clock)
    put(host(arena, monkeypatch), [1])
    assert has(reader, [1]) == [False], "its own"
    first, stranger = OwnedArena("model"), OwnedArena("another model")
    assert siblings() == {os.stat(first.path).st_ino: first.path}
    assert has(reader, [2]) == [False]
    put(host(first, monkeypatch), [2])
    put(host(stranger, monkeypatch), [3])
    assert has(reader, [2, 3]) == [True, False]
    host(first, monkeypatch, 4096)  # another engine divides the memory anew
    assert has(reader, [2]) == [False]
    first.close()
    assert siblings() == {}
    reader.look()
    assert not reader._arenas
    stranger.close()


def test_each_rank_reads_its_part(other: OwnedArena, monkeypatch: pytest.MonkeyPatch) -> None:
    put(host(other, monkeypatch, ranks=2), [1])
    found = [has(PeerStore(part, 2, clock=Clock()), [1]) for part in (0, 1)]
    assert found == [[False], [True]]
    assert has(PeerStore(0, 3, clock=Clock()), [1]) == [False], "it has another number of ranks"


def test_memory_is_used_as_far_as_it_is_pinned(other: OwnedArena, monkeypatch: pytest.MonkeyPatch) -> None:
    store = host(other, monkeypatch, 4096)
    put(store, range(6), 9000)
    pinned: list[RemoteArena] = []
    ended: list[RemoteArena] = []

    def pin(arena: RemoteArena) -> Callable[[], None]:
        pinned.append(arena)
        return lambda: ended.append(arena)

    clock = Clock()
    reader = peer(clock, pin=pin)
    assert has(reader, range(6)) == [False] * 6, "nothing is pinned yet"
    parts = [*pinned[0].parts(3 * 4096)]
    assert get(reader, range(6), 9000) == [False] * 6
    for part in parts:
        pinned[0].extend(part)
    assert has(reader, range(6)) == [True] * 6, "also what was published before"
    [lent] = reader.lend([name_of(1)], [9000])
    assert lent is not None and all(part.nbytes <= 3 * 4096 for part in lent.parts)
    assert get(reader, range(6), 9000) == [True] * 6
    host(other, monkeypatch)  # divides the memory anew
    assert has(reader, [0]) == [False] and not ended, "somebody may still copy from it"
    clock.now += UNPIN_SECONDS
    reader.look()
    assert ended == pinned[:1]


def test_a_page_stays_known_when_another_begins_where_it_was(
    other: OwnedArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, reader, chance = host(other, monkeypatch), peer(), random.Random(7)
    for number in range(600):
        again = chance.randrange(max(0, number - 40), number + 1)
        put(store, [again], 1000 + 37 * again % 30_000)
        kept = [page for page in range(number + 1) if has(store, [page])[0]]
        assert all(has(reader, kept)) or not kept


def test_a_thread_follows_the_others(other: OwnedArena, monkeypatch: pytest.MonkeyPatch) -> None:
    store, reader = host(other, monkeypatch), PeerStore(0, 1)
    reader.watch()
    put(store, range(5))
    eventually(lambda: all(has(reader, range(5))))
    reader.close()


def test_memory_that_is_no_arena_is_not_read(other: OwnedArena, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    reader = peer(clock)
    assert has(reader, [1]) == [False], "nothing there yet"
    path = Path(other.path)
    random.seed(1)
    for size in (1, 63, HEAD_BYTES, 4096, SIZE):
        path.write_bytes(random.randbytes(size))
        assert has(reader, [1]) == [False]
    store = host(other, monkeypatch)
    put(store, [1])
    assert has(reader, [1]) == [True]
    layout = Layout.of(len(store._memory), 1024, 1)
    for cell in range(layout.cells):
        start = layout.entry(cell)
        store._memory[start : start + ENTRY_BYTES] = random.randbytes(ENTRY_BYTES)
    assert get(reader, [1]) == [False]


def test_a_shelf_loads_from_others_and_saves_nothing_there(
    arena: OwnedArena, other: OwnedArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(Shelf({"host": host(other, monkeypatch)}), 1, 2, 3)
    own = host(arena, monkeypatch)
    shelf = Shelf({"host": own, "peer": peer()})
    assert load(shelf, 1, 2, 3) == 3
    found = shelf.figures()
    assert (found["peer"].hit_tokens, found["host"].stored_tokens, own.pages) == (192, 0, 0)
    fill(shelf, 4, 5)
    found = shelf.figures()
    assert (found["host"].stored_tokens, found["peer"].skipped_tokens) == (128, 0)
    assert load(shelf, 4, 1) == 2
    shelf.close()


def test_it_needs_host_memory() -> None:
    with pytest.raises(ConfigError, match="give host, too"):
        EngineConfig(kv_tier=("peer",))
    assert os.environ.get(ARENA) is None and siblings() == {}
