"""Calls between XML tags that name a function, with tags around each parameter: Qwen3-Coder, MiniMax, GLM and others.

    <tool_call>                             <minimax:tool_call>
    <function=get_weather>                  <invoke name="get_weather">
    <parameter=city>                        <parameter name="city">Oslo</parameter>
    Oslo                                    </invoke>
    </parameter>                            </minimax:tool_call>
    </function>
    </tool_call>

GLM 4.5 and later have <tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>, with line
breaks or without. The outer opening is often forgotten; then only the request's tools count.
"""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kvern.tools.buffered import BLANKS
from kvern.tools.json_calls import MARK
from kvern.tools.tool_format import NAME, NUMBER, GrammarPieces, ToolParser, ToolSchemas, literal
from kvern.tools.xml_call import CALL, CALL_END, KEY_IN_TAG, LONGEST_HEAD, Gaps, XmlMarks, XmlParser, written_tools


@dataclass(frozen=True)
class XmlFunctions:
    """The format of one family; see ToolFormat.

    Opening tags are given as the text before a name and the text after it. That of a parameter may contain {}, which
    stands for its type in words, or for "true" for a string and "false" for all else.
    """

    name: str
    outer: tuple[str, str]
    """Tags around all calls, or around each; empty: there are none."""
    function: tuple[str, str, str]
    """Texts before a function's name, after it, and at the end of the call."""
    parameter: tuple[str, str, str]
    lined: bool = False
    several_inside: bool = False
    """True if several calls share one pair of outer tags."""
    types: Literal["", "words", "strings"] = ""
    gaps: Gaps = Gaps()
    header: tuple[str, str, str] = ("", "", "")
    """Texts between two messages with a call each, before the function's name, and after it."""
    forgiving: bool = True
    in_json: bool = False
    """True if arguments are one JSON object instead of parameters."""
    special: tuple[str, ...] = ()
    """Further texts that may be special tokens."""
    stops: tuple[str, ...] = ()
    hint: str = ""
    """A text in templates that render no calls, which identifies this form as its tags do."""

    @functools.cached_property
    def marks(self) -> XmlMarks:
        """The tags for the parser."""
        before, behind, end = self.parameter
        told = "([a-z]+)".join(map(_flexible, behind.split("{}"))) if self.types else _flexible(behind)
        pattern = re.compile(f"{re.escape(before)}({KEY_IN_TAG}){told}")
        opened = self.outer[0]
        calls = (opened,) if opened and not self.several_inside else tuple(filter(None, (opened, self.function[0])))
        ends = tuple(filter(None, (self.function[2], self.outer[1])))
        return XmlMarks(calls, pattern, before, end, ends, self.lined, self.forgiving)

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens and must stay visible."""
        tags = " ".join((*self.outer, *self.function, *self.parameter, *self.header))
        return tuple(dict.fromkeys((*self.special, *MARK.findall(tags))))

    @property
    def trigger(self) -> str:
        """The beginning of a call."""
        return self.marks.calls[0]

    @property
    def opening(self) -> str:
        """The first character of a call."""
        return self.trigger[0]

    def matches(self, template: str) -> bool:
        """The template writes earlier calls with these tags."""
        has_parameter = self.marks.begin in template or bool(self.hint and self.hint in template)
        return has_parameter and self.marks.calls[0] in template and self.function[0] in template

    def as_written(self, texts: Sequence[str], names: Sequence[str]) -> "XmlFunctions":
        """The format with the blanks that a template renders between the tags of calls to these functions."""
        opened, closed = self.outer
        function, head, end = self.function
        parameter, key, last = self.parameter
        keys = re.findall(re.escape(parameter) + f"({KEY_IN_TAG})" + re.escape(last[-1]), texts[0])
        last = last.format(keys[-1] if keys else "")
        gaps = self.gaps.seen(
            texts,
            opened=(opened, function),
            head=(names[0] + head, parameter),
            key=(key.partition("\n")[0], key.partition("\n")[2]),
            parameter=(last, parameter),
            last=(last, end),
            closed=(end, closed),
            calls=(end, function) if self.several_inside or not opened else (closed, opened),
        )
        return replace(self, gaps=gaps)

    def parser(self, tools: ToolSchemas) -> ToolParser:
        """The outer tags leave no doubt, so that calls of unknown tools within them are calls, too."""
        return XmlFunctionsParser(self, tools)

    def calls(self, tools: ToolSchemas, several: bool, write: GrammarPieces) -> str:
        """The grammar of calls, with the template's blanks."""
        gaps = self.gaps
        opened, closed = self.outer
        function, head, end = self.function
        before = function if opened else ""  # else it is the trigger
        one = written_tools(tools, f"{before}{{}}{head}".format, self._opening, self.marks, gaps, write)
        call = f"({one}) {literal(end, write)}"
        if not opened:
            again = literal(gaps.calls + function, write)
            return f"{call} ({again} {call})*" if several else call
        begin, over = literal(gaps.opened, write), literal(gaps.closed + closed, write)
        if self.several_inside:
            more = f"({literal(gaps.calls, write)} {call})*" if several else ""
            return f"{begin} {call} {more} {over}"
        between = self.headed(tools, write) or literal(gaps.calls, write)
        again = f"{between} {literal(opened + gaps.opened, write)}"
        return f"{begin} {call} {over} ({again} {call} {over})*" if several else f"{begin} {call} {over}"

    def headed(self, tools: ToolSchemas, write: GrammarPieces) -> str:
        """A grammar's expression for the header of a message that calls one of the tools; empty: there are none."""
        between, before, behind = (literal(text, write) for text in self.header)
        names = " | ".join(literal(name, write) for name in tools)
        return f"({between})? {before} ({names}) {behind}" if before else ""

    def _opening(self, key: str, kind: str) -> str:
        if self.in_json:
            return ""
        before, behind, _ = self.parameter
        told = kind if self.types == "words" else "true" if kind == "string" else "false"
        behind = behind.replace("\n", self.gaps.key)
        return before + key + (behind.replace("{}", told) if self.types else behind) + ("\n" if self.lined else "")


def _flexible(text: str) -> str:
    """A pattern for tags that may have other blanks between them."""
    return r"\s*".join(re.escape(piece) for piece in text.split("\n"))


class XmlFunctionsParser(XmlParser):
    """A parser of content, a call, and content."""

    def __init__(self, form: XmlFunctions, tools: ToolSchemas) -> None:
        super().__init__(form.marks, tools)
        self._function, behind, _ = form.function
        self._is_open = not form.outer[0]
        between, before, self._behind_name = form.header
        self._headers = (between + before, before) if before else ()
        self._longest = len(behind) + 2 * behind.count(NUMBER)
        behind = re.escape(behind).replace(NUMBER, r"\d{1,9}")
        self._following = () if behind else (form.marks.begin, form.marks.call_end, "{")
        """Texts of which one follows the name, if no tag does."""
        gap = r"\s*" if self._following else ""
        if self._following:
            behind = rf"\s*(?={'|'.join(map(re.escape, self._following))})"
        self._head = re.compile(rf"\s*{re.escape(self._function)}{gap}({NAME.pattern}){behind}")

    def drop(self, marker: str) -> None:
        """Drops a marker; after the outer end the text is outside of calls."""
        super().drop(marker)
        self._is_open = self._is_open and (marker != self._marks.call_end or len(self._marks.ends) == 1)

    def content_state(self) -> bool:
        """Reads content up to an opening, or to a possible header."""
        self._opening = self.content_until(self._marks.calls[0], self._function, *self._headers)
        if self._opening:
            self.state = self._header_state if self._opening in self._headers else self._head_state
        return bool(self._opening)

    def _header_state(self) -> bool:
        """Drops a message header if a call follows."""
        name = NAME.match(self.buffer)
        rest = self.buffer if name is None else self.buffer[name.end() :]
        wanted = self._behind_name + self._marks.calls[0]
        if name is not None and rest.startswith(wanted):
            self.buffer = rest[len(self._behind_name) :]
            self.state = self.content_state
            return True
        return not (wanted.startswith(rest) and not self.ended) and self.no_call(self._opening)

    def _head_state(self) -> bool:
        inner = self._opening == self._function
        text = self._function + self.buffer if inner else self.buffer
        found = self._head.match(text)
        outside = inner and not self._is_open
        if found is None or found.end() > LONGEST_HEAD or (outside and found[1] not in self._tools):
            if not self.ended and found is None and self._may_become_head(text):
                return False
            return self.no_call(self._opening)
        self._is_open = self._is_open or not inner
        self.buffer = text[found.end() :]
        self.opened(found[1])
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


QWEN3_CODER = XmlFunctions(
    "qwen3_coder",
    (CALL, CALL_END),
    ("<function=", ">", "</function>"),
    ("<parameter=", ">", "</parameter>"),
    lined=True,
)
SEED = XmlFunctions(
    "seed",
    ("<seed:tool_call>", "</seed:tool_call>"),
    ("<function=", ">", "</function>"),
    ("<parameter=", ">", "</parameter>"),
)
MINIMAX = XmlFunctions(
    "minimax",
    ("<minimax:tool_call>", "</minimax:tool_call>"),
    ('<invoke name="', '">', "</invoke>"),
    ('<parameter name="', '">', "</parameter>"),
    several_inside=True,
)
DSML = tuple(
    XmlFunctions(
        name,
        (f"<｜DSML｜{outer}>", f"</｜DSML｜{outer}>"),
        ('<｜DSML｜invoke name="', '">', "</｜DSML｜invoke>"),
        ('<｜DSML｜parameter name="', '" string="{}">', "</｜DSML｜parameter>"),
        several_inside=True,
        types="strings",
    )
    for name, outer in (("deepseek_v32", "function_calls"), ("deepseek_v4", "tool_calls"))
)
KIMI_K3 = XmlFunctions(
    "kimi_k3",
    ("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
    ('<|open|>call tool="', f'" index="{NUMBER}"<|sep|>', "<|close|>call<|sep|>"),
    ('<|open|>argument key="', '" type="{}"<|sep|>', "<|close|>argument<|sep|>"),
    several_inside=True,
    types="words",
    gaps=Gaps("", "", "", "", "", "", ""),
)
HY3 = XmlFunctions(
    "hy3",
    ("<tool_calls:opensource>", "</tool_calls:opensource>"),
    ("<tool_call:opensource>", "<tool_sep:opensource>", "</tool_call:opensource>"),
    ("<arg_key:opensource>", "</arg_key:opensource>\n<arg_value:opensource>", "</arg_value:opensource>"),
    several_inside=True,
    gaps=Gaps(key="\n"),
)
GLM = XmlFunctions(
    "glm",
    ("", ""),
    (CALL, "", CALL_END),
    ("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>"),
    gaps=Gaps(opened="", key="\n"),
    stops=("<|observation|>",),
    hint=f"{CALL}function_name",
)
"""GLM 4.5; GLM 4.7 has no line breaks."""
MINICPM5 = XmlFunctions(
    "minicpm5",
    ("", ""),
    ('<function name="', '">', "</function>"),
    ('<param name="', '">', "</param>"),
    gaps=Gaps("", "", "", "", "", "", "\n"),
)
FUNCTIONARY = XmlFunctions(
    "functionary",
    ("", ""),
    ("<function=", ">", "</function>"),
    ("<parameter=", ">", "</parameter>"),
    in_json=True,
    gaps=Gaps("", "", "", "", "", "", ""),
)
MUSE = XmlFunctions(
    "muse",
    ("<atem:function_calls>", "</atem:function_calls>"),
    ('<atem:invoke name="', '">', "</atem:invoke>"),
    ('<atem:parameter name="', '">', "</atem:parameter>"),
    header=("<|eom|><|start|>assistant", " to=", "<|message|>"),
)
XML_FORMATS = (QWEN3_CODER, MINIMAX, SEED, *DSML, KIMI_K3, HY3, MINICPM5, FUNCTIONARY, MUSE)
