"""Guesses by what other answers of the engine said, each namespace by itself."""

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvern import LLM, SamplingParams
from kvern.config import EngineConfig
from kvern.drafting import suffix
from kvern.drafting.suffix import PLACES, KeptAnswer, KeptAnswers, SuffixProposer, likeliest
from kvern.models.implementation import describe_model
from kvern.models.loader import read_config
from kvern.request.request import PromptInput, Request, RequestSpec
from kvern.request.sampling_params import ResolvedParams
from tests.support.internals import core_of, proposer_of
from tests.support.sampling import examples
from tests.support.simulated_drafts import begun


def request(prompt: Sequence[int], answer: Sequence[int] = (), namespace: bytes = b"") -> Request:
    spec = RequestSpec("r", PromptInput(list(prompt)), ResolvedParams(), 999, namespace=namespace)
    return begun(spec, answer)


@pytest.fixture
def proposer(tiny_model: Path) -> SuffixProposer:
    config = EngineConfig(str(tiny_model))
    return SuffixProposer(config, describe_model(tiny_model, read_config(tiny_model), config.model_implementation))


def answer_of(proposer: SuffixProposer, prompt: Sequence[int], tokens: Sequence[int], namespace: bytes = b"") -> None:
    """One that grows, and of which nobody guesses the last token, as it has ended."""
    one = request(prompt, tokens[:1], namespace)
    for token in tokens[1:]:
        proposer.propose([one], [0])
        one.token_ids.append(token)
    del one
    gc.collect()


TEMPLATE = [1, 2, 3, 60, 4, 5, 6, 61, 7, 8]


def test_what_another_answer_said_is_guessed(proposer: SuffixProposer) -> None:
    """From its beginning on, behind what differs, and to its end."""
    answer_of(proposer, [20, 21, 30], TEMPLATE)
    new = request([22, 23, 30], [1])
    assert proposer.propose([new], [3]) == [[2, 3, 60]]
    new.token_ids += [2, 3, 70]
    assert proposer.propose([new], [3]) == [[]], "nothing has ended so"
    new.token_ids += [4, 5]
    assert proposer.propose([new], [9]) == [[6, 61, 7, 8]]
    new.token_ids += [6, 61, 7, 8]
    assert proposer.propose([new], [9]) == [[]]


def test_answers_that_run_at_the_same_time_help_each_other(proposer: SuffixProposer) -> None:
    ahead, behind = request([20, 30], TEMPLATE), request([21, 30], TEMPLATE[:2])
    assert proposer.propose([ahead, behind], [2, 2]) == [[], [3, 60]]


@pytest.mark.parametrize("other", [b"salt", b"adapter 1\0"])
def test_no_namespace_sees_what_another_said(proposer: SuffixProposer, other: bytes) -> None:
    answer_of(proposer, [20, 30], TEMPLATE, b"mine")
    strange, mine = request([20, 30], TEMPLATE[:4], other), request([20, 30], TEMPLATE[:4], b"mine")
    assert proposer.propose([strange, mine], [2, 2]) == [[], [4, 5]]


def test_prompts_of_others_are_not_kept(proposer: SuffixProposer) -> None:
    answer_of(proposer, [11, 12, 13, 14, 30], TEMPLATE)
    assert proposer.propose([request([40, 11, 12], [13])], [2]) == [[]]
    assert proposer.propose([request([11, 12, 13, 14, 11, 12], [13])], [2]) == [[14, 11]], "its own is"


def test_the_likeliest_continuation_is_guessed() -> None:
    many = [[1, 2, 3], [1, 2, 4], [1, 5, 6], [9, 9, 9]]
    assert likeliest(many, 9) == [1, 2, 3]
    assert likeliest(many, 2) == [1, 2]
    assert likeliest([[1], [2], [3]], 2) == [], "none is likely"
    assert likeliest([[1, 2], [1]], 3) == [1, 2]
    assert likeliest([], 3) == []


def test_the_longest_match_counts_and_then_the_votes(proposer: SuffixProposer) -> None:
    for following in (50, 51, 51):
        answer_of(proposer, [20, 30], [1, 2, 3, following, 9])
    answer_of(proposer, [20, 30], [7, 2, 3, 52, 9])
    assert proposer.propose([request([40], [1, 2, 3])], [2]) == [[51, 9]]
    assert proposer.propose([request([40], [7, 2, 3])], [2]) == [[52, 9]]


@settings(max_examples=examples(30))
@given(st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=12), min_size=1, max_size=8), st.integers(3, 20))
def test_the_latest_places_are_found_and_no_others(answers: list[list[int]], most: int) -> None:
    """As slow search finds them in the tokens that are kept."""
    kept, all_places = KeptAnswers(most), []
    for tokens in answers:
        one = KeptAnswer(request([8], tokens))
        kept.keep(one)
        all_places += [(one, place) for place in range(1, len(one.token_ids))]
        expected = [
            (other.token_ids, place)
            for other, place in reversed(all_places[-most:])
            if other.token_ids[place - 1 : place + 1] == one.token_ids[-2:]
        ][: 2 * PLACES]
        expected = [(token_ids, place) for token_ids, place in expected if token_ids is not one.token_ids]
        assert list(kept.places(one)) == expected
        assert len(kept) == min(most, len(all_places))
        assert len(kept._last) <= len(kept), "pairs of forgotten answers are known still"


@pytest.mark.parametrize("options", [{}, {"kv_cache_tokens": 96}, {"prefix_cache": False}], ids=str)
def test_tokens_are_those_without(options: dict[str, Any], tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same prompts again, other seeds, preemptions, and answers that are forgotten."""
    monkeypatch.setattr(suffix, "KEPT", 150)
    common: dict[str, Any] = {"dtype": "float32", "threads": 1, "max_model_len": 64, "max_batch_requests": 8}
    small: dict[str, Any] = common | {"kv_cache_tokens": 512, "block_size": 4} | options
    prompts = [[5, 9, 17, 33] * 4, [5, 9, 17, 33, 2] * 3, [100] * 12, [7, 8, 9, 7, 8]]
    with LLM(str(tiny_model), **small) as plain, LLM(str(tiny_model), proposer="suffix", **small) as guessing:
        for seed in (1, 1, 2):
            params = [
                SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
                SamplingParams(temperature=1, seed=seed, max_tokens=30, ignore_eos=True, n=2),
                SamplingParams(temperature=1, seed=seed, max_tokens=30, repetition_penalty=1.2, logprobs=1),
                SamplingParams(temperature=0, max_tokens=30, logit_bias={7: 50.0, 8: 49.0}, ignore_eos=True),
            ]
            answers = [
                [[answer.token_ids for answer in output.outputs] for output in llm.generate(prompts, params)]
                for llm in (plain, guessing)
            ]
            assert answers[0] == answers[1]
        core = core_of(guessing)
        assert guessing.statistics().accepted_tokens > 0
        assert core.drafting is not None and isinstance(proposer := proposer_of(guessing), SuffixProposer)
        assert not proposer._known and len(proposer._kept) == 150
        core.scheduler.check_integrity()
