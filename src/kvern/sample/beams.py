"""Candidate tokens for the next step of beam search, computed on the device and read on the host with the result."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvern.device.rows import BatchRows
from kvern.device.transfer import fetch, upload
from kvern.request.logprobs import LogprobRows, packed
from kvern.request.step import BeamCandidates, NewRequest


def candidate_count(request: NewRequest) -> int:
    """The number of candidates of a beam: its width, plus one for each token or string that can end a beam."""
    params = request.params
    width = params.beam_width or 0
    return width + (width if params.stop_strings else 0) + len(request.spec.stop_token_ids)


MostProbable = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
"""The signature of `most_probable`."""


def most_probable(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [N, count] float32 and ids [N, count] of the most probable tokens under logits [N, V]."""
    scores, ids = logits.topk(count, -1)
    return scores.float() - logits.float().logsumexp(-1, keepdim=True), ids


@dataclass(frozen=True)
class CandidateLogprobs:
    """Log-probabilities of N beams, from the logits before constraints: candidates [N, K] and best tokens [N, most]."""

    logprobs: torch.Tensor
    ranks: torch.Tensor
    best_ids: torch.Tensor
    best: torch.Tensor

    @classmethod
    def of(cls, logits: torch.Tensor, ids: torch.Tensor, most: int) -> "CandidateLogprobs":
        """Computes them from logits [N, vocabulary] for candidates [N, K] and starts their copy to the host."""
        logprobs = logits.float().log_softmax(-1)
        chosen = logprobs.gather(1, ids)
        ranks = torch.stack([(logprobs > chosen[:, place : place + 1]).sum(-1) + 1 for place in range(ids.shape[1])], 1)
        best = logprobs.topk(min(most, logits.shape[-1]), -1)
        return cls(fetch(chosen), fetch(ranks), fetch(best.indices), fetch(best.values))

    def entry(self, row: int, place: int, token: int, count: int) -> LogprobRows:
        """The log-probability of one candidate, then those of the `count` most probable tokens."""
        ids = [token, *self.best_ids[row, :count].tolist()]
        logprobs = [float(self.logprobs[row, place]), *self.best[row, :count].tolist()]
        return packed(ids, logprobs, int(self.ranks[row, place]))


class DeviceCandidates:
    """The candidates of a step's beams on their way to the host."""

    def __init__(
        self,
        logits: torch.Tensor,
        original: torch.Tensor | None,
        rows: BatchRows,
        slots: Sequence[int],
        most_probable: MostProbable = most_probable,
    ) -> None:
        """Selects the candidates of the beams among `slots` from their `logits` [S, vocabulary].

        `original` are the logits before constraints and masks; None if no request asks for log-probabilities.
        `most_probable` may be replaced by a kernel.
        """
        self._requests = {slot: rows.request(slot) for slot in slots if rows.request(slot).params.beam_width}
        self._counts = [candidate_count(request) for request in self._requests.values()]
        if len(self._requests) < len(slots):
            places = [place for place, slot in enumerate(slots) if slot in self._requests]
            index = upload(places, torch.int64, logits.device)
            logits = logits.index_select(0, index)
            original = None if original is None else original.index_select(0, index)
        logprobs, ids = most_probable(logits, min(max(self._counts), logits.shape[-1]))
        self._logprobs = fetch(logprobs.nan_to_num(nan=float("-inf"), neginf=float("-inf")))  # NaN: all is banned
        self._ids = fetch(ids)
        wanted = [request.params.logprobs for request in self._requests.values()]
        most = max((count for count in wanted if count is not None), default=None)
        self._reported = None
        if original is not None and most is not None:
            self._reported = CandidateLogprobs.of(original, ids.long(), most)

    def by_slot(self) -> dict[int, BeamCandidates]:
        """Waits for the copy and returns the candidates of each slot."""
        found = {}
        rows = zip(self._requests.items(), self._ids.tolist(), self._logprobs.tolist(), strict=True)
        for row, ((slot, request), ids, logprobs) in enumerate(rows):
            count = self._counts[row]
            found[slot] = BeamCandidates(ids[:count], logprobs[:count], self._entry(row, ids, request))
        return found

    def _entry(self, row: int, ids: list[int], request: NewRequest) -> "ReportedEntry | None":
        count = request.params.logprobs
        return None if count is None or self._reported is None else ReportedEntry(self._reported, row, ids, count)


@dataclass(frozen=True)
class ReportedEntry:
    """Makes the log-probabilities of one beam's candidates on demand, because few of them are chosen."""

    logprobs: CandidateLogprobs
    row: int
    ids: list[int]
    count: int

    def __call__(self, place: int) -> LogprobRows:
        return self.logprobs.entry(self.row, place, self.ids[place], self.count)
