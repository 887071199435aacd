"""A watch on an engine's steps for the server: the requests of the running steps, and the limit of silence."""

import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from kvern.engine.step_ring import StepRing

LENGTH_BYTES = 8
"""Before the list, its length: an earlier, longer list may stand behind it."""


class RunningFile:
    """Written before each step that computes others than the step before; what is written survives the process."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
        self.written: list[str] = []
        """The requests of the last call."""

    def write(self, request_ids: Sequence[str]) -> None:
        """These are computed from now on, and those of the call before may be still."""
        content = msgspec.msgpack.encode([*request_ids, *set(self.written).difference(request_ids)])
        self.written = list(request_ids)
        os.pwrite(self._descriptor, len(content).to_bytes(LENGTH_BYTES, "little") + content, 0)


def read_running(content: bytes) -> list[str]:
    """The requests that ran at the end, those of the last step first."""
    try:
        end = LENGTH_BYTES + int.from_bytes(content[:LENGTH_BYTES], "little")
        return msgspec.msgpack.decode(content[LENGTH_BYTES:end], type=list[str])
    except msgspec.DecodeError:
        return []


SHORTEST_SILENCE = 10.0
"""Seconds for which a process may stand still, on a machine that has too much to do."""
TIMES = 20
"""A step may take so many times what one of its size took at least."""


class StepWatch:
    """Is told of each step before it begins and when it has ended, in their order.

    running     the file that says after the engine's death who ran
    tell        is called before a step that may take longer than `silence` said before
    longest     seconds that a step of a size may take which none had before: something may be compiled for it
    shortest    seconds that any step may take
    ring        where the core writes what each step was
    """

    def __init__(
        self,
        running: RunningFile,
        tell: Callable[[float], None],
        longest: float,
        shortest: float = SHORTEST_SILENCE,
        ring: StepRing | None = None,
    ) -> None:
        self.ring = ring
        self._running = running
        self._tell = tell
        self._longest = longest
        self._shortest = min(shortest, longest)
        self._least: dict[tuple[int, int], float] = {}
        """The fewest seconds that steps took, by the lengths in bits of their two sizes."""
        self._limits: dict[tuple[int, int] | None, float] = {}
        """The limits that follow from these."""
        self._begun: deque[tuple[tuple[int, int] | None, float, float]] = deque()
        """The sizes, the limit and the start of each running step."""
        self._quick = None, self._shortest, 0.0
        """Any step whose limit cannot become shorter."""
        self._ended = 0.0

    @property
    def silence(self) -> float:
        """Seconds for which nothing may be heard now."""
        return max((limit for _, limit, _ in self._begun), default=self._shortest)

    def began(self, request_ids: Sequence[str], now: float, tokens: int | None = None, reach: int = 0) -> None:
        """A step is about to begin.

        request_ids  the requests that it computes
        now          the time by a clock that never goes back
        tokens       that it computes; None: nobody knows
        reach        one more than the highest position that it computes
        """
        if request_ids != self._running.written:
            self._running.write(request_ids)
        sizes = None if tokens is None else (tokens.bit_length(), reach.bit_length())
        limit = self._limits.get(sizes, self._longest)
        if limit > self._shortest:
            if limit > self.silence:  # which is never below the shortest
                self._tell(limit)
            self._begun.append((sizes, limit, now))
        else:
            self._begun.append(self._quick)

    def ended(self, now: float) -> None:
        """The oldest step that runs has ended."""
        step = self._begun.popleft()
        before = self._ended
        self._ended = now
        if step is self._quick:
            return
        sizes, _, began = step
        took = now - max(began, before)
        if sizes is not None and took < self._least.get(sizes, math.inf):
            self._least[sizes] = took
            self._limits[sizes] = min(self._longest, max(self._shortest, TIMES * took))

    def forget(self) -> None:
        """The steps that run are given up."""
        self._begun.clear()
