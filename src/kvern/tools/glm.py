"""GLM 4.5 and later: names and values of parameters by turns, between tags.

    <tool_call>get_weather
    <arg_key>city</arg_key>
    <arg_value>Oslo</arg_value>
    </tool_call>

GLM 4.7 has no line breaks.
"""

import re

from kvern.tools.buffered import BLANKS
from kvern.tools.tool_format import NAME, GrammarPieces, ToolParser, ToolSchemas
from kvern.tools.xml_call import CALL, CALL_END, KEY_IN_TAG, LONGEST_HEAD, XmlMarks, XmlParser, written_tools

KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
PARAMETER = re.compile(rf"{KEY}({KEY_IN_TAG}){KEY_END}\s*{VALUE}")
MARKS = XmlMarks((CALL,), PARAMETER, KEY, VALUE_END, (CALL_END,), lined=False)
HEAD = re.compile(rf"\s*({NAME.pattern})\s*")


class Glm:
    """The format; see ToolFormat."""

    name = "glm"
    markers = (CALL, CALL_END, KEY, KEY_END, VALUE, VALUE_END)
    stops = ("<|observation|>",)
    trigger = CALL
    opening = "<"

    def matches(self, template: str) -> bool:
        """It knows these tags, or tells the model to write a name behind the tag."""
        return CALL in template and (KEY in template or f"{CALL}function_name" in template)

    def parser(self, tools: ToolSchemas) -> ToolParser:
        """The tags leave no doubt, so that calls of unknown tools are calls, too."""
        return GlmParser(tools)

    def calls(self, tools: ToolSchemas, several: bool, write: GrammarPieces) -> str:
        """With the line breaks of GLM 4.5."""
        one = written_tools(tools, "{}\n".format, f"{KEY}{{}}{KEY_END}\n{VALUE}".format, MARKS, write)
        call = f"({one}) {write.literal(CALL_END)}"
        return f'{call} ("\\n"? {write.literal(CALL)} {call})*' if several else call


class GlmParser(XmlParser):
    """Content, then a call, then content."""

    def __init__(self, tools: ToolSchemas) -> None:
        super().__init__(MARKS, tools)

    def content_state(self) -> bool:
        """Up to the tag."""
        if not self.content_until(CALL):
            return False
        self.state = self._head_state
        return True

    def _head_state(self) -> bool:
        """A name, and nothing but a parameter, arguments as JSON or the end behind it."""
        found = HEAD.match(self.buffer)
        rest = self.buffer.lstrip(BLANKS) if found is None else self.buffer[found.end() :]
        if found is not None and found.end() <= LONGEST_HEAD and rest.startswith((KEY, CALL_END, "{")):
            self.take(found.end())
            self.opened(found[1])
        elif self.ended or len(self.buffer) > LONGEST_HEAD or not self._may_become_one(found is not None, rest):
            self.content(CALL)
            self.state = self.content_state
        else:
            return False
        return True

    def _may_become_one(self, named: bool, rest: str) -> bool:
        return any(mark.startswith(rest) for mark in (KEY, CALL_END)) if named else not rest
