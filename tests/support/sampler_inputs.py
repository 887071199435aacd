"""Batch rows and random logits for the sampler, and a comparison of frequencies with probabilities."""

from typing import Any

import torch

from kvern import SamplingParams
from kvern.device.rows import BatchRows
from kvern.request.request import PromptInput, RequestSpec
from kvern.request.step import NewRequest
from kvern.sample import sampler

VOCABULARY = 23
DRAWS = 20_000


def make_rows(*requests: tuple[SamplingParams, list[int], int], **fields: Any) -> BatchRows:
    """Rows of requests (parameters, tokens, prompt length); `fields` go to RequestSpec."""
    longest = max(len(tokens) for _, tokens, _ in requests)
    rows = BatchRows(len(requests), longest + 1, 1, torch.device("cpu"))
    for slot, (asked, tokens, prompt_length) in enumerate(requests):
        params = asked.resolved()
        spec = RequestSpec("", PromptInput(tokens[:prompt_length]), params, 1, **fields)
        rows.join([NewRequest(slot, spec, params, params.seed or 0, tokens, [0])])
    return rows


def random_logits(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2.5


def shares(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The frequency of each token at DRAWS positions."""
    rows = make_rows((params, [0], 1))
    tokens = sampler.sample(logits.repeat(DRAWS, 1), rows, [0] * DRAWS, torch.arange(1, DRAWS + 1))
    return tokens.bincount(minlength=VOCABULARY) / DRAWS


def same_distribution(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """True if frequencies are within five standard deviations, plus four draws for improbable tokens."""
    kept = bool(((found > 0) <= (expected > 0)).all() and ((expected > 20 / DRAWS) <= (found > 0)).all())
    return kept and bool(((found - expected).abs() < 5 * (expected / DRAWS).sqrt() + 4 / DRAWS).all())
