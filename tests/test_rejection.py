"""Drafts drawn from known probabilities: tokens have the model's, and drafts are accepted as often as can be."""

import math
from typing import Any

import pytest
import torch

from kvern import SamplingParams
from kvern.device.rows import BatchRows
from kvern.sample import sampler
from kvern.sample.random import uniform
from kvern.sample.rejection import DrawnDrafts, accept
from tests.test_sampler import make_rows

VOCABULARY, DRAWS = 9, 20_000
POSITIONS = torch.arange(1, DRAWS + 1)
FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"top_k": 4},
    {"top_p": 0.8, "min_p": 0.02},
    {"typical_p": 0.9, "temperature": 1.3},
    {"xtc_probability": 0.0, "top_n_sigma": 1.5},
]


def rows_with(drafts: torch.Tensor, **asked: Any) -> BatchRows:
    """A row with a draft at every position."""
    rows = make_rows((SamplingParams(**({"temperature": 1.0, "seed": 11} | asked)), [0] * (DRAWS + 1), 1))
    rows.tokens[0, 1 : DRAWS + 1] = drafts.int()
    return rows


def drawn_from(probabilities: torch.Tensor, seed: int = 11) -> torch.Tensor:
    """Drafts, by the numbers by which the model without drafts would draw its tokens."""
    numbers = uniform(torch.tensor([seed]), POSITIONS, torch.arange(VOCABULARY)[None])
    return sampler.draw(probabilities.expand(DRAWS, -1), numbers)


def p_value(tokens: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Of Pearson's chi-square: how likely it is that numbers of tokens are so far from what is expected."""
    expected, found = probabilities.double() * len(tokens), tokens.bincount(minlength=VOCABULARY)
    possible = expected > 0
    assert not found[~possible].any()
    distance = ((found[possible] - expected[possible]) ** 2 / expected[possible]).sum()
    return float(torch.special.gammaincc((possible.sum() - 1) / 2.0, distance / 2))


def logits_of(seed: int) -> torch.Tensor:
    return torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 1.5


@pytest.mark.parametrize("asked", FILTERS, ids=str)
@pytest.mark.parametrize("seed", [1, 2])
def test_tokens_have_the_models_probabilities(asked: dict[str, Any], seed: int) -> None:
    logits, theirs = logits_of(seed), logits_of(seed + 50).softmax(-1)
    drafts = drawn_from(theirs)
    rows = rows_with(drafts, **asked)
    own = sampler.probabilities(logits, rows, [0], torch.tensor([1]))[0]
    alone = sampler.sample(logits.expand(DRAWS, -1), rows, [0] * DRAWS, POSITIONS)
    chosen = alone.clone()
    drawn = DrawnDrafts(range(DRAWS), theirs.expand(DRAWS, -1))
    accept(chosen, logits.expand(DRAWS, -1), rows, [0] * DRAWS, POSITIONS, drawn)
    assert p_value(alone, own) > 0.001 and p_value(chosen, own) > 0.001
    assert p_value(drafts, theirs[0]) > 0.001
    assert p_value(torch.where(own[drafts] > 0, drafts, own.argmax()), own) < 1e-9, "drafts are no tokens"
    share = float(torch.minimum(own, theirs[0]).sum())
    accepted = float((chosen == drafts).double().mean())
    assert abs(accepted - share) < 4 * math.sqrt(share * (1 - share) / DRAWS), "more or fewer than can be accepted"
    assert accepted > float((alone == drafts).double().mean()), "by chance it would have been as many"


def test_tokens_do_not_know_of_each_other() -> None:
    """A token is as likely behind one that was accepted as behind one that was not."""
    logits, theirs = logits_of(3), logits_of(53).softmax(-1)
    rows = rows_with(drafts := drawn_from(theirs))
    chosen, drawn = torch.zeros(DRAWS, dtype=torch.int64), DrawnDrafts(range(DRAWS), theirs.expand(DRAWS, -1))
    accept(chosen, logits.expand(DRAWS, -1), rows, [0] * DRAWS, POSITIONS, drawn)
    own = sampler.probabilities(logits, rows, [0], torch.tensor([1]))[0]
    before = (chosen == drafts)[:-1]
    for behind in (chosen[1:][before], chosen[1:][~before], chosen[1:][drafts[:-1] == chosen[1:].mode().values]):
        assert p_value(behind, own) > 0.001


def test_the_same_seed_position_and_draft_give_the_same_token_in_any_step() -> None:
    logits, theirs = logits_of(4), logits_of(54).softmax(-1)
    rows = rows_with(drawn_from(theirs))
    together = torch.zeros(40, dtype=torch.int64)
    drawn = DrawnDrafts(range(40), theirs.expand(40, -1))
    accept(together, logits.expand(40, -1), rows, [0] * 40, POSITIONS[:40], drawn)
    for place in range(40):
        alone = torch.full((3,), -1)
        accept(alone, logits.expand(3, -1), rows, [0] * 3, POSITIONS[[0, 0, place]], DrawnDrafts([2], theirs))
        assert alone.tolist() == [-1, -1, together[place].item()], "other places are left as they are"


def test_greedy_tokens_are_the_most_probable_ones() -> None:
    logits, theirs = logits_of(5), logits_of(55).softmax(-1)
    rows = rows_with(drawn_from(theirs), temperature=0.0)
    chosen = torch.zeros(DRAWS, dtype=torch.int64)
    drawn = DrawnDrafts(range(DRAWS), theirs.expand(DRAWS, -1))
    accept(chosen, logits.expand(DRAWS, -1), rows, [0] * DRAWS, POSITIONS, drawn)
    assert (chosen == logits.argmax()).all()


def test_a_drafter_that_is_the_model_is_always_right() -> None:
    logits = logits_of(6)
    own = logits.softmax(-1)
    rows = rows_with(drafts := drawn_from(own))
    chosen = torch.zeros(DRAWS, dtype=torch.int64)
    drawn = DrawnDrafts(range(DRAWS), own.expand(DRAWS, -1))
    accept(chosen, logits.expand(DRAWS, -1), rows, [0] * DRAWS, POSITIONS, drawn)
    assert torch.equal(chosen, drafts)


@pytest.mark.parametrize("draft", [0, 4])
def test_a_draft_that_nobody_drew_is_accepted_with_its_probability(draft: int) -> None:
    """By sampling alone, and as speculative sampling has it for a drafter that is sure."""
    logits = logits_of(7)
    drafts = torch.full((DRAWS,), draft)
    rows = rows_with(drafts)
    own = sampler.probabilities(logits, rows, [0], torch.tensor([1]))[0]
    alone = sampler.sample(logits.expand(DRAWS, -1), rows, [0] * DRAWS, POSITIONS)
    chosen, sure = alone.clone(), torch.nn.functional.one_hot(drafts, VOCABULARY).float()
    accept(chosen, logits.expand(DRAWS, -1), rows, [0] * DRAWS, POSITIONS, DrawnDrafts(range(DRAWS), sure))
    rest = own.clone().index_fill_(0, torch.tensor([draft]), 0.0)
    for tokens in (alone, chosen):
        assert p_value(tokens, own) > 0.001
        assert p_value(tokens[tokens != draft], rest / rest.sum()) > 0.001
