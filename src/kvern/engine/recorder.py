"""Notes what becomes of each request in an engine, and makes its record when it ends.

arrived --grammar--> waits --entered--> runs --finished--> RequestRecord
                       ^                 |
                       +------left-------+

How long requests wait for what is counted once for all of them: the time between two steps belongs to what the best
waiting request lacked in the first. A request that begins to wait notes these counters, and takes the difference when
it gets a row, so that a step costs nothing for those that wait. One that is parked for something of its own counts
that time by itself, and takes no part in the counters meanwhile.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvern.engine.step_load import StepLoad
from kvern.request.record import MOST_CHUNKS, Chunk, Drafts, Gap, Lack, Loss, OwnWait, RequestRecord, Wait
from kvern.request.request import FinishReason, Request, State
from kvern.request.request_log import RequestLog
from kvern.request.step import ModelRunnerOutput, ScheduledTokens, SchedulerOutput

COMMON: tuple[Wait, ...] = ("queue", "rows", "blocks", "budget", "adapter", "batch")
"""The causes of waits in the queue, which all requests share."""
OWN: dict[State, Wait] = {State.LOADING: "load", State.ENCODING: "images"}


@dataclass(slots=True)
class DecodeRun:
    """Steps that follow each other and decode the same requests, which are noted in all of their logs at its end."""

    request_ids: list[str] | None = None
    """The requests; None: the last step was no such step."""
    logs: list[RequestLog] = field(default_factory=list)
    steps: int = 0
    """The steps that are not in the logs yet."""
    last: float = 0.0
    """The end of the last step."""
    longest: float = 0.0
    """The longest time from one of these steps' ends to the next, and when it began."""
    began: float = 0.0

    def begin(self, request_ids: list[str], requests: Iterable[Request], now: float) -> None:
        """A step that has ended and is in the logs may be the first of several."""
        self.request_ids = request_ids
        self.logs = [request.answer.log for request in requests if request.answer.log is not None]
        self.last = now

    def goes_on(self, now: float) -> None:
        """Counts a step of one token each of the same requests, which has ended."""
        self.steps += 1
        gap = now - self.last
        if gap > self.longest:
            self.longest = gap
            self.began = self.last
        self.last = now

    def end(self) -> None:
        """Notes the steps in the logs."""
        if self.request_ids is None:
            return
        if self.steps:
            company = self.steps * (len(self.request_ids) - 1)
            for log in self.logs:
                log.steps += self.steps
                log.company += company
                log.last = self.last
                if self.longest > log.longest:
                    log.longest = self.longest
                    log.gap = self.began, "step"
            self.steps = 0
            self.longest = 0.0
        self.request_ids = None


class Recorder:
    """Is told by the core and the scheduler what happens."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._now = clock()
        self._lack: Wait = "queue"
        self._waited: dict[Wait, float] = dict.fromkeys(COMMON, 0.0)
        self._begun: deque[tuple[float, StepLoad]] = deque()
        """When each step in flight was submitted, and its load."""
        self._read = -math.inf
        """When the last step with a part of a prompt ended."""
        self._searches = 0
        """The number of beam searches."""
        self._run = DecodeRun()

    def _tick(self, now: float | None = None) -> float:
        """Let time pass until now, by the clock if the caller has not just looked at it."""
        if now is None:
            now = self._clock()
        self._waited[self._lack] += now - self._now
        self._now = now
        return now

    # Requests

    def arrived(self, request: Request, prepares: bool) -> None:
        """A request came; with `prepares` it waits for its grammar before it is queued."""
        log = RequestLog(self._wall_clock(), self._tick(), request.output_length)
        request.answer.log = log
        self._wait(log, "grammar" if prepares else None)
        self._searches += request.search is not None

    def parked(self, request: Request, cause: Request | str) -> None:
        """A waiting request cannot run, as `WaitingQueue.park` says."""
        log = request.answer.log
        if log is not None and not log.rows:
            own = OWN.get(request.state) if cause is request else "turn" if isinstance(cause, Request) else "trial"
            if own is not None:
                self._tick()
                self._settle(log)
                self._wait(log, own)

    def woken(self, request: Request) -> None:
        """A waiting request can run again, or its grammar is there."""
        log = request.answer.log
        if log is not None and log.wait.own is not None:
            self._tick()
            self._settle(log)
            self._wait(log, None)

    def entered(self, request: Request) -> None:
        """A request got a row."""
        log = request.answer.log
        if log is not None:
            log.rows += 1
            if log.rows == 1:
                now = self._tick()
                self._settle(log)
                if log.first_step is None:
                    log.first_step = now - log.arrived_at
            if request.answer.loaded_tokens and not log.loaded:
                log.loaded = {store: count for store, count in request.answer.loaded_tokens.items() if count}

    def left(self, request: Request) -> None:
        """A request gave its row back before its end."""
        self._run.end()
        log = request.answer.log
        if log is not None:
            log.rows -= 1
            if not log.rows:
                self._tick()
                self._wait(log, None)

    def preempted(self, request: Request, loss: Loss) -> None:
        """A request was told to wait."""
        log = request.answer.log
        if log is None:
            return
        log.reading = True
        log.lost = self._tick(), loss
        if loss != "preempted":
            log.undone += 1
            return
        log.preemptions.append(self._now - log.arrived_at)

    def finished(self, request: Request, reason: FinishReason) -> None:
        """A request, or beam search, ends; it still has its row."""
        self._run.end()
        log = request.answer.log
        if log is None:
            return
        self._tick()
        if not log.rows:
            self._settle(log)
        request.answer.record = self._record(request, log, reason)
        if request.search is not None:
            self._searches -= 1
        for member in [request] if request.search is None else request.search.requests:
            member.answer.log = None

    def _wait(self, log: RequestLog, own: Wait | None) -> None:
        """Begin to wait, for something of its own or for what the best waiting request lacks."""
        log.wait.begin(self._now, own, tuple(self._waited.values()))

    def _settle(self, log: RequestLog) -> None:
        """Count what was waited for since the last call of `_wait`."""
        log.wait.end(self._now, self._waited)

    # Steps

    def planned(self, lack: Lack | None) -> None:
        """A step was planned, or none will be until a request comes; the best waiting request lacks this."""
        if (lack or "queue") != self._lack:
            self._tick()
            self._lack = lack or "queue"

    def began(self, load: StepLoad, now: float) -> None:
        """The planned step is submitted."""
        self._begun.append((now, load))

    def undone(self) -> None:
        """The steps in flight are lost."""
        self._begun.clear()
        self._run.end()

    def ended(
        self, output: SchedulerOutput, requests: Sequence[Request], result: ModelRunnerOutput, now: float
    ) -> None:
        """The oldest step in flight has brought this, of which requests do not know yet."""
        began, load = self._begun.popleft()
        is_single = load.rows == len(requests)
        if is_single and output.request_ids == self._run.request_ids:
            self._run.goes_on(now)
            return
        self._run.end()
        self._tick(now)
        others = len(requests) - 1
        if load.prompt:
            self._read = now
        decodes = not self._searches
        rows: Iterable[tuple[Request, ScheduledTokens, list[int]]]
        rows = zip(requests, output.scheduled, result.token_ids, strict=True)
        for request, item, token_ids in _once(rows) if self._searches else rows:
            log = request.answer.log
            if log is None:
                continue
            log.steps += 1
            log.company += others
            if log.reading:
                self._reads(log, request, item, began)
            if not token_ids:
                decodes = False
            else:
                if item.sampled > 1:
                    log.drafts[0] += item.sampled - 1
                    log.drafts[1] += len(token_ids) - 1
                if now - log.last > log.longest:
                    self._longest(log)
                log.last = now
        if decodes and is_single:
            self._run.begin(output.request_ids, requests, now)

    def _reads(self, log: RequestLog, request: Request, item: ScheduledTokens, began: float) -> None:
        """A step was one of those that bring a request to its next token."""
        if item.sampled and request.state is State.RUNNING:
            log.reading = False
        if log.first_token is None and item.sampled:
            log.first_token = self._now - log.arrived_at
        if item.start < request.prompt_length or item.count > (item.sampled or 1):
            log.chunk_count += 1
            if len(log.chunks) < MOST_CHUNKS:
                times = began - log.arrived_at, self._now - log.arrived_at
                log.chunks.append(Chunk(*times, item.start, item.count))

    def _longest(self, log: RequestLog) -> None:
        log.longest = self._now - log.last
        if log.lost is not None and log.lost[0] >= log.last:
            log.gap = log.last, log.lost[1]
        else:
            log.gap = log.last, "prefill" if self._read > log.last else "step"

    def _record(self, request: Request, log: RequestLog, reason: FinishReason) -> RequestRecord:
        cached = request.answer.cached_tokens
        sources = {"device": cached - sum(log.loaded.values()), **log.loaded}
        return RequestRecord(
            request.answer_ids[0],
            log.arrived,
            request.prompt_length,
            request.output_length - log.generated,
            reason,
            self._now - log.arrived_at,
            first_step=log.first_step,
            first_token=log.first_token,
            waits=log.wait.seconds,
            cached={source: tokens for source, tokens in sources.items() if tokens},
            chunks=tuple(log.chunks),
            chunk_count=log.chunk_count,
            preemptions=tuple(log.preemptions[:MOST_CHUNKS]),
            preemption_count=len(log.preemptions),
            undone=log.undone,
            steps=log.steps,
            company=log.company / log.steps if log.steps else 0.0,
            longest_gap=None if log.gap is None else Gap(log.longest, log.gap[0] - log.arrived_at, log.gap[1]),
            drafts=Drafts(*log.drafts),
            own_waits=tuple(
                OwnWait(cause, began - log.arrived_at, ended - log.arrived_at) for cause, began, ended in log.wait.times
            ),
        )


def _once(
    rows: Iterable[tuple[Request, ScheduledTokens, list[int]]],
) -> Iterator[tuple[Request, ScheduledTokens, list[int]]]:
    """Yields the first row of each log: beams share one."""
    seen = set()
    for row in rows:
        if id(row[0].answer.log) not in seen:
            seen.add(id(row[0].answer.log))
            yield row
