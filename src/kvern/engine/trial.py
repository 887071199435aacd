"""Finds the request at fault for a failing step: its requests are run again in halves.

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
    """The units that may run after a step has failed."""

    def __init__(self) -> None:
        self._halves: list[dict[str, dict[Request, int]]] = []
        """The halves; the last is on trial. Each has, by unit, the tokens that its requests must reach to pass the
        failure."""

    @property
    def units(self) -> frozenset[str] | None:
        """The units that may run; None for all."""
        return frozenset(self._halves[-1]) if self._halves else None

    def failed(self, planned: Iterable[tuple[Request, int]]) -> str | None:
        """Splits the requests of a failed step. Returns the unit to blame if it was alone.

        `planned` has the number of computed tokens that the step was to reach for each request.
        """
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
        """Notes the numbers of computed tokens that a returned step has reached."""
        if not self._halves:
            return
        for request, tokens in computed:
            goals = self._halves[-1].get(request.unit, {})
            if tokens >= goals.get(request, tokens + 1):
                del goals[request]

    def settle(self) -> bool:
        """Ends the trial of units that have passed or ended. Returns True if others are on trial now, or none."""
        before = len(self._halves)
        while self._halves and all(
            request.state is State.FINISHED for goals in self._halves[-1].values() for request in goals
        ):
            self._halves.pop()
        return len(self._halves) < before

    def skip(self) -> None:
        """Gives up a half of which nothing can run."""
        self._halves.pop()


def computed(output: SchedulerOutput, requests: Iterable[Request]) -> Iterator[tuple[Request, int]]:
    """Yields the requests of a step, and the most tokens that it was to reach."""
    for request, item in zip(requests, output.scheduled, strict=True):
        yield request, item.start + item.count


def reached(
    output: SchedulerOutput, requests: Iterable[Request], result: ModelRunnerOutput
) -> Iterator[tuple[Request, int]]:
    """Yields each request of a finished step, and how many of its tokens are computed now, without rejected drafts."""
    for (request, tokens), token_ids in zip(computed(output, requests), result.token_ids, strict=True):
        yield request, min(tokens, len(request.token_ids) + len(token_ids) - 1) if token_ids else tokens
