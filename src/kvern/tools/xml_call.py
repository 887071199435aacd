"""Calls with each parameter between XML tags: a parser of growing text, and grammars.

    content -> head -> between <-> value
                          |-> body, if all arguments are one JSON object instead
                          -> closing -> content

A format defines its marks and the beginning of a call; this module does the rest.
"""

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvern.request.sampling_params import StructuredOutput
from kvern.tools.buffered import BLANKS, BufferedParser
from kvern.tools.json_call import JsonArguments, JsonValue
from kvern.tools.tool_format import GrammarPieces, ToolSchemas, literal
from kvern.tools.xml_values import ParameterSchema, written_value

CALL, CALL_END = "<tool_call>", "</tool_call>"
LONGEST_HEAD = 512
"""The most characters of the opening of a call or parameter."""
MOST_BLANKS = 64
"""The most blanks between tags."""
NO_BLANK = re.compile(rf"[^{BLANKS}]")
STRINGS = ("string", "true")
"""Attribute values of a parameter's tag that mean a string."""
KEY_IN_TAG = r"[^<>/\n][^<>\n]{0,255}"
PLAIN_KEYWORDS = {"type", "properties", "required", "additionalProperties", "$schema", "$id", "$defs", "definitions"}
PLAIN_KEYWORDS |= {"title", "description", "$comment"}
"""Keywords of schemas whose parameters can be written independently of each other."""


GRAMMAR = "start: VALUE {}\nVALUE: ({}) {}"


@dataclass(frozen=True)
class Gaps:
    """Blanks of a template between the tags of a call.

    They follow the outer opening, the name, a parameter's name, each parameter, the last parameter (in addition), the
    end of a call, and separate two calls.
    """

    opened: str = "\n"
    head: str = "\n"
    key: str = ""
    parameter: str = "\n"
    last: str = ""
    closed: str = "\n"
    calls: str = "\n"

    def seen(self, texts: Sequence[str], **tags: tuple[str, str]) -> "Gaps":
        """The gaps in a template's rendering: each is between two tags; "" is no tag."""
        found = {}
        for name, (left, right) in tags.items():
            pattern = re.compile(rf"{re.escape(left)}(\s*){re.escape(right)}")
            places = [match for text in texts if left and right and (match := pattern.search(text))]
            if places:
                found[name] = places[-1][1]
        last = found.get("last", self.parameter + self.last)
        parameter = found.get("parameter", last)
        return replace(self, **{**found, "parameter": parameter, "last": last.removeprefix(parameter)})


@dataclass(frozen=True)
class XmlMarks:
    """The tags of a format.

    calls      openings of a call: of the first one with the outer tags, and of others
    parameter  the opening of a parameter: its name in the first group, its type in the second if it has one
    begin      the beginning of that opening
    end        the end of a parameter; {} stands for its name
    ends       the ends of a call
    """

    calls: tuple[str, ...]
    parameter: re.Pattern[str]
    begin: str
    end: str
    ends: tuple[str, ...]
    lined: bool
    """One line break after the opening, and one before the end, do not belong to a value."""
    forgiving: bool = True
    """A forgotten end of a value is put up with."""

    @property
    def following(self) -> tuple[str, ...]:
        """The texts that may follow a value."""
        return self.begin, *self.ends, *self.calls

    @property
    def call_end(self) -> str:
        """The last of `ends`."""
        return self.ends[-1]


class XmlParser(BufferedParser):
    """All but how a call begins, which is `content_state`; that calls `opened`."""

    def __init__(self, marks: XmlMarks, tools: ToolSchemas) -> None:
        super().__init__()
        self._marks = marks
        self._tools = tools

    @abstractmethod
    def content_state(self) -> bool: ...

    def opened(self, name: str) -> None:
        """A call has begun, up to its first parameter."""
        self.begin(name)
        self._schema = self._tools.get(name, {})
        self._given: set[str] = set()
        self.state = self._between_state

    def _between_state(self) -> bool:
        self.buffer = self.buffer.lstrip(BLANKS)
        found = self._marks.parameter.match(self.buffer)
        if found is not None and found.end() <= LONGEST_HEAD:
            self.take(found.end())
            self._open_value(found[1].strip(BLANKS), found[2] if found.re.groups > 1 else None)
        elif self.buffer.startswith("{") and not self._given:
            self._body = JsonArguments(self)
            self.state = self._body_state
        elif not self.ended and self._may_go_on():
            return False
        else:
            self._end_between()
        return True

    def _may_go_on(self) -> bool:
        if self.buffer.startswith((*self._marks.ends, *self._marks.calls)):
            return False
        if self.buffer.startswith(self._marks.begin):
            return len(self.buffer) <= LONGEST_HEAD
        return any(mark.startswith(self.buffer) for mark in self._marks.following if mark != self.buffer)

    def _end_between(self) -> None:
        cut = self.ended and self._may_go_on()
        if not cut or self._is_whole():
            self.arguments("}" if self._given else "{}")
        if cut:
            self.buffer = ""
        self.close(*self._marks.ends)

    def _is_whole(self) -> bool:
        """True if all required parameters are there at the end of the text, so that only the call's end is missing."""
        required = self._schema.get("required") or ()
        return not self.buffer.startswith(self._marks.begin) and self._given.issuperset(required)

    def _open_value(self, key: str, told: str | None) -> None:
        """Opens a value; of two parameters with one name the first counts. `told`: the type in the tag."""
        self._parameter = schema = ParameterSchema.of(self._schema, key)
        self._end = self._marks.end.format(key)
        self._types = schema.types()
        self._streams = self._types == {"string"} and schema.text() is not None
        if told is not None:
            self._streams = told in STRINGS
            self._types = frozenset({"string"}) if self._streams else self._types - {"string"} or self._types
        self._write: Callable[[str], None] = self.arguments if key not in self._given else lambda text: None
        self._write((", " if self._given else "{") + json.dumps(key, ensure_ascii=False) + ": ")
        self._write('"' if self._streams else "")
        self._given.add(key)
        self._place, self._at_start = 0, True
        self.state = self._line_state

    def _line_state(self) -> bool:
        if not self.buffer and not self.ended:
            return False
        if self._marks.lined and self.buffer.startswith("\n"):
            self.take(1)
        self.state = self._value_state if self._streams else self._start_state
        return True

    def _start_state(self) -> bool:
        """Starts a value; tags within the strings of a JSON value belong to it."""
        found = NO_BLANK.search(self.buffer, self._place)
        if found is None and not self.ended:
            self._place = len(self.buffer)
            return False
        self.state, self._place = self._value_state, 0
        if found is not None and found[0] in '{["':
            self._json = JsonValue(found.start(), '"')
            self.state = self._json_state
        return True

    def _json_state(self) -> bool:
        if self._json.ends(self.buffer):
            self._place = self._json.place
        elif not self.ended:  # else it has brackets that nothing closes, and is no JSON
            return False
        self.state = self._value_state
        return True

    def _value_state(self) -> bool:
        found = self._find_end()
        certain = self._place if found is None else found
        if self.buffer[certain - 1 : certain] == "\n" and self._is_margin(found):
            certain -= 1
        text = self.take(certain) if self._streams or found is not None else ""
        self._place -= len(text)
        self._at_start = self._at_start and not text
        if self._streams:
            self._write(json.dumps(text, ensure_ascii=False)[1:-1])
        if found is not None:
            self._write('"' if self._streams else self.value(text, self._parameter, self._types))
            self.buffer = self.buffer.removeprefix("\n").removeprefix(self._end)
            self.state = self._between_state
        elif self.ended:
            self.buffer = ""  # of what only a whole value can tell
            self.state = self.content_state
        return found is not None or self.ended

    def value(self, text: str, parameter: ParameterSchema, types: frozenset[str]) -> str:
        """A value that was not streamed, as JSON."""
        return written_value(text, types)

    def _is_margin(self, end: int | None) -> bool:
        """True if a line break before the value's end does not belong to it, or might not."""
        if end is None:
            return not self.ended
        return self._marks.lined or not self.buffer.startswith(self._end, end)

    def _find_end(self) -> int | None:
        """The position of the value's end; None: unknown, but text before `_place` belongs to the value."""
        while (place := self.buffer.find(self._end[0], self._place)) >= 0:
            self._place = place
            if (ends := self._ends_at(place)) is None:
                return None
            if ends:
                return place
            self._place = place + 1
        self._place = len(self.buffer)
        return None

    def _ends_at(self, place: int) -> bool | None:
        """True if a tag ends the value: its own, or one that shows that it is missing; None: undecided."""
        marks, text = self._marks, self.buffer[place : place + len(self._end) + 2 * MOST_BLANKS]
        if text.startswith(self._end):
            return self._followed(text[len(self._end) :], marks.following)
        if not marks.forgiving:
            return not self.ended and (None if self._end.startswith(text) else False)
        on_a_line = self.buffer[place - 1] == "\n" if place else self._at_start
        if text.startswith(marks.call_end) or (on_a_line and text.startswith(marks.begin)):
            return True
        for mark in marks.ends[:-1]:
            if on_a_line and text.startswith(mark):
                return self._followed(text[len(mark) :], (marks.call_end, *marks.calls))
        if self.ended:
            return False
        return None if any(mark.startswith(text) for mark in (self._end, *marks.following)) else False

    def _followed(self, text: str, marks: tuple[str, ...]) -> bool | None:
        text = text[: MOST_BLANKS + max(map(len, marks))]
        rest = text.lstrip(BLANKS)
        if len(text) - len(rest) > MOST_BLANKS:
            return False
        if rest.startswith(marks):
            return True
        return (True if self.ended else None) if any(mark.startswith(rest) for mark in marks) else False

    def _body_state(self) -> bool:
        if not self._body.read():
            return False
        self.close(*self._marks.ends)
        return True


def written_tools(
    tools: ToolSchemas,
    head: Callable[[str], str],
    opening: Callable[[str, str], str],
    marks: XmlMarks,
    gaps: Gaps,
    write: GrammarPieces,
) -> str:
    """A grammar's expression for a call of one of the tools.

    `head` writes the tag with a tool's name, `opening` the tag with a parameter's name and type.
    """
    one = []
    for name, schema in tools.items():
        parameters = _written_parameters(schema, opening, marks, gaps, write)
        inside = f"{write.json(schema)} {write.literal(gaps.parameter)}" if parameters is None else parameters
        one.append(f"{literal(head(name) + gaps.head, write)} {inside} {write.literal(gaps.last)}")
    return " | ".join(one)


def _written_parameters(
    schema: Mapping[str, Any],
    opening: Callable[[str, str], str],
    marks: XmlMarks,
    gaps: Gaps,
    write: GrammarPieces,
) -> str | None:
    """A grammar's expression for the parameters of a tool, in the order of its schema.

    None if they depend on each other, have no names or names that no tag can contain, or if there are no tags.
    """
    properties, required = schema.get("properties") or {}, set(schema.get("required") or ())
    if schema.keys() - PLAIN_KEYWORDS or required - properties.keys() or schema.get("type", "object") != "object":
        return None
    if not opening("a", "string") or (not properties and schema.get("additionalProperties", True) is not False):
        return None
    written = []
    for key in properties:
        parameter = ParameterSchema.of(schema, key)
        alone, text = parameter.standing_alone(), parameter.text()
        kinds = {"string"} if text is not None else parameter.types() - {"string"} or {"object"}
        begun = dict.fromkeys(opening(key, kind) for kind in sorted(kinds))
        tag = marks.parameter.match(next(iter(begun)))
        if tag is None or tag[1] != key or key.strip() != key or alone is None:
            return None
        if alone is not False or key in required:
            tags = " | ".join(write.literal(each) for each in begun)
            value = _written_value(text, alone, key, marks, write)
            written.append(f"(({tags}) {value} {write.literal(gaps.parameter)}){'' if key in required else '?'}")
    return " ".join(written)


def _written_value(text: str | None, schema: Any, key: str, marks: XmlMarks, write: GrammarPieces) -> str:
    closing = marks.end.format(key)
    end = write.literal(("\n" if marks.lined else "") + closing)
    if text is None:
        return f"{write.json(schema)} {end}"
    tags = "|".join(re.escape(mark).replace("/", "\\/") for mark in (closing, *marks.following))
    text = f"({text}) & ~/(?s:.*)({tags})(?s:.*)/"
    inside, behind = (end, "") if end.startswith('"') else ("", end)
    return write.part(StructuredOutput(grammar=GRAMMAR.format(behind, text, inside)))
