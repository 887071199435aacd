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
from dataclasses import dataclass

from kvern.tools.buffered import BufferedParser
from kvern.tools.json_call import JsonArguments
from kvern.tools.tool_format import (
    ANY_IDENTITY,
    NAME,
    NUMBER,
    GrammarPieces,
    ToolFormat,
    ToolParser,
    ToolSchemas,
    literal,
)

LONGEST_HEAD = 256
FENCE = "```"


@dataclass(frozen=True)
class MarkedJson(ToolFormat):
    """A format; see ToolFormat. `section` and `call` are the tokens around them, `inside` the tokens in each call.

    `before` is the beginning of a call, up to its arguments, as the template renders it, with {} for the name. `head`
    is that beginning as the parser reads it: `name`, and `id` if it has one. `fenced`: arguments end with a fence, and
    templates of the form have one; None: no template is told apart by that.
    """

    name: str
    section: tuple[str, str]
    call: tuple[str, str]
    inside: tuple[str, ...]
    before: str
    head: re.Pattern[str]
    fenced: bool | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens and must stay visible."""
        return tuple(mark for mark in (*self.section, *self.call, *self.inside) if mark)

    @property
    def trigger(self) -> str:
        """The beginning of a section of calls."""
        return self.section[0]

    def matches(self, template: str) -> bool:
        """The template writes earlier calls with these tokens, and in the form of this instance."""
        return self.trigger in template and self.fenced in (None, FENCE in template)

    def parser(self, tools: ToolSchemas) -> ToolParser:
        """The tokens leave no doubt, so that calls of unknown tools are calls, too."""
        return MarkedJsonParser(self)

    def calls(self, tools: ToolSchemas, several: bool, write: GrammarPieces) -> str:
        """The grammar of calls in one section, with any number or id that the template writes."""
        begin, end = map(write.literal, self.call)
        one = write.call(tools, lambda name: literal(self.before.format(name), write))
        behind = write.literal(f"\n{FENCE}") if self.fenced else ""
        call = f"{begin} {one} {behind} {end}"
        more = f'("\\n"? {call})*' if several else ""
        return f"{call} {more} {write.literal(self.section[1])}"


SEPARATOR = "<｜tool▁sep｜>"
DEEPSEEK = tuple(
    MarkedJson(
        "deepseek",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        (SEPARATOR,),
        f"function{SEPARATOR}{{}}\n{FENCE}json\n" if fenced else f"{{}}{SEPARATOR}",
        re.compile(
            rf"\s*(?:function{SEPARATOR}(?={NAME.pattern}\s))?(?P<name>{NAME.pattern})(?:\s*{FENCE}json|{SEPARATOR})\s*"
        ),
        fenced,
    )
    for fenced in (True, False)
)
"""V3 with a fence around arguments, and V3.1; the parser reads both."""
ARGUMENTS = "<|tool_call_argument_begin|>"
KIMI_K2 = MarkedJson(
    "kimi_k2",
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ("<|tool_call_begin|>", "<|tool_call_end|>"),
    (ARGUMENTS,),
    f"functions.{{}}:{NUMBER}{ARGUMENTS}",
    re.compile(rf"\s*(?P<id>functions\.(?P<name>{NAME.pattern}):\d{{1,9}})\s*{re.escape(ARGUMENTS)}\s*"),
)
"""Calls have ids of the form in which the template renders earlier calls."""
NAMED, GIVEN = "<|tool_call:name|>", "<|tool_call:args|>"
SOLAR = MarkedJson(
    "solar",
    ("<|tool_calls|>", ""),
    ("<|tool_call:begin|>", "<|tool_call:end|>"),
    (NAMED, GIVEN),
    f"{ANY_IDENTITY}{NAMED}{{}}{GIVEN}",
    re.compile(rf"\s*(?P<id>[\w-]{{0,64}}){re.escape(NAMED)}(?P<name>{NAME.pattern})\s*{re.escape(GIVEN)}\s*"),
)
"""Calls have ids, and the section ends with the answer."""


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
