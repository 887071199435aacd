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
        self.cache_chunks, self.cache_wanted = chunks, wanted
        ready = SimpleNamespace(chunk_bytes=CHUNK, least_chunks=1, most_chunks=20)
        self.supervisor = SimpleNamespace(is_ready=True, link=SimpleNamespace(ready=ready))

    def resize_cache(self, chunks: int) -> bool:
        is_new, self.cache_chunks = chunks != self.cache_chunks, chunks
        return is_new


@pytest.mark.parametrize(("lacks", "rests"), [(50, False), (120, True)])
def test_cached_blocks_go_before_an_idle_model_does(lacks: int, rests: bool) -> None:
    floor = HostMemory(0, TOTAL).floor
    watch = Watch(lambda: HostMemory(floor - lacks * CHUNK // 10, TOTAL))
    begun: list[Any] = []

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
        keeper._decide()
        assert (replicas["idle"].cache_chunks, replicas["busy"].cache_chunks) == (1, 5)

    asyncio.run(run())
    assert [move.name for move in begun] == ["idle"] * rests
