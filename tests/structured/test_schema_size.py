"""Schemas that cost more than they hold: refused by a count, which no machine and no load changes."""

from functools import reduce
from typing import Any

import pytest

from kvern.errors import InvalidParameter
from kvern.structured.schema import rewrite

OVERLAPPING = [{"enum": ["same", *(f"{number} {value}" for value in range(200))]} for number in range(200)]
LONG = "a" * 200
GROWING: dict[str, dict[str, Any]] = {
    "alternatives of one type": {"oneOf": [{"minProperties": number} for number in range(300)]},
    "long lists of types": {"oneOf": [{"type": ["string"] * 2000, "minLength": number} for number in range(200)]},
    "overlapping values": {"oneOf": OVERLAPPING},
    "other texts": {
        "oneOf": [{"enum": ["same", *(f"{number} {value} {LONG}" for value in range(20))]} for number in range(100)]
    },
    "no such items": {"not": {"prefixItems": [{"type": "string"}] * 10_000}},
    "parts with rests": {
        "allOf": [{"properties": {f"{part} {name}": True for name in range(10)}} for part in range(4000)],
        "unevaluatedProperties": False,
    },
    "conditions of conditions": reduce(
        lambda inside, _: {"if": inside, "then": {"maxLength": 9}}, range(15), {"type": "string", "minLength": 1}
    ),
}
"""They become far longer when they are said in other words."""


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", GROWING)
def test_schemas_that_grow_are_refused_by_what_they_hold(name: str) -> None:
    with pytest.raises(InvalidParameter, match="make it smaller"):
        rewrite(GROWING[name])


@pytest.mark.parametrize("keyword", ["$anchor", "$id"])
def test_many_references_are_looked_up_at_once(keyword: str) -> None:
    sign = "#" if keyword == "$anchor" else ""
    named = {f"d{number}": {keyword: f"a{number}", "type": "string"} for number in range(1000)}
    said = rewrite({"$defs": named, "properties": {name: {"$ref": f"{sign}a{name[1:]}"} for name in named}})
    assert len(said["$defs"]) == 1000 and all(made == {"type": "string"} for made in said["$defs"].values())


def test_an_identifier_that_is_no_address_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="references cannot be read"):
        rewrite({"$id": "http://[", "properties": {"a": {"$ref": "#/properties/b"}, "b": {}}})
