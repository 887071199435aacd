"""The choice of an engine for a request, without a look at each of them.

    cost of an engine = tokens to be computed for what it has + tokens of the prompt that it has not cached

The cheapest takes it, of those where nobody has to end before. With 1,000 engines as with two: of those that have
nothing cached the one with the least load is the cheapest, and so it is of those that have equally much.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence, Set
from typing import NamedTuple

from kvern.serving.prefix_index import Level

MOST_LOAD = 1.3
"""An engine with more than so many times the mean load gets no request for the sake of its cache."""
BUSY_TOKENS = 2048
"""An engine with less to compute is not busy, whatever the mean."""


LEAST_HANDED_OVER = 256
"""Tokens of a prompt that an engine has not cached, from which on another computes them for it."""
MOST_AHEAD = 8
"""A prompt is computed where it is answered if so many times its tokens wait for the engine that would compute it."""


def hands_over(uncached: int, before: int, usual: int) -> bool:
    """Returns whether another engine computes a prompt of which the one that answers has not cached so many tokens.

    `before`, `usual`: the tokens that wait for the one that would compute it, and for the one that answers.
    """
    return uncached >= LEAST_HANDED_OVER and before - usual <= MOST_AHEAD * uncached


class Load(NamedTuple):
    """The load of an engine, in the order of preference.

    full        a request would wait there until another ends
    tokens      the approximate number of tokens to compute for the requests that it has
    computed    the tokens of prompts that it has computed so far: of equal engines the fewest, to fill all caches
    """

    full: bool
    tokens: int
    computed: int
    number: int


class EngineLoads:
    """The loads of engines that take requests."""

    def __init__(self) -> None:
        self._loads: dict[int, Load] = {}
        self._order: list[Load] = []
        self._tokens = 0

    def put(self, load: Load) -> None:
        """Takes the present load of an engine."""
        self.drop(load.number)
        self._loads[load.number] = load
        insort(self._order, load)
        self._tokens += load.tokens

    def drop(self, number: int) -> None:
        """The engine takes no requests."""
        load = self._loads.pop(number, None)
        if load is not None:
            del self._order[bisect_left(self._order, load)]
            self._tokens -= load.tokens

    def __contains__(self, number: int) -> bool:
        return number in self._loads

    @property
    def bound(self) -> float:
        """The load above which an engine gets no request for the sake of its cache."""
        return max(MOST_LOAD * self._tokens / max(1, len(self._loads)), BUSY_TOKENS)

    def cheapest(self, levels: Sequence[Level], may: Callable[[int], bool]) -> int | None:
        """Returns the engine for a request, of those that `may` take it; None: there is none.

        `levels`: who has how much of it cached, the most first.
        """
        least = next((load for load in self._order if may(load.number)), None)
        if least is None:
            return None
        best, cost = least, (least.tokens, least.computed)
        bound = max(self.bound, least.tokens)
        for cached, engines in levels:
            limit = min(bound, cost[0] + cached)
            if least.tokens > limit:
                break  # nor is one cheaper that has less of it
            found = self._least(engines, least.full, limit, may)
            if found is not None and (found.tokens - cached, found.computed) < cost:
                best, cost = found, (found.tokens - cached, found.computed)
        return best.number

    def _least(self, engines: Set[int], full: bool, limit: float, may: Callable[[int], bool]) -> Load | None:
        """The one with the least load of some engines that are `full`, or not, if that is at most `limit`."""
        if len(engines) ** 2 <= len(self._order):
            loads = [self._loads[number] for number in engines if number in self._loads]
            found = [load for load in loads if load.full == full and load.tokens <= limit and may(load.number)]
            return min(found, default=None)
        start = bisect_left(self._order, (full,))
        for place in range(start, len(self._order)):
            load = self._order[place]
            if load.full != full or load.tokens > limit:
                break
            if load.number in engines and may(load.number):
                return load
        return None
