"""Probation: finds the request that ends the engine's process repeatedly, by running suspects in small groups.

    a death        all running requests are suspected; they come back in groups of 1, 2, 4 ..., one group at a time
    progress       a request that gets on is cleared; when all of a group are, the next group is tried
    another death  the half of the group that ran is tried first, then the other half, until one is alone

Later requests do not run meanwhile, so they are never blamed. A cleared request runs on and may end the engine a token
later: so only the first request of an engine is ever alone. No engine and no clock: names in, names out.
"""

from collections import Counter, deque
from collections.abc import Sequence
from typing import Literal

LARGEST_GROUP = 32
Cause = Literal["fault", "silence", "outside"]
"""Why a process ended: by itself; killed because it said nothing for too long; or by a signal that others send."""
DEATHS: dict[Cause, int] = {"fault": 2, "silence": 3, "outside": 5}
"""A request that was alone at the last of so many deaths ends the process. The less a step explains it, the more."""


class Probation:
    """Requests by their names. The first group is on trial; the others wait."""

    def __init__(self) -> None:
        self._groups: deque[list[str]] = deque()
        self._deaths: Counter[str] = Counter()
        self._is_alone = False
        """The present engine has been given the one on trial, and nobody else."""

    @property
    def active(self) -> bool:
        """Only the group on trial may run."""
        return bool(self._groups)

    @property
    def on_trial(self) -> list[str]:
        """The requests that may run; without probation none is on trial, and all may run."""
        return list(self._groups[0]) if self._groups else []

    @property
    def suspected(self) -> set[str]:
        """The requests of all groups."""
        return {name for group in self._groups for name in group}

    def end(self) -> None:
        """Nobody is suspected any more."""
        self._groups.clear()
        self._deaths.clear()

    def died(self, running: Sequence[str], cause: Cause) -> str | None:
        """The process ended while these ran, the most suspicious first; returns who is guilty, if that is clear."""
        pending = self.suspected
        if not self._groups:
            tried, behind = list(running), []
        else:
            group = self._groups.popleft()
            tried = [name for name in group if name in set(running)]
            behind = [name for name in group if name not in tried]
            behind += [name for name in running if name not in pending]  # cleared, and here again
        self._deaths.update(tried)
        guilty = None
        if len(tried) == 1:
            [alone] = tried
            if self._is_alone and self._deaths[alone] >= DEATHS[cause]:
                guilty, tried = alone, []
                del self._deaths[alone]
        if len(tried) > 1 and pending:
            middle = (len(tried) + 1) // 2
            self._groups.extendleft((tried[middle:], tried[:middle]))
        else:
            self._groups.extendleft(reversed(_growing(tried)))
        self._groups.extend(_growing(behind))
        self._is_alone = len(self.on_trial) == 1
        return guilty

    def clear(self, name: str) -> bool:
        """A request got on, or has ended; whether that lets others run."""
        self._deaths.pop(name, None)
        for group in self._groups:
            if name in group:
                first = group is self._groups[0]
                group.remove(name)
                if not group:
                    self._groups.remove(group)
                    self._is_alone = self._is_alone and not first
                return first and not group
        return False


def _growing(names: Sequence[str]) -> list[list[str]]:
    """Groups of 1, 2, 4 and so on: the first is the most suspicious, and a trial is cheaper than a death."""
    groups = []
    start = 0
    size = 1
    while start < len(names):
        groups.append(list(names[start : start + size]))
        start, size = start + size, min(2 * size, LARGEST_GROUP)
    return groups
