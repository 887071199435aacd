"""Steps that verify drafts, padded to the size of a graph, keep what they keep eagerly."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvern.runner.verify_graphs
from kvern import LLM, SamplingParams
from kvern.runner.device_runner import DeviceRunner
from kvern.runner.verify_graphs import ROWS, TOKENS, VerifyKind, verify_shapes
from tests.support.families import make_checkpoint
from tests.support.internals import check_integrity, runner_of
from tests.support.kernels.device_engines import OPTIONS, WITH_STATES
from tests.support.kernels.repeated_graphs import RecordedGraphs
from tests.support.outputs import chosen_logprobs, token_ids
from tests.support.peft_adapters import make_adapter
from tests.support.speculation import speculating

pytestmark = pytest.mark.usefixtures("few_products")

PROMPTS = [[5, 9, 17, 33, 2, 81], [3, 1, 4, 1, 5] * 3, [7], [100] * 10]
LENGTH: dict[str, Any] = {"max_tokens": 7, "ignore_eos": True}
GREEDY = [SamplingParams(temperature=0, **LENGTH)] * 4
MIXED = [
    SamplingParams(temperature=0, **LENGTH),
    SamplingParams(temperature=0.8, seed=5, repetition_penalty=2.5, frequency_penalty=2.0, logprobs=1, **LENGTH),
    SamplingParams(temperature=1.5, seed=3, top_p=0.9, min_tokens=7, stop_token_ids=[*range(0, 100, 3)], **LENGTH),
    SamplingParams(temperature=1.0, seed=4, logit_bias={7: 2.0}, logprobs=0, **LENGTH),
]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Callable[[LLM], RecordedGraphs]:
    """Lets an engine replay what it captures; few sizes, as each is computed once before."""
    monkeypatch.setattr(kvern.runner.verify_graphs, "ROWS", (2, 4))
    monkeypatch.setattr(kvern.runner.verify_graphs, "TOKENS", (8, 16))

    def record(llm: LLM) -> RecordedGraphs:
        runner = runner_of(llm)
        assert isinstance(runner, DeviceRunner)
        graphs = RecordedGraphs(VerifyKind(runner.model, 100))
        runner.graphs = [graphs]
        return graphs

    return record


@pytest.mark.parametrize("guessed_there", [True, pytest.param(False, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("family", "params", "options"),
    [
        pytest.param("llama", MIXED, {}, id="options"),
        pytest.param("llama", GREEDY, {}, id="greedy", marks=pytest.mark.nightly),
        pytest.param("llama", MIXED, {"deterministic": True}, id="deterministic", marks=pytest.mark.nightly),
        pytest.param("llama", MIXED, {"overlap": False}, id="one step in flight", marks=pytest.mark.nightly),
        pytest.param("gemma2", GREEDY, {}, id="windows", marks=pytest.mark.nightly),
        pytest.param("gemma4", GREEDY, {}, id="two sizes of tiles", marks=pytest.mark.nightly),
        pytest.param("qwen3_moe", GREEDY, {}, id="experts", marks=pytest.mark.nightly),
        pytest.param("glm4_moe_lite", GREEDY, {}, id="latents", marks=pytest.mark.nightly),
        pytest.param("qwen3_next", MIXED, {}, id="delta nets", marks=pytest.mark.nightly),
        pytest.param("granitemoehybrid", GREEDY, {}, id="mamba2", marks=pytest.mark.nightly),
        pytest.param("lfm2", GREEDY, {}, id="convolutions", marks=pytest.mark.nightly),
    ],
)
def test_a_replayed_step_keeps_what_the_eager_one_does(
    family: str,
    params: list[SamplingParams],
    options: dict[str, Any],
    guessed_there: bool,
    tmp_path: Path,
    on_device: Callable[..., LLM],
    recorded: Callable[[LLM], RecordedGraphs],
) -> None:
    make_checkpoint(family, tmp_path, **WITH_STATES.get(family, {}))
    expected = LLM(str(tmp_path), device="cpu", **OPTIONS).generate(PROMPTS, params)
    llm = on_device(tmp_path, **(OPTIONS | options))
    graphs = recorded(llm)
    with speculating(llm, expected, 0.7, most=3, on_device=guessed_there):
        found = llm.generate(PROMPTS, params)
    assert token_ids(found) == token_ids(expected)
    assert list(chosen_logprobs(found)) == pytest.approx(list(chosen_logprobs(expected)), abs=2e-4)
    counts = {item.count for step in graphs.used for item in step.scheduled}
    assert {1, 4} <= counts, "rows with and without drafts were to be verified together"
    uncertain = {item.uncertain for step in graphs.used for item in step.scheduled}
    assert uncertain == ({False, True} if options.get("overlap", True) else {False})
    check_integrity(llm)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # within PEFT
def test_beside_adapters(
    tmp_path: Path, on_device: Callable[..., LLM], recorded: Callable[[LLM], RecordedGraphs]
) -> None:
    folder = make_checkpoint("llama", tmp_path / "model", num_hidden_layers=2)
    adapter = make_adapter(folder, tmp_path / "one", 1)
    options = OPTIONS | {"max_adapters": 1, "max_adapter_rank": 16, "adapters": {"one": str(adapter)}}
    names = ["one", None, "one", None]
    expected = LLM(str(folder), device="cpu", **options).generate(PROMPTS, GREEDY, adapter=names)
    llm = on_device(folder, **options)
    graphs = recorded(llm)
    with speculating(llm, expected, 0.7, most=3):
        found = llm.generate(PROMPTS, GREEDY, adapter=names)
    assert token_ids(found) == token_ids(expected)
    assert any(step.adapted for step in graphs.used)


@pytest.mark.parametrize("requests", [1, 8, 512])
def test_graphs_are_few_and_hold_any_step_of_few_tokens(requests: int) -> None:
    steps = list(verify_shapes(requests, 8192, 4096, False))
    assert len(steps) == len(set(steps)) <= 72
    assert [step.options for step in steps] == sorted(step.options for step in steps)
    for rows in range(1, min(requests, max(ROWS)) + 1):
        for drafts in (1, 4, 16):
            if rows * (1 + drafts) <= max(TOKENS):
                assert any(step.fits(rows, rows * (1 + drafts), True, False) for step in steps), (rows, drafts)


def test_no_graph_is_larger_than_a_step_or_a_sequence() -> None:
    assert max(step.tokens for step in verify_shapes(64, 100, 4096, False)) == 96
    assert max(step.tokens for step in verify_shapes(64, 8192, 40, False)) == 32
    assert not list(verify_shapes(64, 4, 4096, False))
