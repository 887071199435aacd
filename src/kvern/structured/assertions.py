"""Plain assertions of JSON schemas: their valid values, their negations, and constants that distinguish schemas."""

import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Resolver = Any
"""The resolver of `referencing`: resolves references relative to a schema."""
Schema = Mapping[str, Any] | bool
PlainSchema = dict[str, Any] | bool
"""A schema in the compiler's words."""

TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
OF_TYPE = {
    type(None): "null",
    bool: "boolean",
    int: "number",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
OF_KEYWORD = {
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), "number"),
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), "string"),
    **dict.fromkeys(("items", "prefixItems", "minItems", "maxItems"), "array"),
    **dict.fromkeys(("properties", "patternProperties", "additionalProperties", "required"), "object"),
    **dict.fromkeys(("minProperties", "maxProperties"), "object"),
}
"""The type to which a keyword applies."""
IGNORED = {"$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$defs", "definitions", "$comment"}
IGNORED |= {"$vocabulary", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
IGNORED |= {"contentEncoding", "contentMediaType", "contentSchema"}
"""Keywords that only name or describe."""
LONGEST_INDEX = 10
"""The most digits of a list index."""
COUNTS = {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
COUNTS |= {"minContains", "maxContains"}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


SHAPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        ("properties", "patternProperties", "dependentSchemas", "dependencies"),
        (lambda value: isinstance(value, dict), "an object"),
    ),
    **dict.fromkeys(
        ("allOf", "anyOf", "oneOf"),
        (lambda value: isinstance(value, list) and bool(value), "a list with one schema or more"),
    ),
    **dict.fromkeys(("prefixItems", "enum"), (lambda value: isinstance(value, list), "a list")),
    **dict.fromkeys(("$ref", "$dynamicRef", "pattern", "format"), (lambda value: isinstance(value, str), "a text")),
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), (_is_number, "a number")),
    **dict.fromkeys(
        COUNTS, (lambda value: _is_number(value) and 0 <= value == int(value), "a whole number of 0 or more")
    ),
    "required": (_are_names, "a list of names"),
    "dependentRequired": (
        lambda value: isinstance(value, dict) and all(map(_are_names, value.values())),
        "an object of lists of names",
    ),
}
"""The check of each keyword's value, and a description of valid values."""
OPPOSITES: dict[str, Callable[[Any], PlainSchema]] = {
    "minimum": lambda bound: {"type": "number", "exclusiveMaximum": bound},
    "maximum": lambda bound: {"type": "number", "exclusiveMinimum": bound},
    "exclusiveMinimum": lambda bound: {"type": "number", "maximum": bound},
    "exclusiveMaximum": lambda bound: {"type": "number", "minimum": bound},
    "minLength": lambda count: count > 0 and {"type": "string", "maxLength": int(count) - 1},
    "maxLength": lambda count: {"type": "string", "minLength": int(count) + 1},
    "minItems": lambda count: count > 0 and {"type": "array", "maxItems": int(count) - 1},
    "maxItems": lambda count: {"type": "array", "minItems": int(count) + 1},
    "minProperties": lambda count: count > 0 and {"type": "object", "maxProperties": int(count) - 1},
    "maxProperties": lambda count: {"type": "object", "minProperties": int(count) + 1},
    "type": lambda types: {"type": sorted(TYPES - {_wide(name) for name in _as_list(types)})},
    "const": lambda value: _other_than([value]),
    "enum": lambda values: _other_than(values),
    "required": lambda names: any_of({"type": "object", "properties": {name: False}} for name in names),
}
"""A schema that each keyword excludes, as a part of its negation; False: none."""


def any_of(schemas: Iterable[PlainSchema]) -> PlainSchema:
    """A schema that allows what at least one of `schemas` allows."""
    some = [schema for schema in schemas if schema is not False]
    if not some or True in some or {} in some:
        return bool(some)
    return some[0] if len(some) == 1 else {"anyOf": some}


def all_of(schemas: Iterable[PlainSchema]) -> PlainSchema:
    """A schema that allows what all `schemas` allow."""
    some = [schema for schema in schemas if schema is not True and schema != {}]
    if not some or False in some:
        return not some
    return some[0] if len(some) == 1 else {"allOf": some}


def tell_apart(items: Sequence[Schema]) -> bool:
    """True if constants, or constants of a property that all require, distinguish the schemas.

    This equals a comparison of all pairs, in linear time.
    """
    nodes = [item for item in items if isinstance(item, Mapping)]
    if len(nodes) < len(items):
        return False
    required = set.intersection(*(set(node.get("required", ())) for node in nodes))
    objects = all(types_of(node) == {"object"} for node in nodes)
    tags = ([node.get("properties", {}).get(name) for node in nodes] for name in sorted(required) if objects)
    return any(map(_distinct_values, itertools.chain([nodes], tags)))


def _distinct_values(nodes: Sequence[Any]) -> bool:
    """True if each schema lists its values and no value occurs twice."""
    values: list[Any] = []
    for node in nodes:
        if not isinstance(node, Mapping) or not {"enum", "const"} & node.keys():
            return False
        values += node["enum"] if "enum" in node else [node["const"]]
    return len({canonical(value) for value in values}) == len(values)


def _other_than(values: Sequence[Any]) -> PlainSchema:
    """Values of types that none of these has, other texts, and the other truth value."""
    kinds = {OF_TYPE[type(value)] for value in values}
    options: list[PlainSchema] = [{"type": sorted(TYPES - kinds)}]
    if "string" in kinds:
        texts = [value for value in values if isinstance(value, str)]
        options.append({"type": "string", "pattern": f"^(?:{other_texts(texts)})$"})
    if "boolean" in kinds and not {True, False} <= set(filter(lambda value: isinstance(value, bool), values)):
        options.append({"const": not next(value for value in values if isinstance(value, bool))})
    return any_of(options)


def other_texts(texts: Sequence[str]) -> str:
    """A regular expression for all texts but these."""
    following: dict[str, list[str]] = {}
    for text in texts:
        if text:
            following.setdefault(text[0], []).append(text[1:])
    parts = [re.escape(first) + f"(?:{other_texts(rest)})" for first, rest in following.items()]
    first = "".join(re.escape(character) for character in following)
    parts.append(f"[^{first}](?s:.)*" if first else "(?s:.)+")
    if "" not in texts:
        parts.append("")
    return "|".join(parts)


def types_of(node: Mapping[str, Any]) -> set[str]:
    """The types that a node's values may have."""
    types = set(TYPES)
    if "type" in node:
        types &= {_wide(name) for name in _as_list(node["type"])}
    for values in (node.get("enum"), [node["const"]] if "const" in node else None):
        if isinstance(values, list):
            types &= {OF_TYPE[type(value)] for value in values}
    return types


def closed_without(node: Mapping[str, Any], required: set[str]) -> bool:
    """True if a node's objects cannot have one of the required properties."""
    if node.get("additionalProperties") is not False or node.get("patternProperties") or types_of(node) != {"object"}:
        return False
    return bool(required - set(node.get("properties", ())))


def _wide(name: str) -> str:
    return "number" if name == "integer" else name


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def canonical(value: Any) -> str:
    """A text that is equal for values that JSON schema treats as equal."""
    if isinstance(value, float) and value == int(value):
        value = int(value)
    return json.dumps(value, sort_keys=True)


def pointed_at(reference: str, root: Any) -> Any:
    """The target of a JSON pointer within the schema; None for other references and missing targets."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    found = root
    for part in reference[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdecimal() and len(key) < LONGEST_INDEX and int(key) < len(found):
            found = found[int(key)]
        elif isinstance(found, dict):
            found = found.get(key)
        else:
            return None
    return found
