"""Functionary 3.2: an answer is a turn of messages, each after its recipient, which is a tool or "all".

    all
    The weather in Oslo, then.>>>get_weather
    {"city": "Oslo"}

The prompt ends with the first `>>>`.
"""

import re

from kvern.tools.buffered import BLANKS, LONGEST_GAP, BufferedParser
from kvern.tools.json_call import JsonArguments
from kvern.tools.tool_format import NAME, GrammarPieces, ToolFormat, ToolParser, ToolSchemas, literal

MARK, ALL = ">>>", "all"
HEAD = re.compile(rf"({NAME.pattern})\n")


class Recipients(ToolFormat):
    """The format; see ToolFormat. Answers without calls are in it, too."""

    name = "functionary_v32"
    opening = ALL[0]

    def matches(self, template: str) -> bool:
        """The template writes messages to all."""
        return MARK + ALL in template

    def parser(self, tools: ToolSchemas) -> ToolParser:
        """The parser: after the mark any name is a call, if there are tools; at the beginning only a tool's name is."""
        return RecipientsParser(tools)

    def calls(self, tools: ToolSchemas, several: bool, write: GrammarPieces) -> str:
        """The grammar of messages to tools, without the first mark."""
        one = write.call(tools, lambda name: literal(name + "\n", write))
        return f"{one} ({write.literal(MARK)} {one})*" if several else one

    def answer(self, said: str, write: GrammarPieces) -> str:
        """A grammar's expression for a message to "all" that matches `said`."""
        head = literal(ALL + "\n", write)
        return f"{head} {said}"


class RecipientsParser(BufferedParser):
    """A parser of a turn, message by message."""

    def __init__(self, tools: ToolSchemas) -> None:
        super().__init__(*[MARK] if tools else [])
        self._tools = tools
        self.state = self._beginning_state

    def _beginning_state(self) -> bool:
        found = self.expect(MARK)
        if found is None:
            return False
        if found:
            self.drop(MARK)
            self.opening = MARK
        self.state = self.marked_state
        return True

    def marked_state(self) -> bool:
        """Reads a recipient."""
        found = HEAD.match(self.buffer)
        if found is None:
            if not self.ended and (not self.buffer or NAME.fullmatch(self.buffer)):
                return False
            if self.buffer != ALL:
                return self.no_call()
            self.buffer += "\n"
            return True
        rest = self.buffer[found.end() :]
        text = rest.lstrip(BLANKS)
        is_tool = found[1] in self._tools
        if found[1] != ALL or is_tool:
            if not text and not self.ended and len(rest) < LONGEST_GAP:
                return False
            if text.startswith("{") and (is_tool or (self.opening and self._tools)):
                self.buffer = text
                self.begin(found[1])
                self.state = JsonArguments(self, self.close).state
                return True
        if found[1] != ALL:
            return self.no_call()
        if self.opening and not self._after_call:
            self.content("\n\n")
        self.buffer = rest
        self.state = self.content_state
        return True
