"""Log-probabilities of chosen tokens: computed on the device, read on the host when the step's result is."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import numpy as np
import torch

from kvern.device.transfer import fetch
from kvern.request.logprobs import LogprobRows, row_bytes


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

    @classmethod
    def joined(cls, parts: "Sequence[DeviceLogprobs]") -> "DeviceLogprobs":
        """Puts the tokens of parts behind each other."""
        each = [(part.chosen, part.ranks, part.best_ids, part.best) for part in parts]
        return cls(*map(torch.cat, zip(*each, strict=True)))

    def fetch(self) -> "FetchedLogprobs":
        """A copy on the host, which arrives when the device's work so far is done."""
        columns = [
            self.best_ids.int(),
            self.chosen[:, None].view(torch.int32),
            self.best.view(torch.int32),
            self.ranks[:, None].int(),
        ]
        return FetchedLogprobs(fetch(torch.cat(columns, 1)))


@dataclass(frozen=True)
class FetchedLogprobs:
    """Log-probabilities of N tokens on the host, [N, 2 * most + 2]: rows of `LogprobRows` without the tokens' ids."""

    columns: torch.Tensor

    def rows(self, tokens: Sequence[int], runs: Sequence[tuple[slice, int]]) -> Iterator[LogprobRows]:
        """Yields the rows of each run of the N `tokens`, with so many of the most probable ones."""
        for wanted, group in groupby(runs, itemgetter(1)):
            some = [run for run, _ in group]
            count, first = min(wanted, self.columns.shape[1] // 2 - 1), some[0].start
            size = row_bytes(count)
            block = slice(first, some[-1].stop)
            data = _packed(tokens[block], self.columns[block].numpy(), count)
            for run in some:
                yield LogprobRows(count, data[(run.start - first) * size : (run.stop - first) * size])


def _packed(tokens: Sequence[int], columns: "np.ndarray[tuple[int, int], np.dtype[np.int32]]", count: int) -> bytes:
    own = columns.shape[1] // 2 - 1
    rows = np.empty((len(tokens), row_bytes(count) // 4), np.int32)
    rows[:, 0] = tokens
    rows[:, 1 : 1 + count] = columns[:, :count]
    rows[:, 1 + count : -1] = columns[:, own : own + 1 + count]
    rows[:, -1] = columns[:, -1]
    return rows.tobytes()


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
