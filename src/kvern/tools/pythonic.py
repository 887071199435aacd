"""Calls as Python: the answer is [f(a=1), g(b="x")] and nothing else, or such a list stands between two tokens.

    <|tool_call_start|>[f(a=1), g(b="x")]<|tool_call_end|>

A call is handed over when it is complete: only then its values can become JSON. JSON's own values are understood, and
`f(**{"a": 1})`. Quotes and line breaks within texts need no backslash, since templates write them without: a quote
closes a text where something follows that can follow a text.
"""

import ast
import json
import re
import warnings
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

from kvern.tools.buffered import BufferedParser
from kvern.tools.json_call import JsonMender
from kvern.tools.tool_format import GrammarPieces, ToolFormat, ToolParser, ToolSchemas

HEAD = re.compile(r"\s*([a-zA-Z_][a-zA-Z0-9_.-]{0,127})\(")
LONGEST_HEAD = 256
SIGN = re.compile(r"[()\[\]{}'\"]")
IN_TEXT = {"'": re.compile(r"['\\]"), '"': re.compile(r'["\\]')}
BEHIND_TEXT = re.compile(r"\s*(?:[)\]}:]|,\s*(?:[A-Za-z_]\w*\s*=|\*\*|[)\]}]))")
BEHIND_INNER_TEXT = re.compile(r"\s*[)\]},:]")
MAY_FOLLOW = re.compile(r"\s*(?:,\s*(?:[A-Za-z_]\w*\s*|\*)?)?")
UNESCAPED = re.compile(r"\\.|['\"\n\r]", re.DOTALL)
ESCAPES = {"'": "\\'", '"': '\\"', "\n": "\\n", "\r": "\\r"}
SPREAD = re.compile(r"\s*\*\*\s*(\{.*\})\s*", re.DOTALL)


@dataclass(frozen=True)
class Pythonic(ToolFormat):
    """The format; see ToolFormat. `marks` are the tokens around the list, `hint` is in templates that describe it."""

    name: str
    hint: re.Pattern[str]
    marks: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens and must stay visible."""
        return self.marks

    @property
    def trigger(self) -> str | None:
        """The token before the list, or None."""
        return next(iter(self.marks), None)

    @property
    def opening(self) -> str:
        """The first character of a call."""
        return (self.trigger or "[")[0]

    def matches(self, template: str) -> bool:
        """True if the template, which renders no calls, tells the model to write such calls."""
        return self.hint.search(template) is not None

    def parser(self, tools: ToolSchemas) -> ToolParser:
        """Tokens leave no doubt; a list without them can also be an answer: only calls of the request's tools count."""
        return PythonicParser(None if self.marks else tools, self.marks)

    def calls(self, tools: ToolSchemas, several: bool, write: GrammarPieces) -> str:
        """The grammar of calls with `**` and JSON arguments, because a grammar can follow their schema."""
        one = " | ".join(f'{write.literal(name + "(**")} {write.json(schema)} ")"' for name, schema in tools.items())
        more = f'(", " ({one}))*' if several else ""
        end = "".join(f" {write.literal(mark)}" for mark in self.marks[1:])
        return f'"[" ({one}) {more} "]"{end}'


PYTHONIC = Pythonic("pythonic", re.compile(r"\[\s*func\w*\(\w+="))
LFM2_MARKS = ("<|tool_call_start|>", "<|tool_call_end|>")
LFM2 = Pythonic("lfm2", re.compile(rf"{re.escape(LFM2_MARKS[0])}|List of tools: "), LFM2_MARKS)


class PythonicParser(BufferedParser):
    """The parser of a list after a token; without a token, of a list at the beginning."""

    def __init__(self, names: Container[str] | None, marks: Sequence[str] = ()) -> None:
        """`names`: only calls of these functions count; None: of any."""
        super().__init__(*marks[:1])
        self._names, self._list_ends = names, marks[1:]
        if not marks:
            self.state = self.marked_state

    def marked_state(self) -> bool:
        """Reads the bracket that opens a list."""
        found = self.expect("[")
        if found is None:
            return False
        if not found:
            return self.no_call()
        self.opening += self.take(self.buffer.index("[") + 1)
        self.state = self._head_state
        return True

    def _head_state(self) -> bool:
        found = HEAD.match(self.buffer)
        if found is None or found.end() > LONGEST_HEAD or not self._is_known(found[1]):
            return (self.ended or "(" in self.buffer or len(self.buffer) > LONGEST_HEAD) and self.no_call()
        self._name, self._start = found[1], found.end()
        self._place = found.end()
        self._depth = 1
        self._quote = ""
        self._texts: list[tuple[int, int]] = []
        self.state = self._arguments_state
        return True

    def _is_known(self, name: str) -> bool:
        return self._names is None or name in self._names

    def _arguments_state(self) -> bool:
        """Searches the parenthesis that ends the arguments, outside of strings."""
        while self._depth:
            found = (IN_TEXT[self._quote] if self._quote else SIGN).search(self.buffer, self._place)
            if found is None or (found[0] == "\\" and found.end() == len(self.buffer)):
                self._place = len(self.buffer) if found is None else found.start()
                return self.ended and self.no_call()
            if found[0] == "\\":
                self._place = found.end() + 1
            elif not self._quote and found[0] in "'\"":
                self._quote, self._place = found[0], found.end()
                self._texts.append((found.end(), found.end()))
            elif self._quote:
                closes = self._closes(found.end())
                if closes is None:
                    self._place = found.start()
                    return False
                self._place = found.end()
                if closes:
                    self._texts[-1] = (self._texts[-1][0], found.start())
                    self._quote = ""
            else:
                self._place = found.end()
                self._depth += 1 if found[0] in "([{" else -1
        arguments = None
        if self.buffer[self._place - 1] == ")":
            written, texts = self.buffer[self._start : self._place - 1], self._texts
            arguments = json_arguments(written)
            if arguments is None:
                arguments = json_arguments(_escaped(written, [(a - self._start, b - self._start) for a, b in texts]))
        if arguments is None:
            return self.no_call()
        self.begin(self._name)
        self.arguments(arguments)
        self.take(self._place)
        self.state = self._next_state
        return True

    def _closes(self, place: int) -> bool | None:
        """True if a quote before `place` ends a string; None: this needs more text."""
        if (BEHIND_TEXT if self._depth == 1 else BEHIND_INNER_TEXT).match(self.buffer, place):
            return True
        return None if not self.ended and MAY_FOLLOW.fullmatch(self.buffer, place) else False

    def _next_state(self) -> bool:
        for sign in ",]":
            found = self.expect(sign)
            if found is None:
                return False
            if found:
                self.opening = self.take(self.buffer.index(sign) + 1)
                if sign == ",":
                    self.state = self._head_state
                    return True
                break
        self.close(*self._list_ends)
        return True


def _escaped(text: str, texts: Sequence[tuple[int, int]]) -> str:
    """The text with escapes for the quotes and line breaks within its strings, whose bounds are given."""
    pieces, place = [], 0
    for start, end in texts:
        within = UNESCAPED.sub(lambda found: ESCAPES.get(found[0], found[0]), text[start:end])
        pieces += [text[place:start], within]
        place = end
    return "".join(pieces) + text[place:]


def json_arguments(text: str) -> str | None:
    """The arguments in a call's parentheses, as a JSON object; None if they are none."""
    try:
        spread = SPREAD.fullmatch(text)
        if spread is not None:
            value = json.loads(spread[1], strict=False)
            return spread[1] if isinstance(value, dict) else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            source = f"f({text}\n)"
            call = ast.parse(source, mode="eval").body
            if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
                return None
            values = {
                word.arg: _value(ast.get_source_segment(source, word.value), word.value) for word in call.keywords
            }
        return None if None in values else json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def _value(written: str | None, node: ast.expr) -> Any:
    """JSON if it is that, else a Python literal, else a mixture of them. Raises ValueError."""
    try:
        return json.loads(written or "")
    except ValueError:
        pass
    try:
        return ast.literal_eval(node)
    except ValueError:
        return json.loads(JsonMender().feed(written or "", True))
