"""Answers whose clients said what they expect: the tokens are the same, and come in fewer steps where that is right."""

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvern import LLM, RequestOutput, SamplingParams
from kvern.drafting.predictions import FollowedPrediction
from kvern.errors import InvalidRequest
from kvern.request.request import RequestOptions
from tests.support.internals import core_of, engine_of, set_depth, vocab_size_of
from tests.support.speculation import AnyLength

TEXT = [*range(10, 40)]
PROMPTS = [[5, 9, 17, 33, 2, 81], [5, 9, 17, 33, 2, 80, 40, 41, 42, 43, 44, 45], [100] * 10]


def guessed(predicted: Sequence[int], answer: Sequence[int], count: int = 3) -> list[int]:
    followed = FollowedPrediction(predicted)
    followed.read(1000)
    for length in range(1, len(answer) + 1):
        followed.follow([7, 7, *answer[:length]], 2)
    return followed.continued(count)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ([], TEXT[:3]),
        (TEXT[:5], TEXT[5:8]),
        (TEXT[:28], TEXT[28:]),
        (TEXT, []),
        ([*TEXT[:5], 99], []),
        ([*TEXT[:5], 99, TEXT[5]], TEXT[6:9]),  # put in
        ([*TEXT[:5], 99, TEXT[6]], TEXT[7:10]),  # another in its place
        ([*TEXT[:5], 98, 99, TEXT[9]], []),
        ([*TEXT[:5], 98, 99, *TEXT[9:11]], TEXT[11:14]),  # four tokens became two
        ([*TEXT[:5], *TEXT[20:22]], TEXT[22:25]),  # left out
        ([*TEXT[:20], *TEXT[2:4]], TEXT[4:7]),  # said again
    ],
)
def test_an_answer_is_followed_through_its_prediction(answer: list[int], expected: list[int]) -> None:
    assert guessed(TEXT, answer) == expected


def test_of_equal_places_the_next_one_counts() -> None:
    items = [place for value in range(50, 56) for place in (1, 2, 3, value)]
    answer = [*items[:11], 90, 1, 2]
    assert guessed(items, answer, 2) == [3, 53]


@given(st.lists(st.integers(0, 3), max_size=30), st.lists(st.integers(0, 3), max_size=30), st.data())
def test_however_an_answer_grows(predicted: list[int], answer: list[int], data: st.DataObject) -> None:
    """The guess is a part of the prediction, and depends on the answer alone."""
    followed, length = FollowedPrediction(predicted), 0
    followed.read(1000)
    while length < len(answer):
        length = data.draw(st.integers(length + 1, len(answer)))
        followed.follow(answer[:length], 0)
    found = followed.continued(4)
    assert found in [predicted[place : place + len(found)] for place in range(len(predicted) + 1)]
    assert found == (guessed(predicted, answer, 4) if answer else predicted[:4])


def test_long_predictions_are_read_in_parts() -> None:
    followed = FollowedPrediction(TEXT)
    assert [followed.read(20), followed.read(20), followed.read(20)] == [20, 9, 0]


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    options: dict[str, Any] = {"max_model_len": 64, "max_batch_requests": 8, "kv_cache_tokens": 512, "block_size": 4}
    with LLM(str(tiny_model), dtype="float32", threads=1, **options) as llm:
        core_of(llm).drafting = AnyLength(None, vocab_size_of(llm))
        yield llm


def predicted(llm: LLM, params: SamplingParams, predictions: Sequence[Any]) -> list[RequestOutput]:
    outputs = [
        engine_of(llm).add(str(index), prompt, params, RequestOptions(prediction=prediction))
        for index, (prompt, prediction) in enumerate(zip(PROMPTS, predictions, strict=True))
    ]
    while engine_of(llm).has_work:
        engine_of(llm).step()
    return outputs


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("temperature", [0, 1])
def test_tokens_are_those_without(temperature: float, depth: int, llm: LLM) -> None:
    core = core_of(llm)
    set_depth(llm, depth)
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=24, ignore_eos=True, n=1 + temperature)
    answers = [[answer.token_ids for answer in output.outputs] for output in llm.generate(PROMPTS, params)]
    right = [first for first, *_ in answers]
    edited = [[*tokens[:8], 3, *tokens[9:]] for tokens in right]
    counts = []
    for predictions in (right, edited, [[3] * 60] * 3, ["the fox", "", right[2]]):
        before = copy.copy(llm.statistics())
        outputs = predicted(llm, params, predictions)
        assert [[answer.token_ids for answer in output.outputs] for output in outputs] == answers
        several = [answer for output in outputs for answer in output.outputs]
        accepted = sum(answer.accepted_prediction_tokens for answer in several)
        rejected = sum(answer.rejected_prediction_tokens for answer in several)
        after = llm.statistics()
        assert accepted == after.accepted_tokens - before.accepted_tokens
        assert rejected == after.draft_tokens - before.draft_tokens - accepted
        counts.append((accepted, after.steps - before.steps))
    assert counts[0][0] >= 3 * 20
    assert counts[1][0] >= 3 * 15
    if temperature == 0:
        assert counts[0][1] <= 8 < 20 <= counts[2][1]
    core.scheduler.check_integrity()


@pytest.mark.parametrize(
    ("prediction", "options", "said"),
    [
        (
            [1] * 65,
            {},
            "prediction is longer than the maximum context length of 64 tokens, and no answer is: shorten it",
        ),
        ("a" * 100_000, {}, "prediction is longer than the maximum context length"),
        ([1, 1 << 40], {}, "prediction holds 1099511627776: the model has token ids 0 to"),
        ("a", {"beam_width": 2}, "prediction is given with beam_width 2: .* leave one out"),
    ],
)
def test_what_cannot_be_is_refused(prediction: Any, options: dict[str, Any], said: str, llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match=said):
        engine_of(llm).add("x", [5], SamplingParams(**options), RequestOptions(prediction=prediction))
