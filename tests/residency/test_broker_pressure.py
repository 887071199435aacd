"""The first thing that goes while the machine has little memory: blocks that are cached, and that nobody uses."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from kvern import EngineConfig
from kvern.request.events import EngineStatistics
from kvern.residency import broker
from kvern.residency.gpus import CardMemory, GpuMemory
from kvern.residency.keeper import Keeper
from kvern.residency.options import ServedModel
from kvern.residency.policy import Footprint, Move, Terms
from kvern.residency.pressure import LEAST_FREE, HostMemory, Watch
from kvern.serving.replica import RETRY_SECONDS, Replica
from kvern.serving.wire import Ready
from tests.support.several_models import served

CHUNK = 100_000_000
TOTAL = 10_000_000_000


class FakeLink:
    """The connection to an engine."""

    def __init__(self, ready: SimpleNamespace) -> None:
        self.ready = ready


class FakeReplica:
    """An engine that does at once what it is asked."""

    name = "0"

    def __init__(self, chunks: int, wanted: int) -> None:
        self.cache_chunks, self.cache_touched, self.cache_wanted = chunks, chunks, wanted
        self.told: int | None = None
        self.released: list[int] = []
        ready = SimpleNamespace(chunk_bytes=CHUNK, least_chunks=1, most_chunks=20, pages="", gpu=None)
        self.supervisor = SimpleNamespace(is_ready=True, link=FakeLink(ready))

    def resize_cache(self, chunks: int) -> bool:
        is_new, self.cache_chunks = chunks != self.cache_chunks, chunks
        return is_new

    @property
    def told_chunks(self) -> int:
        return self.cache_chunks if self.told is None else self.told

    def release_pages(self, size: int) -> None:
        self.released.append(size)


def keeper_of_cards(names: str, watch: Watch) -> Keeper:
    """A keeper of models that share a card, which may take far more than there is."""
    card = GpuMemory(TOTAL, TOTAL)
    engines = (EngineConfig("kvern-1m", served_model_name=(name,), gpu_memory_share=0.1) for name in names)
    return Keeper([ServedModel(engine, gpu=card) for engine in engines], TOTAL, None, watch)


def is_awake(keeper: Keeper, name: str, replica: FakeReplica) -> None:
    """Lets a model be awake that has no requests any more."""
    resident = next(one for one in keeper.residents if one.name == name)
    keeper.residency.asked(name, 0.0)
    keeper.residency.decide(0.0)
    keeper.residency.moved(name, 0.0, Footprint(2 * CHUNK, 1.0))
    keeper.residency.ended(name, 1.0)
    resident.client = SimpleNamespace(replicas=[replica])  # type: ignore[assignment]


async def turns() -> None:
    """Lets everything happen that can."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("lacks", "freed", "rests"),
    [(50, 80, False), (120, 80, True), (50, 0, True)],
    ids=["enough", "too little", "of blocks that were never written"],
)
def test_cached_blocks_go_before_an_idle_model_does(
    lacks: int, freed: int, rests: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine is looked at again before a model makes way, and caches take nothing back meanwhile."""
    floor, clock = HostMemory(0, TOTAL).floor, [0.0]
    left = [floor - lacks * CHUNK // 10]
    watch = Watch(lambda: HostMemory(left[0], TOTAL))
    begun: list[Any] = []
    monkeypatch.setattr("kvern.residency.keeper.time", SimpleNamespace(monotonic=lambda: clock[0]))

    async def run() -> None:
        keeper = Keeper([served("idle", "kvern-1m"), served("busy", "kvern-1m")], TOTAL, None, watch)
        replicas = {"idle": FakeReplica(8, 0), "busy": FakeReplica(6, 5)}
        for resident in keeper.residents:
            keeper.residency.asked(resident.name, -1000.0)
            assert keeper.residency.decide(-1000.0).moves
            keeper.residency.moved(resident.name, -1000.0, Footprint(2 * CHUNK, 1.0))
            if resident.name == "idle":
                keeper.residency.ended(resident.name, -990.0)
            resident.client = SimpleNamespace(replicas=[replicas[resident.name]])  # type: ignore[assignment]
        keeper._begin = begun.append  # type: ignore[method-assign, assignment]
        for _ in range(2):
            again_at = keeper._decide()
            assert not begun and again_at is not None and 0 < again_at < 1
        left[0] += freed * CHUNK // 10
        clock[0] = again_at or 0.0
        for _ in range(3):
            clock[0] = keeper._decide() or 0.0
            assert (replicas["idle"].cache_chunks, replicas["busy"].cache_chunks) == (1, 5)

    asyncio.run(run())
    assert [move.name for move in begun] == ["idle"] * rests


def test_pages_of_tiers_go_behind_cached_blocks_and_before_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step has time to show; what tiers gave back they get again once there is twice the floor."""
    floor, clock = HostMemory(0, TOTAL).floor, [0.0]
    left = [floor - 5 * CHUNK]
    watch = Watch(lambda: HostMemory(left[0], TOTAL))
    begun: list[Any] = []
    monkeypatch.setattr("kvern.residency.keeper.time", SimpleNamespace(monotonic=lambda: clock[0]))

    async def run() -> None:
        keeper = Keeper([served("a", "kvern-1m"), served("b", "kvern-1m")], TOTAL, None, watch)
        replicas = [FakeReplica(3, 0), FakeReplica(1, 0)]
        for resident, replica in zip(keeper.residents, replicas, strict=True):
            keeper.residency.asked(resident.name, -1000.0)
            assert keeper.residency.decide(-1000.0).moves
            keeper.residency.moved(resident.name, -1000.0, Footprint(2 * CHUNK, 1.0))
            keeper.residency.ended(resident.name, -990.0)
            resident.client = SimpleNamespace(replicas=[replica])  # type: ignore[assignment]
        keeper._begin = begun.append  # type: ignore[method-assign, assignment]
        replicas[1].supervisor.link.ready.pages = "a tier"
        clock[0] = keeper._decide() or 0.0
        assert replicas[0].cache_chunks == 1 and replicas[1].released == []
        left[0] += 2 * CHUNK
        clock[0] = keeper._decide() or 0.0
        assert replicas[1].released == [3 * CHUNK] and not replicas[0].released and not begun
        left[0] += CHUNK
        clock[0] += 1.0
        keeper._decide()
        assert [move.name for move in begun] == ["a"] and replicas[1].released == [3 * CHUNK]
        keeper.residency.moved("a", clock[0])
        for left[0], lifted in ((floor + CHUNK, []), (2 * floor, [0])):
            clock[0] += 2.0
            keeper._decide()
            assert replicas[1].released[1:] == lifted

    asyncio.run(run())


def test_a_model_that_wakes_while_there_is_little_memory_gives_pages_back_like_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once each, and again after it has slept: engines that wake take memory for pages again."""
    floor, left, clock = HostMemory(0, TOTAL).floor, [0], [1.0]
    monkeypatch.setattr("kvern.residency.keeper.time", SimpleNamespace(monotonic=lambda: clock[0]))
    watch = Watch(lambda: HostMemory(floor + left[0], TOTAL))

    async def run() -> None:
        keeper = Keeper([served(name, "kvern-1m", terms=Terms(pin=True)) for name in "ab"], TOTAL, None, watch)
        keeper._begin = lambda move: None  # type: ignore[method-assign]
        replicas = {name: FakeReplica(1, 0) for name in "ab"}
        for replica in replicas.values():
            replica.supervisor.link.ready.pages = "a tier"

        def decide(spare: int) -> list[int]:
            left[0] = spare * CHUNK
            clock[0] += 2.0
            keeper._decide()
            return [len(replica.released) for replica in replicas.values()]

        is_awake(keeper, "a", replicas["a"])
        assert decide(-1) == decide(-1) == [1, 0]
        is_awake(keeper, "b", replicas["b"])
        assert decide(-1) == decide(-1) == [1, 1]
        keeper.residency._models["b"].target = "asleep"
        assert decide(-1) == [1, 1]
        keeper.residency._models["b"].target = None
        assert decide(-1) == [1, 2]
        assert decide(50) == [2, 3] and replicas["a"].released[-1] == replicas["b"].released[-1] == 0

    asyncio.run(run())


def test_an_engine_that_restarts_while_there_is_little_memory_gives_pages_back_once_it_is_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    floor, clock = HostMemory(0, TOTAL).floor, [1.0]
    monkeypatch.setattr("kvern.residency.keeper.time", SimpleNamespace(monotonic=lambda: clock[0]))
    watch = Watch(lambda: HostMemory(floor - CHUNK, TOTAL))

    async def run() -> None:
        keeper = Keeper([served("a", "kvern-1m", terms=Terms(pin=True))], TOTAL, None, watch)
        keeper._begin = lambda move: None  # type: ignore[method-assign]
        replica = FakeReplica(1, 0)
        replica.supervisor.link.ready.pages = "a tier"
        is_awake(keeper, "a", replica)

        def told() -> int:
            clock[0] += 2.0
            keeper._decide()
            return len(replica.released)

        replica.supervisor.is_ready = False
        assert told() == 0
        replica.supervisor.is_ready = True
        assert told() == told() == 1
        replica.supervisor.link = FakeLink(replica.supervisor.link.ready)
        assert told() == told() == 2, "another engine"

    asyncio.run(run())


def test_a_model_that_has_loaded_half_leaves_the_cache_of_a_busy_one_alone() -> None:
    """48 chunks are spare, of which the wake takes 30: what it has taken is not kept free once more."""
    taken = [0]
    begun: list[Any] = []

    async def run() -> None:
        watch = Watch(lambda: HostMemory(2 * floor + (48 - taken[0] - replica.cache_touched) * CHUNK, TOTAL))
        keeper = Keeper([served(name, "kvern-1m") for name in "ab"], TOTAL, None, watch)
        is_awake(keeper, "a", replica)
        keeper._begin = begun.append  # type: ignore[method-assign, assignment]
        keeper.residency._models["b"].footprint = Footprint(30 * CHUNK, 1.0)
        keeper._decide()
        assert replica.cache_chunks == 20
        keeper.residency.asked("b", time.monotonic())
        keeper._decide()
        assert begun == [Move("b", "awake")]
        await keeper._until_given_back(keeper.residents[1])
        for taken[0], replica.cache_touched in ((0, 5), (15, 5), (15, 10), (30, 10)):
            watch.renew()
            keeper._decide()
            assert replica.cache_chunks >= replica.cache_wanted, f"the model has taken {taken[0]}"
            assert keeper.residency.waking == (30 - taken[0]) * CHUNK
        keeper.residency.moved("b", time.monotonic())
        keeper._decide()
        assert replica.cache_chunks >= replica.cache_wanted and keeper.residency.waking == 0

    floor, replica = HostMemory(0, TOTAL).floor, FakeReplica(20, 15)
    replica.cache_touched = 5
    asyncio.run(run())


@pytest.mark.parametrize("gpu", [None, "GPU-ab"])
def test_caches_are_not_granted_the_same_memory_again(gpu: str | None) -> None:
    """Ten chunks are free beyond twice the floor: a cache of six gets them once, and then those that it has used."""
    memory = HostMemory if gpu is None else CardMemory
    left = [2 * memory(0, TOTAL).floor + 10 * CHUNK]
    watch = Watch(lambda: memory(left[0], TOTAL))

    async def run() -> None:
        keeper = keeper_of_cards("a", watch) if gpu else Keeper([served("a", "kvern-1m")], TOTAL, None, watch)
        replica = FakeReplica(6, 5)
        replica.supervisor.link.ready.gpu = gpu
        is_awake(keeper, "a", replica)
        for _ in range(3):
            keeper._decide()
            assert replica.cache_chunks == 16
        replica.cache_touched = 12
        left[0] -= 6 * CHUNK
        keeper._decide()
        assert replica.cache_chunks == 16, "what was free a moment ago is not any more"

    asyncio.run(run())


class Card:
    """A card on which a cache has memory, and a model that wakes takes some."""

    def __init__(self, replica: FakeReplica, free: int) -> None:
        self._replica = replica
        self._all = free + replica.cache_touched * CHUNK
        self.taken = 0

    def read(self) -> CardMemory:
        return CardMemory(LEAST_FREE + self._all - self.taken - self._replica.cache_touched * CHUNK, TOTAL)


class SlowReplica(FakeReplica):
    """An engine that gives memory back when a test says so."""

    asked = 20

    def resize_cache(self, chunks: int) -> bool:
        is_new, self.asked = chunks != self.asked, chunks
        return is_new

    def answer(self) -> None:
        self.cache_chunks = self.cache_touched = self.asked


def test_a_wake_begins_once_caches_have_given_back_what_the_card_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """All models may take far more than the card has. What the model has taken is not asked for again."""
    monkeypatch.setattr("kvern.residency.keeper.LOOK_SECONDS", 0.0)

    async def run() -> None:
        replica = SlowReplica(20, 0)
        card = Card(replica, 2 * CHUNK)
        watch = Watch(card.read)
        keeper = keeper_of_cards("ab", watch)
        keeper._begin = begun.append  # type: ignore[method-assign]
        is_awake(keeper, "a", replica)
        replica.supervisor.link.ready.gpu = "GPU-ab"
        keeper._decide()
        assert replica.asked == 20
        keeper.residency.asked("b", time.monotonic())
        keeper._decide()
        assert begun == [Move("b", "awake")]
        needed = keeper.residency.footprint("b").needed_from("cold")
        waiting = asyncio.create_task(keeper._until_given_back(keeper.residents[1]))
        await turns()
        assert replica.asked == 20 - -(-(needed - 2 * CHUNK) // CHUNK) and not waiting.done()
        shrunk = replica.asked
        keeper._decide()
        assert replica.asked == shrunk
        replica.answer()
        await turns()
        assert waiting.done()
        for card.taken in (0, needed // 2, needed):
            watch.renew()
            keeper._decide()
            assert replica.asked == shrunk, "it is the model's, and is asked for once"
        keeper.residency.moved("b", time.monotonic())
        keeper._decide()
        assert replica.asked == shrunk
        card.taken = 0
        watch.renew()
        keeper._decide()
        assert replica.asked > shrunk, "nobody else takes it any more"

    begun: list[Any] = []
    asyncio.run(run())


def test_a_wake_on_a_gpu_does_not_wait_for_what_another_one_has_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache gives back what both lack, and nothing for what the first has taken already."""
    monkeypatch.setattr("kvern.residency.keeper.LOOK_SECONDS", 0.0)
    begun: list[Any] = []

    async def run() -> None:
        replica = SlowReplica(20, 0)
        card = Card(replica, 9 * CHUNK)
        keeper = keeper_of_cards("abc", Watch(card.read))
        keeper._begin = begun.append  # type: ignore[method-assign, assignment]
        is_awake(keeper, "a", replica)
        replica.supervisor.link.ready.gpu = "GPU-ab"
        for name in "bc":
            keeper.residency._models[name].footprint = Footprint(8 * CHUNK, 1.0)
        keeper.residency.asked("b", time.monotonic())
        keeper._decide()
        await asyncio.wait_for(keeper._until_given_back(keeper.residents[1]), 1)
        card.taken = 8 * CHUNK
        keeper.residency.asked("c", time.monotonic())
        keeper._watch.renew()  # type: ignore[union-attr]
        keeper._decide()
        assert begun == [Move("b", "awake"), Move("c", "awake")] and keeper.residency.waking == 8 * CHUNK
        waiting = asyncio.create_task(keeper._until_given_back(keeper.residents[2]))
        await turns()
        assert replica.asked == 20 - 7 and not waiting.done(), "one chunk of the 8 was free"
        replica.answer()
        await turns()
        assert waiting.done() and replica.asked == 13
        keeper.residency.moved("b", time.monotonic())
        assert keeper.residency.waking == 8 * CHUNK, "c has taken nothing yet"
        card.taken += 4 * CHUNK
        keeper._watch.renew()  # type: ignore[union-attr]
        keeper._decide()
        assert keeper.residency.waking == 4 * CHUNK and replica.asked == 13

    asyncio.run(run())


def test_on_a_gpu_caches_give_back_what_a_wake_takes_and_grow_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the card is theirs until another model is asked; nobody is refused, and nobody falls asleep."""
    left = [CHUNK]
    watch = Watch(lambda: CardMemory(LEAST_FREE + left[0], TOTAL))
    card = GpuMemory(TOTAL, TOTAL)
    begun: list[Move] = []

    async def run() -> None:
        engines = (EngineConfig("kvern-1m", served_model_name=(name,), gpu_memory_share=0.1) for name in "ab")
        keeper = Keeper([ServedModel(engine, gpu=card) for engine in engines], 30 * CHUNK, None, watch)
        replica = FakeReplica(20, 5)
        keeper.residency.asked("a", 0.0)
        assert keeper.residency.decide(0.0).moves
        keeper.residency.moved("a", 0.0, Footprint(2 * CHUNK, 1.0))
        keeper.residency.ended("a", 1.0)
        keeper.residents[0].client = SimpleNamespace(replicas=[replica])  # type: ignore[assignment]
        keeper._begin = begun.append  # type: ignore[method-assign, assignment]
        keeper._decide()
        assert replica.cache_chunks == 20 and not begun
        keeper.residency.asked("b", time.monotonic())
        keeper._decide()
        assert begun == [Move("b", "awake")]
        assert replica.cache_chunks == 19, "a has 2 chunks, b will have 10, and one is in both"
        keeper.residency.failed("b", 2.0)
        keeper.residency.ended("b", 3.0)
        replica.cache_chunks = replica.cache_touched = 1
        replica.supervisor.link.ready.gpu = "GPU-ab"
        monkeypatch.setattr(broker, "GROWTH_BYTES", 3 * CHUNK)
        left[0] = 30 * CHUNK
        watch.renew()
        for expected in (5, 8, 11, 14, 17, 20, 20):
            keeper._decide()
            assert replica.cache_chunks == expected, "what is needed at once, the rest in steps"

    asyncio.run(run())


class Asked(Replica):
    """An engine that answers when a test says so."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        ready = Ready(1, 1, "", gpu="GPU-0", least_chunks=2)
        send = lambda message: self.sent.append(message.chunks)  # noqa: E731
        self.supervisor = SimpleNamespace(link=SimpleNamespace(ready=ready), send=send)  # type: ignore[assignment]
        self._latest, self._asked_chunks, self._asked_at = EngineStatistics(), 0, 0.0

    def answers(self, chunks: int, refused: int = 0) -> None:
        self._latest = EngineStatistics(cache_chunks=chunks, cache_refused=refused)


def test_memory_that_a_card_did_not_have_is_not_counted_and_asked_for_again_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [100.0]
    monkeypatch.setattr("kvern.serving.replica.time", SimpleNamespace(monotonic=lambda: clock[0]))
    engine = Asked()
    assert engine.cache_chunks == 2
    assert engine.resize_cache(8) and not engine.resize_cache(8)
    assert engine.cache_chunks == 8, "it is about to have them"
    assert engine.cache_touched == 2, "memory that is free is granted once"
    engine.answers(5, refused=8)
    assert engine.cache_chunks == engine.cache_touched == 5
    assert not engine.resize_cache(8)
    clock[0] += RETRY_SECONDS
    assert engine.resize_cache(8) and not engine.resize_cache(8)
    engine.answers(8)
    assert engine.cache_chunks == 8
    assert engine.resize_cache(3)
    assert engine.cache_chunks == 8, "until it says that it has given them back"
    engine.answers(3)
    assert engine.cache_chunks == 3 and engine.sent == [8, 8, 3]


def test_a_cache_on_a_gpu_grows_beyond_what_its_engine_has_told_by_one_step_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica = FakeReplica(2, 1)
    replica.supervisor.link.ready.gpu = "GPU-1"
    replica.supervisor.link.ready.most_chunks = 90
    monkeypatch.setattr("kvern.residency.broker.GROWTH_BYTES", 3 * CHUNK)
    clients: Any = {"a": SimpleNamespace(replicas=[replica])}
    replica.told = 2
    for _ in range(4):
        broker.settle(clients, 80 * CHUNK, needed_alone=False)
        assert replica.cache_chunks == 5
    replica.told = None
    broker.settle(clients, 80 * CHUNK, needed_alone=False)
    assert replica.cache_chunks == 8
