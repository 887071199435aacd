"""The parser of calls with each parameter between XML tags.

content -> head -> between <-> value
                      |-> body, if all arguments are one JSON object instead
                      -> closing -> content
"""

import json
import re
from collections.abc import Callable

from kvern.tools.buffered import BLANKS, BufferedParser
from kvern.tools.json_call import JsonArguments, JsonValue
from kvern.tools.tool_format import NAME, NUMBER, ToolSchemas
from kvern.tools.xml_form import XmlForm
from kvern.tools.xml_values import ParameterSchema, written_value

LONGEST_HEAD = 512
"""The most characters of the opening of a call or parameter."""
MOST_BLANKS = 64
"""The most blanks between tags."""
NO_BLANK = re.compile(rf"[^{BLANKS}]")
STRINGS = ("string", "true")
"""Attribute values of a parameter's tag that mean a string."""


class XmlParser(BufferedParser):
    """A parser of content, a call, and content."""

    def __init__(self, form: XmlForm, tools: ToolSchemas) -> None:
        self._form, self._tools = form, tools
        self._function, behind, _ = form.function
        self._is_open = not form.outer[0]
        between, before, self._behind_name = form.header
        self._headers = (between + before, before) if before else ()
        super().__init__(form.openings[0], self._function, *self._headers)
        self._longest = len(behind) + 2 * behind.count(NUMBER)
        behind = re.escape(behind).replace(NUMBER, r"\d{1,9}")
        self._following = () if behind else (form.parameter[0], form.ends[-1], "{")
        """Texts of which one follows the name, if no tag does."""
        gap = r"\s*" if self._following else ""
        if self._following:
            behind = rf"\s*(?={'|'.join(map(re.escape, self._following))})"
        self._head = re.compile(rf"\s*{re.escape(self._function)}{gap}({NAME.pattern}){behind}")

    def drop(self, marker: str) -> None:
        """Drops a marker; after the outer end the text is outside of calls."""
        super().drop(marker)
        self._is_open = self._is_open and (marker != self._form.ends[-1] or len(self._form.ends) == 1)

    def marked_state(self) -> bool:
        """Reads on after an opening, or after what may be a header."""
        self.state = self._header_state if self.opening in self._headers else self._head_state
        return True

    def _header_state(self) -> bool:
        """Drops a message header if a call follows."""
        name = NAME.match(self.buffer)
        rest = self.buffer if name is None else self.buffer[name.end() :]
        wanted = self._behind_name + self._form.openings[0]
        if name is not None and rest.startswith(wanted):
            self.buffer = rest[len(self._behind_name) :]
            self.state = self.content_state
            return True
        return not (wanted.startswith(rest) and not self.ended) and self.no_call()

    def _head_state(self) -> bool:
        inner = self.opening == self._function
        text = self._function + self.buffer if inner else self.buffer
        found = self._head.match(text)
        outside = inner and not self._is_open
        if found is None or found.end() > LONGEST_HEAD or (outside and found[1] not in self._tools):
            if not self.ended and found is None and self._may_become_head(text):
                return False
            return self.no_call()
        self._is_open = self._is_open or not inner
        self.buffer = text[found.end() :]
        self._begin_call(found[1])
        return True

    def _may_become_head(self, text: str) -> bool:
        named = text.lstrip(BLANKS)
        if len(text) > LONGEST_HEAD or not named.startswith(self._function):
            return len(text) <= LONGEST_HEAD and self._function.startswith(named)
        rest = named[len(self._function) :]
        if self._following:
            name = NAME.match(rest.lstrip(BLANKS))
            rest = rest.lstrip(BLANKS)[0 if name is None else name.end() :].lstrip(BLANKS)
            return any(mark.startswith(rest) for mark in self._following) if name is not None else not rest
        name = NAME.match(rest)
        return len(rest) - (0 if name is None else name.end()) < self._longest

    def _begin_call(self, name: str) -> None:
        self.begin(name)
        self._schema = self._tools.get(name, {})
        self._given: set[str] = set()
        self.state = self._between_state

    def _between_state(self) -> bool:
        self.buffer = self.buffer.lstrip(BLANKS)
        found = self._form.opened_parameter.match(self.buffer)
        if found is not None and found.end() <= LONGEST_HEAD:
            self.take(found.end())
            self._open_value(found[1].strip(BLANKS), found[2] if found.re.groups > 1 else None)
        elif self.buffer.startswith("{") and not self._given:
            self.state = JsonArguments(self, lambda: self.close(*self._form.ends)).state
        elif not self.ended and self._may_go_on():
            return False
        else:
            self._end_between()
        return True

    def _may_go_on(self) -> bool:
        if self.buffer.startswith((*self._form.ends, *self._form.openings)):
            return False
        if self.buffer.startswith(self._form.parameter[0]):
            return len(self.buffer) <= LONGEST_HEAD
        return any(mark.startswith(self.buffer) for mark in self._form.following if mark != self.buffer)

    def _end_between(self) -> None:
        cut = self.ended and self._may_go_on()
        if not cut or self._is_whole():
            self.arguments("}" if self._given else "{}")
        if cut:
            self.buffer = ""
        self.close(*self._form.ends)

    def _is_whole(self) -> bool:
        """True if all required parameters are there at the end of the text, so that only the call's end is missing."""
        required = self._schema.get("required") or ()
        return not self.buffer.startswith(self._form.parameter[0]) and self._given.issuperset(required)

    def _open_value(self, key: str, told: str | None) -> None:
        """Opens a value; of two parameters with one name the first counts. `told`: the type in the tag."""
        self._parameter = schema = ParameterSchema.of(self._schema, key)
        self._end = self._form.parameter[2].format(key)
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
        if self._form.lined and self.buffer.startswith("\n"):
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
        return self._form.lined or not self.buffer.startswith(self._end, end)

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
        form, text = self._form, self.buffer[place : place + len(self._end) + 2 * MOST_BLANKS]
        if text.startswith(self._end):
            return self._followed(text[len(self._end) :], form.following)
        if not form.forgiving:
            return not self.ended and (None if self._end.startswith(text) else False)
        on_a_line = self.buffer[place - 1] == "\n" if place else self._at_start
        if text.startswith(form.ends[-1]) or (on_a_line and text.startswith(form.parameter[0])):
            return True
        for mark in form.ends[:-1]:
            if on_a_line and text.startswith(mark):
                return self._followed(text[len(mark) :], (form.ends[-1], *form.openings))
        if self.ended:
            return False
        return None if any(mark.startswith(text) for mark in (self._end, *form.following)) else False

    def _followed(self, text: str, marks: tuple[str, ...]) -> bool | None:
        text = text[: MOST_BLANKS + max(map(len, marks))]
        rest = text.lstrip(BLANKS)
        if len(text) - len(rest) > MOST_BLANKS:
            return False
        if rest.startswith(marks):
            return True
        return (True if self.ended else None) if any(mark.startswith(rest) for mark in marks) else False
