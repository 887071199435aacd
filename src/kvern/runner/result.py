"""A step's result while the device still computes it."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch

from kvern.device.input_batch import InputBatch
from kvern.device.rows import BatchRows
from kvern.device.transfer import fetch, upload
from kvern.drafting.verification import GuessedDrafts
from kvern.models.decoder import LanguageModel
from kvern.request.logprobs import LogprobRows
from kvern.request.step import ModelRunnerOutput, ScheduledTokens

if TYPE_CHECKING:
    from kvern.runner.processor_rows import ProcessorVerdict
    from kvern.sample.beams import DeviceCandidates
    from kvern.sample.logprobs import DeviceLogprobs, FetchedLogprobs

Interval = tuple[torch.cuda.Event, torch.cuda.Event]
"""Begin and end of some work of a GPU."""
PROMPT_LOGITS_ROWS = 256
"""Prompt positions whose logits are held at once: a row can have 256k entries of 4 bytes."""


@dataclass(frozen=True)
class PromptRun:
    """Prompt tokens of one request whose log-probabilities a step's tokens give.

    `place`: of the request in the step; `first`: index, among the step's tokens, of the one that predicts the first;
    `wanted`: how many of the most probable ones were asked for.
    """

    place: int
    first: int
    tokens: list[int]
    wanted: int


@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities of all tokens of `runs`, of a step with `places` requests."""

    runs: Sequence[PromptRun]
    fetched: "FetchedLogprobs"
    places: int

    def entries(self) -> list[LogprobRows | None]:
        """The log-probabilities by index in the step."""
        tokens = [token for run in self.runs for token in run.tokens]
        ends = list(accumulate((len(run.tokens) for run in self.runs), initial=0))
        asked = [(slice(*ends), run.wanted) for ends, run in zip(pairwise(ends), self.runs, strict=True)]
        result: list[LogprobRows | None] = [None] * self.places
        for run, rows in zip(self.runs, self.fetched.rows(tokens, asked), strict=True):
            result[run.place] = rows
        return result


@dataclass(frozen=True)
class SampledStep:
    """A step of decodes that is computed, and of which nothing is reported but the tokens of each request."""

    token_ids: list[list[int]]
    drafting_seconds: float = 0.0

    def done(self) -> bool:
        """See `StepResult`."""
        return True

    def result(self) -> ModelRunnerOutput:
        """The output of the step."""
        places = len(self.token_ids)
        nothing = [None] * places
        return ModelRunnerOutput(self.token_ids, [*nothing], [*nothing], drafting_seconds=self.drafting_seconds)


@dataclass(frozen=True)
class Reported:
    """The report of a step beside the S tokens that it samples.

    counts           [S] how many of the most probable tokens are reported; None: nothing is
    logprobs         log-probabilities of the sampled tokens
    prompt_logprobs  log-probabilities of prompt tokens
    embeddings       slots [E] and their hidden states [E, hidden]
    broken           as of ModelRunnerOutput, but by index among the S tokens
    candidates       the most probable tokens of beams
    verdict          what logits processors have found
    """

    counts: Sequence[int | None] = ()
    logprobs: "DeviceLogprobs | None" = None
    prompt_logprobs: PromptLogprobs | None = None
    embeddings: tuple[Sequence[int], torch.Tensor] | None = None
    broken: dict[int, str] = field(default_factory=dict)
    candidates: "DeviceCandidates | None" = None
    verdict: "ProcessorVerdict | None" = None


NOTHING_REPORTED = Reported()


class PendingStep:
    """Part of a step on its way: `result` waits for it."""

    def __init__(
        self,
        scheduled: Sequence[ScheduledTokens],
        sampled: torch.Tensor | None,
        reported: Reported = NOTHING_REPORTED,
        *,
        kept: torch.Tensor | None = None,
        guessed: GuessedDrafts | None = None,
        on_gpu: bool = False,
    ) -> None:
        """`sampled` [S]: the sampled tokens; `kept` [R]: how many of them each request keeps; None: all.

        `guessed`: drafts that the result has; None: nobody has to know them. `on_gpu`: there is a GPU to wait for even
        if nothing is sampled.
        """
        self._scheduled, self._reported = scheduled, reported
        self._sampled = None if sampled is None else fetch(sampled)
        self.kept = kept
        self._kept = None if kept is None else fetch(kept)
        self._logprobs = None if reported.logprobs is None else reported.logprobs.fetch()
        given = reported.embeddings
        self._embeddings = None if given is None else (given[0], fetch(given[1].float()))
        self._guessed = guessed
        self.drafted: Interval | None = None
        """The time of drafting: after this step, if the result has its drafts, else after the step before."""
        self._done: torch.cuda.Event | None = None
        if on_gpu or (sampled is not None and sampled.device.type == "cuda"):
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def add_drafts(self, guessed: GuessedDrafts, drafted: Interval | None) -> None:
        """Let the result have drafts that were made behind the step, and wait for these."""
        self._guessed, self.drafted = guessed, drafted
        if self._done is not None:
            self._done.record()

    def done(self) -> bool:
        """See `StepResult`."""
        return self._done is None or bool(self._done.query())  # type: ignore[no-untyped-call]

    def result(self) -> ModelRunnerOutput:
        """Wait for the device."""
        if self._done is not None:
            self._done.synchronize()
        output = self._output()
        if self._guessed is not None:
            output.guessed = self._guessed.by_slot()
        if self.drafted is not None:
            begun, ended = self.drafted
            output.drafting_seconds = begun.elapsed_time(ended) / 1000
        return output

    def _output(self) -> ModelRunnerOutput:
        tokens: list[int] = [] if self._sampled is None else self._sampled.tolist()
        places = len(self._scheduled)
        prompts: list[LogprobRows | None] = [None] * places
        reported = self._reported
        if reported.prompt_logprobs is not None:
            prompts = reported.prompt_logprobs.entries()
        embeddings = {}
        if self._embeddings is not None:
            slots, states = self._embeddings
            embeddings = {slot: state.tobytes() for slot, state in zip(slots, states.numpy(), strict=True)}
        candidates = {} if reported.candidates is None else reported.candidates.by_slot()
        broken = reported.broken
        if reported.verdict is not None:
            broken = reported.verdict.reasons() | broken
        if self._kept is None and self._logprobs is None and len(tokens) == places and not broken:
            return ModelRunnerOutput(
                [[token] for token in tokens], [None] * places, prompts, {}, embeddings, candidates
            )
        runs = self._runs(broken)
        token_ids = [tokens[run] for run in runs]
        broken_slots = {}
        if broken:
            slots = [item.slot for item in self._scheduled]
            ends = {slot: run.stop - 1 for slot, run in zip(slots, runs, strict=True) if run.start < run.stop}
            broken_slots = {slot: broken[end] for slot, end in ends.items() if end in broken}
        return ModelRunnerOutput(token_ids, self._entries(tokens, runs), prompts, broken_slots, embeddings, candidates)

    def _runs(self, broken: Collection[int]) -> list[slice]:
        """The slices of the sampled tokens that each request keeps; none after a token that is broken."""
        kept = [item.sampled for item in self._scheduled] if self._kept is None else self._kept.tolist()
        firsts = accumulate((item.sampled for item in self._scheduled), initial=0)
        runs = [slice(first, first + count) for first, count in zip(firsts, kept, strict=False)]
        if not broken:
            return runs
        rows = [range(run.start, run.stop) for run in runs]
        return [slice(run.start, next((row + 1 for row in run if row in broken), run.stop)) for run in rows]

    def _entries(self, tokens: list[int], runs: Sequence[slice]) -> list[LogprobRows | None]:
        """Log-probabilities of the tokens in each of `runs`, where they were asked for."""
        entries: list[LogprobRows | None] = [None] * len(runs)
        if self._logprobs is not None:
            asked = []
            places = []
            for place, run in enumerate(runs):
                count = self._reported.counts[run.start] if run.start < run.stop else None
                if count is not None:
                    asked.append((run, count))
                    places.append(place)
            for place, rows in zip(places, self._logprobs.rows(tokens, asked), strict=True):
                entries[place] = rows
        return entries


def embeddings(
    rows: BatchRows, slots: Sequence[int], hidden: torch.Tensor
) -> tuple[Sequence[int], torch.Tensor] | None:
    """Slots [E] and states [E, hidden] of those among the sampling `slots` [S] that want theirs, of `hidden` [S]."""
    wanted = [index for index, slot in enumerate(slots) if rows.request(slot).spec.embed]
    if not wanted:
        return None
    return [slots[index] for index in wanted], hidden[upload(wanted, torch.int64, hidden.device)]


def tokens_wanted(batch: InputBatch, runs: Sequence[PromptRun]) -> torch.Tensor | None:
    """Indices of the tokens whose hidden states the step needs: those that are sampled from; None: all."""
    samples = len(batch.sample_slots)
    return None if runs or samples in (0, len(batch.token_ids)) else batch.logits_indices


def prompt_runs(rows: BatchRows, batch: InputBatch) -> list[PromptRun]:
    """The prompt tokens that the step's tokens predict, of requests that asked for their log-probabilities."""
    runs = []
    first = 0
    for place, (slot, start, count) in enumerate(zip(batch.slots, batch.starts, batch.counts, strict=True)):
        request = rows.request(slot)
        wanted = request.params.prompt_logprobs
        if wanted is not None:
            predicted = max(start + 1, request.params.prompt_logprobs_from)
            tokens = request.token_ids[predicted : min(start + count + 1, request.spec.prompt_length)]
            if tokens:
                runs.append(PromptRun(place, first + predicted - 1 - start, tokens, wanted))
        first += count
    return runs


def prompt_logprobs(
    decoder: LanguageModel,
    batch: InputBatch,
    runs: Sequence[PromptRun],
    hidden: torch.Tensor,
    logprobs: "Callable[[torch.Tensor, torch.Tensor, int], DeviceLogprobs]",
) -> PromptLogprobs | None:
    """Log-probabilities of the tokens of `runs`, from the states `hidden` [T, hidden] of the step; None: no runs.

    `logprobs` computes what `token_logprobs` does.
    Scores over the vocabulary are computed for no other token, and for many requests at once.
    """
    if not runs:
        return None
    tokens = [token for run in runs for token in run.tokens]
    places = [run.first + offset for run in runs for offset in range(len(run.tokens))]
    sent = upload(tokens + places, torch.int64, hidden.device).view(2, -1)
    most = max(run.wanted for run in runs)
    parts = [
        logprobs(decoder.logits(hidden.index_select(0, predicting), upcast=False), ids, most)
        for ids, predicting in torch.split(sent, PROMPT_LOGITS_ROWS, dim=1)
    ]
    return PromptLogprobs(runs, parts[0].joined(parts).fetch(), len(batch.slots))
