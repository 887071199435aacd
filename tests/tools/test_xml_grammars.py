"""Calls between XML tags as grammars: what they let through is read back, and is what the schema says."""

import functools
import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvern
from kvern.errors import InvalidParameter, InvalidRequest
from kvern.structured.grammar import Grammars, grammars_of
from kvern.text.tokenizer import Tokenizer
from kvern.tools.answer_grammar import GrammarWriter
from kvern.tools.chat import AnswerReader
from kvern.tools.checks import read_tools
from kvern.tools.tool_format import ToolFormat
from kvern.tools.xml_functions import GLM, MINIMAX, QWEN3_CODER
from tests.support.sampling import examples
from tests.support.tool_calls import read, reader_of
from tests.support.xml_calls import PLAN, glm_call, minimax_call, qwen_call

FOLDER = Path(kvern.__file__).parent / "embedded" / "kvern-1m"
MOST_TOKENS = 400
FORMS = pytest.mark.parametrize("form", [QWEN3_CODER, MINIMAX, GLM], ids=lambda form: form.name)

texts: st.SearchStrategy[Any] = st.one_of(
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 4)),
    st.builds(lambda several: {"enum": several}, st.lists(st.text("a1\n<", max_size=3), min_size=1, max_size=3)),
    st.just({"type": "string", "pattern": "^(a|[^a-y/]){1,3}$"}),
    st.just({"type": "string", "format": "date"}),
    st.just({"$ref": "#/$defs/short"}),
    st.just({"const": 'a"b', "title": "A"}),
)
others: st.SearchStrategy[Any] = st.one_of(
    st.builds(lambda low: {"type": "integer", "minimum": low, "maximum": low + 3}, st.integers(-9, 9)),
    st.just({"type": ["null", "boolean"]}),
    st.just({"enum": ["1", 2, None]}),
    st.just({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/short"}]}),
    st.just({"type": "array", "items": {"$ref": "#/$defs/short"}, "maxItems": 2}),
    st.just({"type": "object", "properties": {"a": {"type": "boolean"}}, "additionalProperties": False}),
)
KEYS = ["a", "b c", "größe", "n>1"]
schemas = st.builds(
    lambda properties, required, closed: {
        "type": "object",
        "properties": properties,
        "required": [key for key in properties if key in required],
        "additionalProperties": False,
        "$defs": {"short": {"type": "string", "maxLength": 3}},
        **({"minProperties": 1} if closed and properties else {}),
    },
    st.dictionaries(st.sampled_from(KEYS), texts | others, max_size=3),
    st.sets(st.sampled_from(KEYS)),
    st.booleans(),
)


@pytest.fixture(scope="module")
def writer() -> tuple[Tokenizer, Grammars, GrammarWriter]:
    tokenizer = Tokenizer(FOLDER)
    grammars = grammars_of(FOLDER, tokenizer.vocab_size)
    return tokenizer, grammars, GrammarWriter(tokenizer, grammars)


def tool_of(schema: Any) -> Any:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


def drawn(grammars: Grammars, grammar: str, seed: int) -> list[int] | None:
    """Tokens that a model without a preference would write; None: it writes on and on."""
    rng, matcher = random.Random(seed), grammars.library.matcher(grammar)
    tokens: list[int] = []
    while len(tokens) < MOST_TOKENS:
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)  # type: ignore[attr-defined]
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        token = int(allowed[rng.randrange(len(allowed))])
        if token in grammars.library.eos_token_ids:
            return tokens
        tokens.append(token)
        assert matcher.consume_token(token)
        if matcher.is_stopped():
            return tokens
    return None


@pytest.mark.sample(1)
@FORMS
@settings(max_examples=examples(50), deadline=None)
@given(schema=schemas, seed=st.integers(0, 99))
def test_what_the_grammar_lets_through_is_valid(form: ToolFormat, writer: Any, schema: Any, seed: int) -> None:
    tokenizer, grammars, written = writer
    use = read_tools([tool_of(schema)], "required", False)
    structured = written.answer(form, use, None, None)
    tokens = drawn(grammars, grammars.compile(structured), seed)
    if tokens is None:
        return
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    reader = AnswerReader(form.parser({"f": schema}), None)
    reader.read(text, True)
    [call] = reader.message.tool_calls
    assert reader.message.content == ""
    jsonschema.validate(json.loads(call.arguments), schema, format_checker=jsonschema.FormatChecker())


@FORMS
@pytest.mark.parametrize(
    ("schema", "value", "text"),
    [
        ({"type": "string"}, "<p>\n\n 5", "<p>\n\n 5"),
        ({"type": ["string", "null"]}, None, "null"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "Oslo", "Oslo"),
        ({"type": "string", "minLength": 2, "pattern": "/a"}, "x/ab", "x/ab"),
        ({"type": "string", "format": "date"}, "2026-11-22", '"2026-11-22"'),
        ({"type": "integer"}, 5, "5"),
        ({}, [{}], "[{}]"),
    ],
)
def test_models_write_as_they_were_taught(form: ToolFormat, writer: Any, schema: Any, value: Any, text: str) -> None:
    """Texts without quotes, unless the grammar cannot tell without them what is allowed."""
    tokenizer, grammars, written = writer
    tool = {"type": "object", "properties": {"key": schema}, "required": ["key"]}
    structured = written.answer(form, read_tools([tool_of(tool)], "required"), None, None)
    answer = {
        "qwen3_coder": f"<tool_call>\n<function=f>\n<parameter=key>\n{text}\n</parameter>\n</function>\n</tool_call>",
        "minimax": f'<minimax:tool_call>\n<invoke name="f">\n<parameter name="key">{text}</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
        "glm": f"<tool_call>f\n<arg_key>key</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>",
    }[form.name]
    matcher = grammars.library.matcher(grammars.compile(structured))
    assert matcher.consume_tokens(tokenizer.encode(answer, add_special_tokens=False))
    reader = AnswerReader(form.parser({"f": tool}), None)
    reader.read(answer, True)
    assert json.loads(reader.message.tool_calls[0].arguments) == {"key": value}


@FORMS
@pytest.mark.parametrize("schema", [{"type": "object"}, {"anyOf": [{"required": ["a"]}], "properties": {"a": {}}}])
def test_arguments_that_depend_on_each_other_are_one_object(form: ToolFormat, writer: Any, schema: Any) -> None:
    tokenizer, grammars, written = writer
    structured = written.answer(form, read_tools([tool_of(schema)], "required"), None, None)
    before, behind = {
        "qwen3_coder": ("<tool_call>\n<function=f>\n", "</function>\n</tool_call>"),
        "minimax": ('<minimax:tool_call>\n<invoke name="f">\n', "</invoke>\n</minimax:tool_call>"),
        "glm": ("<tool_call>f\n", "</tool_call>"),
    }[form.name]
    answer = f'{before}{{"a": 1}}\n{behind}'
    matcher = grammars.library.matcher(grammars.compile(structured))
    assert matcher.consume_tokens(tokenizer.encode(answer, add_special_tokens=False))
    reader = AnswerReader(form.parser({"f": schema}), None)
    reader.read(answer, True)
    assert [(call.name, call.arguments) for call in reader.message.tool_calls] == [("f", '{"a": 1}')]


def test_tags_in_text_are_not_written(writer: Any) -> None:
    """A value with its own end in it would be read as something else."""
    tokenizer, grammars, written = writer
    tool = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
    structured = written.answer(QWEN3_CODER, read_tools([tool_of(tool)], "required"), None, None)
    answer = "<tool_call>\n<function=f>\n<parameter=key>\na</parameter></function>\n</parameter>"
    matcher = grammars.library.matcher(grammars.compile(structured))
    assert not matcher.consume_tokens(tokenizer.encode(answer, add_special_tokens=False))


@pytest.mark.parametrize(
    "schema",
    [
        functools.reduce(lambda inner, _: {"anyOf": [inner]}, range(900), {"type": "string"}),
        {"$ref": "#/properties/key"},
        {"$ref": "#/$defs/many"},
        {"$ref": 3},
        {"type": 5, "enum": 7, "anyOf": {}, "pattern": "(", "minLength": "x"},
        {"type": "string", "pattern": "(" * 900},
        {"type": "string", "minLength": float("inf"), "maxLength": -1},
        {"$ref": "#/properties/list/enum/" + "1" * 5000},
        {"type": "string", "pattern": "[" + "\\a" * 60},
        {"type": "string", "pattern": "(" * 60_000 + "a" + ")" * 60_000},
    ],
    ids=range(10),
)
def test_strange_schemas_hurt_nobody(writer: Any, schema: Any) -> None:
    """Values are read somehow, and a grammar is refused as others are."""
    _, grammars, written = writer
    many = {"anyOf": [{"$ref": "#/$defs/many"}] * 40}
    tool = {"type": "object", "properties": {"key": schema, "list": {"enum": ["abc"]}}, "$defs": {"many": many}}
    reader = AnswerReader(QWEN3_CODER.parser({"f": tool}), None)
    reader.read("<function=f>\n<parameter=key>\nabc\n</parameter>\n</function>", True)
    assert reader.message.tool_calls[0].arguments == '{"key": "abc"}'
    with pytest.raises((InvalidRequest, InvalidParameter)):
        grammars.compile(written.answer(QWEN3_CODER, read_tools([tool_of(tool)], "required"), None, None))


@pytest.mark.sample(4)
@FORMS
@pytest.mark.parametrize("place", range(4))
def test_models_that_write_blanks_for_ever_cost_little(form: ToolFormat, place: int) -> None:
    """Wherever they begin to: each further blank is looked at once, and what it is does not depend on the cutting."""
    written = {"qwen3_coder": qwen_call, "minimax": minimax_call, "glm": glm_call}[form.name]
    call, (opening, closing) = written(("count", "1")), form.markers[:2]
    end = (0, len(opening), call.index("1"), call.rindex(closing))[place]
    text = call[:end] + " " * 10_000
    tail = f"1{closing} x"
    whole = read(reader_of(form, tools={"plan": PLAN}), text + tail)
    pieces = read(reader_of(form, tools={"plan": PLAN}), text + tail, range(1, len(text) + 1))
    assert (pieces.content, [call.arguments for call in pieces.tool_calls]) == (
        whole.content,
        [call.arguments for call in whole.tool_calls],
    )
