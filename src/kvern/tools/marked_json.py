"""Calls with JSON arguments between tokens, in a section between tokens: DeepSeek, Kimi K2 and Solar.

    DeepSeek V3 and R1      <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
                            ```json
                            {"city": "Oslo"}
                            ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

    DeepSeek V3.1           <｜tool▁calls▁begin｜>
                            <｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Oslo"}<｜tool▁call▁end｜>
                            <｜tool▁calls▁end｜>

    Kimi K2                 <|tool_calls_section_begin|>
                            <|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Oslo"}
                            <|tool_call_end|><|tool_calls_section_end|>

    Solar                   <|tool_calls|><|tool_call:begin|>id<|tool_call:name|>get_weather
                            <|tool_call:args|>{"city": "Oslo"}<|tool_call:end|>

Only the calls of V3 contain line breaks. A missing opening of a section is accepted.
"""

import re
from abc import abstractmethod

from kvern.tools.buffered import BufferedParser
from kvern.tools.json_call import JsonArguments
from kvern.tools.tool_format import NAME, GrammarPieces, ToolFormat, ToolParser, ToolSchemas

LONGEST_HEAD = 256
SEPARATOR, FENCE = "<｜tool▁sep｜>", "```"
ARGUMENTS = "<|tool_call_argument_begin|>"


class MarkedJson(ToolFormat):
    """A format; see ToolFormat. `section` and `call` are the tokens around them, `inside` the tokens in each call."""

    section: tuple[str, str]
    call: tuple[str, str]
    inside: tuple[str, ...]
    head: re.Pattern[str]
    """The beginning of a call, up to its arguments: `name`, and `id` if it has one."""
    fence = ""
    """The fence that ends the arguments."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens and must stay visible."""
        return tuple(mark for mark in (*self.section, *self.call, *self.inside) if mark)

    @property
    def trigger(self) -> str:
        """The beginning of a section of calls."""
        return self.section[0]

    def matches(self, template: str) -> bool:
        """The template writes earlier calls with these tokens."""
        return self.trigger in template

    def parser(self, tools: ToolSchemas) -> ToolParser:
        """The tokens leave no doubt, so that calls of unknown tools are calls, too."""
        return MarkedJsonParser(self)

    @abstractmethod
    def before(self, name: str, write: GrammarPieces) -> str:
        """A grammar's expression for the head of a call."""

    def calls(self, tools: ToolSchemas, several: bool, write: GrammarPieces) -> str:
        """The grammar of calls in one section."""
        begin, end = map(write.literal, self.call)
        behind = write.literal(f"\n{self.fence}") if self.fence else ""
        call = f"{begin} {write.call(tools, lambda name: self.before(name, write))} {behind} {end}"
        more = f'("\\n"? {call})*' if several else ""
        return f"{call} {more} {write.literal(self.section[1])}"


class DeepSeek(MarkedJson):
    """DeepSeek's format: V3 with a fence around arguments, or V3.1, by the template; the parser reads both."""

    name = "deepseek"
    section = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    call = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
    inside = (SEPARATOR,)
    head = re.compile(
        rf"\s*(?:function{SEPARATOR}(?={NAME.pattern}\s))?(?P<name>{NAME.pattern})(?:\s*{FENCE}json|{SEPARATOR})\s*"
    )

    def __init__(self, fenced: bool) -> None:
        self.fence = FENCE if fenced else ""

    def matches(self, template: str) -> bool:
        """True if the template has the form of this instance."""
        return super().matches(template) and (FENCE in template) == bool(self.fence)

    def before(self, name: str, write: GrammarPieces) -> str:
        """The beginning of a call as the template renders it."""
        return write.literal(f"function{SEPARATOR}{name}\n{FENCE}json\n" if self.fence else f"{name}{SEPARATOR}")


class KimiK2(MarkedJson):
    """Kimi K2's format: calls have ids of the form in which the template renders earlier calls."""

    name = "kimi_k2"
    section = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    call = ("<|tool_call_begin|>", "<|tool_call_end|>")
    inside = (ARGUMENTS,)
    head = re.compile(rf"\s*(?P<id>functions\.(?P<name>{NAME.pattern}):\d{{1,9}})\s*{re.escape(ARGUMENTS)}\s*")

    def before(self, name: str, write: GrammarPieces) -> str:
        """The beginning of a call, with any number in its id."""
        return f"{write.literal(f'functions.{name}:')} /[0-9]{{1,4}}/ {write.literal(ARGUMENTS)}"


class Solar(MarkedJson):
    """Solar's format: calls have ids, and the section ends with the answer."""

    name = "solar"
    section = ("<|tool_calls|>", "")
    call = ("<|tool_call:begin|>", "<|tool_call:end|>")
    inside = ("<|tool_call:name|>", "<|tool_call:args|>")
    head = re.compile(
        rf"\s*(?P<id>[\w-]{{0,64}}){re.escape(inside[0])}(?P<name>{NAME.pattern})\s*{re.escape(inside[1])}\s*"
    )

    def before(self, name: str, write: GrammarPieces) -> str:
        """The beginning of a call, with any id."""
        named, arguments = self.inside
        return f"/[a-zA-Z0-9]{{4,16}}/ {write.literal(named + name + arguments)}"


class MarkedJsonParser(BufferedParser):
    """A parser of content, calls, and content."""

    def __init__(self, form: MarkedJson) -> None:
        super().__init__(form.section[0], form.call[0])
        self._form = form

    def marked_state(self) -> bool:
        """Reads on after the token that opens a section, or a call without one."""
        self.state = self._head_state if self.opening == self._form.call[0] else self._section_state
        return True

    def _section_state(self) -> bool:
        """Reads the start of a section, which only a call may follow."""
        found = self.expect(self._form.call[0])
        if found is None:
            return False
        if not found:
            return self.no_call()
        self.opening += self.take(self.buffer.index(self._form.call[0]) + len(self._form.call[0]))
        self.state = self._head_state
        return True

    def _head_state(self) -> bool:
        """Reads a name, which must be followed by arguments or the end."""
        found = self._form.head.match(self.buffer[:LONGEST_HEAD])
        rest = "" if found is None else self.buffer[found.end() :]
        end = self._form.call[1]
        if found is not None and rest.startswith(("{", end)):
            self.take(found.end())
            groups = found.groupdict()
            self.begin(groups["name"], groups.get("id", ""))
            if rest.startswith("{"):
                self.state = JsonArguments(self, self._end_call).state
            else:
                self.arguments("{}")
                self._end_call()
            return True
        certain = self.ended or len(self.buffer) > LONGEST_HEAD or "{" in self.buffer or end in self.buffer
        return certain and self.no_call()

    def _end_call(self) -> None:
        self.close(FENCE, self._form.call[1], self._form.section[1])
