"""One call as a JSON object, {"name": "f", "arguments": {...}}, with its keys in any order, read while it grows.

Calls keyed by name are {"f": {...}}. `JsonMender` repairs what is almost JSON, with syntax of Python
and JavaScript.
"""

import json
import re
from collections.abc import Callable, Container

from kvern.tools.buffered import BLANKS, BufferedParser
from kvern.tools.tool_format import NAME

WORDS = {"True": "true", "False": "false", "None": "null", "undefined": "null", "NaN": "null"}
WORD = re.compile(r"[A-Za-z]+")
BLANK = re.compile(r"\s*")
PLAIN = {quote: re.compile(rf"[^\\{quote}\"\x00-\x1f]+") for quote in "'\""}
UNQUOTED = re.compile(r"[^A-Za-z'\",]+")
ESCAPES = '"\\/bfnrtu'


class JsonMender:
    """Repairs a growing text. The joined results of `feed` do not depend on how the text is cut."""

    def __init__(self) -> None:
        self._held = ""
        self._quote = ""

    def feed(self, text: str, ended: bool = False) -> str:
        """The next characters, mended; with `ended` the last ones."""
        text, mended = self._held + text, []
        place = 0
        while place < len(text):
            taken, written = (self._inside if self._quote else self._outside)(text, place, ended)
            if not taken:
                break
            place += taken
            mended.append(written)
        self._held = text[place:]
        return "".join(mended)

    def _outside(self, text: str, place: int, ended: bool) -> tuple[int, str]:
        """The number of characters that are complete, and their replacement."""
        sign = text[place]
        if sign in "'\"":
            self._quote = sign
            return 1, '"'
        if sign == ",":
            behind = BLANK.match(text, place + 1)
            assert behind is not None
            if behind.end() == len(text) and not ended:
                return 0, ""
            blanks = behind[0] if text[behind.end() : behind.end() + 1] in ("}", "]") else "," + behind[0]
            return behind.end() - place, blanks
        if word := WORD.match(text, place):
            if word.end() == len(text) and not ended:
                return 0, ""
            return len(word[0]), WORDS.get(word[0], word[0])
        found = UNQUOTED.match(text, place)
        assert found is not None
        return len(found[0]), found[0]

    def _inside(self, text: str, place: int, ended: bool) -> tuple[int, str]:
        sign = text[place]
        if sign == self._quote:
            self._quote = ""
            return 1, '"'
        if sign == "\\":
            following = text[place + 1 : place + 2]
            if not following:
                return (1, sign) if ended else (0, "")
            if following == "'":
                return 2, "'"
            return (2, sign + following) if following in ESCAPES else (1, "\\\\")
        if sign < " " or sign == '"':
            return 1, json.dumps(sign)[1:-1]
        found = PLAIN[self._quote].match(text, place)
        assert found is not None
        return len(found[0]), found[0]


NAMES = ("name", "tool_name")
ARGUMENTS = ("arguments", "parameters")
LONGEST_STRING = 512
"""Limit of keys and names, in characters as written."""
AFTER_SCALAR = re.compile(r"[,}\]\s]")
OUTSIDE = {quotes: re.compile(rf"[{quotes}{{}}\[\]]") for quotes in ('"', "\"'")}
INSIDE = {quote: re.compile(rf"[{quote}\\]") for quote in "\"'"}
STRING = re.compile(r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'""", re.DOTALL)


class JsonValue:
    """Finds the end of a value that begins at `start` of a growing text: by its brackets and `quotes` alone."""

    def __init__(self, start: int, quotes: str = "\"'") -> None:
        self.start = self.place = start
        self._quotes = quotes
        self._depth = 0
        self._quote = ""

    def ends(self, text: str) -> bool:
        """Advances `place` to the end of the value, or of the text; returns whether the value has ended.

        It is not called again after it has returned True.
        """
        if text[self.start] not in "{[" + self._quotes:
            found = AFTER_SCALAR.search(text, self.place)
            self.place = len(text) if found is None else found.start()
            return found is not None
        while self.place < len(text):
            found = (INSIDE[self._quote] if self._quote else OUTSIDE[self._quotes]).search(text, self.place)
            if found is None:
                self.place = len(text)
            elif found[0] == "\\":
                self.place = found.start()
                if found.end() == len(text):
                    return False
                self.place += 2
            else:
                self.place = found.end()
                if found[0] in self._quotes:
                    self._quote = "" if self._quote else found[0]
                else:
                    self._depth += 1 if found[0] in "{[" else -1
                if not self._quote and self._depth <= 0:
                    return True
        return False


class JsonArguments:
    """Hands over a call's arguments, JSON at the beginning of a parser's buffer, while they grow.

    `state` is a state of the parser; `then` is called when the arguments have left the buffer, and sets the next.
    """

    def __init__(self, parser: BufferedParser, then: Callable[[], None]) -> None:
        self._parser, self._then = parser, then
        self._value = JsonValue(0)
        self._mender = JsonMender()
        self._handed = 0

    def state(self) -> bool:
        """Reads on; returns True when the arguments or the text have ended."""
        parser, value = self._parser, self._value
        ended = value.ends(parser.buffer)
        place = value.place if ended or not parser.ended else len(parser.buffer)
        over = ended or parser.ended
        parser.arguments(self._mender.feed(parser.buffer[self._handed : place], over))
        self._handed = place
        if over:
            parser.take(place)
            self._then()
        return over


class JsonCall:
    """Reads one object from the beginning of a parser's buffer.

    `read` is called whenever the buffer has grown. It begins the call and hands over arguments as soon as both name
    and arguments are certain; until then the buffer stays as it was, so that the text can become content.
    """

    def __init__(self, parser: BufferedParser, names: Container[str] | None, keyed: bool = False) -> None:
        """`names`: only calls of these count; None: of any. `keyed`: the first key is the name."""
        self._parser = parser
        self._names = names
        self._keyed = keyed
        self._mender = JsonMender()
        self._place = 0
        self._name: str | None = None
        self._key = ""
        self._expected = "{"
        self._value: JsonValue | None = None
        self._given: JsonValue | None = None
        self._handed = 0
        self._text: str | None = None
        self.begun = False

    def read(self) -> bool | None:
        """Reads on: True if the call has ended and left the buffer, False if this is no call, or no longer one."""
        while (result := self._step()) is None and self._moved:
            pass
        self._hand_over()
        if result and not self.begun:
            result = self._begin(self._text or "{}")
        if self.begun and result is not None:
            self._parser.take(self._place)
        return result

    def end(self) -> None:
        """Ends a call in the middle: hands over what has come of it, if it has begun."""
        if self.begun:
            rest = self._parser.take(len(self._parser.buffer))
            if self._value is self._given:
                self._parser.arguments(self._mender.feed(rest[self._handed :], True))

    def _step(self) -> bool | None:
        text, self._moved = self._parser.buffer, True
        if self._value is not None:
            return self._read_value(text)
        while self._place < len(text) and text[self._place] in BLANKS:
            self._place += 1
        if self._place == len(text):
            self._moved = False
            return None
        sign = text[self._place]
        if self._expected == "key" and sign in "\"'":
            return self._read_key(text)
        if self._expected == "value":
            self._value = JsonValue(self._place)
            if self._key in ARGUMENTS and self._given is None and self._text is None and sign == "{":
                self._given = self._value
            return None
        following = {"{": {"{": "key"}, "key": {"}": "end"}, ":": {":": "value"}, ",": {",": "key", "}": "end"}}
        expected = following[self._expected].get(sign)
        if expected is None:
            return False
        self._expected = expected
        self._place += 1
        return True if expected == "end" else None

    def _read_key(self, text: str) -> bool | None:
        found = STRING.match(text, self._place)
        if found is None or found.end() - self._place > LONGEST_STRING:
            self._moved = False
            return False if len(text) - self._place > LONGEST_STRING else None
        self._key = _decoded(found[0]) or ""
        if self._keyed and self._name is None:
            if not self._names_a_call(self._key):
                return False
            self._key = ARGUMENTS[0]
        self._place, self._expected = found.end(), ":"
        return None

    def _names_a_call(self, name: str | None) -> bool:
        if name is None or not NAME.fullmatch(name) or (self._names is not None and name not in self._names):
            return False
        self._name = name
        return True

    def _read_value(self, text: str) -> bool | None:
        assert self._value is not None
        if not self._value.ends(text):
            self._moved = False
            too_long = self._key in NAMES and self._value.place - self._value.start > LONGEST_STRING
            return False if too_long else None
        self._place, written = self._value.place, text[self._value.start : self._value.place]
        known = self._given is not None or self._text is not None
        if self._key in NAMES and self._name is None:
            if not self._names_a_call(_decoded(written)):
                return False
        elif self._key in ARGUMENTS and not known and self._value is not self._given:
            self._text = "{}" if written in ("null", "None") else _decoded(written)
            if self._text is None or not self._text.lstrip().startswith("{"):
                return False
        self._value, self._expected = None, ","
        return None

    def _begin(self, text: str) -> bool:
        """Begins the call with these arguments if its name is known."""
        if self._name is None:
            return False
        self.begun = True
        self._parser.begin(self._name)
        self._parser.arguments(self._mender.feed(text, True))
        return True

    def _hand_over(self) -> None:
        if self._given is None or self._name is None:
            return
        if not self.begun:
            self._begin("")
            self._handed = self._given.start
        ended = self._value is not self._given
        self._parser.arguments(self._mender.feed(self._parser.buffer[self._handed : self._given.place], ended))
        self._handed = self._given.place


def _decoded(written: str) -> str | None:
    try:
        value = json.loads(JsonMender().feed(written, True), strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
