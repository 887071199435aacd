"""Finds out whose fault a failing step is: its requests are run again in halves.

    a step fails --of one unit--> that one is to blame
         |
         +--of several--> the first half runs alone --fails--> its halves, likewise
                                     |
                                     all of it got further --> the second half --> nobody is left: everybody goes on

A unit is what a user asked: samples of one prompt and beams wait for each other, so they are tried together. Whatever
is not on trial waits and cannot be blamed. A half that has passed is at least a token further than before, so that
also failures that come and go end.
"""

from collections.abc import Iterable, Iterator

from kvern.request.request import Request, State
from kvern.request.step import ModelRunnerOutput, SchedulerOutput


class Trial:
    """Which units may run, after a step has failed."""

    def __init__(self) -> None:
        self._halves: list[dict[str, dict[Request, int]]] = []
        """The last is on trial. By unit: the tokens that its requests must have computed to be beyond the failure."""

    @property
    def units(self) -> frozenset[str] | None:
        """Those that may run; None: all."""
        return frozenset(self._halves[-1]) if self._halves else None

    def failed(self, planned: Iterable[tuple[Request, int]]) -> str | None:
        """A step failed that was to bring requests to so many computed tokens; the unit to blame, if it was alone."""
        suspects: dict[str, dict[Request, int]] = {}
        for request, tokens in planned:
            suspects.setdefault(request.unit, {})[request] = tokens
        for unit, goals in suspects.items():
            for half in self._halves:
                for request, tokens in half.pop(unit, {}).items():
                    goals[request] = max(tokens, goals.get(request, 0))
        units = list(suspects)
        if len(units) > 1:
            middle = len(units) // 2
            self._halves += [{unit: suspects[unit] for unit in half} for half in (units[middle:], units[:middle])]
        self._halves = [half for half in self._halves if half]
        return units[0] if len(units) == 1 else None

    def passed(self, computed: Iterable[tuple[Request, int]]) -> None:
        """A step has come back that brought requests to so many computed tokens."""
        if not self._halves:
            return
        for request, tokens in computed:
            goals = self._halves[-1].get(request.unit, {})
            if tokens >= goals.get(request, tokens + 1):
                del goals[request]

    def settle(self) -> bool:
        """Let those go that have passed or ended; whether others are on trial now, or nobody."""
        before = len(self._halves)
        while self._halves and all(
            request.state is State.FINISHED for goals in self._halves[-1].values() for request in goals
        ):
            self._halves.pop()
        return len(self._halves) < before

    def skip(self) -> None:
        """Give up a half of which nothing can run."""
        self._halves.pop()


def computed(output: SchedulerOutput, requests: Iterable[Request]) -> Iterator[tuple[Request, int]]:
    """The requests of a step, and how many of their tokens it was to bring them to at most."""
    for request, item in zip(requests, output.scheduled, strict=True):
        yield request, item.start + item.count


def reached(
    output: SchedulerOutput, requests: Iterable[Request], result: ModelRunnerOutput
) -> Iterator[tuple[Request, int]]:
    """The same when it is done: less what was rejected."""
    for (request, tokens), token_ids in zip(computed(output, requests), result.token_ids, strict=True):
        yield request, min(tokens, len(request.token_ids) + len(token_ids) - 1) if token_ids else tokens
