"""How many tokens of an answer are thought: those between the marks, without the marks."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate, islice

from kvern.tools.buffered import BLANKS
from kvern.tools.thinking import Beginning, ThinkingFormat


class ThoughtTokens:
    """Counts for one answer, which may grow from call to call; what has been looked at is not looked at again.

    Marks are found in the bytes that tokens stand for, so that they may be one token or several.
    """

    def __init__(self, form: ThinkingFormat, beginning: Beginning, spelled: Callable[[int], bytes]) -> None:
        self._begin, self._end = form.begin.encode(), form.end.encode()
        self._state, self._spelled = beginning, spelled
        self._bytes = bytearray()
        self._starts: list[int] = [0]
        """Of each token among the bytes, and the end of the last."""
        self._thought_from = 0
        self._counted = 0

    def count(self, token_ids: Sequence[int]) -> int:
        """Thought tokens among those of the answer so far."""
        if self._state != "over":
            self._read(token_ids)
        return self._counted

    def _read(self, token_ids: Sequence[int]) -> None:
        pieces = [self._spelled(token) for token in islice(token_ids, len(self._starts) - 1, None)]
        searched = max(len(self._bytes) - len(self._end) + 1, 0)
        self._starts += islice(accumulate(map(len, pieces), initial=len(self._bytes)), 1, None)
        self._bytes += b"".join(pieces)
        if self._state == "possible":
            self._open()
        if self._state != "inside":
            return
        place = self._bytes.find(self._end, max(searched, self._thought_from))
        self._state = "inside" if place < 0 else "over"
        until = len(self._bytes) if place < 0 else place
        starts = self._starts
        self._counted = bisect_left(starts, until, hi=len(starts) - 1) - bisect_left(starts, self._thought_from)

    def _open(self) -> None:
        """Find out whether the answer begins with the mark."""
        text = self._bytes.lstrip(BLANKS.encode())
        if text.startswith(self._begin):
            self._state, self._thought_from = "inside", len(self._bytes) - len(text) + len(self._begin)
        elif not self._begin.startswith(text):
            self._state = "over"
