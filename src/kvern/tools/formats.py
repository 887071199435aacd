"""All formats, and the detection of a chat template's format by its rendering of an assistant's calls."""

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvern.errors import InvalidRequest
from kvern.request.pieces import Message
from kvern.text.chat_template import ChatTemplate
from kvern.tools.buffered import BLANKS
from kvern.tools.gemma import Gemma
from kvern.tools.harmony import Harmony
from kvern.tools.json_calls import HERMES, JSON, LISTS, LLAMA, JsonCalls
from kvern.tools.marked_json import DEEPSEEK, KIMI_K2, SOLAR
from kvern.tools.mistral import Mistral
from kvern.tools.nested_tags import MINIMAX_M3
from kvern.tools.pythonic import LFM2, PYTHONIC
from kvern.tools.recipients import Recipients
from kvern.tools.thinking import HARMONY, SPECIAL_TOKENS, THINKING, ThinkingFormat, thinking_of
from kvern.tools.tool_format import IDENTITY, NUMBER, ToolFormat
from kvern.tools.xml_functions import GLM, XML_FORMATS

NAMES = ("probe_first", "probe_second")
IDS = ("probe1234", "probe5678")
"""Ids of nine letters and digits, the form that Mistral's templates require."""
SAID = "probe content"
ARGUMENTS: tuple[dict[str, Any], ...] = ({"alpha": "probe text", "beta": 7}, {"alpha": 7})
"""The second for templates that write texts without quotes, or several arguments without commas."""
LONGEST = 256
"""Limit of the text before calls."""
DIGITS = re.compile(r"\d+")


@dataclass(frozen=True)
class RenderedCalls:
    """The rendering of an assistant's message, from its calls to its end, with one call and with two.

    `two` is empty if the template does not support two. `tail` is the end of a message without calls.
    """

    one: str
    two: str
    tail: str
    arguments: Mapping[str, Any]

    def is_read(self, form: ToolFormat) -> bool:
        """True if the text begins like the format and its parser finds the calls again."""
        if form.trigger is not None and form.trigger not in self.one:
            return False
        texts = [text for text in (self.one, self.two) if text]
        return all(self._calls(form, text) == list(NAMES[: 1 + at]) for at, text in enumerate(texts))

    def _calls(self, form: ToolFormat, text: str) -> list[str] | None:
        tools = {name: _definition(name, self.arguments)["function"]["parameters"] for name in NAMES}
        parser, message = form.parser(tools), Message()
        message.add([*parser.feed(text), *parser.finish()])
        wanted = {key: str(value) for key, value in self.arguments.items()}
        for call in message.tool_calls:
            try:
                found = json.loads(call.arguments)
            except ValueError:
                return None
            if {key: str(value) for key, value in found.items()} != wanted:
                return None
        return [call.name for call in message.tool_calls]


def written_calls(source: str) -> list[RenderedCalls]:
    """The template's renderings of probes; empty if it renders no calls."""
    template = ChatTemplate({"default": source})
    found = [_written(template, arguments) for arguments in ARGUMENTS]
    return [written for written in found if written is not None]


def _written(template: ChatTemplate, arguments: Mapping[str, Any]) -> RenderedCalls | None:
    tools = [_definition(name, arguments) for name in NAMES]

    def answer(said: str, count: int) -> str:
        """The text after the assistant's content, or after the prompt for an answer."""
        made = [
            {"type": "function", "id": call_id, "function": {"name": name, "arguments": dict(arguments)}}
            for name, call_id in zip(NAMES[:count], IDS, strict=False)
        ]
        asked: list[Mapping[str, Any]] = [{"role": "user", "content": "probe"}]
        messages = [*asked, {"role": "assistant", "content": said, **({"tool_calls": made} if made else {})}]
        try:
            fitted = template.fit_messages(messages, True, SPECIAL_TOKENS)
            text = template.render(fitted, tools, False, SPECIAL_TOKENS)
            prompt = template.render(asked, tools, True, SPECIAL_TOKENS)
        except InvalidRequest:
            return ""
        _, found, behind = text.rpartition(said) if said else ("", "", "")
        if found and all(name in behind for name in NAMES[:count]):
            return behind
        common = text[: _equal(text, prompt)]
        opened = common.rfind("<")
        return text[opened if opened > common.rfind(">") else len(common) :]

    def calls(count: int) -> str:
        texts = (answer(said, count) for said in (SAID, ""))
        whole = [text for text in texts if all(name in text for name in NAMES[:count])]
        return min(whole, key=lambda text: text.index(NAMES[0]), default="")

    one, two = calls(1), "" if template.forms(True, SPECIAL_TOKENS).calls.single else calls(2)
    return RenderedCalls(_behind_thinking(one), _behind_thinking(two), answer(SAID, 0), arguments) if one else None


def _definition(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    kinds = {str: "string", int: "integer"}
    properties = {key: {"type": kinds[type(value)], "description": "probe"} for key, value in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": "probe", "parameters": parameters}}


def _equal(text: str, other: str) -> int:
    """The length of the common beginning of two texts."""
    pairs = enumerate(zip(text, other, strict=False))
    return next((at for at, (one, another) in pairs if one != another), min(len(text), len(other)))


def _behind_thinking(text: str) -> str:
    first = text.find(NAMES[0])
    ends = [place + len(form.end) for form in THINKING if (place := text.rfind(form.end, 0, max(first, 0))) >= 0]
    return text[max(ends, default=0) :]


@dataclass(frozen=True)
class FoundCall:
    """One call in a text: the bounds of its object, and the texts around its name and arguments."""

    start: int
    end: int
    before: str
    middle: str
    after: str
    keyed: bool


def _find(text: str, place: int, name: str, arguments: Mapping[str, Any]) -> FoundCall | None:
    """The JSON object that calls `name`, from `place` on."""
    decoder = json.JSONDecoder(strict=False)
    while (place := text.find("{", place)) >= 0:
        try:
            value, end = decoder.raw_decode(text, place)
        except ValueError:
            place += 1
            continue
        named = place + text[place:end].find(name)
        given = text.find("{", named)
        if named >= place and arguments in value.values() and given >= 0:
            behind = decoder.raw_decode(text, given)[1]
            return FoundCall(
                place, end, text[place:named], text[named + len(name) : given], text[behind:end], name in value
            )
        place += 1
    return None


def learnt_json(written: RenderedCalls) -> JsonCalls | None:
    """The form of calls that are JSON objects; None: they are something else."""
    one, two = written.one, written.two
    for call_id in IDS:
        one, two = one.replace(call_id, IDENTITY), two.replace(call_id, IDENTITY)
    found = _find(one, 0, NAMES[0], written.arguments)
    if found is None or found.start > LONGEST:
        return None
    begin = one[: found.start].lstrip(BLANKS)
    before = found.before
    after = found.after
    between = None if begin else "; "
    pair = _find(two, 0, NAMES[0], written.arguments)
    other = None if pair is None else _find(two, pair.end, NAMES[1], written.arguments)
    if pair is not None and other is not None:
        between = two[pair.end : other.start]
        before, after = _numbered(before, other.before), _numbered(after, other.after)
    end = _without_tail(one[found.end :], written.tail)
    form = JsonCalls("json", begin, before, found.middle, after, between, end, found.keyed)
    return form if written.is_read(form) else None


def _numbered(text: str, other: str) -> str:
    general = DIGITS.sub(NUMBER, text)
    return general if text != other and general == DIGITS.sub(NUMBER, other) else text


def _without_tail(text: str, tail: str) -> str:
    """The text after the last call, without the text that ends every message."""
    common = text[len(text) - _equal(text[::-1], tail[::-1]) :]
    if len(common) < len(tail):  # the message ends in another way: with a mark of its own
        place = common.find("<")
        common = common[place:] if place >= 0 else text[text.rfind("<") :] if "<" in text else common
    return text[: len(text) - len(common)].rstrip(BLANKS)


FORMATS: tuple[ToolFormat, ...] = (
    *XML_FORMATS,
    MINIMAX_M3,
    GLM,
    HERMES,
    Mistral(),
    Mistral(named=True),
    Mistral(named=True, with_ids=True),
    Gemma("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>"),
    Gemma("functiongemma", "<start_function_call>", "<end_function_call>", "<escape>", "<start_function_response>"),
    PYTHONIC,
    LFM2,
    *DEEPSEEK,
    KIMI_K2,
    SOLAR,
    Recipients(),
    LLAMA,
    Harmony(),
    *LISTS,
    JSON,
)


def format_of(template: str, wanted: str) -> ToolFormat | None:
    """The format named `wanted`; "auto": the one that the template uses; None: none."""
    if wanted == "none":
        return None
    spoken = _spoken(template)
    if wanted in ("auto", spoken.name):
        return spoken
    named = [form for form in FORMATS if form.name == wanted]
    return next((form for form in named if form.matches(template)), named[0])


def _spoken(template: str) -> ToolFormat:
    """The format whose parser reads the calls that the template renders.

    A template that renders no calls may describe them in words; otherwise they are JSON.
    """
    written = written_calls(template)
    for text in written:
        for form in FORMATS:
            if not isinstance(form, JsonCalls) and text.is_read(form):
                kin = (other for other in FORMATS if other.name == form.name and other.matches(text.one))
                return next(kin, form).as_written((text.one, text.two), NAMES)
        if (learnt := learnt_json(text)) is not None:
            known = (form for form in FORMATS if isinstance(form, JsonCalls) and form.mark == learnt.mark)
            return replace(learnt, name=next((form.name for form in known if form.middle == learnt.middle), "json"))
    said = () if written else (form for form in FORMATS if form.matches(template))
    return next(iter(said), JSON)


@functools.lru_cache(maxsize=64)
def formats_of(template: str, tools: str, thinking: str) -> tuple[ToolFormat | None, ThinkingFormat | None]:
    """The formats of calls and of thinking that are called `tools` and `thinking`; see `format_of` and `thinking_of`.

    Harmony is one format of both: it is found for both, or for neither.
    """
    form, thought = format_of(template, tools), thinking_of(template, thinking)
    calls_in_turns = form is not None and form.name == HARMONY.name
    thinks_in_turns = thought is HARMONY
    if calls_in_turns != thinks_in_turns:
        return (None if calls_in_turns else form), (None if thinks_in_turns else thought)
    return form, thought
