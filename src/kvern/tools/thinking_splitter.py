"""The thinking of one answer: its text apart from the rest, which the parser of calls reads, and its tokens."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Literal

from kvern.request.pieces import Content, Piece, Reasoning
from kvern.request.sampling_params import StopScope
from kvern.tools.buffered import BLANKS, first_mark, held_back
from kvern.tools.thinking import ThinkingFormat
from kvern.tools.tool_format import ToolParser

MESSAGE_BEGINS = ("<|start|>", "<|channel|>")
ANSWER_HEADER = r"<\|channel\|>(?!\s*analysis\b)[^<]{0,200}(?:<\|constrain\|>[^<]{0,200})?<\|message\|>"
"""The header of HARMONY's messages that are not thinking."""
QUOTES = "`'\""
FENCE = "```"

Beginning = Literal["possible", "inside", "over"]
"""The end of a prompt: before thinking, in the middle of it (the template opened it), or after it (it is off)."""


@dataclass(frozen=True)
class Thought:
    """The thinking before an answer. `budget` is in tokens; None: unlimited."""

    form: ThinkingFormat
    beginning: Beginning
    budget: int | None = None

    def splitter(self, parser: ToolParser, exact: bool) -> ThinkingSplitter:
        """A reader of one answer, of which `parser` reads the rest."""
        return ThinkingSplitter(self.form, self.beginning, parser, exact)

    def counter(self, spelled: Callable[[int], bytes], exact: bool) -> ThoughtTokens | None:
        """A counter of one answer's thinking tokens; None if there is no thinking to count."""
        if self.beginning == "over" and exact:
            return None
        return ThoughtTokens(self.form, self.beginning, spelled, exact)

    def stop_scope(self, exact: bool = False) -> StopScope | None:
        """The part of an answer in which stop strings count; None: all of it. `exact`: see ThinkingSplitter."""
        form, beginning = self.form, self.beginning
        if form.in_turns:
            return StopScope((form.end, *MESSAGE_BEGINS), ANSWER_HEADER, (), beginning, again=True, quotable=False)
        if beginning == "over" and exact:
            return None
        skipped = (*BLANKS, *filter(None, (form.answer, *form.wraps)))
        ends = "|".join(map(re.escape, form.ends))
        return StopScope((form.begin,), ends, skipped, beginning, not exact, quotable=True)


def beginning_of(prompt_end: str, form: ThinkingFormat) -> Beginning:
    """The state of thinking at the end of a prompt, from its last characters."""
    text = prompt_end.rstrip(BLANKS)
    if text.endswith(form.begin):
        return "inside"
    if text.endswith(form.answer or form.end) or (not form.in_turns and text.endswith(form.end)):
        return "over"
    return "inside" if form.always else "possible"


class ThinkingSplitter:
    """Reads one answer. The joined results do not depend on how the text is cut.

    Thinking at the beginning is split off before calls are read: a call within it is a thought. Later marks are found
    in the content that the parser returns, so that arguments of calls may contain them. Quoted marks, after a quotation
    mark or in a code block, do not count. `exact`: the answer matches a grammar and is not changed. Blanks around
    thoughts are removed.
    """

    def __init__(self, form: ThinkingFormat, beginning: Beginning, parser: ToolParser, exact: bool = False) -> None:
        self._form, self._parser = form, parser
        self._buffer = ""
        self._state = beginning
        self._thoughts = Thoughts()
        self._thought_before = False
        self._later = None if exact else LaterMarks(form, self._thoughts)
        self._opener = form.answer if exact else ""
        self._held = ""

    def feed(self, text: str, ended: bool = False) -> list[Piece]:
        """The next characters; with `ended` the last ones."""
        self._buffer += text
        pieces: list[Piece] = []
        if self._state == "possible":
            self._opens(ended)
        if self._state == "inside":
            pieces = self._think(ended)
        if self._state == "over":
            text, self._buffer = self._buffer, ""
            pieces += self._answered(text, ended)
        elif ended:
            pieces += self._answered("", ended)
        return pieces

    def _opens(self, ended: bool) -> None:
        """Finds out whether the answer begins with the mark."""
        text = self._buffer.lstrip(BLANKS)
        if text.startswith(self._form.begin):
            self._buffer, self._state = text, "inside"
        elif ended or not self._form.begin.startswith(text):
            self._state = "over"

    def _think(self, ended: bool) -> list[Piece]:
        if not self._thoughts.begun and not self._skip_begin_marks(ended):
            return []
        place, end = first_mark(self._buffer, self._form.ends, ended)
        pieces = self._thoughts.add(self._buffer[:place])
        self._buffer = self._buffer[place + (len(end) if end == self._form.end else 0) :]
        if end:
            self._state, self._thought_before = "over", True
        return pieces

    def _skip_begin_marks(self, ended: bool) -> bool:
        """Leave out the mark, also one that repeats the prompt's. True: no more can follow."""
        text = self._buffer.lstrip(BLANKS)
        while text.startswith(self._form.begin):
            self._buffer = text = text[len(self._form.begin) :].lstrip(BLANKS)
        return ended or not self._form.begin.startswith(text)

    def _answered(self, text: str, ended: bool) -> list[Piece]:
        if self._thought_before:
            text = text.lstrip(BLANKS)
            self._thought_before = not text
        if self._opener:
            text, self._held = self._held + text, ""
            if self._opener.startswith(text) and not ended:
                text, self._held = "", text
            else:
                text, self._opener = text.removeprefix(self._opener), ""
        pieces = self._parser.feed(text) if text else []
        if ended:
            pieces += self._parser.finish()
        return pieces if self._later is None else self._later.read(pieces, ended)


class Quotes:
    """Tracks whether a mark at the end of a growing text would be quoted: after a quotation mark, or in code."""

    def __init__(self) -> None:
        self._last = self._ticks = ""
        self._fenced = False

    def add(self, text: str) -> None:
        """Adds text."""
        ticks = self._ticks + text
        self._fenced ^= ticks.count(FENCE) % 2 == 1
        self._ticks = "`" * ((len(ticks) - len(ticks.rstrip("`"))) % len(FENCE))  # they may become a fence
        self._last = text[-1:] or self._last

    @property
    def are_open(self) -> bool:
        """True if a mark here would be quoted."""
        return self._fenced or (self._last != "" and self._last in QUOTES)


class Thoughts:
    """Makes reasoning of thoughts: without blanks around them, and with an empty line between two."""

    def __init__(self) -> None:
        self.begun = False
        self._separator = self._blanks = ""
        self._at_start = True

    def add(self, text: str) -> list[Piece]:
        """Adds text to the current thought."""
        text = self._blanks + text
        if self._at_start:
            text = text.lstrip(BLANKS)
        kept = text.rstrip(BLANKS)
        self._blanks = text[len(kept) :]
        if not kept:
            return []
        if self._at_start:
            kept = self._separator + kept
        self._at_start, self.begun = False, True
        return [Reasoning(kept)]

    def begin(self) -> None:
        """The next thought."""
        self._separator = "\n\n" if self.begun else ""
        self._blanks, self._at_start = "", True


class LaterMarks:
    """Removes marks, and the thoughts between them, from the content after the first thinking."""

    def __init__(self, form: ThinkingFormat, thoughts: Thoughts) -> None:
        self._form, self._thoughts = form, thoughts
        self._marks = tuple(dict.fromkeys((form.begin, form.end, *form.wraps)))
        self._buffer = ""
        self._quotes = Quotes()
        self._inside = False
        self._behind_mark = form.answer != ""

    def read(self, pieces: list[Piece], ended: bool) -> list[Piece]:
        """The pieces without marks in content; a possible beginning of a mark is held back unless `ended`."""
        found: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, Content):
                self._buffer += piece.text
                found += self._take(False)
            else:
                found += [*self._take(True), piece]
        return found + (self._take(True) if ended else [])

    def _take(self, whole: bool) -> list[Piece]:
        """The decided part of the buffer; `whole`: no more text will follow."""
        pieces: list[Piece] = []
        while True:
            marks = self._form.ends if self._inside else self._marks
            place, length, mark = min(
                ((place, -len(mark), mark) for mark in marks if (place := self._buffer.find(mark)) >= 0),
                default=(-1, 0, ""),
            )
            longer = 0 if whole else max(held_back(self._buffer, mark) for mark in marks)
            if place < 0 or place >= len(self._buffer) - longer:
                break
            pieces += self._write(self._buffer[:place])
            self._buffer = self._buffer[place - length :]
            pieces += self._meet(mark)
        end = len(self._buffer) - longer
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        return pieces + self._write(text)

    def _meet(self, mark: str) -> list[Piece]:
        if self._inside:
            self._inside, self._behind_mark = False, True
            if mark != self._form.end:
                self._buffer = mark + self._buffer
            return []
        if mark not in self._form.wraps and self._quotes.are_open:
            return self._write(mark)
        self._inside = mark == self._form.begin
        if self._inside:
            self._thoughts.begin()
        else:
            self._behind_mark = True
        return []

    def _write(self, text: str) -> list[Piece]:
        if self._inside:
            return self._thoughts.add(text)
        if self._behind_mark:
            text = text.lstrip(BLANKS)
            self._behind_mark = not text
        if not text:
            return []
        self._quotes.add(text)
        return [Content(text)]


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
