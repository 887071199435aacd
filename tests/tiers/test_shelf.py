"""Stores that lie, raise, hang and are late: misses that are counted, and nothing else."""

from collections.abc import Sequence

import pytest

from kvern.tiers.host import HostStore
from kvern.tiers.page_memory import Copies, HostPages, Parts, Piece
from kvern.tiers.pages import HEADER_BYTES
from kvern.tiers.price import Breaker, Price
from kvern.tiers.shelf import Shelf
from kvern.tiers.shelved import Names
from kvern.tiers.store import Store
from tests.support.served import eventually
from tests.support.stores import SIZE, Clock, MemoryStore, PromptPages, fill, keep, known, load, name_of, pieces


def shelf_of(*stores: Store) -> tuple[Shelf, Clock]:
    clock = Clock()
    return Shelf({f"store-{number}": store for number, store in enumerate(stores)}, clock), clock


def test_what_is_saved_comes_back() -> None:
    shelf, _ = shelf_of(HostStore(1 << 20))
    fill(shelf, 1, 2, 3)
    assert load(shelf, 1, 2, 3) == 3
    found = shelf.figures()["store-0"]
    assert (found.stored_tokens, found.hit_tokens, found.missed_tokens) == (192, 192, 0)
    assert found.read_bytes == found.written_bytes > 0
    shelf.close()


def test_a_missing_page_ends_a_load() -> None:
    shelf, _ = shelf_of(HostStore(1 << 20))
    fill(shelf, 1, 2, 4)
    assert load(shelf, 1, 2, 3, 4) == 2
    assert shelf.figures()["store-0"].missed_tokens == 64


@pytest.mark.parametrize(
    ("lies", "came", "corrupt"), [("zeros", 0, 2), ("has", 2, 1), ("empty", 0, 2), ("short", 0, 0)]
)
def test_lies_are_misses(lies: str, came: int, corrupt: int) -> None:
    store = MemoryStore()
    shelf, _ = shelf_of(store)
    keep(store, 1, 2)
    store.lies = lies
    assert load(shelf, *(1, 2, 3) if lies == "has" else (1, 2)) == came
    found = shelf.figures()["store-0"]
    assert found.corrupt_pages == corrupt
    assert found.failures == (lies == "short")
    if corrupt:
        store.lies = ""
        assert shelf.find(known(1)) is None or lies == "has", "a page that was not right is asked for again"


def test_a_page_that_was_not_kept_is_a_miss() -> None:
    store = MemoryStore()
    shelf, _ = shelf_of(store)
    store.lies = "kept"
    fill(shelf, 1)
    assert load(shelf, 1) == 0


@pytest.mark.parametrize("call", ["has", "get", "put"])
def test_a_store_that_raises_is_turned_off_and_on_again(call: str) -> None:
    store = MemoryStore()
    shelf, clock = shelf_of(store)
    keep(store, 1)
    store.raises = {call}
    for number in range(3):
        if call == "put":
            fill(shelf, 5 + number)
        else:
            assert load(shelf, 1, number=number) == 0
    assert not shelf.figures()["store-0"].is_on
    calls = len(store.calls)
    assert load(shelf, 1, number=7) == 0
    fill(shelf, 9)
    assert len(store.calls) == calls, "a store that is off is asked"
    store.raises = set()
    clock.now += 1.1
    assert load(shelf, 1, number=8) == 1
    assert shelf.figures()["store-0"].is_on


def test_a_store_that_stays_broken_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    shelf, clock = shelf_of(store)
    keep(store, 1)
    store.raises = {"get"}
    for number in range(12):
        assert load(shelf, 1, number=number) == 0
        clock.now += 1.0
    assert shelf.figures()["store-0"].failures > 5
    assert [message for message in caplog.messages if "it is off for 1 s" in message and "as planned" in message]
    assert len(caplog.messages) == 1


def test_a_store_that_hangs_is_late() -> None:
    store = MemoryStore()
    shelf, clock = shelf_of(store)
    keep(store, 1)
    store.waits = {"get"}
    price = shelf.seconds(shelf.counts([(shelf.stores[0].name, 1000)]))
    for number in range(3):
        wanted = pieces(1)
        shelf.load(number, [wanted])
        assert shelf.ended() == []
        clock.now += 1.0
        assert shelf.ended() == [(number, 0)]
    found = shelf.figures()["store-0"]
    assert found.late_tokens == 192
    assert not found.is_on
    assert found.latency_seconds > price
    store.go.set()
    store.waits = set()
    clock.now += 120
    eventually(lambda: load(shelf, 1, number=9) == 1)
    assert shelf.ended() == []


class Blocks(HostPages):
    """Notes which pages are copied to where they belong."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, pieces: Sequence[Piece], places: Sequence[Parts]) -> Copies:
        self.written += [piece.name for piece in pieces]
        return super().write(pieces, places)


@pytest.mark.parametrize("gives_up", [False, True])
def test_pages_that_come_after_the_end_of_a_load_are_not_copied(gives_up: bool) -> None:
    """The blocks are others' by then."""
    store, clock, blocks = MemoryStore(), Clock(), Blocks()
    shelf = Shelf({"store": store}, clock, blocks)
    keep(store, 1, 2)
    assert load(shelf, 2) == 1 and blocks.written == [name_of(2)]
    store.waits = {"get"}
    shelf.load(7, [pieces(1)])
    eventually(lambda: store.calls.count("get") == 2)
    if gives_up:
        shelf.abandon()
    clock.now += 10.0
    assert shelf.ended() == ([] if gives_up else [(7, 0)])
    store.go.set()
    eventually(lambda: not shelf.stores[0].reading_bytes)
    assert blocks.written == [name_of(2)]


def test_a_load_is_not_late_while_computing_would_take_much_longer() -> None:
    store = MemoryStore()
    shelf, clock = shelf_of(store)
    keep(store, 1)
    store.waits = {"get"}
    shelf.load(1, [pieces(1)], patience=2.0)
    clock.now += 1.9
    assert shelf.ended() == []
    store.go.set()
    eventually(lambda: shelf.ended() == [(1, 1)])
    store.go.clear()
    shelf.load(2, [pieces(1)], patience=2.0)
    clock.now += 2.0
    assert shelf.ended() == [(2, 0)]
    store.go.set()


def test_the_pages_that_came_in_time_count() -> None:
    near, far = MemoryStore(), MemoryStore()
    shelf, clock = shelf_of(near, far)
    keep(near, 1, 2)
    keep(far, 3)
    far.waits = {"get"}
    shelf.load(1, [[piece] for piece in pieces(1, 2, 3)])
    eventually(lambda: shelf.figures()["store-0"].hit_tokens == 128)
    eventually(lambda: not shelf.stores[0].reading_bytes)
    assert shelf.ended() == []
    clock.now += 1.0
    assert shelf.ended() == [(1, 2)]
    far.go.set()


def test_abandoned_loads_are_never_told_of() -> None:
    store = MemoryStore()
    shelf, clock = shelf_of(store)
    keep(store, 1)
    store.waits = {"get"}
    shelf.load(1, [pieces(1)])
    shelf.abandon()
    store.go.set()
    clock.now += 10
    assert shelf.ended() == []


def test_memory_of_this_process_is_copied_from_at_once() -> None:
    """As for a GPU: no thread of the store has a part in it, and nobody waits."""
    store, memory, clock = HostStore(1 << 20), PromptPages(), Clock()
    memory.batch_bytes = 600
    shelf = Shelf({"host": store}, clock, memory)
    fill(shelf, *range(9))
    wanted = pieces(*range(9), 20)
    shelf.load(1, [[piece] for piece in wanted])
    assert shelf.ended() == [] and all(page.readers == 1 for page in store._pages.values())
    memory.is_done = True
    assert shelf.ended() == [(1, 9)]
    assert [bytes(piece.at[HEADER_BYTES:]) for piece in wanted[:9]] == [bytes([number]) * SIZE for number in range(9)]
    found = shelf.figures()["host"]
    assert (found.hit_tokens, found.missed_tokens) == (9 * 64, 64)
    assert found.read_bytes == 9 * (HEADER_BYTES + SIZE)
    store._part(store._pages[name_of(4)].cells[0], 400)[300] ^= 1
    shelf.load(2, [[piece] for piece in pieces(*range(9))])
    assert shelf.ended() == [(2, 4)]
    assert shelf.figures()["host"].corrupt_pages == 1 and store.has([name_of(3), name_of(4)]) == [True, False]
    memory.is_done = False
    shelf.load(3, [[piece] for piece in pieces(1, 2)])
    clock.now += 1.0
    assert shelf.ended() == [], "a step before it takes long"
    shelf.abandon()
    memory.is_done = True
    assert shelf.ended() == []
    assert not any(page.readers for page in store._pages.values()) and not shelf.stores[0].reading_bytes
    assert shelf.figures()["host"].corrupt_pages == 1, "what came too late was right"
    shelf.close()


Crowded = tuple[Shelf, PromptPages, HostStore, MemoryStore, Clock]


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> Crowded:
    """Two pages are as many as the engine's thread has on their way, one as it has copied at once."""
    monkeypatch.setattr("kvern.tiers.shelf.PROMPT_BYTES", 600)
    memory, clock, host, far = PromptPages(), Clock(), HostStore(1 << 20), MemoryStore(is_local=False)
    memory.batch_bytes = 150
    shelf = Shelf({"host": host, "far": far}, clock, memory)
    fill(shelf, *range(8))
    return shelf, memory, host, far, clock


def begun(shelf: Shelf) -> list[bytes]:
    """The first pages of the copies on their way."""
    return [arrival.pieces[0].name for arrival in shelf._arrivals]


def test_pages_are_copied_in_turn(crowded: Crowded) -> None:
    shelf, memory, host, _, _ = crowded
    for number in range(3):
        shelf.load(number, [[piece] for piece in pieces(2 * number, 2 * number + 1)])
    assert begun(shelf) == [name_of(0), name_of(1)] and len(shelf._queued) == 4
    ended: list[tuple[int, int]] = []
    memory.is_done = True
    while shelf._loads:
        ended += shelf.ended()
    assert ended == [(0, 2), (1, 2), (2, 2)] and shelf.ended() == []
    assert not any(page.readers for page in host._pages.values()) and not shelf.stores[0].reading_bytes
    shelf.close()


def test_pages_that_nobody_waits_for_are_given_back_at_once(crowded: Crowded) -> None:
    shelf, memory, host, _, _ = crowded
    for number in range(3):
        shelf.load(number, [[piece] for piece in pieces(2 * number, 2 * number + 1)])
    shelf.abandon()
    assert sum(page.readers for page in host._pages.values()) == 2 == len(shelf._arrivals), "those that are copied"
    size = HEADER_BYTES + SIZE
    assert shelf.stores[0].reading_bytes == 2 * size and not shelf._queued
    shelf.load(7, [[piece] for piece in pieces(6, 7)])
    memory.is_done = True
    assert shelf.ended() == [] and begun(shelf) == [name_of(6), name_of(7)]
    assert shelf.ended() == [(7, 2)] and not shelf.stores[0].reading_bytes
    assert shelf.figures()["host"].corrupt_pages == 0 and host.has([name_of(5)]) == [True]
    shelf.close()


def test_a_store_whose_pages_are_not_copied_yet_is_not_late(crowded: Crowded) -> None:
    """Another one hangs; the pages of loads that end so are not waited for, either."""
    shelf, memory, host, far, clock = crowded
    keep(far, 50)
    shelf.stores[1].known.add(name_of(50))
    far.waits = {"get"}
    shelf.load(1, [[piece] for piece in pieces(0, 1)])
    for number in range(3):
        shelf.load(10 + number, [[piece] for piece in pieces(3 + number, 50)])
    clock.now += 1.0
    assert shelf.ended() == [(10, 0), (11, 0), (12, 0)]
    found = shelf.figures()
    assert found["host"].is_on and not found["host"].failures and not found["host"].late_tokens
    assert not found["far"].is_on and found["far"].late_tokens
    assert not shelf._queued and sum(page.readers for page in host._pages.values()) == 2
    far.go.set()
    memory.is_done = True
    assert shelf.ended() == [(1, 2)]
    shelf.close()


def test_loads_that_are_decided_on_in_one_step_stand_in_line() -> None:
    """Each takes the time of those before it, too, before the first has begun."""
    shelf, _ = shelf_of(HostStore(1 << 20))
    fill(shelf, 1, 2)
    counts = shelf.counts([(shelf.stores[0].name, 10**9)])
    alone = shelf.seconds(counts)
    shelf.promise(counts)
    behind = shelf.seconds(counts)
    assert behind > 1.9 * alone
    shelf.promise(counts)
    assert shelf.seconds(counts) > 2.8 * alone
    assert load(shelf, 1) == 1
    assert len(shelf._promised) == 1, "it has begun"
    shelf.abandon()
    assert not shelf._promised
    shelf.close()


def test_a_page_of_which_a_piece_is_missing_is_saved_again() -> None:
    store = MemoryStore()
    shelf, _ = shelf_of(store)
    keep(store, 1)
    shelf.load(1, [pieces(1, 2)])
    eventually(lambda: shelf.ended() == [(1, 0)])
    assert shelf.wants([known(1)]), "nobody would ever write the other piece"
    fill(shelf, 1, 2)
    shelf.load(2, [pieces(1, 2)])
    eventually(lambda: shelf.ended() == [(2, 1)])


def test_a_store_that_has_answered_is_not_late() -> None:
    near, far = MemoryStore(), MemoryStore()
    shelf, clock = shelf_of(near, far)
    keep(far, 1)
    keep(near, 2)
    far.waits = {"get"}
    for number in range(3):
        shelf.load(number, [[piece] for piece in pieces(1, 2)])
        eventually(lambda number=number: near.calls.count("get") == number + 1)  # type: ignore[misc]
        eventually(lambda: not shelf.stores[0].reading_bytes)
        clock.now += 1.0
        assert shelf.ended() == [(number, 0)]
    found = shelf.figures()
    assert found["store-0"].is_on and not found["store-0"].failures and not found["store-0"].late_tokens
    assert not found["store-1"].is_on
    far.go.set()


def test_what_a_device_has_not_copied_yet_is_not_late() -> None:
    """Copies wait for the steps before them, and the price is that of the store and of its copies."""
    store, memory, clock = MemoryStore(), PromptPages(), Clock()
    shelf = Shelf({"far": store}, clock, memory)
    keep(store, 1, 2)
    price = shelf.seconds(shelf.counts([(shelf.stores[0].name, 1000)]))
    store.waits = {"get"}
    shelf.load(1, [[piece] for piece in pieces(1, 2)])
    eventually(lambda: "get" in store.calls)
    clock.now += 0.3
    store.go.set()
    eventually(lambda: not shelf._loads[1].unanswered)
    clock.now += 60.0
    assert shelf.ended() == []
    memory.is_done = True
    eventually(lambda: shelf.ended() == [(1, 2)])
    found = shelf.figures()["far"]
    assert (found.hit_tokens, found.late_tokens, found.failures) == (128, 0, 0)
    assert found.read_seconds == pytest.approx(0.301), "the store's time, and the copies'"
    assert shelf.seconds(shelf.counts([(shelf.stores[0].name, 1000)])) > price
    shelf.close()


def test_pages_from_below_are_kept_above() -> None:
    near, far = MemoryStore(), MemoryStore()
    shelf, _ = shelf_of(near, far)
    keep(far, 1, 2)
    assert load(shelf, 1, 2) == 2
    eventually(lambda: len(near.pages) == 2)
    assert near.pages == far.pages
    assert load(shelf, 1, 2, number=2) == 2
    assert far.calls.count("get") == 1


def test_each_store_gets_what_is_saved() -> None:
    stores = [MemoryStore(), MemoryStore(is_local=False), HostStore(1 << 20)]
    shelf, _ = shelf_of(*stores)
    fill(shelf, 1, 2)
    assert shelf.wants([known(3)]) and not shelf.wants([known(1)])
    assert [found.stored_tokens for found in shelf.figures().values()] == [128] * 3


def test_another_ranks_pages_are_put_into_private_stores_alone() -> None:
    shared, own = MemoryStore(), HostStore(1 << 20)
    shelf, _ = shelf_of(shared, own)
    shelf.save([piece._replace(is_own=False) for piece in pieces(1)])
    eventually(lambda: own.pages == 1)
    eventually(lambda: shelf.is_quiet)
    assert not shared.pages


def test_host_memory_has_single_heads_for_other_divisions() -> None:
    """Of a piece of two heads; another rank's heads as well, since each rank has memory of its own."""
    page, own = pieces(1)[0], HostStore(1 << 20)
    size = len(page.at) - HEADER_BYTES
    heads = [
        Piece(name_of(10 + head), memoryview(bytearray(HEADER_BYTES + size // 2)), 64 * (not head), False)
        for head in range(2)
    ]
    whole = page._replace(heads=heads, head_count=2, is_own=False)
    for by_heads in (False, True):
        store = HostStore(1 << 20) if not by_heads else own
        shelf = Shelf({"host": store}, Clock(), by_heads=by_heads)
        assert shelf.has_shared is by_heads
        shelf.save([whole])
        eventually(lambda shelf=shelf: shelf.is_quiet)  # type: ignore[misc]
        names = [page.name, *(head.name for head in heads)]
        assert store.has(names) == ([False, True, True] if by_heads else [True, False, False])
        assert shelf.find(whole.names) is shelf.stores[0]


def test_bytes_on_their_way_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvern.tiers.shelf.MOST_WRITING", 1500)
    store = MemoryStore()
    shelf, _ = shelf_of(store)
    store.waits = {"put"}
    for number in range(5):
        shelf.save(pieces(number))
    eventually(lambda: not shelf._sealing_bytes)
    assert not shelf.has_room(600)
    assert shelf.figures()["store-0"].skipped_tokens == 3 * 64
    store.go.set()
    eventually(lambda: shelf.is_quiet)
    assert shelf.has_room(600) and len(store.pages) == 2


def test_distant_stores_are_asked_at_arrival() -> None:
    store = MemoryStore(is_local=False)
    shelf, clock = shelf_of(store)
    keep(store, 1, 2)
    assert shelf.find(known(1)) is None
    store.waits = {"has"}
    question = shelf.ask([known(1), known(2), known(3)])
    assert question is not None and not shelf.answered(question)
    store.go.set()
    eventually(lambda: shelf.answered(question))
    assert load(shelf, 1, 2, 3) == 2
    store.pages.clear()
    assert load(shelf, 1, 2, number=2) == 0, "what it said is out of date"
    assert shelf.find(known(1)) is None
    store.go.clear()
    question = shelf.ask([known(1)])
    assert question is not None and not shelf.answered(question)
    clock.now += 10
    assert shelf.answered(question), "nobody waits for ever"
    store.go.set()


def test_what_the_first_rank_has_found_another_loads() -> None:
    """It has asked nobody, and is told of each page which store has it."""
    store = MemoryStore(is_local=False)
    shelf, _ = shelf_of(MemoryStore(is_local=False), store, HostStore(1 << 20))
    keep(store, 1, 2)
    for number, told in enumerate(("", "store-0", "store-2", "none", "store-1")):
        shelf.load(number, [pieces(1), pieces(2)], stores=[told, told])
        ended: list[tuple[int, int]] = []
        eventually(lambda found=ended: bool(found.extend(shelf.ended()) or found))  # type: ignore[misc]
        assert ended == [(number, 2 if told == "store-1" else 0)]
    shelf.close()


def test_a_distant_store_has_the_time_that_its_answers_take() -> None:
    store = MemoryStore(is_local=False)
    shelf, clock = shelf_of(store)
    store.waits = {"has"}
    for number in range(20):
        store.go.clear()
        question = shelf.ask([known(number)])
        assert question is not None
        eventually(lambda number=number: len(store.calls) == number + 1)  # type: ignore[misc]
        clock.now += 0.06
        assert not shelf.answered(question)
        store.go.set()
        eventually(lambda question=question: shelf.answered(question))  # type: ignore[misc]
    assert shelf.figures()["store-0"].failures == 0
    store.go.clear()
    question = shelf.ask([known(1)])
    assert question is not None
    clock.now += 0.15
    assert shelf.answered(question), "as long as it mostly takes, and a half"
    store.go.set()


def test_questions_that_nobody_follows_are_forgotten() -> None:
    """Their requests have ended."""
    store = MemoryStore(is_local=False)
    shelf, _ = shelf_of(store)
    for number in range(5):
        shelf.ask([known(number)])
    eventually(lambda: len(store.calls) == 5 and not shelf._questions)


def test_stores_that_are_near_are_not_asked() -> None:
    shelf, _ = shelf_of(MemoryStore())
    assert shelf.ask([known(1)]) is None


def test_a_price_follows_what_transfers_take_and_forgets() -> None:
    price = Price(0.001, 1e9)
    assert price.seconds(10**9) == pytest.approx(1.001)
    assert price.seconds(10**9, queued=10**9) == pytest.approx(2.001)
    for _ in range(50):
        price.learn(10**8, 1.0)
    assert price.seconds(10**8) == pytest.approx(1.0, rel=0.05)
    assert price.seconds(10**8, now=600.0) < 0.2, "a store that was slow once is never tried again"
    for _ in range(50):
        price.learn(10**8, 0.01, 600.0)
    assert price.seconds(10**8, now=600.0) == pytest.approx(0.01, rel=0.1)


def test_a_breaker_opens_for_longer_each_time() -> None:
    breaker = Breaker()
    now, found = 0.0, []
    for _ in range(9):
        assert not breaker.failed(now) and not breaker.failed(now + 0.1)
        seconds = breaker.failed(now + 0.2)
        assert not breaker.is_on(now + 0.2 + seconds / 2)
        now += 0.2 + seconds
        assert breaker.is_on(now)
        found.append(seconds)
    assert found == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    breaker.worked(now + 20)
    assert [breaker.failed(now + 30 + place) for place in range(3)] == [0, 0, 1]
    breaker = Breaker()
    assert [breaker.failed(20.0 * place) for place in range(9)] == [0] * 9, "failures that are far apart"


def test_names_are_bounded() -> None:
    names = Names(2)
    for name in (b"a", b"b", b"a", b"c"):
        names.add(name)
    assert [name in names for name in (b"a", b"b", b"c")] == [True, False, True]
