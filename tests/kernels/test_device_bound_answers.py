"""Where the host has a say in every token, the engine whose batch lives on the device answers as the ordinary one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvern import LLM, SamplingParams
from kvern.request.sampling_params import StructuredOutput
from tests.support.drafting_requests import PROMPTS
from tests.support.kernels.device_engines import OPTIONS
from tests.support.outputs import chosen_logprobs, token_ids
from tests.support.processors import install
from tests.support.speculation import speculating
from tests.support.tiny_model import make_tiny_model

pytestmark = pytest.mark.usefixtures("few_products")

DRAFTS = pytest.mark.parametrize(
    "drafts", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["with drafts", "without drafts"]
)


@pytest.mark.nightly
@DRAFTS
def test_structured_answers(drafts: bool, tmp_path: Path, on_device: Callable[..., LLM]) -> None:
    """Their next step is planned before their last token is known."""
    folder = make_tiny_model(tmp_path / "model")
    form = StructuredOutput(json={"type": "array", "items": {"enum": [1, 22, "a"]}, "maxItems": 2})
    bound = SamplingParams(temperature=0.9, seed=3, max_tokens=12, structured=form, logprobs=1)
    params = [bound, SamplingParams(temperature=0, max_tokens=6), bound.replace(seed=4)]
    prompts = [[5, 6, 7], [8, 9, 10, 11], [5, 6, 7, 8, 9]]
    expected = LLM(str(folder), device="cpu", **OPTIONS).generate(prompts, params)
    assert expected[0].outputs[0].finish_reason == "stop"
    llm = on_device(folder, **OPTIONS)
    with speculating(llm, expected, 0.8, most=3 * drafts):
        assert token_ids(llm.generate(prompts, params)) == token_ids(expected)
        assert bool(llm.statistics().accepted_tokens) == drafts


@pytest.mark.nightly
@DRAFTS
def test_logits_processors(
    drafts: bool, tmp_path: Path, on_device: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They see the token that the host does not know yet, and fail alone."""
    monkeypatch.syspath_prepend(str(install(tmp_path / "site")))
    folder = make_tiny_model(tmp_path / "model")
    asked: list[dict[str, Any] | None] = [
        {"follow": {"by": 1}},
        None,
        {"follow": {"by": 7}, "shift": {}},
        {"break": {"how": "nan", "after": 2}},
        {"break": {"how": "apply", "after": 3}},
    ]
    params = [SamplingParams(seed=3, max_tokens=8, logprobs=1, logits_processors=each) for each in asked]
    options = OPTIONS | {"logits_processors": ("follow", "shift", "break"), "max_batch_requests": 8}
    expected = LLM(str(folder), device="cpu", **options).generate([PROMPTS[0]] * 5, params, on_error="return")
    llm = on_device(folder, **options)
    with speculating(llm, expected, 0.8, most=3 * drafts):
        found = llm.generate([PROMPTS[0]] * 5, params, on_error="return")
        assert bool(llm.statistics().accepted_tokens) == drafts
    assert [output.failure for output in found] == [output.failure for output in expected]
    assert found[3].failure and found[4].failure and not found[2].failure
    assert token_ids(found[:3]) == token_ids(expected[:3])
    assert list(chosen_logprobs(found[:3])) == pytest.approx(list(chosen_logprobs(expected[:3])), abs=2e-4)
