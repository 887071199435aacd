"""A template's calls are read as it writes them, and demanded in its own form, whatever its prose says."""

import functools
import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvern.text.chat_template import ChatTemplate
from kvern.tools.answer_grammar import GrammarWriter
from kvern.tools.checks import read_tools
from kvern.tools.formats import format_of
from kvern.tools.json_call import JsonMender
from kvern.tools.thinking import SPECIAL_TOKENS
from kvern.tools.tool_format import ToolFormat
from tests.support import call_templates
from tests.support.sampling import examples
from tests.support.tool_calls import calls_of, embedded_grammars, everywhere, read, reader_of, typed, values

TEMPLATES = call_templates.OBJECTS | call_templates.XML | call_templates.NAMED
PARAMETERS = {"a": {"type": "string"}, "b": {}}
SCHEMA = {"type": "object", "properties": PARAMETERS, "additionalProperties": False}
SCHEMAS: dict[str, Any] = dict.fromkeys(("f", "get_weather", "a-b.c"), SCHEMA)
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
SINGLE = ("as a message", "bare parameters")
"""Those that write no second call."""


@functools.cache
def form_of(name: str) -> ToolFormat:
    form = format_of(TEMPLATES[name], "auto")
    assert form is not None
    return form


@functools.cache
def template_of(name: str) -> ChatTemplate:
    return ChatTemplate({"default": TEMPLATES[name]})


def rendered(name: str, calls: list[tuple[str, dict[str, Any]]], said: str = "") -> str:
    """What the template writes for an assistant's turn."""
    template = template_of(name)
    written = [
        {"type": "function", "id": f"call1234{at}", "function": {"name": called, "arguments": arguments}}
        for at, (called, arguments) in enumerate(calls)
    ]
    asked: list[dict[str, Any]] = [{"role": "user", "content": "Hm?"}]
    answer = {"role": "assistant", "content": said, "tool_calls": written}
    prompt = template.render(asked, TOOLS, True, SPECIAL_TOKENS)
    text = template.render([*asked, answer], TOOLS, False, SPECIAL_TOKENS)
    assert text.startswith(prompt)
    return text[len(prompt) :].removesuffix("<|over|>").removeprefix("<think>\n\n</think>\n\n")


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=3, deadline=None)
@given(calls=calls_of, cuts=everywhere)
def test_calls_are_read_as_the_template_writes_them(name: str, calls: list[Any], cuts: list[int]) -> None:
    check_reading(name, calls, cuts)


@pytest.mark.nightly
@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=examples(30), deadline=None)
@given(calls=calls_of, cuts=everywhere)
def test_many_calls_are_read_as_the_template_writes_them(name: str, calls: list[Any], cuts: list[int]) -> None:
    check_reading(name, calls, cuts)


def check_reading(name: str, calls: list[Any], cuts: list[int]) -> None:
    calls, tools = typed(calls) if name in call_templates.XML else (calls, SCHEMAS)
    if name in SINGLE:
        calls = calls[:1]
    if name == "names in tags":  # in which what is nested has no types but its schema's
        calls = [(called, {key: value for key, value in given.items() if is_plain(value)}) for called, given in calls]
    text = rendered(name, calls)
    message = read(reader_of(form_of(name), tools=tools), text, cuts)
    assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == calls
    assert not message.content.strip()
    assert message == read(reader_of(form_of(name), tools=tools), text)


def is_plain(value: Any) -> bool:
    return not isinstance(value, list | dict)


@pytest.mark.sample(18)
@pytest.mark.parametrize("name", TEMPLATES)
def test_demanded_calls_have_the_templates_own_form(name: str) -> None:
    """The grammar takes what the template writes, byte by byte, and no more calls than it can write."""
    given: dict[str, Any] = {"a": "x\ny'\"", "b": 5} if name == "names in tags" else {"a": "x\ny'\"", "b": [1, None]}
    calls = [("f", given), ("a-b.c", {})]
    one, several = (rendered(name, calls[:1]), "" if name in SINGLE else rendered(name, calls))
    assert is_demanded(name, one)
    if several:
        assert is_demanded(name, several)
        assert not is_demanded(name, several, parallel=False)


def is_demanded(name: str, text: str, parallel: bool = True) -> bool:
    """Whether an answer that must call may be this text."""
    tokenizer, grammars = embedded_grammars()
    use = read_tools(TOOLS, "required", parallel)
    structured = GrammarWriter(tokenizer, grammars).answer(form_of(name), use, None, None)
    assert structured is not None
    matcher = grammars.library.matcher(grammars.compile(structured))
    form = form_of(name)
    text = text.strip("\n") if form.trigger is not None else text
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@settings(max_examples=examples(30), deadline=None)
@given(value=values, cuts=everywhere, indent=st.sampled_from([None, 1]))
def test_json_stays_as_it_is_written(value: Any, cuts: list[int], indent: int | None) -> None:
    text = json.dumps({"a": value}, ensure_ascii=False, indent=indent)
    assert mended(text, cuts) == text


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("{'a': 'it\\'s \"so\"', 'b': [True, None, False,], }", {"a": 'it\'s "so"', "b": [True, None, False]}),
        (
            '{"a": "x\ny\tz", "b": "c:\\dir", "c": "True, None,]"}',
            {"a": "x\ny\tz", "b": "c:\\dir", "c": "True, None,]"},
        ),
        ('{"a": NaN, "b": undefined,\n}', {"a": None, "b": None}),
    ],
)
def test_json_that_is_a_little_wrong_is_mended(text: str, wanted: Any) -> None:
    assert json.loads(mended(text, [])) == wanted
    assert mended(text, range(1, len(text))) == mended(text, [])


def mended(text: str, cuts: Sequence[int]) -> str:
    mender = JsonMender()
    places = [0, *sorted({cut for cut in cuts if cut < len(text)}), len(text)]
    pieces = (text[one:another] for one, another in itertools.pairwise(places))
    return "".join(map(mender.feed, pieces)) + mender.feed("", True)
