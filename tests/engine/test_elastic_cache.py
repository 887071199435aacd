"""A KV cache whose memory comes and goes in chunks: answers stay, and the system gets the pages."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from kvern import LLM, EngineConfig, SamplingParams
from kvern.engine.core import EngineCore
from kvern.serving.client import EngineClient

PROMPTS = [[5 + number, *range(30, 90)] for number in range(6)]
PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
OPTIONS: dict[str, Any] = {"max_model_len": 128, "kv_cache_tokens": 2048, "threads": 1, "device": "cpu"}


def resident(address: int, size: int) -> int:
    """The bytes of memory that this process has within some of its addresses."""
    found = 0
    for entry in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", entry):
            first, end = (int(number, 16) for number in match.groups())
            if first < address + size and address < end:
                found += 1024 * int(entry.partition("Rss:")[2].split()[0])
    return found


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads what a process of Linux has")
def test_answers_stay_while_the_cache_changes_and_its_memory_goes(tiny_model: Path) -> None:
    with LLM(str(tiny_model), **OPTIONS) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]
    with LLM(str(tiny_model), **OPTIONS, elastic_kv_cache=True) as llm:
        engine: Any = llm._engine
        core: Any = engine.core
        assert isinstance(core, EngineCore)
        memory, [pool] = core.scheduler.cache.memory, core.executor._worker.runner.pools
        least = engine.layout.least_chunks
        assert 0 < least * memory.chunk * 16 < 2048 and memory.most_chunks == 64
        assert memory.chunks == 64, "nobody else wants the memory"

        def held() -> int:
            return resident(pool.data_ptr(), pool.nbytes)

        for chunks in (memory.most_chunks, least, 20):
            assert core.resize_cache(chunks)[0] == chunks == memory.chunks
            assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)] == expected
        core.resize_cache(memory.most_chunks)
        llm.generate(PROMPTS * 4, PARAMS)
        full = held()
        core.resize_cache(least)
        assert held() < full
        core.scheduler.check_integrity()
        requests = [engine.add(str(number), prompt, PARAMS) for number, prompt in enumerate(PROMPTS)]
        core.resize_cache(memory.most_chunks)
        events = 0
        while engine.has_work:
            engine.step()
            events += 1
            if events % 7 == 0:
                core.resize_cache(least if events % 2 else memory.most_chunks)
                core.scheduler.check_integrity()
        assert [request.outputs[0].token_ids for request in requests] == expected
        assert core.scheduler.preemption_count, "requests had blocks of chunks that went"


def test_a_server_of_one_model_has_all_of_its_cache(tiny_model: Path) -> None:
    """Also after a sleep."""

    async def run() -> None:
        async with EngineClient(EngineConfig(str(tiny_model), **OPTIONS, elastic_kv_cache=True)) as client:
            [replica] = client.replicas
            for sleeps in (True, False):
                news = asyncio.Event()
                generation = await client.replicas.submit(PROMPTS[0], PARAMS, news=news)
                async for _ in client.replicas.follow([generation], news):
                    pass
                assert replica.told_chunks == replica.supervisor.link.ready.most_chunks == 64
                if sleeps:
                    await client.sleep()
                    await client.start()

    asyncio.run(run())
