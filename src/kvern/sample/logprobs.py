"""Log-probabilities of chosen tokens: computed on the device, read on the host when the step's result is."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvern.device.transfer import fetch
from kvern.request.step import Logprob, TokenLogprobs


@dataclass(frozen=True)
class DeviceLogprobs:
    """Log-probability and rank of N tokens, [N]; ids and log-probabilities of the most probable tokens, [N, count]."""

    chosen: torch.Tensor
    ranks: torch.Tensor
    best_ids: torch.Tensor
    best: torch.Tensor

    @classmethod
    def of(cls, found: Sequence[torch.Tensor], count: int, most: int) -> "DeviceLogprobs":
        """Wraps the first `count` rows and `most` columns of the results of `kernels.logprobs`."""
        own, ranks, ids, values = found
        return cls(own[:count], ranks[:count], ids[:count, :most], values[:count, :most])

    def fetch(self) -> "DeviceLogprobs":
        """A copy on the host, which arrives when the device's work so far is done."""
        return DeviceLogprobs(*(fetch(item) for item in (self.chosen, self.ranks, self.best_ids, self.best)))

    def entries(self, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
        """For each token its own entry, then the `count` most probable ones."""
        rows = zip(
            tokens,
            counts,
            self.chosen.tolist(),
            self.ranks.tolist(),
            self.best_ids.tolist(),
            self.best.tolist(),
            strict=True,
        )
        result = []
        for token, count, logprob, rank, best_ids, best in rows:
            entry = {token: Logprob(logprob, rank)}
            for place, (other, value) in enumerate(zip(best_ids[:count], best[:count], strict=True)):
                entry.setdefault(other, Logprob(value, place + 1))
            result.append(entry)
        return result


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> DeviceLogprobs:
    """Log-probabilities of `tokens` [N] int64 and of the `count` most probable tokens, from logits [N, vocabulary].

    Equally probable tokens are ordered by id, as in greedy sampling.
    """
    logprobs = logits.float().log_softmax(-1)
    chosen = tokens[:, None]
    score = logits.gather(1, chosen)
    ids = torch.arange(logits.shape[-1], device=logits.device)
    ranks = ((logits > score) | ((logits == score) & (ids < chosen))).sum(-1) + 1
    best = logprobs.topk(min(count, logits.shape[-1]), -1)
    return DeviceLogprobs(logprobs.gather(1, chosen)[:, 0], ranks, best.indices, best.values)
