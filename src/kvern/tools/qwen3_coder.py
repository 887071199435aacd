"""Qwen3-Coder and models that write as it does: each parameter between tags of its own.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Oslo
    </parameter>
    </function>
    </tool_call>

The outer opening is often forgotten; then only the request's tools count.
"""

import re

from kvern.tools.tool_format import NAME, GrammarPieces, ToolParser, ToolSchemas
from kvern.tools.xml_call import CALL, CALL_END, LONGEST_HEAD, XmlMarks, XmlParser, written_tools

FUNCTION, FUNCTION_END = "<function=", "</function>"
MARKS = XmlMarks(
    re.compile(r"<parameter=([^<>\n]{1,256})>"), "<parameter=", "</parameter>", (FUNCTION_END, CALL_END), lined=True
)
HEAD = re.compile(rf"\s*{FUNCTION}({NAME.pattern})>")


class Qwen3Coder:
    """The format; see ToolFormat."""

    name = "qwen3_coder"
    markers = (CALL, CALL_END)
    stops = ()
    trigger = CALL
    opening = "<"

    def matches(self, template: str) -> bool:
        """The template writes earlier calls with these tags."""
        return CALL in template and FUNCTION in template and MARKS.begin in template

    def parser(self, tools: ToolSchemas) -> ToolParser:
        """The outer tags leave no doubt, so that calls of unknown tools within them are calls, too."""
        return Qwen3CoderParser(tools)

    def calls(self, tools: ToolSchemas, several: bool, write: GrammarPieces) -> str:
        """With all line breaks that templates have."""
        one = written_tools(tools, f"{FUNCTION}{{}}>\n".format, "<parameter={}>\n".format, MARKS, write)
        call = f'"\\n"? ({one}) {write.literal(FUNCTION_END)} "\\n"? {write.literal(CALL_END)}'
        return f'{call} ("\\n"? {write.literal(CALL)} {call})*' if several else call


class Qwen3CoderParser(XmlParser):
    """Content, then a call, then content."""

    def __init__(self, tools: ToolSchemas) -> None:
        super().__init__(MARKS, tools)

    def content_state(self) -> bool:
        """Up to either of the openings."""
        self._opening = self.content_until(CALL, FUNCTION)
        if self._opening:
            self.state = self._head_state
        return bool(self._opening)

    def _head_state(self) -> bool:
        inner = self._opening == FUNCTION
        text = FUNCTION + self.buffer if inner else self.buffer
        found = HEAD.match(text)
        if found is None or found.end() > LONGEST_HEAD or (inner and found[1] not in self._tools):
            if not (self.ended or ">" in text or len(text) > LONGEST_HEAD):
                return False
            self.content(self._opening)
            self.state = self.content_state
            return True
        self.buffer = text[found.end() :]
        self.opened(found[1])
        return True
