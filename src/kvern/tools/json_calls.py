"""Calls that are JSON objects, between marks or as the whole answer: the format of most families.

    <tool_call>{"name": "f", "arguments": {...}}</tool_call>        Hermes, Qwen, Granite 4
    <tool_calls>[{"name": "f", "arguments": {...}}]</tool_calls>    Hunyuan, Apriel
    <|tools_prefix|>[{"f": {...}}]<|tools_suffix|>                  Apertus
    {"name": "f", "parameters": {...}}                              Llama 3

A template's own form, with its line breaks and separators, is learnt from its output: `learnt_json` in `formats.py`.
"""

import re
from collections.abc import Container
from dataclasses import dataclass

from kvern.tools.buffered import BLANKS, BufferedParser
from kvern.tools.json_call import JsonCall
from kvern.tools.tool_format import GrammarPieces, ToolFormat, ToolParser, ToolSchemas, literal

MARK = re.compile(r"<[^<>\s]{1,64}>|\[[A-Z_/]{1,64}\]")
WRAPPERS = ("<|python_tag|>", "functools", "```json", "```", "<tool_call>")
"""Texts that may precede calls that are the whole answer."""
WRAPPER_ENDS = ("```", "</tool_call>")


@dataclass(frozen=True)
class JsonCalls(ToolFormat):
    """One form; see ToolFormat. A call is `before`, its name, `middle`, its arguments and `after`.

    `begin` precedes the first call, `between` separates two, `end` follows the last; without `between` there is one
    call only. `keyed`: calls are {"f": {...}}. `hints` are texts in templates that render no calls, which identify this
    form.
    """

    name: str
    begin: str
    before: str
    middle: str
    after: str
    between: str | None
    end: str
    keyed: bool = False
    hints: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()

    @property
    def mark(self) -> str:
        """The mark before calls; empty: calls are the whole answer."""
        return self.begin.rstrip(BLANKS + "[")

    @property
    def end_mark(self) -> str:
        """The mark after calls."""
        return self.end.strip(BLANKS).lstrip(BLANKS + "]")

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens and must stay visible."""
        wrappers = () if self.mark else WRAPPERS[:1]
        return tuple(dict.fromkeys((*MARK.findall(f"{self.begin} {self.between or ''} {self.end}"), *wrappers)))

    @property
    def trigger(self) -> str | None:
        """The beginning of a call, or None."""
        return self.mark or None

    @property
    def opening(self) -> str:
        """The first character of a call."""
        return (self.begin + self.before)[0]

    def matches(self, template: str) -> bool:
        """True if the template, which renders no calls, contains a hint."""
        return any(hint in template for hint in self.hints)

    def parser(self, tools: ToolSchemas) -> ToolParser:
        """Marks leave no doubt, so that calls of unknown tools are calls, too; without any, JSON can be an answer."""
        return JsonCallsParser(self, None if self.mark else tools)

    def calls(self, tools: ToolSchemas, several: bool, write: GrammarPieces) -> str:
        """The grammar of calls in the template's form."""
        one = write.call(tools, lambda name: literal(self.before + name + self.middle, write))
        call = f"{one} {literal(self.after, write)}"
        more = f"({literal(self.between, write)} {call})*" if several and self.between is not None else ""
        return f"{literal(self.begin[len(self.mark) :], write)} {call} {more} {literal(self.end, write)}"


class JsonCallsParser(BufferedParser):
    """The parser: content, then calls after a mark, then content; without a mark, calls at the beginning."""

    def __init__(self, form: JsonCalls, names: Container[str] | None) -> None:
        """`names`: only calls of these functions count; None: of any."""
        super().__init__(*filter(None, [form.mark]))
        self._form, self._names = form, names
        self._in_list = False
        if not form.mark:
            self.state = self._beginning_state

    def marked_state(self) -> bool:
        """Reads on after the mark."""
        self._in_list = False
        self.state = self.open_state
        return True

    def _beginning_state(self) -> bool:
        for wrapper in WRAPPERS:
            found = self.expect(wrapper)
            if found is None:
                return False
            if found:
                self.opening = self.take(self.buffer.index(wrapper) + len(wrapper))
                break
        self.state = self.open_state
        return True

    def open_state(self) -> bool:
        """Reads up to a possible call; text before it is in `opening`."""
        text = self.buffer.lstrip(BLANKS)
        if not text and not self.ended:
            return False
        opens = text.startswith("[") and not self._in_list
        self.opening += self.take(len(self.buffer) - len(text) + opens)
        if opens:
            self._in_list = True
            return True
        self._call = JsonCall(self, self._names, self._form.keyed)
        self.state = self._call_state
        return True

    def _call_state(self) -> bool:
        result = self._call.read()
        if result is None and not self.ended:
            return False
        if not self._call.begun:
            self.no_call()
        elif result:
            self._in_list = True
            self.state = self._next_state
        else:
            if result is None:
                self._call.end()
            self.close_call()
        return True

    def _next_state(self) -> bool:
        """Reads the text after a call: another call, or the end."""
        found = {sign: self.expect(sign) for sign in ",;{]"}
        if None in found.values():
            return False
        sign = next((sign for sign in found if found[sign]), "")
        self.opening = self.take(self.buffer.index(sign) + 1) if sign and sign != "{" else ""
        if sign and sign != "]":
            self.state = self.open_state
        else:
            self.close_call()
        return True

    def close_call(self) -> None:
        """Expects the mark after calls, or the end of what wraps them."""
        self.close(*((self._form.end_mark,) if self._form.mark else WRAPPER_ENDS))


NAMED = ('{"name": "', '", "arguments": ', "}")
HERMES = JsonCalls(
    "hermes",
    "<tool_call>\n",
    *NAMED,
    "\n</tool_call>\n<tool_call>\n",
    "\n</tool_call>",
    hints=("<tool_call>",),
)
LLAMA = JsonCalls(
    "llama",
    "",
    *('{"name": "', '", "parameters": ', "}"),
    "; ",
    "",
    hints=('{"name": function name, "parameters":',),
)
LISTS = (
    JsonCalls("granite", "<|tool_call|>[", *NAMED, ", ", "]", hints=("<|tool_call|>",)),
    JsonCalls("phi4_mini", "<|tool_call|>[", *NAMED, ", ", "]<|/tool_call|>", hints=("<|tool|>",)),
    JsonCalls("functools", "functools[", *NAMED, ", ", "]", hints=("functools[",)),
    JsonCalls("nemotron", "<TOOLCALL>[", *NAMED, ", ", "]</TOOLCALL>", hints=("<TOOLCALL>",)),
    JsonCalls("tool_calls", "<tool_calls>[", *NAMED, ", ", "]</tool_calls>", hints=("<tool_calls>",)),
)
JSON = JsonCalls("json", "", *NAMED, ", ", "")
"""The format for templates that render calls in no known form."""
