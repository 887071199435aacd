"""The base of parsers: a growing text that is read by states, each of which waits for the text it needs."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection

from kvern.request.pieces import Arguments, CallBegins, Content, Piece
from kvern.tools.tool_format import new_call_id

BLANKS = " \t\r\n"
LONGEST_GAP = 1024
"""The most blanks before an expected marker."""
GARBAGE = re.compile(r"[^<\[{]{0,128}")
"""Text after a call, up to the mark that ends it."""
SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a character, which a model may write with an escape, and which no answer can be encoded with."""


def held_back(text: str, marker: str) -> int:
    """The number of characters at the end of a text that may begin a marker."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


def first_mark(text: str, marks: Collection[str], ended: bool) -> tuple[int, str]:
    """The place of the first of some marks, and that mark; without one the length of the text that begins none, and "".

    `ended`: no text follows, so that no mark can begin.
    """
    found = [(place, mark) for mark in marks if (place := text.find(mark)) >= 0]
    if found:
        return min(found)
    kept = 0 if ended else max((held_back(text, mark) for mark in marks), default=0)
    return len(text) - kept, ""


class BufferedParser(ABC):
    """The base class of the parsers of all formats.

    Content is read up to one of `marks` (without any: to the end), which `opening` then is, and `marked_state` follows.

    A state is a method that reads from `buffer`, takes what it understands, and returns whether it made progress. It
    may decide only what no further character can change, so that the result does not depend on how the text is cut.
    When `ended`, no text follows, and a state that still waits turns its text into content.

    Blanks before and after a call are left out of the content.
    """

    brackets = "}])"
    """Closing brackets of which surplus ones may follow a call."""
    new_id: Callable[[], str] = staticmethod(new_call_id)

    def __init__(self, *marks: str) -> None:
        self._marks = marks
        self.opening = ""
        """The apparent opening of a call, which becomes content if it is none."""
        self.buffer = ""
        self.ended = False
        self.state: Callable[[], bool] = self.content_state
        self._pieces: list[Piece] = []
        self._blanks = ""
        self._calls = 0
        self._ids: set[str] = set()
        self._after_call = False

    def content_state(self) -> bool:
        """Reads text that is no call."""
        place, self.opening = first_mark(self.buffer, self._marks, self.ended)
        self.content(self.take(place))
        if self.opening:
            self.take(len(self.opening))
            self.state = self.marked_state
        return bool(self.opening)

    @abstractmethod
    def marked_state(self) -> bool:
        """Reads the text after a mark."""

    def feed(self, text: str) -> list[Piece]:
        """The next characters."""
        self.buffer += text
        while self.state():
            pass
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> list[Piece]:
        """The text has ended."""
        self.ended = True
        pieces = self.feed("")
        self.content(self.buffer)
        self.buffer = ""
        if not self._after_call and self._blanks:
            self._pieces.append(Content(self._blanks))
        return [*pieces, *self._pieces]

    def take(self, count: int) -> str:
        """Removes and returns the first characters."""
        taken, self.buffer = self.buffer[:count], self.buffer[count:]
        return taken

    def expect(self, marker: str) -> bool | None:
        """True if the buffer, without leading blanks, begins with a marker; None: this needs more text."""
        text = self.buffer.lstrip(BLANKS)
        if len(self.buffer) - len(text) > LONGEST_GAP:
            return False
        if text.startswith(marker):
            return True
        return None if marker.startswith(text) and not self.ended else False

    def drop(self, marker: str) -> None:
        """Removes the marker that `expect` has found."""
        self.take(self.buffer.index(marker) + len(marker))

    def content(self, text: str) -> None:
        """Emits text as content."""
        kept = text.rstrip(BLANKS)
        if kept:
            self._after_call = False
            self._pieces.append(Content(self._blanks + kept))
            self._blanks = ""
        self._blanks += text[len(kept) :]

    def no_call(self) -> bool:
        """Turns the apparent opening of a call into content, unless the answer ends with it after a call."""
        if not self.ended or not self._calls or self.buffer.strip(BLANKS):
            self.content(self.opening)
        self.state = self.content_state
        return True

    def close(self, *markers: str) -> None:
        """Expects the end of a call: each marker, which may be missing, then rubbish, then content."""
        self._closing = list(markers)
        self._ends = tuple(marker for marker in markers if marker.startswith("<"))
        self._closed = False
        self.state = self._closing_state

    def _closing_state(self) -> bool:
        while self._closing:
            found = self.expect(self._closing[0])
            if found is None:
                return False
            marker = self._closing.pop(0)
            if found:
                self.drop(marker)
                self._closed = self._closed or marker in self._ends
        self.state = self._rubbish_state
        return True

    def _rubbish_state(self) -> bool:
        """Brackets too many, ends too many, and anything short before an end that is still missing."""
        rest = self.buffer.lstrip(BLANKS + self.brackets)
        garbage = GARBAGE.match(rest) if self._ends and not self._closed else None
        behind = rest if garbage is None else rest[garbage.end() :]
        end = next((end for end in self._ends if behind.startswith(end)), None)
        if end is not None:
            self.drop(end)
            self._closed = True
        elif not self.ended and (not behind or any(end.startswith(behind) for end in self._ends)):
            return False
        else:
            if any(sign in self.brackets for sign in self.buffer[: len(self.buffer) - len(rest)]):
                self.buffer = rest
            self.state = self.content_state
        return True

    def begin(self, name: str, call_id: str = "") -> None:
        """Begins a call; without an id it gets a new one."""
        self._blanks = ""
        self._after_call = True
        call_id = call_id if call_id not in self._ids else ""
        self._ids.add(call_id)
        self._pieces.append(CallBegins(self._calls, call_id or self.new_id(), name))
        self._calls += 1

    def arguments(self, text: str) -> None:
        """Emits more arguments of the newest call."""
        text = SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
        if text:
            self._pieces.append(Arguments(self._calls - 1, text))
