"""Counts the tokens of an answer that are thinking: those between the marks, without the marks."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate, islice

from kvern.tools.buffered import BLANKS
from kvern.tools.thinking import Beginning, ThinkingFormat
from kvern.tools.thinking_splitter import FENCE, QUOTES


class ThoughtTokens:
    """A counter for one growing answer; it reads each token once.

    Marks are found in the bytes of tokens, so they may be one token or several. Later marks count as in
    ThinkingSplitter; `exact`: they do not.
    """

    def __init__(
        self, form: ThinkingFormat, beginning: Beginning, spelled: Callable[[int], bytes], exact: bool = False
    ) -> None:
        self._begin, self._ends = form.begin.encode(), [end.encode() for end in form.ends]
        self._in_turns, self._exact = form.in_turns, exact
        self._spelled = spelled
        self._state: str = "later" if beginning == "possible" and form.in_turns else beginning
        self._fenced = False
        self._bytes = bytearray()
        self._starts: list[int] = [0]
        """The first byte of each token, and the end of the last."""
        self._thought_from = 0
        """The byte at which thinking has begun, or from which on it may begin."""
        self._segment_from = 0
        """The first byte after the last mark in the answer."""
        self._counted = self._counted_before = 0
        if beginning == "over":
            self._answer_begins(0)

    def count(self, token_ids: Sequence[int]) -> int:
        """The number of thinking tokens among those of the answer so far."""
        if self._state != "over":
            self._read(token_ids)
        return self._counted

    def _read(self, token_ids: Sequence[int]) -> None:
        pieces = [self._spelled(token) for token in islice(token_ids, len(self._starts) - 1, None)]
        searched = max(len(self._bytes) - max(map(len, self._ends)) + 1, 0)
        self._starts += islice(accumulate(map(len, pieces), initial=len(self._bytes)), 1, None)
        self._bytes += b"".join(pieces)
        while self._find_mark(searched):
            pass

    def _find_mark(self, searched: int) -> bool:
        """True if the next mark has come; an end mark begins at `searched` or later."""
        if self._state != "inside":
            return self._state != "over" and (self._opens() if self._state == "possible" else self._opens_later())
        found = (self._bytes.find(end, max(searched, self._thought_from)) for end in self._ends)
        place, end = min(
            ((place, end) for place, end in zip(found, self._ends, strict=True) if place >= 0), default=(-1, b"")
        )
        until = len(self._bytes) if place < 0 else place
        starts = self._starts
        thought = bisect_left(starts, until, hi=len(starts) - 1) - bisect_left(starts, self._thought_from)
        self._counted = self._counted_before + max(thought, 0)
        if place >= 0:
            self._counted_before = self._counted
            self._answer_begins(place + len(end))
        return place >= 0

    def _answer_begins(self, place: int) -> None:
        self._state = "over" if self._exact and not self._in_turns else "later"
        self._thought_from = self._segment_from = place

    def _opens(self) -> bool:
        """True if it is decided whether the answer begins with the mark."""
        begin = len(self._bytes) - len(self._bytes.lstrip(BLANKS.encode()))
        if self._bytes.startswith(self._begin, begin):
            self._state, self._thought_from = "inside", begin + len(self._begin)
        elif not self._begin.startswith(self._bytes[begin:]):
            self._answer_begins(0)
        return self._state != "possible"

    def _opens_later(self) -> bool:
        """True if the mark has come later in the answer, or in a further message of it."""
        place = self._bytes.find(self._begin, self._thought_from)
        if place < 0:
            self._thought_from = max(self._thought_from, len(self._bytes) - len(self._begin) + 1)
            return False
        self._thought_from = place + len(self._begin)
        self._fenced ^= self._bytes.count(FENCE.encode(), self._segment_from, place) % 2 == 1
        quoted = self._fenced or (place > 0 and chr(self._bytes[place - 1]) in QUOTES)
        self._segment_from = place
        if self._in_turns or not quoted:
            self._state = "inside"
        return True
