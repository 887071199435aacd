"""Two models with one memory for their KV caches, which follows the load."""

import asyncio
from typing import Any

import pytest

from kvern.residency.options import ServedModel
from tests.support.several_models import engine_of, load, served, server_of

CACHE: dict[str, Any] = {"max_model_len": 256, "kv_cache_tokens": 4096, "max_batch_requests": 5}
SPARE = 8
"""Chunks that both models together have beyond the least of each."""


def models(**options: Any) -> list[ServedModel]:
    return [served(name, "kvern-1m", **{**CACHE, **options}) for name in "ab"]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_blocks_follow_the_load_and_answers_are_those_of_fixed_sizes(ranks: int) -> None:
    async def run() -> None:
        async with server_of(models(tensor_parallel_size=ranks)) as (http, _):
            expected = await load(http, "a")
        async with server_of(models(elastic_kv_cache=True, tensor_parallel_size=ranks)) as (http, keeper):
            for name in "ab":
                await http.post(f"/v1/models/{name}/load")
            engines = {name: engine_of(keeper, name) for name in "ab"}
            ready = engines["a"].supervisor.link.ready
            assert ready.chunk_bytes and 0 < ready.least_chunks < ready.most_chunks
            keeper.residency.memory = keeper.residency.held + SPARE * ready.chunk_bytes
            for busy, idle in ("ab", "ba"):
                while True:
                    assert await load(http, busy) == expected
                    sizes = {name: engine.cache_chunks - ready.least_chunks for name, engine in engines.items()}
                    assert sum(sizes.values()) <= SPARE and min(sizes.values()) >= 0
                    if sizes[busy] > 2 * sizes[idle]:
                        break
            assert [*await asyncio.gather(load(http, "a"), load(http, "b"))] == [expected, expected]
            while engines["a"].cache_chunks == ready.least_chunks:
                assert await load(http, "a") == expected
            await http.post("/v1/models/a/sleep")
            assert engines["a"].cache_chunks == ready.least_chunks, "it does not have what others may take"
            assert await load(http, "b") == expected == await load(http, "a")

    asyncio.run(run())
