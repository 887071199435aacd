"""Drafts drawn from known probabilities, and a test that the answers follow the probabilities of the model."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvern import LLM, SamplingParams
from kvern.device.rows import BatchRows
from kvern.drafting.device.drafter import ComputedStep
from kvern.drafting.proposer import takes_drafts
from kvern.drafting.rejection import Drawn
from kvern.drafting.room import Wanted
from kvern.request.request import Request
from kvern.request.step import SchedulerOutput
from kvern.sample import sampler
from kvern.sample.random import uniform
from tests.support.internals import core_of, rows_of, set_drafter, vocab_size_of
from tests.support.speculation import AnyLength

VOCABULARY, DRAWS = 9, 20_000


def p_value(tokens: torch.Tensor, probabilities: torch.Tensor) -> float:
    """The p-value of Pearson's chi-square test of tokens against probabilities."""
    expected, found = probabilities.double() * len(tokens), tokens.bincount(minlength=len(probabilities))
    possible = expected > 0
    assert not found[~possible].any()
    distance = ((found[possible] - expected[possible]) ** 2 / expected[possible]).sum()
    return float(torch.special.gammaincc((possible.sum() - 1) / 2.0, distance / 2))


def logits_of(seed: int) -> torch.Tensor:
    return torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 1.5


HOT = 100.0
TOKENS = list(range(60, 60 + VOCABULARY))
"""The tokens that may be sampled."""


class Drawing:
    """A drafter that samples drafts from fixed probabilities, with the random numbers of the sampler."""

    reads_hidden, inputs = False, None
    caches = ()
    graphs = ()

    def __init__(self, rows: BatchRows, probabilities: torch.Tensor, drawn: Drawn | None) -> None:
        self._rows, self._probabilities, self.drawn = rows, probabilities, drawn

    def prepare(self, output: SchedulerOutput) -> None:
        pass

    def draft(self, step: ComputedStep) -> None:
        rows, asked = self._rows, [item for item in step.scheduled if item.sampled and item.guesses]
        if self.drawn is not None:
            self.drawn.clear()
        for ahead in range(max((item.guesses for item in asked), default=0)):
            slots = [item.slot for item in asked if item.guesses > ahead]
            positions = rows.num_computed_tokens[slots].long() + 1 + ahead
            theirs = self._probabilities.expand(len(slots), -1)
            numbers = uniform(rows.seeds[slots], positions, torch.arange(theirs.shape[1])[None])
            rows.tokens[slots, positions] = sampler.draw(theirs, numbers).int()
            if self.drawn is not None:
                self.drawn.keep(slots, theirs)


class OwnLengths(AnyLength):
    """Drafting whose number of drafts depends on the request alone, not on the other requests of a step."""

    def wanted(self, running: int) -> Wanted | None:
        return lambda request: self._length(request) if takes_drafts(request) else 0

    def _length(self, request: Request) -> int:
        return random.Random(f"{request.params.seed} {len(request.token_ids)}").randint(0, 3)


@contextmanager
def drawing(llm: LLM, probabilities: torch.Tensor, rejection: bool) -> Iterator[None]:
    set_drafter(llm, Drawing(rows_of(llm), probabilities, Drawn() if rejection else None))
    core_of(llm).drafting = OwnLengths(None, vocab_size_of(llm), 3)
    try:
        yield
    finally:
        core_of(llm).drafting = None
        set_drafter(llm, None)


def check_draws(llm: LLM, requests: int, count: int) -> None:
    """Checks sampled tokens and acceptance; at a high temperature only the biases matter, so all positions are
    alike.
    """
    own, theirs = logits_of(1)[0], torch.zeros(vocab_size_of(llm))
    theirs[TOKENS] = logits_of(51)[0].softmax(-1)
    hot: dict[str, Any] = {"temperature": HOT, "max_tokens": count, "ignore_eos": True, "allowed_token_ids": TOKENS}
    biases = {token: HOT * float(logit) for token, logit in zip(TOKENS, own, strict=True)}
    params = [SamplingParams(**hot, seed=100 + seed, logit_bias=biases) for seed in range(requests)]
    shares, found = {}, {}
    for rejection in (False, True, True):
        with drawing(llm, theirs, rejection):
            outputs = llm.generate([[5, 6, 7]] * requests, params)
            statistics = llm.statistics()
        tokens = torch.tensor([output.outputs[0].token_ids for output in outputs])
        shares[rejection] = statistics.accepted_tokens / statistics.draft_tokens
        assert p_value((tokens - TOKENS[0]).flatten(), own.softmax(-1)) > 0.001
        found[rejection] = tokens
    assert shares[True] > 1.1 * shares[False]
