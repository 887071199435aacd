"""Top-n-sigma, XTC and dynamic temperature beside their definitions, in float64."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvern import SamplingParams
from kvern.errors import InvalidParameter
from kvern.sample import sampler
from tests.support.sampler_inputs import VOCABULARY, make_rows, random_logits, same_distribution, shares
from tests.support.sampling import examples


def expected_shares(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """How often each token should be drawn, [vocabulary] float64."""
    scores = logits[0].double()
    if params.top_n_sigma > 0:
        scores = scores.masked_fill(scores < scores.max() - params.top_n_sigma * scores.std(correction=0), -math.inf)
    dynamic = params.dynatemp_range > 0
    temperature = params.temperature or 1.0
    probabilities = (scores if dynamic else scores / temperature).softmax(-1)
    if params.top_k:
        probabilities[probabilities < probabilities.sort(descending=True).values[params.top_k - 1]] = 0
    probabilities[probabilities < (params.min_p or 0) * probabilities.max()] = 0
    probabilities /= probabilities.sum()
    without = probabilities.clone()
    reached = [token for token in probabilities.argsort().tolist() if probabilities[token] >= params.xtc_threshold]
    without[reached[1:]] = 0
    share = params.xtc_probability
    return (1 - share) * heated(probabilities, params) + share * heated(without, params)


def heated(probabilities: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """With the temperature that the entropy asks for."""
    kept = probabilities[probabilities > 0] / probabilities.sum()
    if params.dynatemp_range == 0 or len(kept) == 1:
        return probabilities / probabilities.sum()
    unsure = float(-(kept * kept.log()).sum()) / math.log(len(kept))
    temperature = params.temperature or 1.0
    low, high = max(0.0, temperature - params.dynatemp_range), temperature + params.dynatemp_range
    heat = low + (high - low) * unsure**params.dynatemp_exponent
    return (probabilities.log() / heat).softmax(-1)


SINGLE = [
    {"top_n_sigma": 0.3},
    {"top_n_sigma": 1.5, "temperature": 3.0},
    {"xtc_probability": 1.0, "xtc_threshold": 0.02},
    {"xtc_probability": 0.4, "xtc_threshold": 0.05},
    {"xtc_probability": 0.5, "xtc_threshold": 0.0},
    {"xtc_probability": 0.5, "xtc_threshold": 0.03, "top_k": 4, "temperature": 2.0},
    {"dynatemp_range": 0.9, "temperature": 1.2},
    {"dynatemp_range": 2.0, "dynatemp_exponent": 3.0, "temperature": 1.0, "min_p": 0.05},
    {"top_n_sigma": 1.2, "xtc_probability": 0.3, "dynatemp_range": 0.5, "temperature": 0.8},
]


@pytest.mark.sample(5)
@pytest.mark.parametrize("fields", SINGLE, ids=str)
def test_tokens_are_drawn_as_the_definition_says(fields: dict[str, Any]) -> None:
    params = SamplingParams(**({"temperature": 1.0} | fields))
    plain = SamplingParams(temperature=params.temperature, top_k=params.top_k, min_p=params.min_p)
    same = []
    for seed in range(3):
        logits = random_logits(seed)
        expected = expected_shares(logits, params)
        assert same_distribution(shares(logits, params), expected)
        same.append(same_distribution(shares(logits, plain), expected))
    assert not all(same)


@pytest.mark.nightly
@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 10**6),
    temperature=st.floats(0.3, 3.0),
    top_k=st.sampled_from((0, 2, 7)),
    min_p=st.sampled_from((0.0, 0.05)),
    top_n_sigma=st.sampled_from((-1.0, 0.0, 0.7, 2.0)),
    xtc_probability=st.sampled_from((0.0, 0.5, 1.0)),
    xtc_threshold=st.sampled_from((0.02, 0.1, 0.3, 0.6)),
    dynatemp_range=st.sampled_from((0.0, 0.3, 5.0)),
    dynatemp_exponent=st.sampled_from((0.0, 0.5, 1.0, 2.0)),
)
def test_they_combine(seed: int, **fields: Any) -> None:
    params = SamplingParams(**fields)
    logits = random_logits(seed)
    assert same_distribution(shares(logits, params), expected_shares(logits, params))


def test_a_single_choice_is_never_excluded() -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 3] = 9.0
    assert shares(logits, SamplingParams(xtc_probability=1.0, xtc_threshold=0.2))[3] > 0.99
    logits[0, [3, 5, 9]] = torch.tensor([5.0, 4.0, 4.0])
    found = shares(logits, SamplingParams(xtc_probability=1.0, xtc_threshold=0.1))
    assert not found[3] and found[5] > 0.3 and found[9] > 0.3, "the last of those above, and its ties, stay"


def test_greedy_draws_nothing() -> None:
    params = SamplingParams(temperature=0, xtc_probability=1.0, xtc_threshold=0.0, dynatemp_range=2.0, top_n_sigma=1.0)
    for seed in range(5):
        logits = random_logits(seed)
        assert shares(logits, params)[logits.argmax()] == 1


EXTREMES = [
    SamplingParams(
        temperature=temperature,
        top_n_sigma=sigmas,
        xtc_probability=xtc,
        xtc_threshold=threshold,
        dynatemp_range=dynamic,
        dynatemp_exponent=exponent,
        top_p=top_p,
    )
    for temperature in (1e-5, 1.0, 1e6)
    for sigmas in (0.0, 5e-324, 1e6)
    for xtc, threshold in ((0.0, 0.0), (1.0, 0.0), (1.0, 1e-40))
    for dynamic, exponent in ((0.0, 0.0), (1e-6, 1.0), (1e6, 1e6), (1.0, 5e-324))
    for top_p in (1.0, 1e-37)
]


@pytest.mark.sample(3)
@pytest.mark.parametrize("value", [0.0, 1e9, -1e9, 3e38, math.nan, math.inf, -math.inf])
def test_whatever_the_numbers_are_the_token_exists_and_is_the_same_in_any_batch(value: float) -> None:
    rows = make_rows(*((params, [0], 1) for params in EXTREMES))
    slots = list(range(len(EXTREMES)))
    for places in (slice(None), slice(3, 9)):
        logits = random_logits(2, len(slots))
        logits[:, places] = value
        tokens = sampler.sample(logits, rows, slots, torch.arange(len(slots)))
        assert ((tokens >= 0) & (tokens < VOCABULARY)).all()
        alone = [sampler.sample(logits[[row]], rows, [row], torch.tensor([row])).item() for row in slots[::3]]
        assert math.isnan(value) or alone == tokens.tolist()[::3]
        if value == -math.inf and places != slice(None):
            assert not set(tokens.tolist()) & set(range(3, 9)), "what is banned is never drawn"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_n_sigma": -1.5}, "top_n_sigma is -1.5"),
        ({"xtc_probability": 1.1}, "xtc_probability is 1.1"),
        ({"xtc_threshold": -0.1}, "xtc_threshold is -0.1"),
        ({"dynatemp_range": math.inf}, "dynatemp_range is inf"),
        ({"dynatemp_exponent": "1"}, "dynatemp_exponent is '1'"),
        ({"dry_multiplier": -1}, "dry_multiplier is -1"),
        ({"dry_allowed_length": 0}, "dry_allowed_length is 0"),
        ({"dry_penalty_last_n": 2.5}, "dry_penalty_last_n is 2.5: it must be a whole number"),
        ({"dry_sequence_breakers": "\n"}, r"dry_sequence_breakers is '\n': it must be a list"),
        ({"dry_sequence_breakers": ["a", ""]}, "dry_sequence_breakers holds ''"),
        ({"beam_width": 2, "xtc_probability": 0.5}, "xtc_probability is 0.5 with beam_width 2"),
    ],
    ids=str,
)
def test_what_is_out_of_range_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**fields)
    assert message in str(caught.value)
