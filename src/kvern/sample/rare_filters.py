"""Filters that few requests use: top-n-sigma, XTC and dynamic temperature, with llama.cpp's names and meanings.

top_n_sigma          first of all filters: it reads the logits of the whole vocabulary, and a temperature does not
                     change its result
xtc                  after the common filters: it drops the most probable of the remaining tokens
dynamic temperature  last: it depends on the entropy of the remaining tokens; the filters before it read the
                     probabilities at temperature 1
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from kvern.device.transfer import upload
from kvern.request.sampling_params import SamplingParams
from kvern.sample.random import uniform

COIN = 2**31 - 1
"""An id that no token has: the random number that decides about XTC is never used to sample a token."""


@dataclass(frozen=True)
class RareFilters:
    """Parameters of N rows, [N, 1] float32 each. The fields have the names of `SamplingParams`."""

    top_n_sigma: torch.Tensor
    xtc_probability: torch.Tensor
    xtc_threshold: torch.Tensor
    dynatemp_range: torch.Tensor
    dynatemp_exponent: torch.Tensor

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> "RareFilters":
        """The parameters of requests, sent to the device in one copy."""
        names = [field.name for field in fields(cls)]
        numbers = [getattr(item, name) for item in params for name in names]
        return cls(*upload(numbers, torch.float32, device).view(-1, len(names), 1).unbind(1))

    def before_common(self, logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        """Logits [N, vocabulary] after top_n_sigma and temperatures [N, 1] that are not dynamic; before top_k."""
        known = logits > float("-inf")
        count = known.sum(-1, keepdim=True)
        mean = logits.masked_fill(~known, 0).sum(-1, keepdim=True) / count
        deviation = ((logits - mean).masked_fill(~known, 0).square().sum(-1, keepdim=True) / count).sqrt()
        limit = logits.amax(-1, keepdim=True) - self.top_n_sigma * deviation
        kept = logits.masked_fill((self.top_n_sigma > 0) & (logits < limit), float("-inf"))
        return kept / torch.where(self.dynatemp_range > 0, 1.0, temperature)

    def after_common(
        self, probabilities: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Returns probabilities [N, candidates] after XTC and dynamic temperature: the place of most new filters.

        The probabilities are those that typical_p left, not normalised; positions and seeds are [N].
        """
        probabilities = self._without_top_choices(probabilities, seeds, positions)
        return torch.where(self.dynatemp_range > 0, self._heated(probabilities, temperature), probabilities)

    def _without_top_choices(
        self, probabilities: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """XTC: with a probability, drops all tokens above the threshold except the least probable of them."""
        shares = probabilities / probabilities.sum(-1, keepdim=True)
        reached = (shares >= self.xtc_threshold) & (shares > 0)
        least = shares.masked_fill(~reached, float("inf")).amin(-1, keepdim=True)
        coin = uniform(seeds, positions, upload([COIN], torch.int64, shares.device)[None])
        return probabilities.masked_fill((coin < self.xtc_probability) & (shares > least), 0)

    def _heated(self, probabilities: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        """Applies a temperature between the ends of the range, chosen by the entropy of each row."""
        shares = probabilities / probabilities.sum(-1, keepdim=True)
        entropy = -torch.where(shares > 0, shares * shares.log(), 0).sum(-1, keepdim=True)
        most = (shares > 0).sum(-1, keepdim=True).float().log()
        unsure = torch.where(most > 0, entropy / most, 0).clamp_(0, 1)
        low, high = (temperature - self.dynatemp_range).clamp_(min=0), temperature + self.dynatemp_range
        heat = low + (high - low) * unsure**self.dynatemp_exponent
        return (shares / shares.amax(-1, keepdim=True)) ** (1 / heat)
