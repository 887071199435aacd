"""Drafts of models whose layers keep states and lie in several stages: each state sees those that are accepted."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvern import LLM, RequestOutput, SamplingParams
from kvern.cache.messages import StateMessage
from kvern.drafting.drafting import Drafting
from kvern.models.loader import read_config
from kvern.models.registry import spec_from_config
from kvern.request.step import ScheduledTokens, SchedulerOutput
from kvern.runner.state_memory import StateMemory
from tests.support.divided_families import STAGE_CHANGES
from tests.support.draft_heads import add_prediction
from tests.support.families import make_checkpoint, similar_prompts
from tests.support.head_drafting import Always
from tests.support.idle import is_idle
from tests.support.internals import core_of
from tests.support.outputs import token_ids
from tests.support.speculation import AnyLength, accepted_of_prediction, speculating
from tests.support.state_drafting import LITTLE_ROOM, OPTIONS, PARAMS

TWO_STAGES = {"pipeline_parallel_size": 2}
TWO_OF_TWO = TWO_STAGES | {"tensor_parallel_size": 2}
FAMILIES = ["qwen3_next", "granitemoehybrid", "lfm2"]
"""Gated delta nets, Mamba-2, short convolutions."""


@pytest.fixture(
    scope="module", params=[FAMILIES[0], *(pytest.param(name, marks=pytest.mark.nightly) for name in FAMILIES[1:])]
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made, sizes = tmp_path_factory.mktemp("hybrid"), STAGE_CHANGES[request.param]
    return make_checkpoint(request.param, made, vocab_size=288, eos_token_id=1, **sizes)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return similar_prompts(200)


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> Iterator[list[RequestOutput]]:
    with LLM(str(folder), **OPTIONS, device="cpu", prefix_cache=False) as llm:
        yield llm.generate(prompts, PARAMS)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("options", "on_device"),
    [
        pytest.param(TWO_STAGES | LITTLE_ROOM, False, id="no room"),
        pytest.param(TWO_STAGES | LITTLE_ROOM, True, id="no room, behind the last stage"),
        pytest.param(TWO_STAGES, False, id="room", marks=pytest.mark.nightly),
        pytest.param(TWO_STAGES | {"prefix_cache": False}, True, id="not cached", marks=pytest.mark.nightly),
        pytest.param(TWO_OF_TWO | LITTLE_ROOM, False, id="two ranks each", marks=pytest.mark.nightly),
    ],
)
def test_drafts_leave_the_answers(
    folder: Path, prompts: list[list[int]], expected: list[RequestOutput], options: dict[str, Any], on_device: bool
) -> None:
    """Of a proposer, and of what guesses behind the last stage; later ones go on with states that were kept."""
    with LLM(str(folder), **OPTIONS | options, device="cpu") as llm:
        for accuracy in (0.0, 1.0, 0.7):
            with speculating(llm, expected, accuracy, on_device=on_device) as oracle:
                assert token_ids(llm.generate(prompts, PARAMS)) == token_ids(expected)
                statistics = llm.statistics()
            assert oracle.guessed > 50
        assert is_idle(llm)
    assert 0 < statistics.accepted_tokens < statistics.draft_tokens
    assert statistics.cached_tokens
    assert (statistics.preemptions > 0) == ("kv_cache_tokens" in options)


@pytest.mark.nightly
def test_two_of_three_stages_wait_while_two_steps_are_on_their_way(prompts: list[list[int]], tmp_path: Path) -> None:
    sizes = {"layer_types": ["linear_attention", "full_attention"] * 3, "num_hidden_layers": 6}
    folder = make_checkpoint("qwen3_next", tmp_path, vocab_size=288, eos_token_id=1, **sizes)
    with LLM(str(folder), **OPTIONS, device="cpu") as alone:
        expected = alone.generate(prompts, PARAMS)
    with LLM(str(folder), **OPTIONS | LITTLE_ROOM, device="cpu", pipeline_parallel_size=3) as llm:
        for on_device in (False, True):
            with speculating(llm, expected, on_device=on_device):
                assert token_ids(llm.generate(prompts, PARAMS)) == token_ids(expected)
                statistics = llm.statistics()
        assert is_idle(llm)
    assert statistics.preemptions
    assert 0 < statistics.accepted_tokens < statistics.draft_tokens


@pytest.mark.nightly
def test_a_conversation_goes_on_behind_verified_answers(
    folder: Path, prompts: list[list[int]], expected: list[RequestOutput]
) -> None:
    """With states that all stages had kept when it ended, also where they saw more drafts than the answer has."""
    said = expected[0].outputs[0].token_ids
    params = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=said[9:10])
    with LLM(str(folder), **OPTIONS, device="cpu", prefix_cache=False) as alone:
        [answer] = alone.generate([prompts[0]], params)
        longer = [[*prompts[0], *answer.outputs[0].token_ids, 77, 78], [*prompts[0], *said, 77]]
        again = alone.generate(longer, PARAMS[0])
    with LLM(str(folder), **OPTIONS | TWO_STAGES, device="cpu") as llm:
        for accuracy in (1.0, 0.6):
            with speculating(llm, [expected[0]] * 2, accuracy):
                outputs = llm.generate([prompts[0]] * 2, [params, PARAMS[0]])
            assert token_ids(outputs) == [*token_ids([answer]), *token_ids(expected[:1])]
            before = llm.statistics().cached_tokens
            assert token_ids(llm.generate(longer, PARAMS[0])) == token_ids(again)
            assert llm.statistics().cached_tokens > before


@pytest.mark.nightly
def test_an_engine_looks_up_drafts_and_follows_predictions(
    folder: Path, prompts: list[list[int]], expected: list[RequestOutput], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Drafting, "most", AnyLength.most)
    few = [params.replace(allowed_token_ids=[5, 6, 7]) for params in PARAMS[:3]]
    with LLM(str(folder), **OPTIONS, device="cpu") as plain:
        said = token_ids(plain.generate(prompts[:3], few))
    with LLM(str(folder), **OPTIONS | TWO_STAGES, device="cpu", proposer="ngram") as llm:
        assert token_ids(llm.generate(prompts[:3], few)) == said
        assert llm.statistics().accepted_tokens > 0
        told = expected[0].outputs[0].token_ids
        assert accepted_of_prediction(llm, prompts[0], PARAMS[0], told, 12) > 5


@pytest.mark.nightly
@pytest.mark.parametrize("divided", [TWO_STAGES, TWO_OF_TWO], ids=["pp 2", "tp 2 x pp 2"])
def test_the_models_own_layer_drafts_behind_the_last_stage(divided: dict[str, int], tmp_path: Path) -> None:
    sizes = {"vocab_size": 288, "eos_token_id": 1}
    folder = make_checkpoint("qwen3_next", tmp_path, **sizes, **STAGE_CHANGES["qwen3_next"])
    alone = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    add_prediction(folder, "qwen3_next", "qwen", **sizes, **alone)
    prompts, params = similar_prompts(200)[:3], [PARAMS[0], PARAMS[2], PARAMS[0]]
    with LLM(str(folder), **OPTIONS, device="cpu") as llm:
        expected = token_ids(llm.generate(prompts, params))
    with LLM(str(folder), **OPTIONS | divided, device="cpu", draft_model="mtp") as llm:
        core_of(llm).drafting = Always(288, 3)
        assert token_ids(llm.generate(prompts, params)) == expected
        assert llm.statistics().draft_tokens > 50


def test_a_state_that_another_request_has_sees_no_drafts(folder: Path) -> None:
    """Of two steps on their way, whose drafts are told of when the state of one of them is that of a new request."""
    spec = spec_from_config(read_config(folder))
    memory = StateMemory(spec, 3, 2, torch.float32, torch.device("cpu"))
    seen: list[tuple[int, int]] = []
    memory.prepare(SchedulerOutput(1, extensions=StateMessage([], [(0, 0), (1, 1)]).by_name()))
    for _ in range(2):
        step = memory.plan([ScheduledTokens(slot, 0, 3, 3) for slot in (0, 1)])
        for place, (_, _, state) in enumerate(step.drafts):
            step.note(place, lambda count, state=state: seen.append((state, count)))  # type: ignore[misc]
        memory.defer()
    memory.prepare(SchedulerOutput(3, extensions=StateMessage([(-1, 1)], []).by_name(), kept=[[2, 1]]))
    assert seen == [(0, 2), (1, 1)], "told before the state changes its owner"
    memory.prepare(SchedulerOutput(4, kept=[[3, 3]]))
    assert seen[2:] == [(0, 3)]
