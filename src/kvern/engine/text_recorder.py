"""Notes what becomes of each text in an encoder, and makes its record when it ends."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kvern.request.record import Chunk, RequestRecord, Wait
from kvern.request.request import FinishReason, RequestSpec


@dataclass(slots=True, eq=False)
class TextLog:
    """The notes about a text; it has waited for `cause` `since` then, or been in a step if that is None."""

    spec: RequestSpec
    arrived: float
    arrived_at: float
    since: float
    cause: Wait | None
    waits: dict[Wait, float] = field(default_factory=dict)
    first_step: float | None = None
    steps: int = 0
    company: int = 0
    undone: int = 0


class TextRecorder:
    """Is told by an encoder's core what happens."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._logs: dict[str, TextLog] = {}

    def arrived(self, name: str, spec: RequestSpec) -> None:
        """A text or an image came."""
        now = self._clock()
        self._logs[name] = TextLog(spec, self._wall_clock(), now, now, "images" if spec.prompt.attachments else "queue")

    def queued(self, name: str) -> None:
        """An image is decoded."""
        self._turn([name], "queue")

    def began(self, names: list[str]) -> None:
        """A step with these is about to begin."""
        for log in self._turn(names, None):
            log.steps += 1
            log.company += len(names) - 1
            if log.first_step is None:
                log.first_step = log.since - log.arrived_at

    def failed(self, names: list[str]) -> None:
        """Their step failed; they run again, apart from each other."""
        for log in self._turn(names, "trial"):
            log.undone += 1

    def ended(self, name: str, reason: FinishReason) -> RequestRecord | None:
        """Returns the record of a text that has ended, once."""
        began = self._logs[name].since if name in self._logs else 0.0
        read = bool(self._turn([name], None)) and reason == "stop"
        log = self._logs.pop(name, None)
        if log is None:
            return None
        end, length = log.since - log.arrived_at, log.spec.prompt_length
        return RequestRecord(
            name,
            log.arrived,
            length,
            0,
            reason,
            end,
            first_step=log.first_step,
            waits=log.waits,
            chunks=(Chunk(began - log.arrived_at, end, 0, length),) if read else (),
            chunk_count=int(read),
            undone=log.undone,
            steps=log.steps,
            company=log.company / log.steps if log.steps else 0.0,
        )

    def _turn(self, names: Iterable[str], cause: Wait | None) -> list[TextLog]:
        """Let those of these that are known wait for something else from now on, or not at all; returns them."""
        now = self._clock()
        found = [self._logs[name] for name in names if name in self._logs]
        for log in found:
            if log.cause is not None:
                log.waits[log.cause] = log.waits.get(log.cause, 0.0) + now - log.since
            log.since, log.cause = now, cause
        return found
