"""Each sampling parameter beside a small direct reference."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvern import SamplingParams
from kvern.errors import InvalidParameter
from kvern.sample import sampler
from kvern.sample.constraints import constrain
from kvern.sample.random import uniform
from tests.support.sampler_inputs import DRAWS, VOCABULARY, make_rows, random_logits, same_distribution, shares
from tests.support.sampling import examples


def transformers_probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distribution that transformers' processors make, in the order of its `generate`."""
    from transformers.generation import logits_process as hf

    chain: list[Any] = [hf.TemperatureLogitsWarper(params.temperature or 1.0)]
    if params.top_k:
        chain.append(hf.TopKLogitsWarper(params.top_k))
    if params.top_p is not None and params.top_p < 1:
        chain.append(hf.TopPLogitsWarper(params.top_p))
    if params.min_p:
        chain.append(hf.MinPLogitsWarper(params.min_p))
    if params.typical_p < 1:
        chain.append(hf.TypicalLogitsWarper(params.typical_p))
    scores = logits.clone()
    for processor in chain:
        scores = processor(torch.zeros(1, 1, dtype=torch.int64), scores)
    return scores.softmax(-1)[0]


SINGLE = [
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": VOCABULARY + 40},
    {"top_p": 0.1},
    {"top_p": 0.8},
    {"top_p": 0.999},
    {"min_p": 0.02},
    {"min_p": 1.0},
    {"typical_p": 0.3},
    {"typical_p": 0.95},
]


@pytest.mark.sample(6)
@pytest.mark.parametrize("fields", SINGLE, ids=str)
def test_each_filter_keeps_what_transformers_keeps(fields: dict[str, Any]) -> None:
    params = SamplingParams(**({"temperature": 1.0} | fields))
    for seed in range(4):
        logits = random_logits(seed)
        expected = transformers_probabilities(logits, params)
        assert same_distribution(shares(logits, params), expected)
    assert not same_distribution(shares(random_logits(99), params), expected)


@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 10**6),
    temperature=st.floats(0.2, 3.0),
    top_k=st.sampled_from((0, 0, 2, 7)),
    top_p=st.sampled_from((1.0, 0.5, 0.9)),
    min_p=st.sampled_from((0.0, 0.05)),
    typical_p=st.sampled_from((1.0, 0.7)),
)
def test_filters_combine_as_in_transformers(seed: int, **fields: Any) -> None:
    params = SamplingParams(**fields)
    logits = random_logits(seed)
    assert same_distribution(shares(logits, params), transformers_probabilities(logits, params))


def test_ties_at_the_last_place_of_top_k_are_all_kept() -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 3], logits[0, [5, 9, 11]] = 3.0, 1.0
    found = shares(logits, SamplingParams(top_k=2))
    assert found.nonzero()[:, 0].tolist() == [3, 5, 9, 11]


def test_a_row_is_sampled_alike_in_any_batch() -> None:
    kinds = [SamplingParams(seed=7, **({"temperature": 1.0} | fields)) for fields in (*SINGLE, {"temperature": 0.0})]
    logits = random_logits(5, len(kinds))
    positions = torch.arange(40, 40 + len(kinds))
    alone = [
        sampler.sample(logits[[row]], make_rows((params, [0], 1)), [0], positions[[row]]).item()
        for row, params in enumerate(kinds)
    ]
    rows = make_rows(*((params, [0], 1) for params in kinds))
    everyone = list(range(len(kinds)))
    assert sampler.sample(logits.clone(), rows, everyone, positions).tolist() == alone
    backwards = everyone[::-1]
    assert sampler.sample(logits[backwards], rows, backwards, positions[backwards]).tolist() == alone[::-1]


def test_greedy_takes_the_most_probable_also_beside_others() -> None:
    logits = random_logits(1, 3)
    greedy, random = SamplingParams(temperature=0), SamplingParams(temperature=1.0, top_k=3)
    for params in ((greedy, greedy, greedy), (greedy, random, greedy)):
        rows = make_rows(*((item, [0], 1) for item in params))
        tokens = sampler.sample(logits.clone(), rows, [0, 1, 2], torch.tensor([1, 1, 1]))
        assert [tokens[0], tokens[2]] == [logits[0].argmax(), logits[2].argmax()]


EXTREMES = [
    {"temperature": temperature, "top_k": top_k, "top_p": top_p, "typical_p": typical_p, "min_p": min_p}
    for temperature in (5e-324, 1e-5, 1.0, 1e6)
    for top_k in (0, 1, 2**31 - 1)
    for top_p in (1e-37, 0.5, 1.0)
    for typical_p in (1e-37, 1.0)
    for min_p in (0.0, 5e-324, 1.0)
]


def test_a_tiny_share_keeps_the_best_token_or_is_refused() -> None:
    logits = random_logits(4)
    for value in (0, 5e-324, 1e-46, 1e-37):
        assert shares(logits, SamplingParams(temperature=1.0, top_p=value))[logits.argmax()] == 1
    with pytest.raises(InvalidParameter, match="top_p is -1e-30: it must be a finite number at least 0"):
        SamplingParams(top_p=-1e-30)
    for value in (0, 5e-324, 1e-300, 1e-46, 1e-40, -1e-30):
        with pytest.raises(InvalidParameter, match=f"typical_p is {value}: it must be a finite number at least 1e-37"):
            SamplingParams(typical_p=value)


@pytest.mark.sample(3)
@pytest.mark.parametrize("value", [0.0, 1e9, -1e9, 3e38, math.nan, math.inf, -math.inf])
def test_whatever_the_numbers_are_the_token_exists(value: float) -> None:
    """All filters at their extremes, over rows of which all, some or one of the logits are extreme."""
    rows = make_rows(*((SamplingParams(**fields), [0], 1) for fields in EXTREMES))
    slots = list(range(len(EXTREMES)))
    for places in (slice(None), slice(3, 9), slice(VOCABULARY - 1, None)):
        logits = random_logits(2, len(slots))
        logits[:, places] = value
        tokens = sampler.sample(logits, rows, slots, torch.arange(len(slots)))
        assert ((tokens >= 0) & (tokens < VOCABULARY)).all()
        alone = [sampler.sample(logits[[row]], rows, [row], torch.tensor([row])).item() for row in slots]
        assert math.isnan(value) or alone == tokens.tolist()
        if value == -math.inf and places != slice(None):
            assert not set(tokens.tolist()) & set(range(VOCABULARY)[places]), "what is banned is never drawn"


# Random numbers


COUNT = 40_000
MANY = torch.arange(COUNT)
ONE = torch.zeros(1, dtype=torch.int64)
NUMBERS = {
    "of tokens": lambda: uniform(ONE, ONE + 17, MANY[None])[0],
    "of positions": lambda: uniform(torch.full((COUNT,), 5), MANY, ONE[None])[:, 0],
    "of seeds": lambda: uniform(MANY, torch.full((COUNT,), 17), ONE[None] + 3)[:, 0],
    "of all three": lambda: uniform(MANY, MANY, MANY[:, None])[:, 0],
}


@pytest.mark.parametrize("name", NUMBERS)
def test_random_numbers_are_uniform_and_independent(name: str) -> None:
    numbers = NUMBERS[name]()
    assert numbers.min() > 0 and numbers.max() < 1
    assert abs(numbers.double().mean() - 0.5) < 4 / math.sqrt(12 * COUNT)
    assert chi_square(torch.histc(numbers, 64, 0, 1), torch.full((64,), COUNT / 64)) < chi_square_limit(63)
    small = (numbers * 2**10).frac()  # the bits after the first ten
    assert chi_square(torch.histc(small, 64, 0, 1), torch.full((64,), COUNT / 64)) < chi_square_limit(63)
    for distance in (1, 2, 64):
        neighbours = torch.corrcoef(torch.stack([numbers[distance:], numbers[:-distance]]))[0, 1]
        assert abs(neighbours) < 4 / math.sqrt(COUNT)
    assert len(numbers.unique()) > 0.998 * COUNT
    for other in NUMBERS.keys() - {name}:
        assert abs(torch.corrcoef(torch.stack([numbers, NUMBERS[other]()]))[0, 1]) < 4 / math.sqrt(COUNT)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63)])
def test_every_seed_has_its_own_random_numbers(seed: int) -> None:
    positions, tokens = torch.arange(100), torch.arange(50)[None]
    numbers = uniform(torch.full((100,), seed), positions, tokens)
    assert ((numbers > 0) & (numbers < 1)).all()
    other = uniform(torch.full((100,), 12345), positions, tokens)
    assert abs(torch.corrcoef(torch.stack([numbers.flatten(), other.flatten()]))[0, 1]) < 4 / math.sqrt(5000)


def test_rounding_hardly_ever_changes_the_token() -> None:
    """A distribution that is off by rounding is sampled alike, however large the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(400, 8192, generator=generator)
    nearly = logits + torch.randn(logits.shape, generator=generator) * 1e-4
    rows = make_rows((SamplingParams(seed=1), [0], 1))
    first, second = (
        sampler.sample(item, rows, [0] * 400, torch.arange(1, 401)) for item in (logits.clone(), nearly.clone())
    )
    assert (first != second).sum() <= 1 and len(first.unique()) > 350


def chi_square(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((found.double() - expected) ** 2 / expected).sum())


def chi_square_limit(freedom: int) -> float:
    """The value that one in about 30 000 exceeds (Wilson and Hilferty 1931)."""
    return freedom * (1 - 2 / (9 * freedom) + 4 * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_tokens_are_drawn_with_their_probabilities(seed: int) -> None:
    logits = random_logits(seed)
    params = SamplingParams(temperature=0.8, top_k=12, seed=seed)
    expected = transformers_probabilities(logits, params).double() * DRAWS
    kept = expected > 0
    found = shares(logits, params) * DRAWS
    assert not found[~kept].any()
    assert chi_square(found[kept], expected[kept]) < chi_square_limit(int(kept.sum()) - 1)


# Constraints


def constrained(params: SamplingParams, tokens: list[int], prompt_length: int, **fields: Any) -> torch.Tensor:
    logits = random_logits(3)
    constrain(logits, make_rows((params, tokens, prompt_length), **fields), [0], [len(tokens)])
    return logits[0]


def banned(logits: torch.Tensor) -> set[int]:
    return set(logits.isneginf().nonzero()[:, 0].tolist())


TOKENS = [1, 2, 2, 5, 7, 7, 7, 1, 9]
"""Four of the prompt, five of the answer."""


@pytest.mark.parametrize("penalty", [0.5, 1.3])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([TOKENS]), random_logits(3))[0]
    found = constrained(SamplingParams(repetition_penalty=penalty), TOKENS, 4)
    assert torch.allclose(found, expected) and not torch.equal(found, random_logits(3)[0])


def test_presence_and_frequency_penalties_count_the_answer_only() -> None:
    found = constrained(SamplingParams(presence_penalty=0.5, frequency_penalty=-0.25), TOKENS, 4)
    expected = random_logits(3)[0]
    for token, times in Counter(TOKENS[4:]).items():
        expected[token] -= 0.5 - 0.25 * times
    assert torch.allclose(found, expected)


def test_penalties_of_a_row_leave_the_others_alone() -> None:
    logits = random_logits(3, 2)
    plain, strict = SamplingParams(), SamplingParams(presence_penalty=2.0, logit_bias={4: 9.0})
    constrain(logits, make_rows((plain, TOKENS, 4), (strict, TOKENS, 4)), [0, 1], [9, 9])
    assert torch.equal(logits[0], random_logits(3, 2)[0]) and not torch.equal(logits[1], random_logits(3, 2)[1])


def test_logit_bias_is_added() -> None:
    change = constrained(SamplingParams(logit_bias={4: 1.5, 20: -100.0}), TOKENS, 4) - random_logits(3)[0]
    assert torch.allclose(change, torch.tensor([{4: 1.5, 20: -100.0}.get(token, 0.0) for token in range(VOCABULARY)]))


def test_only_allowed_tokens_remain() -> None:
    found = constrained(SamplingParams(allowed_token_ids=[2, 8], logit_bias={8: 1.0, 3: 5.0}), TOKENS, 4)
    assert banned(found) == set(range(VOCABULARY)) - {2, 8}
    assert torch.allclose(found[[2, 8]], random_logits(3)[0, [2, 8]] + torch.tensor([0.0, 1.0]))


def test_bad_words_are_never_completed() -> None:
    params = SamplingParams(bad_words=["any"])
    words = ((6,), (7, 1, 9, 4), (1, 9, 5), (9, 3), (1, 8), (5, 7, 7, 7, 1, 9, 2))
    assert banned(constrained(params, TOKENS, 4, bad_word_ids=words)) == {6, 4, 5, 3}, "the last begins in the prompt"
    assert banned(constrained(params, TOKENS[:4], 4, bad_word_ids=((5, 3), (2,)))) == {2}


def test_stop_tokens_wait_for_min_tokens() -> None:
    for min_tokens, expected in ((5, set()), (6, {3, 5})):
        params = SamplingParams(min_tokens=min_tokens)
        assert banned(constrained(params, TOKENS, 4, stop_token_ids=frozenset({3, 5}))) == expected
