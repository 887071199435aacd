"""Tags around calls and around each parameter: how a family writes them, and the grammar of such calls."""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvern.request.sampling_params import StructuredOutput
from kvern.tools.json_calls import MARK
from kvern.tools.tool_format import GrammarPieces, ToolFormat, ToolSchemas, literal
from kvern.tools.xml_values import ParameterSchema

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
class XmlForm(ToolFormat):
    """The tags of one family, and the grammar of its calls; see ToolFormat.

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
    """True if arguments are one JSON object instead of parameters, for the grammar; parsers read both."""
    special: tuple[str, ...] = ()
    """Further texts that may be special tokens."""
    stops: tuple[str, ...] = ()
    hint: str = ""
    """A text in templates that render no calls, which identifies this form as its tags do."""

    @functools.cached_property
    def openings(self) -> tuple[str, ...]:
        """The openings of a call: of the first one with the outer tags, and of others."""
        opened = self.outer[0]
        return (opened,) if opened and not self.several_inside else tuple(filter(None, (opened, self.function[0])))

    @functools.cached_property
    def ends(self) -> tuple[str, ...]:
        """The ends of a call."""
        return tuple(filter(None, (self.function[2], self.outer[1])))

    @functools.cached_property
    def following(self) -> tuple[str, ...]:
        """The texts that may follow a value."""
        return self.parameter[0], *self.ends, *self.openings

    @functools.cached_property
    def opened_parameter(self) -> re.Pattern[str]:
        """The opening of a parameter: its name in the first group, its type in the second if it has one."""
        before, behind, _ = self.parameter
        told = "([a-z]+)".join(map(_flexible, behind.split("{}"))) if self.types else _flexible(behind)
        return re.compile(f"{re.escape(before)}({KEY_IN_TAG}){told}")

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that may be special tokens and must stay visible."""
        tags = " ".join((*self.outer, *self.function, *self.parameter, *self.header))
        return tuple(dict.fromkeys((*self.special, *MARK.findall(tags))))

    @property
    def trigger(self) -> str:
        """The beginning of a call."""
        return self.openings[0]

    def matches(self, template: str) -> bool:
        """The text of a template mentions the tags; see `ToolFormat.matches`."""
        has_parameter = self.parameter[0] in template or bool(self.hint and self.hint in template)
        return has_parameter and self.openings[0] in template and self.function[0] in template

    def as_written(self, texts: Sequence[str], names: Sequence[str]) -> "XmlForm":
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

    def calls(self, tools: ToolSchemas, several: bool, write: GrammarPieces) -> str:
        """The grammar of calls, with the template's blanks."""
        gaps = self.gaps
        opened, closed = self.outer
        function, head, end = self.function
        before = function if opened else ""  # else it is the trigger
        one = []
        for name, schema in tools.items():
            inside = self.parameters(schema, write)
            if inside is None:
                inside = f"{write.json(schema)} {write.literal(gaps.parameter)}"
            one.append(f"{literal(before + name + head + gaps.head, write)} {inside} {write.literal(gaps.last)}")
        call = f"({' | '.join(one)}) {literal(end, write)}"
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
        before, behind, _ = self.parameter
        told = kind if self.types == "words" else "true" if kind == "string" else "false"
        behind = behind.replace("\n", self.gaps.key)
        return before + key + (behind.replace("{}", told) if self.types else behind) + ("\n" if self.lined else "")

    def parameters(self, schema: Mapping[str, Any], write: GrammarPieces) -> str | None:
        """A grammar's expression for the parameters of a tool, in the order of its schema.

        None if they depend on each other, have no names or names that no tag can contain, or if there are no tags.
        """
        properties, required = schema.get("properties") or {}, set(schema.get("required") or ())
        if schema.keys() - PLAIN_KEYWORDS or required - properties.keys() or schema.get("type", "object") != "object":
            return None
        if self.in_json or (not properties and schema.get("additionalProperties", True) is not False):
            return None
        written = []
        for key in properties:
            parameter = ParameterSchema.of(schema, key)
            alone, text = parameter.standing_alone(), parameter.text()
            kinds = {"string"} if text is not None else parameter.types() - {"string"} or {"object"}
            begun = dict.fromkeys(self._opening(key, kind) for kind in sorted(kinds))
            tag = self.opened_parameter.match(next(iter(begun)))
            if tag is None or tag[1] != key or key.strip() != key or alone is None:
                return None
            if alone is not False or key in required:
                tags = " | ".join(write.literal(each) for each in begun)
                value = self._value(text, alone, key, write)
                written.append(
                    f"(({tags}) {value} {write.literal(self.gaps.parameter)}){'' if key in required else '?'}"
                )
        return " ".join(written)

    def _value(self, text: str | None, schema: Any, key: str, write: GrammarPieces) -> str:
        closing = self.parameter[2].format(key)
        end = write.literal(("\n" if self.lined else "") + closing)
        if text is None:
            return f"{write.json(schema)} {end}"
        tags = "|".join(re.escape(mark).replace("/", "\\/") for mark in (closing, *self.following))
        text = f"({text}) & ~/(?s:.*)({tags})(?s:.*)/"
        inside, behind = (end, "") if end.startswith('"') else ("", end)
        return write.part(StructuredOutput(grammar=GRAMMAR.format(behind, text, inside)))


def _flexible(text: str) -> str:
    """A pattern for tags that may have other blanks between them."""
    return r"\s*".join(re.escape(piece) for piece in text.split("\n"))
