"""States of layers on a simulated device: for each place what stands for all tokens that its state has seen."""

from collections import deque
from collections.abc import Sequence

from kvern.cache.messages import StateMessage
from kvern.request.step import SchedulerOutput


class SimulatedStates:
    """The states of the device; 0: a state without tokens, None: an unknown state.

    Those that `wait` are of the first of several stages: they see drafts when a later step tells how many were kept.
    """

    def __init__(self, count: int, waits: bool) -> None:
        self.seen: list[int | None] = [None] * count
        self._waits = waits and count > 0
        self._due: deque[list[tuple[int, list[int]]]] = deque()
        """For each step whose drafts are verified: the states of their rows, and what they are behind each token."""

    def prepare(self, output: SchedulerOutput, failing: bool) -> None:
        """Prepares a step: drafts are seen, then states are copied, and overwritten states are reset."""
        for counts in output.kept if self._waits else ():
            self._see(self.seen, self._due.popleft(), counts)
        message = output.message(StateMessage)
        for source, target in () if message is None else message.copies:
            self.seen[target] = 0 if source < 0 else self.seen[source]
            for step in self._due:
                step[:] = [(-1 if state == target else state, keys) for state, keys in step]
        if self._waits and not failing and any(item.sampled > 1 for item in output.scheduled):
            self._due.append([])

    def see(self, state: int, keys: list[int], sampled: int, kept: int) -> None:
        """A row has computed a token, behind which stands the last of `keys`, or drafts, of which some are kept."""
        if self._waits and sampled > 1:
            self._due[-1].append((state, keys[-sampled:]))
        else:
            self.seen[state] = keys[len(keys) - sampled + kept - 1]

    def lose(self, states: set[int]) -> None:
        """Nobody knows any more what these have seen."""
        self.seen = [None if place in states else key for place, key in enumerate(self.seen)]

    def when_told(self, kept: Sequence[Sequence[int]]) -> list[int | None]:
        """The states after the result of the oldest steps, which tells how many drafts were kept."""
        seen = list(self.seen)
        for step, counts in zip(self._due, kept, strict=False):
            self._see(seen, step, counts)
        return seen

    def _see(self, seen: list[int | None], step: list[tuple[int, list[int]]], counts: Sequence[int]) -> None:
        for (state, keys), count in zip(step, counts, strict=True):
            if state >= 0:
                seen[state] = keys[count - 1]
