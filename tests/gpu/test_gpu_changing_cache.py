"""KV caches on a GPU whose memory comes and goes while engines run. Run with `pytest -m gpu`."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvern import LLM, EngineConfig, SamplingParams
from kvern.device.chunked_memory import ChunkedMemory, blocks_of_a_piece
from kvern.device.mapped_memory import MappedMemory, granularity
from kvern.residency.gpus import card_memory
from kvern.residency.keeper import watch_for
from kvern.residency.options import served_models
from tests.support.families import make_checkpoint
from tests.support.internals import core_of, worker_of
from tests.support.several_models import engine_of, load, server_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

CARD = torch.device("cuda:0")
MIB = 1 << 20
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "max_position_embeddings": 1024, **HEADS}
"""A model of which a piece of memory has few blocks."""
OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "bfloat16",
    "max_model_len": 512,
    "kv_cache_tokens": 1 << 14,
    "max_batch_requests": 16,
    "gpu_memory_share": 0.1,
}
PROMPTS = [[5 + number, *(20 + place % 50 for place in range(40 + 13 * number))] for number in range(20)]
PARAMS = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


@contextmanager
def filled(left: int) -> Iterator[None]:
    """Another owner has the card's memory but for about so many bytes."""
    torch.cuda.synchronize()
    other = MappedMemory(CARD)
    try:
        for size in (1 << 30, 64 * MIB, 2 * MIB):
            while torch.cuda.mem_get_info()[0] >= left + size:
                other.add(size)
        yield
    finally:
        other.unmap()


@pytest.mark.alone
def test_memory_comes_as_zeros_at_addresses_that_stay_and_goes_to_others() -> None:
    unit = blocks_of_a_piece(granularity(CARD), [64 << 10])
    assert granularity(CARD) == 2 * MIB and unit == 32
    memory = ChunkedMemory(CARD, 1280, 256, 256, unit)
    pools = [memory.zeros(8, (16, 4, 512), torch.bfloat16), memory.zeros(2, (16, 1, 1024), torch.float32)]
    chunk = 10 * 16 * MIB
    assert memory.size == memory.least_bytes == chunk + 2 * 2 * MIB
    first = pools[0][:, :256]
    graph = torch.cuda.CUDAGraph()
    total = first.sum(dtype=torch.float64)  # loads the kernels
    for pool in pools:
        assert not pool[:, :256].any()
        pool[:, :256] = 3
    with torch.cuda.graph(graph):
        total = first.sum(dtype=torch.float64)
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0] + memory.size
    addresses = [pool.data_ptr() for pool in pools]
    for count in (512, 1280, 768, 256, 1280):
        before = memory.blocks
        assert memory.resize(count) == count
        assert [pool.data_ptr() for pool in pools] == addresses
        assert memory.size == chunk * count // 256 + 4 * MIB
        assert abs(free - torch.cuda.mem_get_info()[0] - memory.size) < 100 * MIB
        for pool in pools:
            assert not pool[:, before:count].any()
            pool[:, before:count] = 3
            pool[:, memory.scratch] = 5
        first.fill_(2)
        graph.replay()
        torch.cuda.synchronize()
        assert total.item() == 2 * first.numel()
    memory.resize(256)
    with filled(2 * chunk + chunk // 2):
        got = memory.resize(1280)
        assert 256 < got < 1280 and got % 256 == 0
        assert not pools[0][:, 256:got].any()
        memory.leave()
        memory.enter()
        assert memory.blocks == 256 and not first.any()
    assert memory.resize(1280) == 1280


def tokens(llm: LLM, prompts: Sequence[list[int]] = PROMPTS) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(list(prompts), PARAMS)]


@pytest.mark.alone
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"dtype": "float32"}, id="graphs"),
        pytest.param({"deterministic": True, "kv_cache_dtype": "fp8"}, id="8 bits"),
    ],
)
def test_answers_are_those_of_a_fixed_cache_and_graphs_hold(options: dict[str, Any], tmp_path: Path) -> None:
    folder = str(make_checkpoint("llama", tmp_path, **WIDE))
    with LLM(folder, **OPTIONS | options) as llm:
        expected = tokens(llm)
    with LLM(folder, **OPTIONS | options, elastic_kv_cache=True) as llm:
        core: Any = core_of(llm)
        runner: Any = worker_of(llm).runner
        engine: Any = llm._engine
        memory, least = core.scheduler.cache.memory, engine.layout.least_chunks
        core.resize_cache(least)
        while core.idle():
            pass
        captured = [dict(graphs.captured) for graphs in runner._graphs]
        assert any(captured), "before the cache grew"
        most = memory.most_chunks
        assert least < 3 < most
        addresses = [cache.data_ptr() for cache in runner.caches]
        for chunks in (most, least, 3, most):
            assert core.resize_cache(chunks)[0] == chunks
            assert tokens(llm) == expected
            core.scheduler.check_integrity()
        assert [cache.data_ptr() for cache in runner.caches] == addresses
        for before, graphs in zip(captured, runner._graphs, strict=True):
            assert all(graphs.captured[shape] is graph for shape, graph in before.items())
        core.resize_cache(least)
        with filled((most - least) // 2 * (worker_of(llm).memory.chunked.size // least)):
            assert core.resize_cache(most)[0] < most
            assert core.statistics().cache_refused == most
            assert tokens(llm, PROMPTS[:4]) == expected[:4], "what was refused disturbs nobody"
        assert core.resize_cache(most)[0] == most and not core.statistics().cache_refused
        requests = [engine.add(str(number), prompt, PARAMS) for number, prompt in enumerate(PROMPTS)]
        steps = 0
        while engine.has_work:
            engine.step()
            steps += 1
            if steps % 40 == 0:
                _, events = core.resize_cache(least if steps % 80 else most)
                engine._outputs.process(events)
        assert [request.outputs[0].token_ids for request in requests] == expected
        assert core.scheduler.preemption_count, "requests had blocks of chunks that went"


def test_models_with_drafts_sleep_wake_and_share_memory_and_say_the_same(tmp_path: Path) -> None:
    """A, B, A: as engines of fixed caches, whatever the other has taken meanwhile."""
    folder, draft = (str(make_checkpoint("llama", tmp_path / name, **WIDE)) for name in ("model", "draft"))
    models = {"a": {"model": folder, "draft_model": draft}, "b": {"model": folder, "proposer": "ngram"}}
    plain = {name: value for name, value in OPTIONS.items() if name != "gpu_memory_share"}
    engine = EngineConfig(deterministic=True, **plain)
    fixed = served_models(engine, {name: model | {"gpu_memory_share": 0.1} for name, model in models.items()}, None)
    found = served_models(engine, models, None)
    assert all(one.engine.elastic_kv_cache for one in found) and not fixed[0].engine.elastic_kv_cache
    card = found[0].gpu
    assert card is not None

    async def run() -> None:
        async with server_of(fixed, memory=card.usable) as (http, _):
            expected = {name: await load(http, name) for name in "ab"}
        watch = watch_for(found)
        async with server_of(found, card.usable, watch) as (http, keeper):
            for name in "ab":
                await http.post(f"/v1/models/{name}/load")
            engines = {name: engine_of(keeper, name) for name in "ab"}
            ready = engines["a"].supervisor.link.ready
            assert ready.chunk_bytes and 0 < ready.least_chunks < ready.most_chunks
            footprints = [keeper.residency.footprint(name).awake for name in "ab"]
            assert footprints == [engine.supervisor.link.ready.gpu_bytes for engine in engines.values()]
            least = {name: engine.supervisor.link.ready.least_chunks for name, engine in engines.items()}
            keeper.residency.memory = keeper.residency.held + ready.chunk_bytes
            for busy, idle in ("ab", "ba"):
                for _ in range(100):
                    assert await load(http, busy) == expected[busy]
                    if engines[busy].cache_chunks > least[busy] and engines[idle].cache_chunks == least[idle]:
                        break
                else:
                    pytest.fail(f"no memory came to {busy}")
            for name in "aba":
                assert (await http.post(f"/v1/models/{name}/sleep")).json()
                assert await load(http, name) == expected[name]
            state = card_memory(card.names)
            assert state is not None and 0 < state.free < state.total

    asyncio.run(run())


@pytest.mark.alone
def test_a_wake_for_which_others_have_the_memory_is_refused_with_numbers_and_later_it_works(tmp_path: Path) -> None:
    folder = str(make_checkpoint("llama", tmp_path, **WIDE))
    plain = {name: value for name, value in OPTIONS.items() if name != "gpu_memory_share"}
    found = served_models(EngineConfig(deterministic=True, **plain), dict.fromkeys("ab", folder), None)
    card = found[0].gpu
    assert card is not None

    async def run() -> None:
        async with server_of(found, card.usable, watch_for(found)) as (http, keeper):
            for name in "ab":
                await http.post(f"/v1/models/{name}/load")
            expected = await load(http, "a")
            await http.post("/v1/models/a/sleep")
            model = keeper.residency._models["a"]
            model.footprint = replace(model.footprint, cache=0)
            with filled(400 * MIB):
                await asyncio.sleep(1.2)  # the next look at the card
                answer = await http.post("/v1/completions", json={"model": "a", "prompt": [5, 9], "max_tokens": 1})
                assert answer.status_code == 503 and "are free" in answer.text
                assert len(await load(http, "b")) == len(expected), "who is awake goes on"
            await asyncio.sleep(2.5)
            assert await load(http, "a") == expected

    asyncio.run(run())
