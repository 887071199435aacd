"""Completion of JSON answers before their token limit.

A model can continue endlessly where a grammar lets it: a text, one element after the other, brackets within brackets.
Shortly before `max_tokens` such an answer takes the shortest way out: it closes what is open.
"""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvern.structured.backend import Matcher

LONGEST_WAY = 256
"""The most tokens of a way out; answers that need more are not finished."""
MOST_GROWTH = 16
"""The most by which one token usually lengthens the way out: it may open that many brackets."""


def has_ways(grammar: str) -> bool:
    """True if answers of a compiled grammar contain JSON."""
    return '"json_schema"' in grammar


class Ways(Protocol):
    """Finds the ways out of one model's answers."""

    def way_out(self, matcher: "Matcher", most: int) -> list[int] | None:
        """Returns `Backend.way_out`."""


@dataclass
class Landing:
    """The landing of one answer. `left`: tokens that remain; `budget`: all its tokens.

    `began`: it is on its way out; `over`: it has ended, so that later tokens do not belong to it. Both depend on the
    answer's tokens alone, so a replay gives the same.
    """

    budget: int
    left: int
    began: bool = False
    over: bool = False
    _asked_below: int = field(default=1 << 62)
    _way: list[int] = field(default_factory=list)

    def forced(self, matcher: "Matcher", ways: Ways) -> int | None:
        """The token that must come next; None: the form alone decides."""
        if self.began and not self._way:
            self.over = True
        if not self.began and self.left < self._asked_below:
            self._ask(matcher, ways)
        return self._way[0] if self._way else None

    def went_on(self) -> None:
        """The answer has one token more: the forced one, if there was one."""
        self.left -= 1
        self._way = self._way[1:]

    def copy(self) -> "Landing":
        """The landing of an answer that forks from this one."""
        return replace(self)

    def _ask(self, matcher: "Matcher", ways: Ways) -> None:
        way = ways.way_out(matcher, min(self.left, LONGEST_WAY))
        if way is None:
            self._asked_below = self.left * 7 // 8
            return
        margin = 1 + min(MOST_GROWTH, self.budget // 64)
        spare = self.left - len(way) - margin
        if spare <= 0 and way:
            self._way, self.began = way, True
        self._asked_below = self.left - spare // (MOST_GROWTH + 1)
