"""Guesses by what a text says twice, and how many of them are worth their rows."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvern import LLM, SamplingParams
from kvern.config import EngineConfig
from kvern.drafting import ngram
from kvern.drafting.ngram import KEPT, LONGEST, PLACES, Chances, Followed, Text
from kvern.models.implementation import describe_model
from kvern.models.loader import read_config
from kvern.request.request import PromptInput, Request, RequestSpec
from kvern.request.sampling_params import ResolvedParams
from tests.support.internals import core_of, engine_of, proposer_of


def as_it_read(token_ids: list[int], count: int) -> list[int]:
    """Slowly: of the last places that end with the same two tokens, the one that reads the same for longest."""
    end = len(token_ids) - 1
    places = [place for place in range(1, end) if token_ids[place - 1 : place + 1] == token_ids[end - 1 :]][::-1]
    if not places:
        return []

    def length(place: int) -> int:
        same = 0
        while same < min(LONGEST, place + 1) and token_ids[place - same] == token_ids[end - same]:
            same += 1
        return same

    found = max(places[:PLACES], key=length)
    text = list(token_ids)
    for ahead in range(count):
        text.append(text[found + 1 + ahead])
    return text[end + 1 :]


@given(st.lists(st.integers(0, 2), min_size=2, max_size=60), st.integers(1, 12), st.data())
def test_a_text_goes_on_as_it_read(token_ids: list[int], count: int, data: st.DataObject) -> None:
    """However it grows."""
    text, known = Text(), 0
    while known < len(token_ids):
        known = data.draw(st.integers(known + 1, len(token_ids)))
        if known > 1:
            assert text.read(token_ids[:known], 99) > 0
            assert text.continued(token_ids[:known], count) == as_it_read(token_ids[:known], count)


def test_long_prompts_are_read_in_parts(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them together, while texts that were read go on."""
    monkeypatch.setattr(ngram, "READ_AT_ONCE", 40)
    monkeypatch.setattr(ngram, "READ_OF_EACH", 2)
    config, folder = EngineConfig(str(tiny_model)), tiny_model
    proposer = ngram.NgramProposer(config, describe_model(folder, read_config(folder), config.model_implementation))
    texts = [5, 6] * 4, [*range(10)] * 4, [*range(10)] * 4
    going = [Request(RequestSpec(str(i), PromptInput(text), ResolvedParams(), 99)) for i, text in enumerate(texts)]
    known = going[0]
    assert proposer.propose([known], [2]) == [[5, 6]]
    found = []
    for _ in range(4):
        known.token_ids += 5, 6
        found.append(proposer.propose(going, [2, 2, 2]))
    assert [guesses[0] for guesses in found] == [[5, 6]] * 4
    assert [guesses[1] for guesses in found] == [[], [0, 1], [0, 1], [0, 1]]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "options", [{}, {"cpu_kernels": False, "prefix_cache": False}, {"kv_cache_tokens": 96}], ids=str
)
def test_answers_are_those_without(options: dict[str, Any], tiny_model: Path) -> None:
    """Of texts that say all twice, whose drafts are right and wrong; with preemptions, where the cache is small."""
    common: dict[str, Any] = {"dtype": "float32", "threads": 1, "max_model_len": 64, "max_batch_requests": 8}
    small: dict[str, Any] = common | {"kv_cache_tokens": 512, "block_size": 4} | options
    prompts = [[5, 9, 17, 33] * 4, [5, 9, 17, 33, 2] * 3, [100] * 12, [7, 8, 9, 7, 8]]
    params = [
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0.3, seed=4, max_tokens=40, ignore_eos=True, n=2),
        SamplingParams(temperature=0.8, seed=5, max_tokens=40, repetition_penalty=0.5, logprobs=1),
        SamplingParams(temperature=0, max_tokens=40, logit_bias={7: 50.0, 8: 49.0}, ignore_eos=True),
    ]
    with LLM(str(tiny_model), **small) as plain, LLM(str(tiny_model), proposer="ngram", **small) as guessing:
        for _ in range(2):
            answers = [
                [[answer.token_ids for answer in output.outputs] for output in llm.generate(prompts, params)]
                for llm in (plain, guessing)
            ]
            assert answers[0] == answers[1]
        counted = engine_of(guessing).statistics()
        assert 0 < counted.accepted_tokens <= counted.draft_tokens
        core = core_of(guessing)
        core.scheduler.check_integrity()
        assert core.drafting is not None and isinstance(proposer := proposer_of(guessing), ngram.NgramProposer)
        assert not proposer._texts, "what is known of texts outlives their requests"


def grown(text: Followed, token_ids: list[int], answer: list[int], count: int) -> tuple[list[int], int]:
    """How many drafts each step had until an answer was there, and how many of all were right."""
    drafts, right, known = [], 0, list(token_ids)
    while len(known) < len(token_ids) + len(answer):
        text.read(known, 999)
        guess, rest = text.guess(known, count), answer[len(known) - len(token_ids) :]
        agreeing = 0
        while agreeing < min(len(guess), len(rest)) and guess[agreeing] == rest[agreeing]:
            agreeing += 1
        drafts.append(len(guess))
        right += agreeing
        known += rest[: agreeing + 1]
    return drafts, right


PASSAGE = [*range(10, 34)]


@pytest.mark.parametrize(
    ("edited", "steps"),
    [
        pytest.param([*PASSAGE[:12], 99, *PASSAGE[13:]], 5, id="another"),
        pytest.param([*PASSAGE[:12], *PASSAGE[15:]], 5, id="left out"),
        pytest.param([*PASSAGE[:12], 99, 98, *PASSAGE[12:]], 7, id="put in"),
    ],
)
def test_a_text_is_followed_across_what_is_edited(edited: list[int], steps: int) -> None:
    """By eight drafts a step: behind the first two tokens it goes on at once where one differs."""
    drafts, right = grown(Followed(Chances()), [*PASSAGE, 1, 2], edited, 8)
    assert len(drafts) <= steps + 1 and right >= len(edited) - len(drafts)


def test_matches_that_are_seldom_right_give_fewer_drafts() -> None:
    chances = Chances()
    first = chances.most(Chances.kind(2))
    for _ in range(500):
        chances.learn(Chances.kind(2), [1], [2])
        chances.learn(Chances.kind(LONGEST), [1] * 8, [1] * 8)
    assert chances.most(Chances.kind(2)) == 0 < first < chances.most(Chances.kind(LONGEST))


@pytest.mark.parametrize(
    ("new", "right", "wrong"),
    [
        ([1, 2, 3], 3, 0),
        ([1, 2], 2, 0),  # what was guessed further on may come yet
        ([1, 2, 3, 4], 3, 0),
        ([1, 4, 3], 1, 1),
        ([4], 0, 1),
    ],
)
def test_a_guess_counts_up_to_its_first_wrong_token(new: list[int], right: int, wrong: int) -> None:
    chances, kind = Chances(), Chances.kind(2)
    chances.learn(kind, [1, 2, 3], new)
    assert chances.of(kind) == pytest.approx((KEPT * 8 + right) / (KEPT * 9 + right + wrong))


def test_nothing_is_learnt_where_nothing_was_guessed_or_came() -> None:
    chances, kind = Chances(), Chances.kind(2)
    for _ in range(100):
        chances.learn(kind, [], [1])
        chances.learn(kind, [1], [])
    chances.learn(kind, [1], [2])
    assert chances.of(kind) == pytest.approx(KEPT * 8 / (KEPT * 9 + 1))


def test_what_is_left_out_is_learnt_from() -> None:
    """Matches that were seldom right give drafts again once they would have been."""
    chances = Chances()
    for _ in range(500):
        chances.learn(Chances.kind(2), [1], [2])
    drafts = []
    for _ in range(40):
        text, token_ids = Followed(chances), [8, 5, 6, 7, 4, 9, 5, 6]
        for token in (7, 4):
            text.read(token_ids, 999)
            drafts.append(len(text.guess(token_ids, 4)))
            token_ids.append(token)
    assert drafts[0] == 0 and drafts[-2] > 0
