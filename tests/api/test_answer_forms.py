"""The names that clients of other servers have for the form of an answer."""

from typing import Any

import pytest

from kvern.api.forms import structured_of
from kvern.errors import InvalidParameter

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("body", "form"),
    [
        ({"json_schema": SCHEMA}, {"json": SCHEMA}),
        ({"json_schema": '{"type": "object", "properties": {"a": {"type": "integer"}}}'}, {"json": SCHEMA}),
        ({"grammar": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"grammar": ""}, None),
        ({"ebnf": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
        ({"regex": "[a-z]+"}, {"regex": "[a-z]+"}),
        ({"format": "json"}, {"json": True}),
        ({"format": SCHEMA}, {"json": SCHEMA}),
        ({"format": ""}, None),
        ({"structured_outputs": {"json_object": True}}, {"json": True}),
        ({"structured_outputs": {"json_object": False, "regex": "a", "disable_any_whitespace": False}}, {"regex": "a"}),
        ({"structured_outputs": {"json": '{"type": "null"}'}}, {"json": {"type": "null"}}),
        ({"structured_outputs": {"json_object": False}}, None),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json": SCHEMA}),
        ({"response_format": {"type": "json_object"}}, {"json": True}),
    ],
)
def test_forms_under_other_names(body: dict[str, Any], form: dict[str, Any] | None) -> None:
    assert structured_of(body) == form


def test_tags_under_another_name() -> None:
    tags = {"structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<a>"]}
    wanted = structured_of({"response_format": {"type": "structural_tag", **tags}})
    assert structured_of({"structured_outputs": {"structural_tag": tags}}) == wanted
    assert wanted is not None


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"format": "yaml"}, "format is not valid JSON"),
        ({"json_schema": "{"}, "json_schema is not valid JSON"),
        ({"regex": "a", "ebnf": "b"}, "regex and ebnf are set"),
        ({"response_format": {"type": "json_object", "schema": 7}}, "json_object needs a schema"),
    ],
)
def test_forms_that_cannot_be_read(body: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidParameter, match=problem):
        structured_of(body)
