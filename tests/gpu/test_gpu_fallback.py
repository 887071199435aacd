"""Models that transformers computes on a GPU, over kvern's attention, with graphs where they can be captured.

Run with `pytest -m gpu`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from kvern import LLM, SamplingParams
from tests.support.families import make_checkpoint
from tests.support.internals import check_integrity, decoder_of, worker_of
from tests.support.outputs import chosen_logprobs, token_ids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

OPTIONS: dict[str, Any] = {
    "model_implementation": "transformers",
    "max_model_len": 256,
    "kv_cache_tokens": 4096,
    "max_batch_requests": 8,
}
GRAPHS = {"gpt2", "llama"}
"""Families of which is known that they never wait for the device."""
PROMPTS = [[5 + number, *(20 + place % 50 for place in range(20 + 13 * number))] for number in range(6)]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)


@pytest.mark.parametrize("family", ["gpt2", "apertus", "mimo_v2_flash", "llama"])
def test_answers_are_those_of_a_cpu(family: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path)
    with LLM(str(tmp_path), device="cpu", dtype="float32", cpu_kernels=False, **OPTIONS) as llm:
        expected = llm.generate(PROMPTS, PARAMS)
    with LLM(str(tmp_path), device="cuda", dtype="float32", gpu_memory_share=0.1, **OPTIONS) as llm:
        decoder, runner = decoder_of(llm), worker_of(llm).runner
        assert decoder.captures or family not in GRAPHS
        assert bool(runner.graphs) == decoder.captures
        for _ in range(2):  # with the prompts cached
            found = llm.generate(PROMPTS, PARAMS)
            assert token_ids(found) == token_ids(expected)
            assert list(chosen_logprobs(found)) == pytest.approx(list(chosen_logprobs(expected)), abs=2e-3)
        check_integrity(llm)


@pytest.mark.parametrize("quantization", ["int4", "int8", "fp8"])
def test_quantized_while_it_is_loaded(quantization: str) -> None:
    """As kvern's own model of the same weights, which is quantized alike."""
    options = OPTIONS | {"dtype": "bfloat16", "quantization": quantization, "gpu_memory_share": 0.1}
    texts = ["The capital of France is", "Once upon a time", "User: What is two plus three?\nAssistant:"]
    found = []
    for implementation in ("kvern", "transformers"):
        with LLM("kvern-12m", device="cuda", **options | {"model_implementation": implementation}) as llm:
            found.append(llm.generate(texts, PARAMS.replace(max_tokens=1)))
    own, beside = found
    assert token_ids(beside) == token_ids(own)
    assert list(chosen_logprobs(beside)) == pytest.approx(list(chosen_logprobs(own)), abs=0.2)
