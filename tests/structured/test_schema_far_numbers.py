"""Whole numbers beyond 2^53 in schemas: the answer has the number itself, and keeps to the bound itself."""

import random
import re
from typing import Any

import pytest

from kvern.errors import InvalidParameter
from kvern.models.hub import resolve_model
from kvern.request.sampling_params import StructuredOutput
from kvern.structured.far_numbers import whole_numbers
from kvern.structured.grammar import Grammars, grammars_of
from kvern.text.tokenizer import Tokenizer

N = 1234567890123456789
OTHER = 1234567890123456768
"""What `N` is as a float."""
ID = {"enum": [N]}
TREE = {
    "$defs": {
        "node": {"type": "object", "properties": {"id": ID, "next": {"$ref": "#/$defs/node"}}, "required": ["id"]}
    },
    "$ref": "#/$defs/node",
}
OPTIONAL = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": ID, "c": {"$ref": "#/$defs/t"}, "d": {"type": "null"}},
    "required": ["c"],
    "$defs": {"t": {"type": "string", "maxLength": 2}},
}
CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (ID, [str(N)], [str(OTHER), f"{N}0", f'"{N}"', f"-{N}"]),
    ({"const": -N}, [str(-N)], [str(N), str(-OTHER)]),
    ({"const": 2**64 - 1}, [str(2**64 - 1)], [str(2**64)]),
    ({"enum": [7, "x", N, None, 1e300]}, ["7", '"x"', str(N), "null", "1e+300"], ["8", str(OTHER)]),
    ({"type": "string", "enum": [N, "x"]}, ['"x"'], [str(N)]),
    ({"type": "integer", "enum": [N, N + 2], "minimum": N + 1}, [str(N + 2)], [str(N)]),
    ({"enum": [[1, {"a": N}]]}, [f'[1, {{ "a": {N}}}]', f'[1,{{"a":{N}}}]'], [f'[1,{{"a":{OTHER}}}]', "[1]"]),
    ({"type": "integer", "minimum": N}, [str(N), str(10 * N), str(N + 1)], [str(N - 1), "1", str(-N), f"{N}.5"]),
    ({"type": "integer", "exclusiveMaximum": -N}, [str(-N - 1), str(-10 * N)], [str(-N), "0", str(N)]),
    ({"type": "integer", "maximum": N}, [str(N), str(-20 * N), "0", "-3"], [str(N + 1), "-0", "01"]),
    ({"type": "integer", "minimum": N, "exclusiveMaximum": N + 2}, [str(N), str(N + 1)], [str(N - 1), str(N + 2)]),
    ({"minimum": N}, ['"a"', "null", str(N), '{"a": 1}'], [str(N - 1)]),
    (
        {"type": ["array", "null"], "items": ID, "minItems": 1, "maxItems": 2},
        [f"[{N} ,\n{N}]", "null"],
        ["[]", f"[{N},{N},{N}]"],
    ),
    ({"type": "array", "items": ID}, ["[]", f"[{N}]", f"[{N},{N},{N}]"], [f"[{OTHER}]"]),
    (
        {"prefixItems": [True, ID], "items": {"type": "boolean"}, "type": "array"},
        ["[]", '["a"]', f"[1,{N},true]"],
        ["[1,2]"],
    ),
    ({"anyOf": [{"type": "null"}, ID]}, ["null", str(N)], [str(OTHER)]),
    ({"type": "integer", "anyOf": [ID, {"const": 3}]}, ["3", str(N)], [str(OTHER), "4"]),
    (
        TREE,
        [f'{{"id":{N}}}', f'{{"id": {N}, "next": {{"id":{N}}}}}'],
        [f'{{"id":{OTHER}}}', f'{{"id":{N},"next":{{}}}}', "{}"],
    ),
    (
        OPTIONAL,
        ['{"c":"x"}', f'{{"b":{N},"c":""}}', f'{{"a":true,"b":{N},"c":"x","d":null}}', '{"c":"x","d":null}'],
        ["{}", f'{{"b":{N}}}', '{"c":"xyz"}', f'{{"c":"x","b":{OTHER}}}', '{,"c":"x"}', '{"c":"x",}'],
    ),
    ({"type": "object", "properties": {"a": ID}}, ["{}", f'{{"a":{N}}}'], [f'{{"a":{OTHER}}}']),
    (
        {"type": "object", "properties": {'"é\n': ID}, "required": ['"é\n'], "additionalProperties": False},
        [f'{{"\\"é\\n":{N}}}'],
        ["{}"],
    ),
]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return grammars_of(resolve_model("kvern-1m"), 4096)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(resolve_model("kvern-1m"))


def is_answer(grammars: Grammars, tokenizer: Tokenizer, compiled: str, text: str) -> bool:
    matcher: Any = grammars.library.matcher(compiled)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(("schema", "said", "unsaid"), CASES, ids=range(len(CASES)))
def test_the_number_itself_is_written(
    grammars: Grammars, tokenizer: Tokenizer, schema: dict[str, Any], said: list[str], unsaid: list[str]
) -> None:
    compiled = grammars.compile(StructuredOutput(json=schema))
    assert [text for text in said if not is_answer(grammars, tokenizer, compiled, text)] == []
    assert [text for text in unsaid if is_answer(grammars, tokenizer, compiled, text)] == []


@pytest.mark.parametrize(
    "schema",
    [
        {"multipleOf": 2**54},
        {"type": "object", "additionalProperties": ID},
        {"type": "object", "properties": {"a": ID}, "patternProperties": {"^b": {"type": "null"}}},
        {"type": "object", "properties": {"a": ID, "b": True, "c": True}, "minProperties": 2},
        {"$ref": "#/$defs/a", "type": "integer", "$defs": {"a": ID}},
    ],
)
def test_shapes_that_cannot_hold_the_number_are_refused(grammars: Grammars, schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter, match="numbers are held exactly up to 9007199254740992"):
        grammars.compile(StructuredOutput(json=schema))


@pytest.mark.parametrize(
    "schema", [{"type": "string", "const": N}, {"type": "integer", "minimum": N, "maximum": N - 1}]
)
def test_contradictions_are_refused(grammars: Grammars, schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter, match="allows no value"):
        grammars.compile(StructuredOutput(json=schema))


def test_open_objects_with_a_far_maximum_stay_open(grammars: Grammars, tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 2**63 - 1}}, "required": ["a"]}
    compiled = grammars.compile(StructuredOutput(json=schema))
    assert is_answer(grammars, tokenizer, compiled, '{"a":5,"b":"x"}')
    compiled = grammars.compile(StructuredOutput(json={**schema, "additionalProperties": False}))
    assert is_answer(grammars, tokenizer, compiled, f'{{"a":{2**63 - 1}}}')
    assert not is_answer(grammars, tokenizer, compiled, f'{{"a":{2**63}}}')


def test_many_parts_that_share_large_definitions_are_refused_at_once(grammars: Grammars) -> None:
    shared = {"enum": ["x" * 1000 + str(number) for number in range(100)]}
    items = [{"type": "array", "items": {"$ref": "#/$defs/shared"}, "maxItems": number} for number in range(1, 200)]
    schema = {"$defs": {"shared": shared}, "prefixItems": [ID, *items], "type": "array"}
    with pytest.raises(InvalidParameter, match="numbers are held exactly up to"):
        grammars.compile(StructuredOutput(json=schema))


def test_ranges_hold_just_what_lies_between_their_bounds() -> None:
    chance = random.Random(0)
    spans = [(low, high) for low in range(-12, 13, 3) for high in range(low, 121, 19)]
    spans += [tuple(sorted(chance.randrange(-2000, 2000) for _ in "ab")) for _ in range(10)]
    for low, high in [*spans, *((None, high) for high in (-100, 0, 99)), *((low, None) for low in (-1, 0, 100))]:
        pattern = re.compile(whole_numbers(low, high) or "")
        held = [number for number in range(-2100, 2100) if pattern.fullmatch(str(number))]
        expected = range(-2100 if low is None else low, 2100 if high is None else high + 1)
        assert held == list(expected), (low, high)
    assert whole_numbers(2, 1) is None
    assert not re.fullmatch(whole_numbers(-1, 1) or "", "-0")
