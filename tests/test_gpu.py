"""The engine on a GPU: the same answers as on the CPU, with every switch on and off. Run with `pytest -m gpu`."""

import itertools
import random
from pathlib import Path

import pytest
import torch

from kvern import LLM, SamplingParams
from tests.families import FAMILIES, make_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

SWITCHES = list(itertools.product(("paged", "contiguous"), (True, False), (True, False), ("continuous", "static")))


def questions() -> list[list[dict[str, str]]]:
    rng = random.Random(7)
    sums = [f"What is {rng.randrange(1000)} + {rng.randrange(1000)}?" for _ in range(32)]
    names = ["Who are you?", "What is paged attention?", "What is the KV cache?", "Tell me a story about a fox."]
    return [[{"role": "user", "content": text}] for text in sums + names]


@pytest.fixture(scope="module")
def cpu_answers() -> list[list[int]]:
    llm = LLM(device="cpu", dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=48)
    return [output.outputs[0].token_ids for output in llm.chat(questions(), params)]


@pytest.mark.parametrize(("kv_cache", "prefix_cache", "chunked_prefill", "batching"), SWITCHES)
def test_embedded_model_answers_as_on_the_cpu(
    cpu_answers: list[list[int]], kv_cache: str, prefix_cache: bool, chunked_prefill: bool, batching: str
) -> None:
    llm = LLM(
        device="cuda",
        dtype="float32",
        max_model_len=512,
        kv_cache_tokens=64 * 512,
        kv_cache=kv_cache,
        prefix_cache=prefix_cache,
        chunked_prefill=chunked_prefill,
        batching=batching,
    )
    outputs = llm.chat(questions(), SamplingParams(temperature=0, max_tokens=48))
    assert [output.outputs[0].token_ids for output in outputs] == cpu_answers


@pytest.mark.parametrize("family", list(FAMILIES), ids=str)
def test_family_logprobs_match_the_cpu(family: str, tmp_path: Path) -> None:
    from transformers import CONFIG_MAPPING

    if FAMILIES[family][0] not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {FAMILIES[family][0]} to make a checkpoint with")
    folder = tmp_path / "model"
    make_checkpoint(family, folder)
    rng = random.Random(1)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=0)
    prompts = [[rng.randrange(3, 90) for _ in range(length)] for length in (5, 16, 33)]
    results = []
    for device in ("cpu", "cuda"):
        llm = LLM(str(folder), device=device, dtype="float32", kv_cache_tokens=1024, max_model_len=64)
        outputs = llm.generate(prompts, params)
        results.append(
            [
                [next(iter(entry.values())).logprob for entry in (output.prompt_logprobs or [])[1:] if entry]
                for output in outputs
            ]
        )
    for on_cpu, on_gpu in zip(*results, strict=True):
        assert on_gpu == pytest.approx(on_cpu, abs=2e-3)
