"""Readers of answers that hold tool calls, and hypothesis strategies for such calls."""

import functools
import json
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from kvern.models.hub import resolve_model
from kvern.request.pieces import Message
from kvern.structured.grammar import Grammars, grammars_of
from kvern.text.tokenizer import Tokenizer
from kvern.tools.chat import AnswerReader, PlainParser
from kvern.tools.formats import FORMATS
from kvern.tools.json_calls import LISTS
from kvern.tools.thinking_splitter import Thought
from kvern.tools.tool_format import ToolFormat
from kvern.tools.xml_form import XmlForm

NAMES: dict[str, Any] = {name: {} for name in ("f", "get_weather", "a-b.c")}
IDS = "[TOOL_CALLS][CALL_ID][ARGS]"
TYPED_BY_SCHEMA = ("qwen3_coder", "minimax", "glm")
ELSEWHERE = [
    *LISTS[1:],
    *(form for form in FORMATS if form.name == "mistral" and form.matches(IDS)),
    *(form for form in FORMATS if isinstance(form, XmlForm) and form.name not in TYPED_BY_SCHEMA),
]
DIFFERENT = [form for form in FORMATS if form not in ELSEWHERE]
"""Others differ from these in their marks; see test_learnt_calls.py."""
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**6), 10**6)
    | st.text(max_size=6)
    | st.floats(allow_nan=False, width=16),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=5,
).filter(lambda value: "Infinity" not in json.dumps(value))


def read(reader: AnswerReader, text: str, cuts: Sequence[int] = ()) -> Message:
    """The answer as it comes, cut at these places; ids are left out, they are drawn."""
    for cut in sorted({cut for cut in cuts if cut < len(text)}):
        reader.read(text[:cut], False)
    reader.read(text, True)
    for call in reader.message.tool_calls:
        call.call_id = ""
    return reader.message


def reader_of(form: ToolFormat | None, thought: Thought | None = None, tools: Any = NAMES) -> AnswerReader:
    return AnswerReader(PlainParser() if form is None else form.parser(tools), thought)


def typed(calls: list[tuple[str, dict[str, Any]]]) -> tuple[list[tuple[str, dict[str, Any]]], dict[str, Any]]:
    """The values under names that tags can contain, and tools whose schemas tell which of them are strings."""
    named = [
        (name, {f"{number} {index}": value for index, value in enumerate(given.values())})
        for number, (name, given) in enumerate(calls)
    ]
    properties = {
        key: {"type": "string"} if isinstance(value, str) else {} for _, given in named for key, value in given.items()
    }
    return named, {name: {"type": "object", "properties": properties} for name in NAMES}


arguments = st.dictionaries(st.text(max_size=4), values, max_size=3)
calls_of = st.lists(st.tuples(st.sampled_from(sorted(NAMES)), arguments), min_size=1, max_size=3)
everywhere = st.lists(st.integers(1, 400), max_size=30) | st.just(list(range(1, 400)))


@functools.cache
def embedded_grammars() -> tuple[Tokenizer, Grammars]:
    folder = resolve_model("kvern-1m")
    return Tokenizer(folder), grammars_of(folder, 4096)
