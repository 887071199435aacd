"""The first thing that goes while the machine has little memory: blocks that are cached, and that nobody uses."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from kvern.residency.keeper import Keeper
from kvern.residency.policy import Footprint
from kvern.residency.pressure import HostMemory, Watch
from tests.support.several_models import served

CHUNK = 100_000_000
TOTAL = 10_000_000_000


class FakeReplica:
    """An engine that does at once what it is asked."""

    name = "0"

    def __init__(self, chunks: int, wanted: int) -> None:
        self.cache_chunks, self.cache_touched, self.cache_wanted = chunks, chunks, wanted
        ready = SimpleNamespace(chunk_bytes=CHUNK, least_chunks=1, most_chunks=20)
        self.supervisor = SimpleNamespace(is_ready=True, link=SimpleNamespace(ready=ready))

    def resize_cache(self, chunks: int) -> bool:
        is_new, self.cache_chunks = chunks != self.cache_chunks, chunks
        return is_new


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


def test_caches_are_not_granted_the_same_memory_again_while_they_do_not_write_to_it() -> None:
    """Ten chunks are free beyond twice the floor: a cache of six gets them once, and then those that it has used."""
    floor = HostMemory(0, TOTAL).floor
    left = [2 * floor + 10 * CHUNK]
    watch = Watch(lambda: HostMemory(left[0], TOTAL))

    async def run() -> None:
        keeper = Keeper([served("a", "kvern-1m")], TOTAL, None, watch)
        replica = FakeReplica(6, 5)
        keeper.residency.asked("a", 0.0)
        assert keeper.residency.decide(0.0).moves
        keeper.residency.moved("a", 0.0, Footprint(2 * CHUNK, 1.0))
        keeper.residents[0].client = SimpleNamespace(replicas=[replica])  # type: ignore[assignment]
        for _ in range(3):
            keeper._decide()
            assert replica.cache_chunks == 16
        replica.cache_touched = 12
        left[0] -= 6 * CHUNK
        watch.renew()
        keeper._decide()
        assert replica.cache_chunks == 16

    asyncio.run(run())
