"""Beam search: which continuations of a prompt's beams go on, and which have ended.

    prompt --step--> its most probable next tokens --choose--> up to `width` beams
    each beam --step--> its most probable next tokens --report--> when all have reported: choose
                                                                   |
                        the best that do not end go on <-----------+-----------> the best that end are hypotheses

The rules are those of `generate(num_beams=...)` in Hugging Face transformers: a continuation that ends becomes a
hypothesis if it is among the `width` most probable of all beams, the `width` best hypotheses are kept, and the search
ends when `early_stopping` says so or when nothing can go on. The search knows nothing of blocks and rows.
"""

from __future__ import annotations

import copy
import heapq
from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kvern.engine.scheduler import Scheduler
from kvern.request.events import TokenEvent
from kvern.request.logprobs import LogprobRows, joined
from kvern.request.request import DraftProgress, FinishReason, Request, State
from kvern.request.step import BeamCandidates, Fork, ModelRunnerOutput

if TYPE_CHECKING:
    from kvern.engine.stop_strings import ScopedSearch, StopSearch
    from kvern.text.detokenizer import IncrementalDetokenizer
    from kvern.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class BeamText:
    """The text of a beam, with the search for stop strings; `ended`: its last token completed one.

    It is immutable: all continuations of the beam begin with it.
    """

    detokenizer: IncrementalDetokenizer
    search: StopSearch | ScopedSearch
    ended: bool = False

    def after(self, token_id: int) -> BeamText:
        """Returns the text with another token."""
        detokenizer, search = self.detokenizer.fork(), self.search.fork()
        return BeamText(detokenizer, search, search.append(detokenizer.append([token_id])) is not None)


@dataclass(eq=False)
class Beam:
    """A sequence that goes on. `total` is its log-probability; `entries` are reported of its tokens, if asked for.

    `text`: if stop strings are looked for.
    """

    request: Request
    text: BeamText | None
    total: float = 0.0
    entries: list[LogprobRows] = field(default_factory=list)
    candidates: BeamCandidates | None = None


class Continuation(NamedTuple):
    """A beam with the candidate at `place` behind it."""

    beam: Beam
    place: int
    token_id: int
    total: float
    text: BeamText | None

    @property
    def token_ids(self) -> list[int]:
        """All that was generated."""
        request = self.beam.request
        return [*request.token_ids[request.prompt_length :], self.token_id]

    @property
    def entries(self) -> list[LogprobRows]:
        """The log-probabilities of all generated tokens, if wanted."""
        entry = self.beam.candidates.entry if self.beam.candidates is not None else None
        return [] if entry is None else [*self.beam.entries, entry(self.place)]


@dataclass(frozen=True)
class Hypothesis:
    """A sequence that has ended."""

    score: float
    """`total` over its length to the power of `length_penalty`."""
    total: float
    token_ids: list[int]
    entries: list[LogprobRows]
    reason: FinishReason
    stop_reason: int | None = None


class BeamSearch:
    """The beams of one prompt. Begins with one, the request that computes the prompt.

    `done` when no beam goes on; `hypotheses` are then the answers, best first.
    """

    def __init__(self, request: Request, text: BeamText | None) -> None:
        """`text`: of the prompt, if the request has stop strings."""
        params = request.params
        assert params.beam_width is not None
        self.width = params.beam_width
        self.name = request.request_id
        """The id of one of its requests, always."""
        self.answer_ids = request.answer_ids
        self.beams = [Beam(request, text)]
        self.held: set[Request] = set()
        self.hypotheses: list[Hypothesis] = []
        self.done = False
        self.failure: str | None = None
        """Why a beam could not be followed."""
        self._params = params
        self._max_tokens = request.max_tokens
        self._stop_token_ids = request.spec.stop_token_ids

    @property
    def requests(self) -> list[Request]:
        """The requests of the beams."""
        return [beam.request for beam in self.beams]

    def report(self, request: Request, candidates: BeamCandidates | None, failure: str | None) -> bool:
        """Takes the candidates of one beam, or its failure. Returns True once all beams have reported."""
        beam = next(beam for beam in self.beams if beam.request is request)
        if candidates is None or failure is not None:
            candidates, self.failure = BeamCandidates((), ()), failure
        beam.candidates = candidates
        return all(beam.candidates is not None for beam in self.beams)

    def choose(self) -> list[Continuation]:
        """The continuations that go on, best first; empty when the search is done."""
        length = self.beams[0].request.output_length + 1
        following: list[Continuation] = []
        for rank, continuation in enumerate(self._best_first()):
            ending = self._ending(continuation, length)
            if ending is None:
                following.append(continuation)
            elif rank < self.width:
                self._keep(continuation, length, *ending)
            if len(following) == self.width or (length == self._max_tokens and rank + 1 == self.width):
                break
        self.done = not following or not self._can_improve(following[0].total, length)
        return [] if self.done else following

    def go_on(self, following: Sequence[Continuation], requests: Sequence[Request]) -> None:
        """Let these requests be the beams, one for each continuation."""
        self.beams = [
            Beam(request, continuation.text, continuation.total, continuation.entries)
            for continuation, request in zip(following, requests, strict=True)
        ]

    def _best_first(self) -> Iterator[Continuation]:
        """All candidates of all beams, the most probable first, without those that are impossible."""
        known = [(beam, beam.candidates) for beam in self.beams if beam.candidates is not None]
        heap = [(-beam.total - item.logprobs[0], index, 0) for index, (beam, item) in enumerate(known) if item.logprobs]
        heapq.heapify(heap)
        while heap:
            negative, index, place = heap[0]
            if negative == float("inf"):
                return
            beam, candidates = known[index]
            if place + 1 < len(candidates.logprobs):
                heapq.heapreplace(heap, (-beam.total - candidates.logprobs[place + 1], index, place + 1))
            else:
                heapq.heappop(heap)
            token_id = candidates.token_ids[place]
            yield Continuation(beam, place, token_id, -negative, beam.text and beam.text.after(token_id))

    def _ending(self, continuation: Continuation, length: int) -> tuple[FinishReason, int | None] | None:
        if length > self._params.min_tokens:
            if continuation.token_id in self._stop_token_ids:
                return "stop", continuation.token_id
            if continuation.text is not None and continuation.text.ended:
                return "length", None  # which string it is, and where the text is cut, is found with the whole text
        return ("length", None) if length == self._max_tokens else None

    def _keep(self, continuation: Continuation, length: int, reason: FinishReason, stop_reason: int | None) -> None:
        total = continuation.total
        score = total / length**self._params.length_penalty
        if len(self.hypotheses) == self.width and score <= self.hypotheses[-1].score:
            return
        ended = Hypothesis(score, total, continuation.token_ids, continuation.entries, reason, stop_reason)
        insort(self.hypotheses, ended, key=lambda hypothesis: -hypothesis.score)
        del self.hypotheses[self.width :]

    def _can_improve(self, best: float, length: int) -> bool:
        """True if a beam may still become one of the best hypotheses; `best` is the log-probability of the first."""
        if len(self.hypotheses) < self.width:
            return True
        params = self._params
        if params.early_stopping is True:
            return False
        longest = self._max_tokens if params.early_stopping == "never" and params.length_penalty > 0 else length
        possible: float = best / longest**params.length_penalty
        return possible > self.hypotheses[-1].score


def _first_text(request: Request, tokenizer: Tokenizer) -> BeamText:
    from kvern.engine.stop_strings import StopStrings, search_of
    from kvern.text.detokenizer import IncrementalDetokenizer

    params, prompt = request.params, request.token_ids[: request.prompt_length]
    kept = frozenset(params.visible_token_ids or ())
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, params.skip_special_tokens, kept)
    return BeamText(detokenizer, search_of(StopStrings(params.stop_strings), params.stop_scope))


def answers(search: BeamSearch, request: Request) -> list[TokenEvent]:
    """The answers of a search that is done; `request` is one of its beams, and has the record."""
    events = [
        TokenEvent(
            answer_id,
            found.token_ids,
            joined(found.entries),
            cached_tokens=request.answer.cached_tokens,
            loaded_tokens=request.answer.loaded_tokens,
            finish_reason=found.reason,
            stop_reason=found.stop_reason,
            queue_seconds=request.queue.seconds,
            cumulative_logprob=found.total,
        )
        for answer_id, found in zip(search.answer_ids, search.hypotheses, strict=False)
    ]
    reason = None
    if not search.hypotheses:
        reason = f"no beam can go on: {search.failure or 'every next token is banned'}"
    missing = search.answer_ids[len(search.hypotheses) :]
    events += [TokenEvent(answer_id, finish_reason="abort", stop_reason=reason) for answer_id in missing]
    if (record := request.answer.record) is not None:
        tokens = sum(len(found.token_ids) for found in search.hypotheses[: len(search.answer_ids)])
        events[0] = msgspec.structs.replace(events[0], record=msgspec.structs.replace(record, answer_tokens=tokens))
    return events


class Beams:
    """The beam searches of an engine, for the model in `folder`, whose tokenizer finds stop strings."""

    def __init__(self, scheduler: Scheduler, folder: Path | None) -> None:
        self._scheduler = scheduler
        self._folder = folder
        self._names = 0

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        from kvern.text.tokenizer import Tokenizer

        assert self._folder is not None, "beams with stop strings need the model's tokenizer"
        return Tokenizer(self._folder)

    def begin(self, request: Request) -> None:
        """Begin the search of a new request."""
        text = _first_text(request, self._tokenizer) if request.params.stop_strings else None
        request.search = BeamSearch(request, text)

    def report(self, request: Request, slot: int, result: ModelRunnerOutput) -> list[TokenEvent]:
        """Takes what a step found for the beam in row `slot`. Returns the answers if that ends its search.

        Once all beams have reported, it chooses which go on.
        """
        search = request.search
        assert isinstance(search, BeamSearch)
        self._scheduler.hold(request)
        if not search.report(request, result.candidates.get(slot), result.broken.get(slot)):
            return []
        following = search.choose()
        if not search.done:
            children = [(continuation.beam.request, continuation.token_id) for continuation in following]
            search.go_on(following, self.branch(search.requests, children))
            return []
        first = search.requests[0]
        self._scheduler.finish(first, "stop" if search.hypotheses else "abort")
        return answers(search, first)

    def branch(self, members: Sequence[Request], children: Sequence[tuple[Request, int]]) -> list[Request]:
        """Let the held beams `members` go on as `children`: each a member and the token that follows it.

        A member's first child is itself; the others take the places of members without children, or new ones. Those
        for which there is no room wait. Returns one request for each child.
        """
        parents = {parent for parent, _ in children}
        spare = [member for member in members if member not in parents]
        for member in reversed(spare):
            self._scheduler.remove(member, keep_cached=False)
        first: dict[Request, int] = {}
        requests = []
        for parent, token_id in children:
            if parent in first:
                child = spare.pop(0) if spare else self._sibling(parent)
                self._fork(parent, child, token_id)
                requests.append(child)
            else:
                first[parent] = token_id
                requests.append(parent)
        for parent, token_id in first.items():
            if parent.state is State.RUNNING:
                self._scheduler.forks.add(Fork(parent.slot, parent.slot, len(parent.token_ids), token_id))
            self._scheduler.go_on(parent, token_id)
        for member in spare:
            self._retire(member, requests[0])
        return requests

    def _fork(self, parent: Request, child: Request, token_id: int) -> None:
        """Let `child`, which neither runs nor waits, continue from `parent`."""
        scheduler = self._scheduler
        child.token_ids = [*parent.token_ids, token_id]
        child.cached_path = []
        if child.search is not None:
            child.search.held.discard(child)
        fits = parent.state is State.RUNNING and scheduler.running.free_rows
        copies = scheduler.cache.fork(parent, child) if fits else None
        if copies is None:
            scheduler.requeue(child)
            return
        scheduler.enter(child)
        fork = Fork(child.slot, parent.slot, len(parent.token_ids), token_id)
        scheduler.forks.add(fork, copies, child.block_ids[-1:] if copies else [])

    def _sibling(self, parent: Request) -> Request:
        """One more beam of the same search; it reports nothing of the prompt, which its first beam computes."""
        sibling = copy.copy(parent)
        sibling.request_id = f"{parent.request_id}/{self._names}"
        self._names += 1
        sibling.params = parent.params.replace(prompt_logprobs=None)
        sibling.block_ids = []
        sibling.nodes = []
        sibling.num_computed_tokens = 0
        sibling.slot = -1
        sibling.drafts = DraftProgress()
        sibling.answer, sibling.queue = replace(parent.answer), replace(parent.queue)
        self._scheduler.register(sibling)
        return sibling

    def _retire(self, request: Request, heir: Request) -> None:
        """End a beam that was removed. The search keeps the name by which it is known outside."""
        assert request.search is not None
        if request.request_id == request.search.name:
            self._scheduler.exchange_ids(request, heir)
        request.search.held.discard(request)
        self._scheduler.forget(request)
