"""All formats, and the detection of a chat template's format."""

import functools
from dataclasses import replace

from kvern.tools.gemma import Gemma
from kvern.tools.glm import Glm
from kvern.tools.harmony import Harmony
from kvern.tools.json_calls import HERMES, JSON, LISTS, LLAMA, JsonCalls
from kvern.tools.learning import NAMES, learnt_json, written_calls
from kvern.tools.marked_json import DeepSeek, KimiK2, Solar
from kvern.tools.mistral import Mistral
from kvern.tools.nested_tags import MINIMAX_M3
from kvern.tools.pythonic import Lfm2, Pythonic
from kvern.tools.recipients import Recipients
from kvern.tools.thinking import HARMONY, ThinkingFormat, thinking_of
from kvern.tools.tool_format import ToolFormat
from kvern.tools.xml_functions import XML_FORMATS, XmlFunctions

FORMATS: tuple[ToolFormat, ...] = (
    *XML_FORMATS,
    MINIMAX_M3,
    Glm(),
    HERMES,
    Mistral(),
    Mistral(named=True),
    Mistral(named=True, with_ids=True),
    Gemma("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>"),
    Gemma("functiongemma", "<start_function_call>", "<end_function_call>", "<escape>", "<start_function_response>"),
    Pythonic(),
    Lfm2(),
    DeepSeek(fenced=True),
    DeepSeek(fenced=False),
    KimiK2(),
    Solar(),
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
                if isinstance(form, XmlFunctions | Glm):
                    return form.as_written((text.one, text.two), NAMES)
                kin = (other for other in FORMATS if other.name == form.name and other.matches(text.one))
                return next(kin, form)
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
