"""Weights that are replaced while an engine on a GPU runs, whose graphs stay. Run with `pytest -m gpu`."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvern import LLM, EngineConfig, SamplingParams
from kvern.serving.client import EngineClient
from tests.support.families import make_checkpoint
from tests.support.internals import check_integrity, engine_of, worker_of
from tests.support.new_weights import change_weights, perturbed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

DEVICE = "cuda"
OPTIONS: dict[str, Any] = {"device": DEVICE, "max_model_len": 256, "kv_cache_tokens": 4096, "max_batch_requests": 8}
EXACT = {"dtype": "bfloat16", "deterministic": True}
SINGLE = {"dtype": "float32"}
"""Of models whose bits depend on the batch."""
PROMPTS = [[5 + number, *(20 + place % 50 for place in range(20 + 13 * number))] for number in range(6)]
PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def answers(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]


def models(family: str, folder: Path) -> tuple[Path, Path, Path]:
    """A model, the same with other weights, and a file with a part of these."""
    old = make_checkpoint(family, folder / "old", hidden_size=128, intermediate_size=256)
    new = shutil.copytree(old, folder / "new")
    changed, part = perturbed(old), perturbed(old, "layers.1.mlp")
    assert part
    save_file(changed, new / "model.safetensors")
    save_file({name: changed[name] for name in part}, folder / "part.safetensors")
    return old, new, folder / "part.safetensors"


@pytest.mark.parametrize(
    ("family", "options"),
    [
        pytest.param("llama", EXACT, id="dense"),
        pytest.param("llama", EXACT | {"quantization": "int4"}, id="int4"),
        pytest.param("llama", EXACT | {"quantization": "fp8"}, id="fp8"),
        pytest.param("llama", EXACT | {"proposer": "ngram", "kv_tier": ("host:64MB",)}, id="drafts and a tier"),
        pytest.param("qwen3_5", SINGLE, id="states"),
        pytest.param("deepseek_v3", SINGLE, id="latents and experts"),
    ],
)
def test_answers_are_those_of_an_engine_with_these_weights(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    old, new, part = models(family, tmp_path)
    mixed = shutil.copytree(old, tmp_path / "mixed")
    save_file(load_file(old / "model.safetensors") | load_file(part), mixed / "model.safetensors")
    expected = {}
    for folder in (new, mixed):
        with LLM(str(folder), **OPTIONS | options) as llm:
            expected[folder.name] = answers(llm)
    with LLM(str(old), **OPTIONS | options) as llm:
        expected["old"] = answers(llm)
        assert len({str(found) for found in expected.values()}) == 3
        runner: Any = worker_of(llm).runner
        captured = [dict(graphs.captured) for graphs in runner._graphs] if DEVICE == "cuda" else []
        for number, (path, name) in enumerate([(new, "new"), (old, "old"), (part, "mixed"), (new, "new")], 1):
            change_weights(llm, str(number), path)
            assert answers(llm) == expected[name], (number, name)
            assert answers(llm) == expected[name], "from the cache"
        for before, graphs in zip(captured, runner._graphs if captured else (), strict=True):
            assert all(graphs.captured[shape] is graph for shape, graph in before.items())
        check_integrity(llm)


@pytest.mark.parametrize("keep", [True, False])
def test_requests_that_run_go_on(keep: bool, tmp_path: Path) -> None:
    old, new, _ = models("llama", tmp_path)
    with LLM(str(new), **OPTIONS | EXACT) as llm:
        expected = answers(llm)
    with LLM(str(old), **OPTIONS | EXACT) as llm:
        engine: Any = engine_of(llm)
        running = [engine.add(str(number), prompt, PARAMS) for number, prompt in enumerate(PROMPTS)]
        while len(running[-1].outputs[0].token_ids) < 9:
            engine.step()
        known = [list(one.outputs[0].token_ids) for one in running]
        change_weights(llm, "1", new, keep=keep)
        while engine.has_work:
            engine.step()
        found = [one.outputs[0].token_ids for one in running]
        assert [tokens[: len(before)] for tokens, before in zip(found, known, strict=True)] == known
        assert [len(tokens) for tokens in found] == [40] * len(PROMPTS)
        assert answers(llm) == expected
        check_integrity(llm)


def test_a_model_that_slept_has_the_new_weights(tmp_path: Path) -> None:
    """Asleep weights of a GPU are in the host's memory, of which the old ones must be gone."""
    old, new, part = models("llama", tmp_path)

    async def answer(client: EngineClient) -> list[int]:
        news = asyncio.Event()
        generation = await client.replicas.submit(PROMPTS[2], PARAMS, news=news)
        async for _ in client.replicas.follow([generation], news):
            pass
        return list(generation.output.outputs[0].token_ids)

    async def run() -> None:
        options = OPTIONS | EXACT | {"enable_sleep": True}
        options |= {"gpu_memory_share": 0.08} if DEVICE == "cuda" else {}
        async with EngineClient(EngineConfig(str(new), **options)) as client:
            expected = await answer(client)
        async with EngineClient(EngineConfig(str(old), **options)) as client:
            before = await answer(client)
            assert before != expected
            for path, wanted in ((new, expected), (old, before), (part, None), (new, expected)):
                await client.weights.update(str(path), keep=False)
                found = await answer(client)
                assert wanted in (None, found)
                assert await client.sleep()
                await client.start()
                assert await answer(client) == found

    asyncio.run(run())
