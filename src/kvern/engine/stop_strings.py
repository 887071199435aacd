"""Search for stop strings in a growing text; the first one counts (Aho and Corasick 1975).

A state is the longest end of the text with which some stop string begins; its length must be held back. States are
created when a text first reaches them: the cost depends on the text, not on the length of the list.
"""

import copy
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Literal

from kvern.request.sampling_params import LONGEST_SCOPE_END, StopScope
from kvern.tools.buffered import BLANKS, held_back
from kvern.tools.thinking_splitter import Quotes


class MatchState:
    """The first `depth` characters of the sorted stop strings `low` to `high` (exclusive)."""

    __slots__ = ("children", "depth", "fail", "high", "low", "stop")

    def __init__(self, texts: Sequence[str], low: int, high: int, depth: int) -> None:
        self.low = low
        self.high = high
        self.depth = depth
        self.stop: str | None = None
        """The longest stop string that the text ends with."""
        self.fail: MatchState | None = None
        """The next shorter end of the text with which a stop string begins; None if there is none."""
        self.children: dict[str, MatchState | None] = {}
        """Next states by character; None if no text has reached the state."""
        if low < high and len(texts[low]) == depth:
            self.stop = texts[low]
            low += 1
        while low < high:
            character = texts[low][depth]
            self.children[character] = None
            low = _end(texts, low, high, depth)


class StopStrings:
    """The stop strings of one request, shared by its answers."""

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._texts = sorted(set(stop_strings))
        self._order = {text: index for index, text in reversed(list(enumerate(stop_strings)))}
        self.longest = max(map(len, self._texts), default=0)
        self.root = MatchState(self._texts, 0, len(self._texts), 0)

    def order(self, text: str) -> int:
        """Returns the first index of a text in the list."""
        return self._order[text]

    def next(self, state: MatchState, character: str) -> MatchState:
        """Returns the state after another character. A whole text takes about two steps a character at most."""
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
    """Returns the end of the texts that have the same character at `depth` as the one at `low`."""
    character = texts[low][depth]
    if texts[high - 1][depth] == character:
        return high
    return bisect_right(texts, character, low, high, key=lambda text: text[depth])


class StopSearch:
    """Searches for stop strings in one answer."""

    def __init__(self, stop_strings: StopStrings) -> None:
        self._stop_strings = stop_strings
        self._state = stop_strings.root
        self._length = 0

    def append(self, piece: str, ended: bool = False) -> tuple[int, str] | None:
        """Takes the text's next characters. Returns the offset and the text of the first stop string that ends in them,
        or None.

        Of several that begin at that offset, it is the first of the list. `ended`: no more text follows.
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
        """Returns a copy for an answer that continues differently from here."""
        return copy.copy(self)

    @property
    def held_back(self) -> int:
        """The number of characters at the end of the text with which a stop string begins."""
        state = self._state
        return state.fail.depth if state.fail and state.depth == self._stop_strings.longest else state.depth


class ScopedSearch:
    """Looks for stop strings in the visible parts of an answer; see `StopSearch`.

        before --(the answer begins with thinking)--> thinking --(end)--> behind --(neither blank nor mark)--> visible
               --(it does not)--> visible --(`again`, and a mark that begins something else)--> thinking

    What it finds does not depend on how the text is cut: what may become a mark waits in a buffer.
    """

    def __init__(self, stop_strings: StopStrings, scope: StopScope) -> None:
        self._stop_strings, self._scope = stop_strings, scope
        self._end = re.compile(scope.end)
        self._buffer = ""
        self._taken = 0
        """The number of characters before the buffer."""
        self._quotes = Quotes()
        """The quotation marks of the visible text."""
        self._state: Literal["before", "thinking", "behind", "visible"] = "before"
        if scope.beginning == "inside":
            self._state = "thinking"
        elif scope.beginning == "over":
            self._show()

    def append(self, piece: str, ended: bool = False) -> tuple[int, str] | None:
        """Takes the text's next characters, like `StopSearch.append`."""
        self._buffer += piece
        if self._state == "before":
            self._begin(ended)
        while self._buffer and self._state != "before":
            if self._state == "visible":
                found = self._read(ended)
                if found is not None or self._state == "visible":
                    return found
            elif not (self._think() if self._state == "thinking" else self._skip(ended)):
                break
        return None

    def fork(self) -> "ScopedSearch":
        """Returns a copy for an answer that continues differently from here."""
        fork = copy.copy(self)
        fork._quotes = copy.copy(self._quotes)
        if self._state == "visible":
            fork._search = self._search.fork()
        return fork

    @property
    def held_back(self) -> int:
        """The number of characters at the end of the text with which a stop string may begin."""
        if self._state == "thinking":
            return 0
        return len(self._buffer) + (self._search.held_back if self._state == "visible" else 0)

    def _take(self, count: int) -> str:
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        self._taken += len(taken)
        return taken

    def _show(self) -> None:
        self._state = "visible"
        self._search = StopSearch(self._stop_strings)
        self._shown_from = self._taken

    def _begin(self, ended: bool) -> None:
        text = self._buffer.lstrip(BLANKS)
        if text.startswith(self._scope.begins):
            self._state = "thinking"
        elif ended or not any(mark.startswith(text) for mark in self._scope.begins):
            self._show()

    def _think(self) -> bool:
        """Returns True if the reasoning is over."""
        match = self._end.search(self._buffer)
        self._take(match.end() if match else max(len(self._buffer) - LONGEST_SCOPE_END, 0))
        if match:
            self._state = "behind"
            if not self._scope.skipped:
                self._show()
        return match is not None

    def _skip(self, ended: bool) -> bool:
        """Returns True if a skipped text was removed, or the visible answer begins."""
        mark = next(filter(self._buffer.startswith, self._scope.skipped), "")
        self._take(len(mark))
        if mark:
            return True
        if not ended and any(mark.startswith(self._buffer) for mark in self._scope.skipped):
            return False
        self._show()
        return True

    def _read(self, ended: bool) -> tuple[int, str] | None:
        begins = self._scope.begins if self._scope.again else ()
        while True:
            place = min((place for mark in begins if (place := self._buffer.find(mark)) >= 0), default=-1)
            kept = 0 if ended else max((held_back(self._buffer, mark) for mark in begins), default=0)
            found = self._search_next(place if place >= 0 else len(self._buffer) - kept)
            if place >= 0 and found is None and not (self._scope.quotable and self._quotes.are_open):
                self._state = "thinking"
            if place < 0 or found is not None or self._state == "thinking":
                return found
            found = self._search_next(1)  # the mark is part of the text
            if found is not None:
                return found

    def _search_next(self, count: int) -> tuple[int, str] | None:
        text = self._take(count)
        self._quotes.add(text)
        found = self._search.append(text)
        return None if found is None else (self._shown_from + found[0], found[1])


def search_of(stop_strings: StopStrings, scope: StopScope | None) -> StopSearch | ScopedSearch:
    """Returns a search for the stop strings of one answer."""
    return StopSearch(stop_strings) if scope is None else ScopedSearch(stop_strings, scope)
