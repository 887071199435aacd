"""Models that transformers computes, whose batch lives on the device: kernels attend and sample, interpreted here."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvern import LLM, SamplingParams
from tests.support.drafting_requests import PROMPTS
from tests.support.fallback_families import FALLBACKS
from tests.support.families import make_checkpoint
from tests.support.internals import check_integrity
from tests.support.kernels.device_engines import OPTIONS
from tests.support.outputs import chosen_logprobs, token_ids

pytestmark = pytest.mark.usefixtures("few_products")
OTHERS = {"model_implementation": "transformers"}
BY_DAY = ("apertus", "mimo_v2_flash")


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[] if name in BY_DAY else pytest.mark.nightly)
        for name in [*FALLBACKS, "llama", "qwen3"]
    ],
)
def test_answers_are_those_of_pytorch(family: str, tmp_path: Path, on_device: Callable[..., LLM]) -> None:
    make_checkpoint(family, tmp_path)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    with LLM(str(tmp_path), device="cpu", **OPTIONS, **OTHERS) as llm:
        expected = llm.generate(PROMPTS, params)
    with on_device(tmp_path, **OPTIONS, **OTHERS) as llm:
        for _ in range(2):  # with the prompts cached
            found = llm.generate(PROMPTS, params)
            assert token_ids(found) == token_ids(expected)
            assert list(chosen_logprobs(found)) == pytest.approx(list(chosen_logprobs(expected)), abs=2e-4)
        check_integrity(llm)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("options", "close"),
    [
        ({"kv_cache_dtype": "int8"}, 2e-2),
        ({"quantization": "int8"}, 0.1),
        ({"elastic_kv_cache": True}, 2e-4),
        ({"proposer": "ngram"}, 2e-4),
        ({"kv_tier": ("host:8MB",)}, 2e-4),
        ({"enable_sleep": True, "overlap": False}, 2e-4),
    ],
    ids=str,
)
def test_options_give_what_they_give_through_pytorch(
    options: dict[str, Any], close: float, tmp_path: Path, on_device: Callable[..., LLM]
) -> None:
    make_checkpoint("apertus", tmp_path)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=1)
    given = OPTIONS | OTHERS | options
    with LLM(str(tmp_path), device="cpu", **given) as llm:
        expected = llm.generate(PROMPTS, params)
    with on_device(tmp_path, **given) as llm:
        found = llm.generate(PROMPTS, params)
        check_integrity(llm)
    # After an answer's first token engines may go on with different ones.
    first, wanted = (list(chosen_logprobs(outputs))[::2] for outputs in (found, expected))
    assert first == pytest.approx(wanted, abs=close)
