"""JSON schemas for llguidance: parts that it would loosen, or could not finish, are expressed differently.

Its strings are patterns between quotation marks, where some classes match quotation marks and backslashes; names of
additional properties may be spelt with escapes, also like a declared one; and a pattern for names that have all been
written leads to a dead end.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvern.errors import InvalidParameter
from kvern.structured.assertions import PlainSchema, all_of, other_texts

TOKENS = re.compile(
    r"(?P<escape>\\[pP](?:\{[^}]*\}|.)|\\.)|\[(?P<members>\^?(?:[^\\\]]|\\.)*)\]|(?P<plain>.)", re.DOTALL
)
PLAIN_MEMBERS = re.compile(r"(?:[^\\^\x00-\x1f]|\\[dwst.+*?()/^$|{}\[\]-])+")
"""Members of classes without control characters, or with few of them."""
SPELT = {"patternProperties": {"^(?s:.*)$": True}, "additionalProperties": False}
"""Objects with any names, none of them spelt with needless escapes."""
EXACT = 1 << 53
"""The largest integer up to which the compiler represents all integers exactly."""
OUTWARDS = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}
"""The sign of the infinity that each bound excludes."""


def held(schema: Mapping[str, Any], has_text: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Converts the result of `rewrite` for llguidance. `has_text` tells if a schema of strings allows one.

    Raises InvalidParameter for parts that it would loosen.
    """
    made = _held({key: value for key, value in schema.items() if key != "$defs"}, has_text, alone=True)
    alone = "'allOf'" not in str(schema)
    definitions = {name: _held(item, has_text, alone) for name, item in schema.get("$defs", {}).items()}
    return {**(made if isinstance(made, dict) else {}), "$defs": definitions}


def _held(schema: PlainSchema, has_text: Callable[[dict[str, Any]], bool], alone: bool) -> PlainSchema:
    """Converts one schema; `alone`: no other schema applies to the same value."""
    if isinstance(schema, bool):
        return schema
    alone = alone and not ({"$ref", "anyOf", "allOf"} & schema.keys() and len(schema) > 1)
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("properties", "patternProperties"):
            named = {name: _held(item, has_text, True) for name, item in value.items()}
            made[key] = named if key == "properties" else {quotable(name): item for name, item in named.items()}
        elif key in ("items", "additionalProperties"):
            made[key] = _held(value, has_text, True)
        elif key == "prefixItems":
            made[key] = [_held(item, has_text, True) for item in value]
        elif key in ("anyOf", "allOf"):
            made[key] = [_held(item, has_text, alone and key == "anyOf") for item in value]
        elif key == "pattern":
            made[key] = quotable(value)
        else:
            made[key] = value
    made = _with_exact_numbers(made)
    if "patternProperties" in made:
        return _with_patterns(made, has_text, alone)
    if (made.get("properties") or made.get("required")) and made.get("additionalProperties", True) is not False:
        return all_of([made, SPELT])
    return made


def _with_patterns(node: dict[str, Any], has_text: Callable[[dict[str, Any]], bool], alone: bool) -> dict[str, Any]:
    """Removes patterns that match only declared properties; closes the object if no other keyword opens it."""
    properties = {**node.get("properties", {})}
    names = list(dict.fromkeys([*properties, *node.get("required", ())]))
    patterns = {}
    for pattern, schema in node["patternProperties"].items():
        others = {"type": "string", "allOf": [{"pattern": pattern}, {"pattern": f"^(?:{other_texts(names)})$"}]}
        if not names or has_text(others):
            patterns[pattern] = schema
            continue
        for name in names:
            if has_text({"type": "string", "const": name, "pattern": pattern}):
                properties[name] = all_of([properties.get(name, True), schema])
    made = {**node, "properties": properties, "patternProperties": patterns}
    if alone:
        made["additionalProperties"] = False
    return {key: value for key, value in made.items() if value != {} or key == "additionalProperties"}


def quotable(pattern: str) -> str:
    """An expression of ECMA 262 as the compiler keeps it between quotation marks: without the character U+0000."""
    return "".join(_quotable(found) for found in TOKENS.finditer(pattern))


def _quotable(found: re.Match[str]) -> str:
    members = found["members"]
    if members is None:
        is_property = found["escape"] is not None and found["escape"][1] in "pP"
        return rf"[{found[0]}--\x00]" if is_property else found[0]
    if members in ("", "^"):
        return r"[^\s\S]" if not members else r"[\s\S]"
    if "--" in members:
        raise InvalidParameter(f"structured: {found[0]!r:.100} in a pattern is not clear: escape the dash")
    members = re.sub(r"\\.|[\[&~]", lambda each: each[0] if len(each[0]) > 1 else f"\\{each[0]}", members)
    return f"[{members}]" if PLAIN_MEMBERS.fullmatch(members) else rf"[[{members}]--\x00]"


def _with_exact_numbers(node: dict[str, Any]) -> dict[str, Any]:
    """Reduces far bounds to exact numbers. Raises InvalidParameter for other numbers that the compiler would change."""
    nearer = {key: EXACT if node[key] > 0 else -EXACT for key, may_be_nearer in far_keywords(node) if may_be_nearer}
    made = {**node, **nearer}
    for key in ("const", "enum", *OUTWARDS, "multipleOf"):
        number = inexact(made.get(key))
        if number is not None:
            raise InvalidParameter(
                f"structured: {key} has {number!s:.60}, and in a schema of this shape numbers are held exactly up to "
                f"{EXACT}: name the properties of its objects, and put nothing beside $ref"
            )
    return made


def far_keywords(node: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Keywords whose number the compiler would change, and whether a smaller bound allows a part of the same values."""
    for key in ("const", "enum", *OUTWARDS):
        number = inexact(node.get(key))
        if number is not None:
            yield key, number * OUTWARDS.get(key, 0) > 0


def inexact(value: Any) -> int | float | None:
    """A number in the value that is another one for the compiler."""
    if isinstance(value, (list, dict)):
        found = (inexact(item) for item in (value.values() if isinstance(value, dict) else value))
        return next((number for number in found if number is not None), None)
    return value if isinstance(value, (int, float)) and abs(value) > EXACT else None
