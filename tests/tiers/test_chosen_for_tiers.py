"""Real engines: a prompt goes back to the one whose host memory has it, though no engine's device has it any more."""

import asyncio
import sys
from collections.abc import Sequence

import pytest

from kvern import EngineConfig, SamplingParams
from kvern.serving.client import EngineClient
from tests.support.served import PATIENCE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="engines find each other's memory in /proc")
# A model whose prompts take longer to compute than to load, and engines that hold two of them.
CONFIG = EngineConfig(
    model="kvern-12m",
    threads=1,
    device="cpu",
    dtype="float32",
    max_model_len=512,
    kv_cache_tokens=1024,
    data_parallel_size=2,
    kv_tier=("host:64MB",),
)
PARAMS = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
PROMPTS = [[300 + (number * 31 + place * 7) % 500 for place in range(390)] for number in range(12)]


async def asked(client: EngineClient, prompt: Sequence[int]) -> tuple[str, Sequence[int]]:
    """The engine that answers, and the answer."""
    generation = await client.replicas.submit(prompt, PARAMS, news=asyncio.Event())
    assert generation.workload is not None
    engine = generation.workload.engine
    async for _ in client.replicas.follow([generation], generation.news):
        pass
    return engine, generation.output.outputs[0].token_ids


def test_a_prompt_goes_to_the_engine_whose_host_memory_has_it() -> None:
    async def run() -> None:
        async with asyncio.timeout(PATIENCE), EngineClient(CONFIG) as client:
            found = [(prompt, await asked(client, prompt)) for prompt in PROMPTS]
            assert [engine for _, (engine, _) in found] == ["0", "1"] * 6, "the one that has computed less"
            stores = [replica.statistics.stores["host"] for replica in client.replicas]
            assert not any(store.hit_tokens for store in stores)
            evicted = found[:6]
            for prompt, before in sorted(evicted, key=lambda one: one[1]):  # all of one engine, and all of the other
                assert await asked(client, prompt) == before
            stores = [replica.statistics.stores["host"] for replica in client.replicas]
            outcomes = sum(
                store.hit_tokens + store.late_tokens for store in stores
            )  # late: of a processor that is busy
            assert outcomes == 384 * len(evicted), "no device has them"

    asyncio.run(run())
