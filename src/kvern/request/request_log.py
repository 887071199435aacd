"""Notes about a request while an engine works on it, from which `engine/recorder.py` makes its record."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from kvern.request.record import MOST_CHUNKS, Chunk, Loss, Wait


@dataclass(slots=True, eq=False)
class WaitLog:
    """The waits of a request so far, by cause in `seconds`, and its present one.

    `own`: what it waits for if that is its own; else the counters of all were as in `before` when it began to wait.
    `times`: the first waits of its own that have ended, with their begin and end.
    """

    since: float = 0.0
    own: Wait | None = None
    before: tuple[float, ...] = ()
    seconds: dict[Wait, float] = field(default_factory=dict)
    times: list[tuple[Wait, float, float]] = field(default_factory=list)

    def begin(self, now: float, own: Wait | None, before: tuple[float, ...]) -> None:
        """A wait begins, while the counters have these values."""
        self.since = now
        self.own = own
        self.before = before

    def end(self, now: float, counters: Mapping[Wait, float]) -> None:
        """The wait has ended, while the counters have these values."""
        if self.own is not None:
            if now > self.since:
                self._add(self.own, now - self.since)
                if len(self.times) < MOST_CHUNKS:
                    self.times.append((self.own, self.since, now))
            self.own = None
            return
        for (cause, after), before in zip(counters.items(), self.before, strict=True):
            if after > before:
                self._add(cause, after - before)

    def _add(self, cause: Wait, seconds: float) -> None:
        self.seconds[cause] = self.seconds.get(cause, 0.0) + seconds


@dataclass(slots=True, eq=False)
class RequestLog:
    """Times are those of the recorder's clock.

    generated   tokens of its answer that earlier engines made
    rows        rows that it has: above 1 only beams of a search
    reading     the next step may compute a part of its prompt, or of the tokens that it computes again
    last        the time of its last token; infinite before the first
    longest     the longest time between two tokens; `gap`: when it began, and why
    lost        when it lost its row, and how
    drafts      how many were verified, and how many of these accepted
    """

    arrived: float
    arrived_at: float
    generated: int
    wait: WaitLog = field(default_factory=WaitLog)
    rows: int = 0
    reading: bool = True
    steps: int = 0
    company: int = 0
    """The sum over its steps of the number of other sequences in them."""
    last: float = math.inf
    longest: float = 0.0
    first_step: float | None = None
    gap: tuple[float, Literal["prefill", "step"] | Loss] | None = None
    lost: tuple[float, Loss] | None = None
    first_token: float | None = None
    drafts: list[int] = field(default_factory=lambda: [0, 0])
    chunks: list[Chunk] = field(default_factory=list)
    chunk_count: int = 0
    preemptions: list[float] = field(default_factory=list)
    undone: int = 0
    loaded: dict[str, int] = field(default_factory=dict)
