"""JSON schemas in the subset that xgrammar enforces: never wider than the original.

xgrammar reads the first of a few keywords of a schema and silently ignores the others. So each schema, in the terms of
`kvern.structured.schema`, becomes alternatives of one type each, with keywords that xgrammar combines correctly.
Statements about one value are merged; objects with named properties are closed, since the key of an additional one
could be spelt like theirs with escapes. Other keywords are refused by name.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from kvern.errors import InvalidParameter
from kvern.structured.assertions import OF_KEYWORD, OF_TYPE, PlainSchema, any_of
from kvern.structured.xgrammar_patterns import plain_pattern, plain_text

HIGHEST = {"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"}
LOWEST = {"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"}
KINDS = ("null", "boolean", "string", "integer", "number", "array", "object")
MOST_NODES = 20_000
DEEPEST_REFERENCE = 16
EXACT = 1 << 53
"""The largest integer up to which floats represent all integers exactly."""
LARGEST_BOUND, DECIMALS = 10**9, 4
"""Bounds of numbers for which it is known that xgrammar keeps them."""


def narrow(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Converts the result of `rewrite` for xgrammar. Raises InvalidParameter with the keyword that it ignores."""
    narrower = _Narrower(schema.get("$defs", {}))
    made = narrower.said([{key: value for key, value in schema.items() if key != "$defs"}])
    definitions = narrower.definitions()
    if made is False:
        raise InvalidParameter("structured: the schema allows no value at all that xgrammar can say")
    return {**(made if isinstance(made, dict) else {}), "$defs": definitions}


class _Narrower:
    def __init__(self, definitions: Mapping[str, PlainSchema]) -> None:
        self._given = definitions
        self._names: dict[str, str] = {}
        self._nodes = 0

    def definitions(self) -> dict[str, PlainSchema]:
        """The definitions that are referenced."""
        made: dict[str, PlainSchema] = {}
        while missing := self._names.keys() - made.keys():
            for name in missing:
                made[name] = self.said([self._given[name]])
                if made[name] is False:
                    raise InvalidParameter(f"structured: what the schema's reference {name} names allows no value")
        return {self._names[name]: schema for name, schema in made.items()}

    def said(self, schemas: Sequence[PlainSchema], depth: int = 0) -> PlainSchema:
        """The schema of the values that all schemas allow."""
        self._nodes += 1
        if self._nodes > MOST_NODES or depth > DEEPEST_REFERENCE:
            raise _refusal("schemas that are combined so often")
        parts = [part for schema in schemas for part in _flat(schema)]
        if False in parts:
            return False
        for number, part in enumerate(parts):
            others = [*parts[:number], *parts[number + 1 :]]
            if isinstance(part, dict) and "anyOf" in part:
                return any_of(self.said([choice, *others], depth) for choice in part["anyOf"])
        for number, part in enumerate(parts):
            others = [*parts[:number], *parts[number + 1 :]]
            if isinstance(part, dict) and "$ref" in part:
                name = part["$ref"].removeprefix("#/$defs/")
                if others or self._given[name] is False:
                    return self.said([self._given[name], *others], depth + 1)
                return {"$ref": f"#/$defs/{self._names.setdefault(name, _letters(len(self._names)))}"}
        return self._plain([part for part in parts if isinstance(part, dict)])

    def _plain(self, parts: Sequence[dict[str, Any]]) -> PlainSchema:
        """Merges schemas of plain assertions."""
        if not parts:
            return True
        merged: dict[str, Any] = {}
        kinds = set(KINDS)
        for part in parts:
            for key, value in part.items():
                if key == "type":
                    names = set(value if isinstance(value, list) else [value])
                    if names - set(KINDS):
                        raise InvalidParameter(f"structured: Invalid type: {', '.join(sorted(names - set(KINDS)))}")
                    kinds &= names | ({"integer"} if "number" in names else set())
                elif key in ("enum", "const"):
                    values = value if key == "enum" else [value]
                    if "enum" in merged:
                        raise _refusal("enum beside another")
                    merged["enum"] = values
                elif key not in OF_KEYWORD:
                    raise _refusal(key)
                elif key in HIGHEST:
                    merged[key] = max(value, merged.get(key, value))
                elif key in LOWEST:
                    merged[key] = min(value, merged.get(key, value))
                elif key == "required":
                    merged[key] = [*merged.get(key, []), *value]
                elif OF_KEYWORD[key] == "string" or key == "multipleOf":
                    if merged.get(key, value) != value:
                        raise _refusal(f"{key} beside another")
                    merged[key] = value
        if "enum" in merged:
            return _values(merged, kinds)
        if "number" in kinds:
            kinds.discard("integer")
        makers = {"object": self._object, "array": self._array}
        told = {OF_KEYWORD[key] for part in parts for key in part if key in OF_KEYWORD}
        if not told and kinds == set(KINDS) - {"integer"}:
            return True
        made: list[PlainSchema] = []
        for kind in KINDS:
            if kind not in kinds:
                continue
            if kind in makers and kind in told:
                made.append(makers[kind](parts, merged))
            elif kind == "string" and kind in told:
                made.append(_text(merged))
            elif kind in ("number", "integer") and "number" in told:
                made.append(_number(kind, merged))
            else:
                made.append({"type": kind})
        return any_of(made)

    def _array(self, parts: Sequence[dict[str, Any]], merged: Mapping[str, Any]) -> PlainSchema:
        count = max(len(part.get("prefixItems", ())) for part in parts)
        least, most = merged.get("minItems", 0), merged.get("maxItems")
        first: list[PlainSchema] = []
        rest: PlainSchema = self.said([part.get("items", True) for part in parts])
        for index in range(count if most is None else min(count, most)):
            item = self.said([_item(part, index) for part in parts])
            if item is False:
                rest = False
                break
            first.append({} if item is True else item)  # which xgrammar wants here
        if most is not None and most <= len(first):
            rest = False
        if (rest is False and least > len(first)) or (most is not None and most < least):
            return False
        made: dict[str, Any] = {"type": "array", "items": rest}
        if first:
            made["prefixItems"] = first
        if least:
            made["minItems"] = least
        if most is not None and rest is not False:
            made["maxItems"] = most
        return made

    def _object(self, parts: Sequence[dict[str, Any]], merged: Mapping[str, Any]) -> PlainSchema:
        required = list(dict.fromkeys(merged.get("required", ())))
        names = list(dict.fromkeys([*(name for part in parts for name in part.get("properties", ())), *required]))
        patterns = {pattern for part in parts for pattern in part.get("patternProperties", ())}
        least, most = merged.get("minProperties", 0), merged.get("maxProperties")
        rest = self.said([part.get("additionalProperties", True) for part in parts])
        made: dict[str, Any] = {"type": "object", "additionalProperties": False}
        if names:
            said = {name: self.said([value for part in parts for value in _property(part, name)]) for name in names}
            made["properties"] = properties = {name: value for name, value in said.items() if value is not False}
            made["required"] = required
            if set(required) - properties.keys():
                return False
            if not properties and (rest is not False or patterns):
                raise _refusal("properties that may not be there beside any others")
            if max(least, len(required)) > min(len(properties), len(properties) if most is None else most):
                return False
            if most is not None and most < len(properties):
                made["maxProperties"] = most
            if least > len(required):
                made["minProperties"] = least
            return made
        if most == 0 or (rest is False and not patterns):
            return False if least else {**made, "maxProperties": 0}
        if least > 1:
            raise _refusal("minProperties without the names of the properties")
        if not patterns:
            made["additionalProperties"] = rest
        elif len(patterns) == 1 and len(parts) == 1:
            [(pattern, value)] = parts[0]["patternProperties"].items()
            value = self.said([value])
            if value is False:
                raise _refusal("patternProperties that may not be there")
            made["patternProperties"] = {plain_pattern(pattern, in_json=True): value}
        else:
            raise _refusal("patternProperties of several patterns")
        return made | ({"minProperties": least} if least else {}) | ({} if most is None else {"maxProperties": most})


def _flat(schema: PlainSchema) -> Iterator[PlainSchema]:
    """Schemas equivalent to the given one, each of which is plain, a reference or a choice."""
    if schema is True or schema == {}:
        return
    if schema is False:
        yield False
        return
    assert isinstance(schema, dict)
    plain = {key: value for key, value in schema.items() if key not in ("$ref", "anyOf", "allOf")}
    if plain:
        yield plain
    for key in schema.keys() & {"$ref", "anyOf"}:
        yield {key: schema[key]}
    for part in schema.get("allOf", ()):
        yield from _flat(part)


def _item(part: Mapping[str, Any], index: int) -> PlainSchema:
    first = part.get("prefixItems", ())
    item: PlainSchema = first[index] if index < len(first) else part.get("items", True)
    return item


def _property(part: Mapping[str, Any], name: str) -> Iterator[PlainSchema]:
    """The subschemas of a plain schema for one property."""
    patterns = part.get("patternProperties", {})
    try:
        matched = [value for pattern, value in patterns.items() if re.search(pattern, name)]
    except re.error as error:
        raise _refusal(f"the patternProperties {', '.join(patterns)!r:.100}") from error
    if name in part.get("properties", {}):
        yield part["properties"][name]
    elif not matched:
        yield part.get("additionalProperties", True)
    yield from matched


def _values(merged: Mapping[str, Any], kinds: set[str]) -> PlainSchema:
    values = []
    for value in merged["enum"]:
        kind = OF_TYPE[type(value)]
        beside = [key for key in merged if OF_KEYWORD.get(key) == kind]
        if beside:
            raise _refusal(f"enum beside {beside[0]}")
        if isinstance(value, float) and kind == "number" and "number" not in kinds:
            raise _refusal("enum of fractions beside the type integer")
        if _changes(value):
            raise _refusal(f"the number in enum {value!r:.80}")
        if kind in kinds or (kind == "number" and "integer" in kinds):
            values.append(value)
    return bool(values) and {"enum": values}


def _changes(value: Any) -> bool:
    """True if xgrammar's notation changes a number in the value."""
    if isinstance(value, list | dict):
        return any(map(_changes, value.values() if isinstance(value, dict) else value))
    if isinstance(value, float):
        return Decimal(f"{value:.17g}") != Decimal(repr(value))
    return isinstance(value, int) and abs(value) > EXACT


def _text(merged: Mapping[str, Any]) -> PlainSchema:
    told = [key for key in ("format", "pattern", "minLength", "maxLength") if key in merged]
    if told[0] == "format" or (told[0] == "pattern" and len(told) > 1):
        raise _refusal(" beside ".join(told))
    if told[0] == "pattern":
        return {"type": "string", "pattern": f"^{plain_pattern(merged['pattern'], in_json=True)}$"}
    least, most = merged.get("minLength", 0), merged.get("maxLength")
    if most is not None and most < least:
        return False
    return {"type": "string", "pattern": f"^{plain_text(least, most)}$"}


def _number(kind: str, merged: Mapping[str, Any]) -> PlainSchema:
    if "multipleOf" in merged:
        raise _refusal("multipleOf")
    low, above = max((merged.get("minimum", -math.inf), False), (merged.get("exclusiveMinimum", -math.inf), True))
    high, within = min((merged.get("maximum", math.inf), True), (merged.get("exclusiveMaximum", math.inf), False))
    below = not within
    for bound in (low, high):
        if math.isfinite(bound) and (abs(bound) > LARGEST_BOUND or round(bound, DECIMALS) != bound):
            raise _refusal(f"a bound as large or exact as {bound!r:.60}")
    if kind == "integer":
        low = low if math.isinf(low) else math.floor(low) + 1 if above else math.ceil(low)
        high = high if math.isinf(high) else math.ceil(high) - 1 if below else math.floor(high)
        above = below = False
    if low > high or (low == high and (above or below)):
        return False
    made: dict[str, Any] = {"type": kind}
    if math.isfinite(low):
        made["exclusiveMinimum" if above else "minimum"] = low
    if math.isfinite(high):
        made["exclusiveMaximum" if below else "maximum"] = high
    return made


def _letters(number: int) -> str:
    """A name without digits, which xgrammar leaves out of names."""
    return "d" + "".join(chr(ord("a") + int(digit)) for digit in str(number))


def _refusal(what: str) -> InvalidParameter:
    return InvalidParameter(
        f"structured: xgrammar does not respect {what}: leave it out, or start with grammar_backend llguidance"
    )
