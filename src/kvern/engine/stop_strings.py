"""Finds stop strings in a growing text, whichever of them comes first (Aho and Corasick 1975).

A state is the longest end of the text that some stop string begins with; its length is what must be held back. States
are made when a text first comes there: what a list costs follows the text, not the length of the list.
"""

import copy
from bisect import bisect_left, bisect_right
from collections.abc import Sequence


class MatchState:
    """The first `depth` characters of the sorted stop strings `low` to `high` (exclusive)."""

    __slots__ = ("children", "depth", "fail", "high", "low", "stop")

    def __init__(self, texts: Sequence[str], low: int, high: int, depth: int) -> None:
        self.low, self.high, self.depth = low, high, depth
        self.stop: str | None = None
        """The longest stop string that the text ends with."""
        self.fail: MatchState | None = None
        """The next shorter end of the text that a stop string begins with; None: there is nothing shorter."""
        self.children: dict[str, MatchState | None] = {}
        """By the character that leads there; None: no text has come there."""
        if low < high and len(texts[low]) == depth:
            self.stop = texts[low]
            low += 1
        while low < high:
            character = texts[low][depth]
            self.children[character] = None
            low = _end(texts, low, high, depth)


class StopStrings:
    """The stop strings of one request, which all its answers look for."""

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._texts = sorted(set(stop_strings))
        self._order = {text: index for index, text in reversed(list(enumerate(stop_strings)))}
        self.longest = max(map(len, self._texts), default=0)
        self.root = MatchState(self._texts, 0, len(self._texts), 0)

    def order(self, text: str) -> int:
        """Its first place in the list."""
        return self._order[text]

    def next(self, state: MatchState, character: str) -> MatchState:
        """The state after another character. The steps of a whole text are about twice its characters at most."""
        found: MatchState | None = None
        made: list[MatchState] = []
        at: MatchState | None = state
        while at is not None:
            if character in at.children:
                known = at.children[character]
                child = at.children[character] = known or self._child(at, character)
                if made:
                    made[-1].fail = child
                found = found or child
                if known is not None:
                    break
                child.fail = self.root
                made.append(child)
            at = at.fail
        for child in reversed(made):
            assert child.fail is not None
            child.stop = child.stop or child.fail.stop
        return found or self.root

    def _child(self, state: MatchState, character: str) -> MatchState:
        texts, depth = self._texts, state.depth
        low = state.low + (len(texts[state.low]) == depth)
        low = bisect_left(texts, character, low, state.high, key=lambda text: text[depth])
        return MatchState(texts, low, _end(texts, low, state.high, depth), depth + 1)


def _end(texts: Sequence[str], low: int, high: int, depth: int) -> int:
    """Where the texts end that have the same character at `depth` as the one at `low`."""
    character = texts[low][depth]
    if texts[high - 1][depth] == character:
        return high
    return bisect_right(texts, character, low, high, key=lambda text: text[depth])


class StopSearch:
    """Looks for stop strings in one answer."""

    def __init__(self, stop_strings: StopStrings) -> None:
        self._stop_strings = stop_strings
        self._state = stop_strings.root
        self._length = 0

    def append(self, piece: str) -> tuple[int, str] | None:
        """Take the text's next characters; where the first stop string begins that ends within them, and which it is.

        Of several that begin there, the first of the list.
        """
        root, state = self._stop_strings.root, self._state
        start, self._length = self._length, self._length + len(piece)
        if state is root and root.children.keys().isdisjoint(piece):
            return None
        found: list[tuple[int, int, str]] = []
        for end, character in enumerate(piece, start + 1):
            state = state.children.get(character) or self._stop_strings.next(state, character)
            if (stop := state.stop) is not None:
                found.append((end - len(stop), self._stop_strings.order(stop), stop))
        self._state = state
        if not found:
            return None
        place, _, stop = min(found)
        return place, stop

    def fork(self) -> "StopSearch":
        """One more, in an answer that goes on from here in another way."""
        return copy.copy(self)

    @property
    def held_back(self) -> int:
        """Characters at the end of the text that a stop string begins with: fewer than the longest of them has."""
        state = self._state
        return state.fail.depth if state.fail and state.depth == self._stop_strings.longest else state.depth
