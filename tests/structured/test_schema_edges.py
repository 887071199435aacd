"""Where answers could be wider than their schema: numbers, formats, classes of characters, and names of properties."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from kvern import LLM, SamplingParams
from kvern.errors import InvalidParameter
from kvern.models.hub import resolve_model
from kvern.request.sampling_params import StructuredOutput
from kvern.structured.grammar import Grammars, grammars_of
from kvern.structured.llguidance_schema import quotable
from kvern.text.tokenizer import Tokenizer
from tests.support.internals import engine_of

FILE_NAME = {"type": "string", "pattern": '^[^\\\\/:*?"<>|]+$'}
NAMED = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}
ONLY_A = {
    "type": "object",
    "properties": {"a": {"enum": ["a value that takes many tokens"]}},
    "required": ["a"],
    "additionalProperties": False,
    "patternProperties": {"^a$": {"type": "string"}},
}
CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (FILE_NAME, ['"ab"', r'"a\nb"'], [r'"a\\b"', r'"a\"b"', r'"a\u002fb"', r'"a\/b"', '"a:"', '"a/"']),
    ({"type": "string", "pattern": r"^\P{P}+$"}, ['"ab"', r'"\n"'], [r'"\\"', r'"\""', '"."']),
    ({"type": "string", "pattern": "^[^a]$"}, ['"b"', r'"\""', r'"\\"'], [r'"\u0061"', '"a"']),
    ({"type": "string", "pattern": "^[[a&&~]+$"}, ['"[a&~"'], ['"b"']),
    ({"type": "string", "format": "password"}, ['"x"', '""'], ["1"]),
    ({"type": "string", "format": "uuid4", "minLength": 2}, ['"xy"'], ['"x"']),
    (
        {"type": "string", "format": "date"},
        ['"2024-02-29"', '"2000-02-29"', '"2023-12-31"'],
        ['"2023-02-29"', '"1900-02-29"', '"2023-04-31"', '"2023-00-10"', '"2023-13-01"', '"0000-01-01"'],
    ),
    (
        {"type": "string", "format": "time"},
        ['"23:59:60Z"', '"12:00:59Z"', '"00:00:00.5+23:59"'],
        ['"12:00:60Z"', '"23:59:60+01:00"', '"24:00:00Z"', '"12:00:00"', '"12:00:00+24:00"'],
    ),
    (
        {"type": "string", "format": "date-time"},
        ['"2024-02-29T00:00:00Z"', '"2016-12-31T23:59:60Z"'],
        ['"2023-02-29T00:00:00Z"', '"2016-12-30T23:59:60Z"', '"2023-02-28T12:00:60Z"'],
    ),
    ({"type": "string", "format": "date", "pattern": "^2"}, ['"2023-02-28"'], ['"1999-02-28"', '"2"']),
    (
        NAMED,
        ['{"a":1,"b":"x"}', '{"é":"x"}', '{"aa":"x"}', r'{"\n":"x"}'],
        ['{"a":1,"a":"x"}', r'{"a":1,"\u0061":"x"}', r'{"\u0061":"x"}', '{"a":"x"}'],
    ),
    ({"allOf": [NAMED, {"required": ["b"]}]}, ['{"b":"x"}'], [r'{"b":"x","\u0062":"y"}', "{}"]),
    ({"type": "object", "required": ["b"]}, ['{"b":1}'], [r'{"b":1,"\u0062":2}', '{"b":1,"b":2}']),
    (ONLY_A, ['{"a":"a value that takes many tokens"}'], ['{"a":"a value that takes many tokens",', "{}"]),
    (
        {"type": "object", "properties": {"a": {"type": "null"}}, "patternProperties": {"^[ab]$": True}},
        ['{"a":null}', '{"a":null,"b":1}'],
        ['{"a":null,"a":1}', r'{"\u0062":1}'],
    ),
    (
        {"enum": [9007199254740991, -0.5, 1e-7]},
        ["9007199254740991", "-0.5", "1e-7", "0.0000001"][:2],
        ["9007199254740990"],
    ),
    ({"type": "integer", "minimum": -9223372036854775808, "maximum": 18446744073709551615}, ["-5", "12345"], ["1.5"]),
    ({"type": "number", "maximum": 1e300}, ["12345"], ['"a"']),
]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return grammars_of(resolve_model("kvern-1m"), 4096)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(resolve_model("kvern-1m"))


@pytest.mark.parametrize(("schema", "said", "unsaid"), CASES, ids=range(len(CASES)))
def test_no_answer_is_wider_than_its_schema(
    grammars: Grammars, tokenizer: Tokenizer, schema: dict[str, Any], said: list[str], unsaid: list[str]
) -> None:
    compiled = grammars.compile(StructuredOutput(json=schema))

    def is_answer(text: str) -> bool:
        matcher: Any = grammars.library.matcher(compiled)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(tokens) == len(tokens)

    assert [text for text in said if not is_answer(text)] == []
    assert [text for text in unsaid if is_answer(text) and is_whole(text)] == []
    assert not any(is_answer(text) for text in unsaid if not is_whole(text))


def is_whole(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def test_classes_stand_for_what_they_say() -> None:
    assert quotable(r"^[a-z0-9_.-]+\d\[x\]$") == r"^[a-z0-9_.-]+\d\[x\]$"
    assert quotable("[^a[]") == r"[[^a\[]--\x00]"
    assert quotable(r"\p{L}x[]") == r"[\p{L}--\x00]x[^\s\S]"


TEXTS: list[dict[str, Any]] = [
    {"type": "string", "maxLength": 6},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "anything"},
    FILE_NAME | {"maxLength": 6},
    {"type": "string", "pattern": "^[a-c]{1,3}$"},
]
NUMBERS: list[dict[str, Any]] = [
    {"type": "integer", "minimum": -3, "maximum": 40},
    {"enum": [1.5, -7, 2**53, "x", None, [1, {"a": 0.1}]]},
    {"type": "boolean"},
    {"const": {"k": [True, 10**15]}},
    {"enum": [1234567890123456789, [-(2**62)]]},
    {"type": "integer", "minimum": 2**60 + 1, "maximum": 2**60 + 3},
]


def made_schema(chance: random.Random, depth: int) -> dict[str, Any]:
    """Of objects, lists and alternatives, with what may go wrong in each."""
    kind = chance.choice(["text", "number"] if depth == 0 else ["text", "number", "object", "object", "array", "any"])
    if kind == "text":
        return chance.choice(TEXTS)
    if kind == "number":
        return chance.choice(NUMBERS)
    if kind == "array":
        return {"type": "array", "items": made_schema(chance, depth - 1), "maxItems": 2}
    if kind == "any":
        return {"anyOf": [made_schema(chance, depth - 1), {"type": "null"}]}
    names = chance.sample(["a", "b", "é", 'q"', "x-1", "x-2"], chance.randint(1, 4))
    made: dict[str, Any] = {"type": "object", "properties": {name: made_schema(chance, depth - 1) for name in names}}
    made["required"] = chance.sample(names, chance.randint(0, len(names)))
    made["additionalProperties"] = chance.choice([False, False, True, {"type": "boolean"}])
    if chance.random() < 0.4:
        made["patternProperties"] = {chance.choice(["^x-", "^[ab]$", "^a$"]): chance.choice([True, {"type": "null"}])}
    return made


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    options: dict[str, Any] = {"max_model_len": 384, "max_batch_requests": 32, "threads": 1}
    with LLM(str(tiny_model), **options) as llm:
        yield llm


@pytest.mark.parametrize("count", [24, pytest.param(600, marks=pytest.mark.nightly)])
def test_generated_schemas_are_followed(llm: LLM, count: int) -> None:
    chance = random.Random(count)
    params, schemas = [], []
    for seed in range(count):
        schema = {"type": "object", "properties": {"v": made_schema(chance, 2)}, "required": ["v"]}
        try:
            engine_of(llm).inputs.grammars.compile(StructuredOutput(json=schema))
        except InvalidParameter:
            continue
        schemas.append(schema)
        params.append(
            SamplingParams(structured=StructuredOutput(json=schema), temperature=1.0, seed=seed, max_tokens=300)
        )
    assert len(schemas) >= 0.5 * count
    outputs = llm.generate([[5, 6, 7]] * len(params), params)
    ended = 0
    for schema, output in zip(schemas, outputs, strict=True):
        [answer] = output.outputs
        if answer.finish_reason == "length" and not is_whole(answer.text):
            continue
        ended += 1
        checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
        jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(answer.text))
    assert ended >= len(schemas) // 2
