"""Long runs of queries that attend to keys and values made of latents, beside what a CPU answers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvern import LLM, SamplingParams
from kvern.attention import expanded
from tests.support.drafting_requests import PROMPTS
from tests.support.families import make_checkpoint
from tests.support.kernels.device_engines import OPTIONS
from tests.support.outputs import chosen_logprobs, token_ids


@pytest.mark.nightly
@pytest.mark.sample(1)
@pytest.mark.parametrize("most_bytes", [1 << 30, pytest.param(24 << 10, marks=pytest.mark.nightly)])
def test_long_runs_make_keys_and_values_of_latents(
    most_bytes: int, tmp_path: Path, on_device: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all that a step has, of some, and in parts that there is memory for; beside decodes, and behind a context."""
    make_checkpoint("glm4_moe_lite", tmp_path, num_hidden_layers=2, mlp_layer_types=["dense", "dense"])
    monkeypatch.setattr(expanded, "LEAST_QUERIES", 6)
    monkeypatch.setattr(expanded, "MOST_BYTES", most_bytes)
    attend, seen = expanded.ExpandedRuns.attend, set()

    def watched(runs: expanded.ExpandedRuns, *arguments: Any) -> None:
        seen.add((runs.whole, runs.first > 0, len(runs.parts) > 1))
        attend(runs, *arguments)

    monkeypatch.setattr(expanded.ExpandedRuns, "attend", watched)
    prompts = [PROMPTS[0], list(range(5, 22)), list(range(40, 53)), list(range(7, 37))]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    options = OPTIONS | {"max_batch_tokens": 32}
    expected = LLM(str(tmp_path), device="cpu", **options).generate(prompts, params)
    found = on_device(tmp_path, **options).generate(prompts, params)
    assert token_ids(found) == token_ids(expected)
    assert list(chosen_logprobs(found)) == pytest.approx(list(chosen_logprobs(expected)), abs=2e-4)
    whole, beside, divided = (set(kind) for kind in zip(*seen, strict=True))
    assert True in divided if most_bytes < 1 << 20 else whole == beside == {False, True}
