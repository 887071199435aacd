"""Lark grammars for JSON schemas with integers beyond 2^53, which llguidance keeps as floats.

Only the schemas that contain such a number become rules; all other parts stay JSON, as `%json`.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any

import msgspec

from kvern.errors import InvalidParameter
from kvern.structured.assertions import OF_KEYWORD, OF_TYPE, PlainSchema, any_of, types_of
from kvern.structured.llguidance_schema import far_keywords, inexact


def whole_numbers(low: int | None, high: int | None) -> str | None:
    """A regular expression for integers from `low` to `high`, None: unbounded; returns None if there are none."""
    if low is not None and high is not None and low > high:
        return None
    made = []
    if low is None or low < 0:
        largest = -1 if high is None else min(high, -1)
        made.append(f"-(?:{'|'.join(_positive(-largest, None if low is None else -low))})")
    if high is None or high >= 0:
        made += _positive(max(low or 0, 0), high)
    return "|".join(made)


def _positive(low: int, high: int | None) -> Iterator[str]:
    """Patterns by number of digits; both bounds are 0 or more."""
    most = len(str(low if high is None else high))
    for digits in range(len(str(low)), most + 1):
        first = max(low, 10 ** (digits - 1) if digits > 1 else 0)
        last = 10**digits - 1
        yield _between(str(first), str(last if high is None else min(high, last)))
    if high is None:
        yield f"[1-9][0-9]{{{most},}}"


def _between(low: str, high: str) -> str:
    """A pattern for numbers between bounds with equal numbers of digits."""
    if low == high:
        return low
    count = len(low)
    if set(low) == {"0"} and set(high) == {"9"}:
        return f"[0-9]{{{count}}}"
    if low[0] == high[0]:
        return low[0] + _between(low[1:], high[1:])
    if count == 1:
        return f"[{low}-{high}]"
    parts = [low[0] + _between(low[1:], "9" * (count - 1)), high[0] + _between("0" * (count - 1), high[1:])]
    if int(high[0]) - int(low[0]) > 1:
        parts.append(f"[{int(low[0]) + 1}-{int(high[0]) - 1}][0-9]{{{count - 1}}}")
    return f"(?:{'|'.join(parts)})"


MOST_CHARACTERS = 1 << 20
"""Limit of the parts that stay JSON, each with the definitions it refers to."""
WS = "WS?"
COMMA, COLON = f'{WS} "," {WS}', f'{WS} ":" {WS}'
HEAD = r"WS: /[\x20\x0A\x0D\x09]{1,16}/"


class Unsaid(Exception):
    """The schema has no such number, or has a shape that this module does not support."""


def rules_of(schema: Mapping[str, Any], held: Callable[[dict[str, Any]], dict[str, Any] | None], exact: bool) -> str:
    """A Lark grammar for the result of `rewrite`.

    `held` converts a part for llguidance; None if it allows no value. `exact`: the grammar must allow exactly what the
    schema allows; otherwise objects with such a number are closed, and numbers beyond a far bound are integers. Raises
    Unsaid.
    """
    definitions = schema.get("$defs", {})
    writer = _Writer(definitions, held, exact)
    root = {key: value for key, value in schema.items() if key != "$defs"}
    if not writer.is_far(root):
        raise Unsaid
    start = writer.rule(root)
    if start is None:
        raise InvalidParameter("structured: the schema allows no value at all")
    return "\n".join([f"start: {start}", HEAD, *writer.rules])


class _Writer:
    def __init__(
        self,
        definitions: Mapping[str, PlainSchema],
        held: Callable[[dict[str, Any]], dict[str, Any] | None],
        exact: bool,
    ) -> None:
        self.rules: list[str] = []
        self._definitions = definitions
        self._held = held
        self._exact = exact
        self._references: dict[str, str] = {}
        self._leaves: dict[str, str | None] = {}
        self._characters = 0
        self._known: dict[int, tuple[Any, bool]] = {}
        self._far: set[str] = set()
        self._named_in = {name: _references_of(definition) for name, definition in definitions.items()}
        users: dict[str, list[str]] = {}
        for name, named in self._named_in.items():
            for other in named:
                users.setdefault(other, []).append(name)
        waiting = [name for name, definition in definitions.items() if self.is_far(definition)]
        while waiting:
            name = waiting.pop()
            if name not in self._far:
                self._far.add(name)
                waiting += users.get(name, ())
        self._known.clear()

    def is_far(self, schema: Any) -> bool:
        """True if the schema, or one it refers to, has a number that the compiler would change."""
        if not isinstance(schema, dict):
            return False
        if id(schema) not in self._known:
            own = any(self._exact or not may_be_nearer for _, may_be_nearer in far_keywords(schema))
            there = schema.get("$ref", "").removeprefix("#/$defs/") in self._far
            self._known[id(schema)] = schema, own or there or any(map(self.is_far, _parts(schema)))
        return self._known[id(schema)][1]

    def rule(self, schema: PlainSchema) -> str | None:
        """The name of a rule for a schema; None if the schema allows no value."""
        if not isinstance(schema, dict) or not self.is_far(schema):
            return self._leaf(schema)
        if schema.keys() == {"$ref"}:
            return self._reference(schema["$ref"].removeprefix("#/$defs/"))
        if schema.keys() == {"anyOf"}:
            return self._one_of(self.rule(choice) for choice in schema["anyOf"])
        if "allOf" in schema or "anyOf" in schema:
            return self.rule(_together(schema))
        if "$ref" in schema:
            raise Unsaid
        if {"enum", "const"} & schema.keys():
            return self._one_of(self._values(schema))
        return self._one_of(self._of_type(kind, schema) for kind in sorted(types_of(schema)))

    def _named(self, body: str) -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def _one_of(self, rules: Iterable[str | None]) -> str | None:
        some = [rule for rule in rules if rule is not None]
        return self._named(" | ".join(some)) if some else None

    def _reference(self, name: str) -> str:
        if name not in self._references:
            self._references[name] = f"d{len(self._references)}"
            made = self.rule(self._definitions[name])
            if made is None:
                raise Unsaid
            self.rules.append(f"{self._references[name]}: {made}")
        return self._references[name]

    def _leaf(self, schema: PlainSchema) -> str | None:
        if schema is False:
            return None
        used: set[str] = set()
        waiting = _references_of(schema)
        while waiting:
            name = waiting.pop()
            used.add(name)
            waiting |= self._named_in[name] - used
        definitions = {name: self._definitions[name] for name in sorted(used)}
        made = {**(schema if isinstance(schema, dict) else {}), "$defs": definitions}
        text = msgspec.json.encode(made).decode()
        if text not in self._leaves:
            self._characters += len(text)
            if self._characters > MOST_CHARACTERS:
                raise Unsaid
            held = self._held(made)
            written = None if held is None else f"%json {msgspec.json.encode(held).decode()}"
            self._leaves[text] = written and self._named(written)
        return self._leaves[text]

    def _values(self, node: Mapping[str, Any]) -> Iterator[str | None]:
        """Rules for listed values: one for those that the compiler keeps exactly, and one for each other value."""
        values = node["enum"] if "enum" in node else [node["const"]]
        near = [value for value in values if inexact(value) is None]
        if near:
            rest = {key: value for key, value in node.items() if key not in ("enum", "const")}
            yield self.rule({**rest, "enum": near})
        if {"enum", "const"} <= node.keys():
            raise Unsaid
        for value in values:
            kind = OF_TYPE[type(value)]
            if inexact(value) is None or kind not in types_of(node):
                continue
            beside = {key: limit for key, limit in node.items() if OF_KEYWORD.get(key) == kind}
            if kind == "number":
                whole = "number" in _types(node) or value == int(value)
                if whole and all(HOLDS[key](value, limit) for key, limit in beside.items()):
                    yield self._named(f'"{json.dumps(value)}"')
            elif beside:
                raise Unsaid
            else:
                yield self.rule(_as_schema(value))

    def _of_type(self, kind: str, node: Mapping[str, Any]) -> str | None:
        own = {key: value for key, value in node.items() if OF_KEYWORD.get(key) == kind}
        own["type"] = "integer" if kind == "number" and "number" not in _types(node) else kind
        if not self.is_far(own):
            return self._leaf(own)
        return {"number": self._number, "array": self._array, "object": self._object}[kind](own)

    def _number(self, node: Mapping[str, Any]) -> str | None:
        if "multipleOf" in node or (self._exact and node["type"] != "integer"):
            raise Unsaid
        lows = [math.ceil(node["minimum"])] if "minimum" in node else []
        lows += [math.floor(node["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in node else []
        highs = [math.floor(node["maximum"])] if "maximum" in node else []
        highs += [math.ceil(node["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in node else []
        pattern = whole_numbers(max(lows, default=None), min(highs, default=None))
        return pattern and self._named(f"/{pattern}/")

    def _array(self, node: Mapping[str, Any]) -> str | None:
        least, most = node.get("minItems", 0), node.get("maxItems", math.inf)
        first: list[str] = []
        for schema in node.get("prefixItems", ()):
            made = self.rule(schema) if len(first) < most else None
            if made is None:
                most = min(most, len(first))
                break
            first.append(made)
        rest = self.rule(node.get("items", True)) if most > len(first) else None
        if rest is None:
            most = min(most, len(first))
        if most < least:
            return None
        if rest is not None and not first:
            first.append(rest)
        tail = ""
        if rest is not None and most > len(first):
            times = f"{max(0, least - len(first))},{'' if most == math.inf else int(most) - len(first)}"
            tail = f"({COMMA} {rest}){{{times}}}"
        for place in range(len(first) - 1, -1, -1):
            one = self._named(f"{COMMA if place else ''} {first[place]} {tail}")
            tail = one if place < least else f"{one}?"
        return self._named(f'"[" {WS} {tail} {WS} "]"')

    def _object(self, node: Mapping[str, Any]) -> str | None:
        others = node.get("additionalProperties", True)
        required = set(node.get("required", ()))
        named = node.get("properties", {})
        schemas = {**named, **{name: others for name in node.get("required", ()) if name not in named}}
        is_counted = node.get("minProperties", 0) > len(required) or node.get("maxProperties", math.inf) < len(schemas)
        if "patternProperties" in node or is_counted or not schemas or (self._exact and others is not False):
            raise Unsaid
        made = [(name, self.rule(schema)) for name, schema in schemas.items()]
        if any(rule is None for name, rule in made if name in required):
            return None
        pairs = [
            (name, f"{_quoted(json.dumps(name, ensure_ascii=False))} {COLON} {rule}") for name, rule in made if rule
        ]
        starts, tail = [""], ""
        for name, pair in reversed(pairs):
            one = self._named(pair)
            starts = [f"{one} {tail}", *([] if name in required else starts)]
            following = f"{COMMA} {one}"
            tail = self._named(f"{following if name in required else f'({following})?'} {tail}")
        some = self._named(" | ".join(start for start in starts if start)) if any(starts) else ""
        return self._named(f'"{{" {WS} {some}{"?" if some and "" in starts else ""} {WS} "}}"')


HOLDS: dict[str, Callable[[Any, Any], bool]] = {
    "minimum": lambda value, limit: value >= limit,
    "maximum": lambda value, limit: value <= limit,
    "exclusiveMinimum": lambda value, limit: value > limit,
    "exclusiveMaximum": lambda value, limit: value < limit,
    "multipleOf": lambda value, factor: Fraction(value) % Fraction(str(factor)) == 0,
}
"""The check of a number against each keyword."""


def _together(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema without allOf, and without anyOf beside other keywords; plain parts may not contradict each other."""
    merged: dict[str, Any] = {}
    for part in ({key: value for key, value in schema.items() if key != "allOf"}, *schema.get("allOf", ())):
        if (
            not isinstance(part, dict)
            or "allOf" in part
            or any(merged.get(key, part[key]) != part[key] for key in part)
        ):
            raise Unsaid
        merged |= part
    choices = merged.pop("anyOf", None)
    if choices is None or not merged:
        return merged if choices is None else {"anyOf": choices}
    made = any_of(choice if isinstance(choice, bool) else _together({"allOf": [choice, merged]}) for choice in choices)
    if not isinstance(made, dict):
        raise Unsaid
    return made


def _parts(schema: Mapping[str, Any]) -> Iterator[Any]:
    for key in ("properties", "patternProperties"):
        yield from schema.get(key, {}).values()
    for key in ("prefixItems", "anyOf", "allOf"):
        yield from schema.get(key, ())
    yield from (schema.get(key) for key in ("items", "additionalProperties"))


def _references_of(schema: Any) -> set[str]:
    if not isinstance(schema, dict):
        return set()
    own = {schema["$ref"].removeprefix("#/$defs/")} if "$ref" in schema else set()
    return own.union(*map(_references_of, _parts(schema)))


def _as_schema(value: Any) -> dict[str, Any]:
    """A list or an object as a schema for it alone."""
    if isinstance(value, list):
        items = [{"const": item} for item in value]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    properties = {name: {"const": item} for name, item in value.items()}
    return {"type": "object", "properties": properties, "required": list(value), "additionalProperties": False}


def _types(node: Mapping[str, Any]) -> list[str]:
    types = node.get("type", ["number"])
    return types if isinstance(types, list) else [types]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
