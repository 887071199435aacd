"""Answers in JSON that come to their end when the tokens that they may have run out.

A model can go on for ever where a form lets it: with a text, with one element after the other, with brackets within
brackets. Shortly before `max_tokens` such an answer takes the shortest way out: it closes what is open.
"""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvern.structured.backend import Matcher

LONGEST_WAY = 256
"""Tokens; answers that need more to end are left alone."""
MOST_GROWTH = 16
"""By so much one token makes the way longer at most, as a rule: it may open that many brackets."""


def has_ways(grammar: str) -> bool:
    """Whether there is JSON in the answers of a compiled grammar."""
    return '"json_schema"' in grammar


class Ways(Protocol):
    """What knows the ways of one model's answers."""

    def way_out(self, matcher: "Matcher", most: int) -> list[int] | None:
        """As `Backend.way_out`."""


@dataclass
class Landing:
    """One answer's. `left`: tokens that it may still have; `budget`: those that it may have in all.

    `began`: it is on its way out; `over`: it has got there, so that what comes next is not a part of it any more. Both
    follow from the answer's tokens alone, so that they are the same where it is read anew.
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
        """Of an answer that goes on from here as another one."""
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
