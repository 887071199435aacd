"""Drafts of models whose layers keep states: a state sees the drafts that are accepted, and no others."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvern import LLM, RequestOutput, SamplingParams
from kvern.drafting.drafting import Drafting
from kvern.layers import delta_net, mamba2
from kvern.layers.states import StepStates, advance_states
from tests.support.families import make_checkpoint, similar_prompts
from tests.support.idle import is_idle
from tests.support.internals import set_depth
from tests.support.outputs import token_ids
from tests.support.speculation import AnyLength, speculating
from tests.support.state_drafting import LITTLE_ROOM, OPTIONS, PARAMS
from tests.support.state_families import rule_inputs


@pytest.mark.parametrize("rule", [delta_net, mamba2], ids=["delta_rule", "state_space"])
def test_a_state_sees_the_drafts_that_are_accepted(rule: Any) -> None:
    """Beside tokens that are alone and runs that are sure; until it is told, it sees none."""
    inputs = list(rule_inputs(rule, 12))
    shape = (4, 8, 5) if rule is delta_net else (2, 8, 10)
    memory = torch.randn(5, *shape, generator=torch.Generator().manual_seed(0))
    before, copies = memory.clone(), memory.clone()
    drafts, kept = [(1, 4, 3), (5, 3, 1)], [2, 3]  # first, tokens, state
    states = torch.tensor([2])
    step = StepStates([], torch.tensor([0]), states, [(8, 4, 0)], drafts)
    turns = [(0, 1, 2), *drafts, (8, 4, 0)]
    expected = [
        rule.advance_run(copies[state], *(item[first : first + count] for item in inputs))
        for first, count, state in turns
    ]
    found = advance_states(step, memory, inputs, rule.advance, rule.advance_run)
    torch.testing.assert_close(found, torch.cat(expected), atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(memory[[0, 2]], copies[[0, 2]], atol=2e-6, rtol=1e-5)
    assert torch.equal(memory[[1, 3, 4]], before[[1, 3, 4]])
    step.accept(kept)
    for (first, _, state), count in zip(drafts, kept, strict=True):
        rule.advance_run(before[state], *(item[first : first + count] for item in inputs))
        torch.testing.assert_close(memory[state], before[state], atol=2e-6, rtol=1e-5)


FAMILIES = ["qwen3_next", "qwen3_5", "nemotron_h", "granitemoehybrid", "falcon_h1", "lfm2"]


@pytest.fixture(
    scope="module", params=[FAMILIES[0], *(pytest.param(name, marks=pytest.mark.nightly) for name in FAMILIES[1:])]
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp("hybrid"), vocab_size=288, eos_token_id=1)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return similar_prompts(200)


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> Iterator[list[RequestOutput]]:
    with LLM(str(folder), **OPTIONS, prefix_cache=False) as llm:
        yield llm.generate(prompts, PARAMS)


@pytest.mark.parametrize(
    ("options", "depth"),
    [
        pytest.param(LITTLE_ROOM, 2, id="no room"),
        pytest.param(LITTLE_ROOM, 1, id="no room, one step", marks=pytest.mark.nightly),
        pytest.param({}, 2, id="room", marks=pytest.mark.nightly),
        pytest.param({}, 1, id="room, one step", marks=pytest.mark.nightly),
        pytest.param({"prefix_cache": False}, 2, id="not cached", marks=pytest.mark.nightly),
        pytest.param({"prefix_cache": False}, 1, id="not cached, one step", marks=pytest.mark.nightly),
    ],
)
def test_drafts_leave_the_answers(
    folder: Path, prompts: list[list[int]], expected: list[RequestOutput], options: dict[str, Any], depth: int
) -> None:
    """Several times, so that later ones go on with states that verified steps have left."""
    with LLM(str(folder), **OPTIONS | options) as llm:
        set_depth(llm, depth)
        for accuracy in (0.0, 1.0, 0.7):
            with speculating(llm, expected, accuracy) as oracle:
                assert token_ids(llm.generate(prompts, PARAMS)) == token_ids(expected)
                statistics = llm.statistics()
            assert oracle.guessed > 50
        assert is_idle(llm)
    assert 0 < statistics.accepted_tokens < statistics.draft_tokens
    assert (statistics.preemptions > 0) == (options is LITTLE_ROOM)


@pytest.mark.parametrize("stops", [False, True], ids=["to its length", "at a stop"])
def test_a_conversation_goes_on_behind_verified_answers(
    folder: Path, prompts: list[list[int]], expected: list[RequestOutput], stops: bool
) -> None:
    """With the state behind them, unless the device has verified more than the answer has."""
    said = expected[0].outputs[0].token_ids
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=not stops, stop_token_ids=said[9:10])
    with LLM(str(folder), **OPTIONS) as llm:
        [alone] = llm.generate([prompts[0]], params)
        longer = [*prompts[0], *alone.outputs[0].token_ids, 77, 78]
    with LLM(str(folder), **OPTIONS) as llm:
        again = llm.generate([longer], PARAMS[0])
    for accuracy in (1.0, 0.6):
        with LLM(str(folder), **OPTIONS) as llm:
            with speculating(llm, expected[:1], accuracy):
                assert token_ids(llm.generate([prompts[0]], params)) == token_ids([alone])
            assert token_ids(llm.generate([longer], PARAMS[0])) == token_ids(again)
            assert llm.statistics().cached_tokens > 0


def test_an_engine_looks_its_drafts_up(folder: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """In answers of few different tokens, whether it is worth the rows or not."""
    monkeypatch.setattr(Drafting, "most", AnyLength.most)
    params = [params.replace(allowed_token_ids=[5, 6, 7]) for params in PARAMS[:3]]
    with LLM(str(folder), **OPTIONS) as plain, LLM(str(folder), **OPTIONS, proposer="ngram") as llm:
        assert token_ids(llm.generate(prompts[:3], params)) == token_ids(plain.generate(prompts[:3], params))
        assert llm.statistics().accepted_tokens > 0
