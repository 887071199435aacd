"""What the records of requests must say, found by looking at a simulated engine whenever time passes."""

from collections import Counter, defaultdict

import pytest

from kvern.engine.scheduler import Scheduler
from kvern.request.events import TokenEvent
from kvern.request.record import MOST_CHUNKS, RequestRecord
from kvern.request.request import Request


def record_id(request: Request) -> str:
    """The id of the record of a request, or of the search that it is a beam of."""
    return request.answer_ids[0]


class RecordChecks:
    """Sees the passing of time, steps and events, and compares records with them."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.records: dict[str, RequestRecord] = {}
        self.requests: dict[str, Request] = {}
        self.together: set[str] = set()
        """Those with events of several steps that came in one: when each was computed is unknown here."""
        self._scheduler = scheduler
        self._without_row: defaultdict[str, float] = defaultdict(float)
        self._steps: Counter[str] = Counter()
        self._last: dict[str, float] = {}
        self._longest: defaultdict[str, float] = defaultdict(float)

    def passed(self, seconds: float) -> None:
        """So much time passes with things as they are."""
        placed = {record_id(request) for request in self._scheduler.running}
        for name in {record_id(request) for request in self._scheduler.by_id.values()} - placed:
            self._without_row[name] += seconds

    def computed(self, request_ids: list[str]) -> None:
        """A step has computed these."""
        self._steps.update(name for name in request_ids if self._scheduler.get(name) is not None)

    def hear(self, event: TokenEvent, now: float) -> None:
        """An event came then."""
        name = event.request_id
        if event.token_ids:
            if name in self._last:
                self._longest[name] = max(self._longest[name], now - self._last[name])
            self._last[name] = now
        if event.record is not None:
            assert event.record.request_id == name and name not in self.records
            self.records[name] = event.record
            self._check(event.record, self.requests[name])
        elif event.finish_reason is not None:
            assert name != record_id(self.requests[name.split("#")[0] + "#0"]), "an answer has no record"

    def _check(self, record: RequestRecord, request: Request) -> None:
        assert sum(record.waits.values()) == pytest.approx(self._without_row[record.request_id])
        assert all(seconds > 0 for seconds in record.waits.values())
        own = {wait.cause: 0.0 for wait in record.own_waits}
        for wait in record.own_waits:
            assert 0 <= wait.began < wait.ended <= record.ended
            own[wait.cause] += wait.ended - wait.began
        assert own == pytest.approx({cause: record.waits[cause] for cause in own})
        told = {"load", "images", "turn", "trial"} & record.waits.keys()
        assert len(record.own_waits) == MOST_CHUNKS or own.keys() == told
        assert sum(record.cached.values()) == request.answer.cached_tokens
        assert record.prompt_tokens == request.prompt_length
        assert record.drafts.accepted <= record.drafts.verified
        assert len(record.chunks) == min(record.chunk_count, MOST_CHUNKS)
        times = [time for chunk in record.chunks for time in (chunk.began, chunk.ended)]
        assert all(0 <= time <= record.ended for time in (*times, *record.preemptions))
        if record.steps:
            assert record.first_step is not None
            assert 0 <= record.company < self._scheduler.limits.max_batch_requests
        lost = record.preemption_count + record.undone
        if request.search is not None:  # it may be a beam that has left
            return
        assert record.finish_reason == request.answer.finish_reason
        assert lost == request.queue.preemptions and len(record.preemptions) == min(
            record.preemption_count, MOST_CHUNKS
        )
        assert record.steps == self._steps[record.request_id]
        assert record.answer_tokens == request.output_length
        if record.answer_tokens and not lost and record.chunk_count <= MOST_CHUNKS:
            assert sum(chunk.tokens for chunk in record.chunks) == request.prompt_length - request.answer.cached_tokens
        if not request.answer.gathers and record.request_id not in self.together:
            gap = record.longest_gap
            assert (0.0 if gap is None else gap.seconds) == pytest.approx(self._longest[record.request_id])
            assert gap is None or gap.cause in ("prefill", "step") or lost
