"""FunctionGemma and Gemma 4: call:f{key:value,...} between two tokens, with tokens instead of quotes.

    <start_function_call>call:f{city:<escape>Oslo<escape>,days:3}<end_function_call>
    <|tool_call>call:f{city:<|"|>Oslo<|"|>,days:3}<tool_call|>

A call is handed over when it is complete: only then its notation can become JSON. JSON is understood in its place, and
so are Python's words, single quotes, and texts without any quotes.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from kvern.tools.buffered import BufferedParser
from kvern.tools.json_call import WORDS
from kvern.tools.tool_format import NAME, GrammarPieces, ToolFormat, ToolParser, ToolSchemas

HEAD = re.compile(rf"\s*call:({NAME.pattern})(?=\{{)")
LONGEST_HEAD = 256
IN_JSON = re.compile(r'["\\]')
STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
KEY = re.compile(r'[^\s:{}\[\],"]+')
SCALAR = re.compile(r"[^{}\[\],\"]+")
QUOTED = re.compile(r"'(.*?)'(?=\s*[,}\]])", re.DOTALL)
DEEPEST = 100
T = TypeVar("T")


@dataclass(frozen=True)
class Gemma(ToolFormat):
    """The format of one generation, by its tokens; see ToolFormat."""

    name: str
    begin: str
    end: str
    quote: str
    stop: str

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens and must stay visible."""
        return (self.begin, self.end, self.quote)

    @property
    def stops(self) -> tuple[str, ...]:
        """Tokens after which the model waits for a tool's answer."""
        return (self.stop,)

    @property
    def trigger(self) -> str:
        """The beginning of a call."""
        return self.begin

    def matches(self, template: str) -> bool:
        """The template writes earlier calls with these tokens."""
        return self.begin in template and self.quote in template

    def parser(self, tools: ToolSchemas) -> ToolParser:
        """The tokens leave no doubt, so that calls of unknown tools are calls, too."""
        return GemmaParser(self)

    def calls(self, tools: ToolSchemas, several: bool, write: GrammarPieces) -> str:
        """The grammar of calls with JSON arguments, because a grammar can follow their schema."""
        one = write.call(tools, lambda name: write.literal(f"call:{name}"))
        call = f"{one} {write.literal(self.end)}"
        return f"{call} ({write.literal(self.begin)} {call})*" if several else call


class GemmaParser(BufferedParser):
    """A parser of content, a call between tokens, and content."""

    def __init__(self, form: Gemma) -> None:
        super().__init__(form.begin)
        self._end = form.end
        self._quote = quote = form.quote
        sign = re.compile(rf'[{{}}]|"|{re.escape(quote)}')
        self._next = {"": sign, '"': IN_JSON, quote: re.compile(re.escape(quote))}

    def marked_state(self) -> bool:
        """Reads the name of a call."""
        found = HEAD.match(self.buffer)
        if found is None or found.end() > LONGEST_HEAD:
            return (self.ended or "{" in self.buffer or len(self.buffer) > LONGEST_HEAD) and self.no_call()
        self._name, self._start = found[1], found.end()
        self._place = found.end()
        self._depth = 0
        self._inside = ""
        self.state = self._arguments_state
        return True

    def _arguments_state(self) -> bool:
        """Searches the brace that ends the arguments, outside of strings."""
        while True:
            found = self._next[self._inside].search(self.buffer, self._place)
            longest = len(self._quote)
            if found is None:
                self._place = max(self._place, len(self.buffer) - longest + 1)
                return self.ended and self.no_call()
            if found[0] in '"\\' and found.end() + longest > len(self.buffer) and not self.ended:
                return False  # it may be a part of the token that quotes
            self._place = found.end()
            if found[0] == "\\":
                self._place += 1
            elif found[0] in "{}":
                self._depth += 1 if found[0] == "{" else -1
            else:
                self._inside = "" if self._inside else found[0]
            if not self._depth:
                return self._complete()

    def _complete(self) -> bool:
        arguments = written_arguments(self.buffer[self._start : self._place], self._quote)
        if arguments is None:
            return self.no_call()
        self.begin(self._name)
        self.arguments(arguments)
        self.take(self._place)
        self.close(self._end)
        return True


def written_arguments(text: str, quote: str) -> str | None:
    """A mapping in Gemma's notation as JSON; None if it is none."""
    try:
        reader = _Reader(text, quote)
        value = reader.value(0)
        if reader.place != len(text) or not isinstance(value, dict):
            return None
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return None


class _Reader:
    """A parser of values; raises ValueError for other text."""

    def __init__(self, text: str, quote: str) -> None:
        self.place = 0
        self._text, self._quote = text, quote

    def value(self, depth: int) -> Any:
        self._blanks()
        if depth > DEEPEST:
            raise ValueError("too deep")
        if self._take("{"):
            return dict(self._items("}", lambda: self._entry(depth + 1)))
        if self._take("["):
            return self._items("]", lambda: self.value(depth + 1))
        string = self._string()
        if string is not None:
            return string
        if self._text.startswith("'", self.place):
            return self._match(QUOTED)[1:-1]
        word = self._match(SCALAR).strip()
        try:
            return json.loads(WORDS.get(word, word), parse_constant=str)
        except ValueError:
            if not word:
                raise
            return word

    def _entry(self, depth: int) -> tuple[str, Any]:
        key = self._string()
        key = self._match(KEY) if key is None else key
        self._blanks()
        if not self._take(":"):
            raise ValueError("no colon")
        return key, self.value(depth)

    def _items(self, end: str, read: Callable[[], T]) -> list[T]:
        """The values that `read` reads, with commas between them, up to `end`."""
        found: list[T] = []
        self._blanks()
        while not self._take(end):
            found.append(read())
            self._blanks()
            if not self._take(",") and not self._text.startswith(end, self.place):
                raise ValueError("no comma")
            self._blanks()
        return found

    def _string(self) -> str | None:
        if self._take(self._quote):
            end = self._text.index(self._quote, self.place)
            text, self.place = self._text[self.place : end], end + len(self._quote)
            return text
        if self._text.startswith('"', self.place):
            return str(json.loads(self._match(STRING), strict=False))
        return None

    def _match(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self._text, self.place)
        if found is None:
            raise ValueError("nothing there")
        self.place = found.end()
        return found[0]

    def _take(self, sign: str) -> bool:
        found = self._text.startswith(sign, self.place)
        self.place += len(sign) if found else 0
        return found

    def _blanks(self) -> None:
        while self._text.startswith((" ", "\n", "\t", "\r"), self.place):
            self.place += 1
