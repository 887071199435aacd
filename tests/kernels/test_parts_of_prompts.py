"""Steps in which a part of a prompt stands beside decodes, of the engine whose batch lives on the device."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvern import LLM, SamplingParams
from tests.support.drafting_requests import PROMPTS
from tests.support.kernels.device_engines import OPTIONS
from tests.support.outputs import chosen_logprobs, token_ids
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.usefixtures("few_products")


def test_a_part_of_a_prompt_is_asked_for_nothing_beside_a_decode(
    tmp_path: Path, on_device: Callable[..., LLM], caplog: pytest.LogCaptureFixture
) -> None:
    """What a request wants of its tokens, those beside a part of its prompt have nothing of."""
    folder, options = make_tiny_model(tmp_path), OPTIONS | {"max_batch_tokens": 8}
    params = [
        SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=1),
    ]
    prompts = [PROMPTS[2][:2], PROMPTS[1] * 2]
    expected, found = (
        llm.generate(prompts, params)
        for llm in (LLM(str(folder), device="cpu", **options), on_device(folder, **options))
    )
    assert token_ids(found) == token_ids(expected)
    assert list(chosen_logprobs(found)) == pytest.approx(list(chosen_logprobs(expected)), abs=2e-4)
    assert "failed" not in caplog.text, "no step ran again"
