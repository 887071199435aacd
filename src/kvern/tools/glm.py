"""GLM 4.5 and later: names and values of parameters by turns, between tags.

    <tool_call>get_weather
    <arg_key>city</arg_key>
    <arg_value>Oslo</arg_value>
    </tool_call>

GLM 4.7 has no line breaks.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvern.tools.buffered import BLANKS
from kvern.tools.tool_format import NAME, GrammarPieces, ToolParser, ToolSchemas, literal
from kvern.tools.xml_call import CALL, CALL_END, KEY_IN_TAG, LONGEST_HEAD, Gaps, XmlMarks, XmlParser, written_tools

KEY = "<arg_key>"
KEY_END = "</arg_key>"
VALUE = "<arg_value>"
VALUE_END = "</arg_value>"
PARAMETER = re.compile(rf"{KEY}({KEY_IN_TAG}){KEY_END}\s*{VALUE}")
MARKS = XmlMarks((CALL,), PARAMETER, KEY, VALUE_END, (CALL_END,), lined=False)
HEAD = re.compile(rf"\s*({NAME.pattern})\s*")


@dataclass(frozen=True)
class Glm:
    """The format of GLM; see ToolFormat. The default `gaps` are those of GLM 4.5."""

    gaps: Gaps = Gaps(opened="", key="\n")

    name: ClassVar[str] = "glm"
    markers: ClassVar[tuple[str, ...]] = (CALL, CALL_END, KEY, KEY_END, VALUE, VALUE_END)
    stops: ClassVar[tuple[str, ...]] = ("<|observation|>",)
    trigger: ClassVar[str | None] = CALL
    opening: ClassVar[str] = "<"

    def matches(self, template: str) -> bool:
        """True if the template contains these tags, or tells the model to write a name after the tag."""
        return CALL in template and (KEY in template or f"{CALL}function_name" in template)

    def parser(self, tools: ToolSchemas) -> ToolParser:
        """The tags leave no doubt, so that calls of unknown tools are calls, too."""
        return GlmParser(tools)

    def as_written(self, texts: Sequence[str], names: Sequence[str]) -> "Glm":
        """The format with the blanks that a template renders between the tags of calls to these functions."""
        gaps = self.gaps.seen(
            texts,
            head=(names[0], KEY),
            key=(KEY_END, VALUE),
            parameter=(VALUE_END, KEY),
            last=(VALUE_END, CALL_END),
            calls=(CALL_END, CALL),
        )
        return Glm(gaps)

    def calls(self, tools: ToolSchemas, several: bool, write: GrammarPieces) -> str:
        """The grammar of calls, with the template's blanks."""

        def opening(key: str, _: str) -> str:
            return f"{KEY}{key}{KEY_END}{self.gaps.key}{VALUE}"

        one = written_tools(tools, "{}".format, opening, MARKS, self.gaps, write)
        call = f"({one}) {literal(CALL_END, write)}"
        return f"{call} ({literal(self.gaps.calls + CALL, write)} {call})*" if several else call


class GlmParser(XmlParser):
    """A parser of content, a call, and content."""

    def __init__(self, tools: ToolSchemas) -> None:
        super().__init__(MARKS, tools)

    def content_state(self) -> bool:
        """Reads content up to the tag."""
        if not self.content_until(CALL):
            return False
        self.state = self._head_state
        return True

    def _head_state(self) -> bool:
        """Reads a name, which must be followed by a parameter, arguments as JSON, or the end."""
        found = HEAD.match(self.buffer)
        rest = self.buffer.lstrip(BLANKS) if found is None else self.buffer[found.end() :]
        if found is not None and found.end() <= LONGEST_HEAD and rest.startswith((KEY, CALL_END, "{")):
            self.take(found.end())
            self.opened(found[1])
        elif self.ended or len(self.buffer) > LONGEST_HEAD or not self._may_become_one(found is not None, rest):
            self.no_call(CALL)
        else:
            return False
        return True

    def _may_become_one(self, named: bool, rest: str) -> bool:
        return any(mark.startswith(rest) for mark in (KEY, CALL_END)) if named else not rest
