"""Drafts on a GPU: the answers without them, and no step that waits for the device.

Run with `pytest -m gpu`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from kvern import LLM, SamplingParams
from kvern.request.sampling_params import StructuredOutput
from tests.support.families import make_checkpoint, similar_prompts
from tests.support.gpu_engines import HALVES, SMALL, held_out, steps
from tests.support.internals import check_integrity, core_of, engine_of, vocab_size_of
from tests.support.outputs import token_ids
from tests.support.speculation import AnyLength, speculating
from tests.support.trained_adapters import ADAPTERS

if torch.cuda.is_available():
    from kvern.runner.step_graphs import StepOutputs
    from kvern.runner.verify_graphs import VerifyKind

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

GUESSING: dict[str, Any] = {"proposer": "ngram"}
"""Engines capture steps that verify drafts where somebody guesses."""
LENGTH: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
PARAMS = [
    SamplingParams(temperature=0, max_tokens=48),
    SamplingParams(temperature=0.8, seed=1, **LENGTH),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=2, **LENGTH),
    SamplingParams(temperature=1.0, seed=3, presence_penalty=2.0, frequency_penalty=2.0, bad_words=["the"], **LENGTH),
    SamplingParams(temperature=0.8, typical_p=0.8, seed=4, logprobs=2, **LENGTH),
    SamplingParams(temperature=1.2, seed=5, max_tokens=40, min_tokens=30, n=2),
]
RECORD = StructuredOutput(
    json={
        "type": "object",
        "properties": {"mood": {"enum": ["calm", "stormy"]}, "seen": {"type": "array", "items": {"type": "integer"}}},
        "required": ["mood", "seen"],
    }
)
BOUND = [
    SamplingParams(temperature=0, max_tokens=60, structured=RECORD),
    SamplingParams(temperature=0.9, top_p=0.95, seed=6, max_tokens=60, structured=RECORD, logprobs=1),
    SamplingParams(temperature=0.8, seed=7, prompt_logprobs=1, **LENGTH),
]
"""The host has a say at every token, or something to report first."""


OPTIONS: list[dict[str, Any]] = [
    {},
    {"proposer": None},
    {"overlap": False},
    {"cuda_graphs": False},
    {"triton_kernels": False},
    {"attention_backend": "torch_sdpa"},
    {"deterministic": True},
    {"max_batch_tokens": 64, "max_batch_requests": 32},
    {"kv_cache_tokens": 1024},
    {"model": "kvern-1m", "adapters": ADAPTERS, "max_adapters": 1},
]


@pytest.mark.parametrize(
    ("options", "accuracy"),
    [
        pytest.param(
            given, accuracy, marks=pytest.mark.nightly if given and accuracy == 1.0 else (), id=f"{given}-{accuracy}"
        )
        for given in OPTIONS
        for accuracy in (0.5, 1.0)
    ],
)
def test_drafts_leave_the_answers(options: dict[str, Any], accuracy: float) -> None:
    llm = LLM(device="cuda", **(SMALL | GUESSING | options))
    core_of(llm).drafting = None
    conversations = held_out()[:36]
    params = [(PARAMS + BOUND)[index % len(PARAMS + BOUND)] for index in range(len(conversations))]
    expected = llm.chat(conversations, params)
    for guessed_there in (False, True):
        with speculating(llm, expected, accuracy, on_device=guessed_there) as oracle:
            found = llm.chat(conversations, params)
        assert oracle.guessed > 500
        assert token_ids(found) == token_ids(expected)
        check_integrity(llm)


@pytest.mark.parametrize("options", [{}, {"cuda_graphs": False}, {"overlap": False}], ids=str)
def test_a_model_that_drafts_for_itself_is_right(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that verify are replayed, and nearly all drafts are right: few are where sums are rounded otherwise."""
    plain = {**SMALL, "model": "kvern-1m"}
    conversations = held_out()[:12]
    params = [SamplingParams(temperature=index % 2, seed=index, **LENGTH) for index in range(12)]
    expected = LLM(device="cuda", **(plain | options)).chat(conversations, params)
    llm = LLM(device="cuda", draft_model="kvern-1m", **(plain | options))
    core_of(llm).drafting = AnyLength(None, vocab_size_of(llm), 5)
    replayed = []
    run = VerifyKind.run

    def recorded(kind: VerifyKind, *given: Any) -> StepOutputs | None:
        verified = run(kind, *given)
        replayed.append(verified is not None)
        return verified

    monkeypatch.setattr(VerifyKind, "run", recorded)
    assert token_ids(llm.chat(conversations, params)) == token_ids(expected)
    statistics = llm.statistics()
    assert statistics.accepted_tokens > 0.9 * statistics.draft_tokens > 200
    assert any(replayed) == options.get("cuda_graphs", True)


@pytest.mark.parametrize("options", [{}, {"kv_cache_tokens": 256, "cuda_graphs": False}], ids=str)
@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h", "lfm2"])
def test_states_see_the_drafts_that_are_accepted(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    model = str(make_checkpoint(family, tmp_path, vocab_size=288, eos_token_id=1))
    prompts = [similar_prompts(200)[index % 6] for index in range(12)]
    params = [PARAMS[index % 3].replace(max_tokens=30, ignore_eos=True) for index in range(12)]
    sizes: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "kv_cache_tokens": 4096, "proposer": "ngram"}
    with LLM(model, device="cuda", max_batch_requests=12, **(sizes | options)) as llm:
        core_of(llm).drafting = None
        expected = llm.generate(prompts, params)
        for accuracy in (0.5, 1.0):
            with speculating(llm, expected, accuracy) as oracle:
                assert token_ids(llm.generate(prompts, params)) == token_ids(expected)
            assert oracle.guessed > 200
        check_integrity(llm)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("options", [{}, {"cuda_graphs": False}], ids=str)
def test_no_step_waits_for_the_device(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """Drafts are written, verified and counted while the step before is on its way. A step that waits would fail."""
    llm = LLM(device="cuda", **(HALVES | GUESSING | options))
    core_of(llm).drafting = None
    prompts = [[7 + index] * (20 + index) for index in range(12)]
    params = [PARAMS[index % len(PARAMS)].replace(n=1, max_tokens=60, stop_token_ids=None) for index in range(12)]
    expected = llm.generate(prompts, params)

    def run() -> None:
        for index, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            engine_of(llm).add(f"{index}", prompt, param)
            steps(llm, 1)
        steps(llm, 40)
        engine_of(llm).abort(engine_of(llm).request_ids)
        steps(llm, 3)

    for mode in ("default", "error"):  # the first time, kernels are compiled and graphs captured
        with speculating(llm, expected, 0.7) as oracle:
            torch.cuda.set_sync_debug_mode(mode)
            try:
                run()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert oracle.guessed > 100
        assert "failed" not in caplog.text
