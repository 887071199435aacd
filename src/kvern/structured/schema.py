"""JSON schemas in the subset that grammar compilers support: never wider than the original.

The compiler knows properties, items, references, anyOf, allOf and the plain assertions. All else is expressed with
these. A schema is the conjunction of its keywords, so `not` is pushed inwards to plain assertions, where it is another
assertion (not minimum 3: a number below 3); oneOf, if and dependent schemas are alternatives, some of them negated;
unevaluatedProperties closes each alternative separately. Where a schema cannot be expressed fully, a part of it is
taken (elements that `contains` demands come first), so that an answer still has the requested form. Where nothing or
only a poor part is left (uniqueItems), the keyword is refused.

Keywords are those of draft 2020-12 (https://json-schema.org/draft/2020-12), and the older ones of drafts 4 to 7.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from referencing import Registry, Resource
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT3, DRAFT4, DRAFT6, DRAFT7, DRAFT202012, SchemaRegistry, specification_with

from kvern.errors import InvalidParameter
from kvern.structured.assertions import (
    COUNTS,
    IGNORED,
    OPPOSITES,
    SHAPES,
    TYPES,
    PlainSchema,
    Resolver,
    Schema,
    all_of,
    any_of,
    canonical,
    closed_without,
    tell_apart,
    types_of,
)

YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
DAY = (
    f"(?:{YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{LEAP_YEAR}-02-29)"
)
FRACTION = "(?:[.][0-9]+)?"
HOUR = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
TIME = f"{HOUR}:[0-5][0-9]{FRACTION}(?:[Zz]|[+-]{HOUR})"
LEAP_SECOND = f"23:59:60{FRACTION}(?:[Zz]|[+-]00:00)"
"""Seconds are inserted at the end of a day in UTC, by RFC 3339 of the last day of June or December."""

FORMATS: dict[str, dict[str, Any]] = {
    "date": {"pattern": f"^{DAY}$"},
    "time": {"pattern": f"^(?:{TIME}|{LEAP_SECOND})$"},
    "date-time": {"pattern": f"^(?:{DAY}[Tt]{TIME}|{YEAR}-(?:06-30|12-31)[Tt]{LEAP_SECOND})$"},
    **{name: {"format": name} for name in ("duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "regex")},
    "idn-email": {"format": "email"},
    "idn-hostname": {"format": "hostname"},
    "iri": {"format": "uri"},
    "iri-reference": {"format": "uri"},
    "uri-reference": {"format": "uri"},
    "uri-template": {"format": "uri"},
    "json-pointer": {"pattern": "^(/([^~/]|~[01])*)*$"},
    "relative-json-pointer": {"pattern": "^(0|[1-9][0-9]*)(#|(/([^~/]|~[01])*)*)$"},
}
"""A schema for each format, which may be narrower than the standard; other formats assert nothing."""


MOST_WORK = 1_000_000
"""About a second of rewriting, in characters or entries that are copied or compared; it can grow with the square."""
NODE_WORK = 20
"""The work for a schema within a schema."""
MOST_CONTAINED = 64
MOST_ALTERNATIVES = 256
DEEPEST = 32
"""The deepest nesting of references and properties that is followed."""
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
LONE_REFERENCES = (DRAFT3, DRAFT4, DRAFT6, DRAFT7)
"""Drafts in which keywords beside `$ref` are ignored."""


def rewrite(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema in the compiler's subset. Raises InvalidParameter with the place of an unsupported part."""
    specification = specification_with(str(schema.get("$schema")), default=DRAFT202012)
    resource: Resource[Any] = specification.create_resource(schema)
    base = resource.id() or ""
    try:
        registry: SchemaRegistry = Registry().with_resource(base, resource)
        with suppress(AttributeError, TypeError):  # for values that are no schemas: refused later, if they matter
            registry = registry.crawl()  # otherwise each look-up repeats this
        resolver = registry.resolver(base)
        rewriter = Rewriter(specification)
        root = rewriter.said(schema, resolver, "#")
    except RecursionError as error:
        raise InvalidParameter("structured: the schema is nested too deeply, or has too long constants") from error
    except InvalidParameter:
        raise
    except (Unresolvable, AttributeError, TypeError, ValueError) as error:
        raise InvalidParameter(f"structured: the schema's references cannot be read: {error!r:.200}") from error
    if root is False:
        reasons = "; ".join(["structured: the schema allows no value at all", *sorted(rewriter.reasons)])
        raise InvalidParameter(reasons)
    return {**(root if isinstance(root, dict) else {}), "$defs": rewriter.definitions}


class Rewriter:
    """Converts schemas to the compiler's subset: `said` a schema itself, `negated` its complement."""

    def __init__(self, specification: Any) -> None:
        self._specification = specification
        self._work = 0
        self._names: dict[tuple[int, bool], str] = {}
        self._apart: dict[int, bool] = {}
        self._values: dict[int, frozenset[str]] = {}
        self.definitions: dict[str, PlainSchema] = {}
        self.reasons: set[str] = set()
        """Reasons why nothing may be left: needed keywords that cannot be expressed, or contradictions."""

    def said(self, schema: Schema, at: Resolver, path: str) -> PlainSchema:
        """A schema in the compiler's terms that allows what `schema` allows, or a part of it."""
        if isinstance(schema, bool):
            return schema
        node, at = self.enter(schema, at, path)
        if "unevaluatedProperties" in node or "unevaluatedItems" in node:
            return closed(self, node, at, path)
        meanings = (self.applied(key, node, at, path) for key in node.keys() & APPLIED.keys())
        return all_of([self.plain(node, at, path), *itertools.chain.from_iterable(meanings)])

    def negated(self, schema: Schema, at: Resolver, path: str) -> PlainSchema:
        """A schema that allows a part of what `schema` excludes; False if none of it can be expressed."""
        if isinstance(schema, bool):
            return not schema
        node, at = self.enter(schema, at, path)
        return any_of(self._opposites(node, at, path))

    def enter(self, schema: Schema, at: Resolver, path: str) -> tuple[dict[str, Any], Resolver]:
        """A node with the keywords of older drafts in today's words; checked."""
        self.count()
        if not isinstance(schema, Mapping):
            raise InvalidParameter(f"structured: {path} is {schema!r:.60}: a schema is an object, true or false")
        node = dict(schema)
        if "$ref" in node and self._specification in LONE_REFERENCES:
            node = {"$ref": node["$ref"]}
        if isinstance(node.get("$id"), str):
            at = at.in_subresource(self._specification.create_resource(schema))
        for key in node.keys() & SHAPES.keys():
            test, what = SHAPES[key]
            if not test(node[key]):
                raise InvalidParameter(f"structured: {path}/{key} is {node[key]!r:.60}: it must be {what}")
            if key in COUNTS:
                node[key] = int(node[key])
        if isinstance(node.get("items"), list):
            node["prefixItems"] = node.pop("items")
            if "additionalItems" in node:
                node["items"] = node["additionalItems"]
        node.pop("additionalItems", None)
        for low, high in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            if isinstance(node.get(low), bool) and node.pop(low) and high in node:
                node[low] = node.pop(high)
        for name, what in (node.pop("dependencies", None) or {}).items():
            kind = "dependentRequired" if isinstance(what, list) else "dependentSchemas"
            node[kind] = {**node.get(kind, {}), name: what}
        if node.get("uniqueItems"):
            raise InvalidParameter(f"structured: {path}/uniqueItems cannot be expressed: leave it out or make it false")
        node.pop("uniqueItems", None)
        return node, at

    def count(self, work: int = NODE_WORK) -> None:
        """So much was looked at. Raises InvalidParameter if it becomes too much."""
        self._work += work
        if self._work > MOST_WORK:
            raise InvalidParameter(
                f"structured: the schema holds more than {MOST_WORK // NODE_WORK} schemas, or its alternatives and "
                "negations are too large to be compared: make it smaller"
            )

    def values(self, node: Mapping[str, Any]) -> frozenset[str] | None:
        """The values that a node of the schema names, as texts, if it does."""
        if not {"enum", "const"} & node.keys():
            return None
        if id(node) not in self._values:
            self._values[id(node)] = frozenset(map(canonical, node["enum"] if "enum" in node else [node["const"]]))
        return self._values[id(node)]

    def plain(self, node: Mapping[str, Any], at: Resolver, path: str) -> PlainSchema:
        """The assertions that the compiler knows, with the schemas in them."""
        made: dict[str, Any] = {}
        form: dict[str, Any] = {}
        for key, value in node.items():
            here = f"{path}/{key}"
            if key in ("properties", "patternProperties"):
                made[key] = {name: self.said(item, at, f"{here}/{name}") for name, item in value.items()}
            elif key == "prefixItems":
                made[key] = [self.said(item, at, f"{here}/{index}") for index, item in enumerate(value)]
            elif key in ("items", "additionalProperties"):
                made[key] = self.said(value, at, here)
            elif key == "format":
                form = FORMATS.get(value, {})
            elif key not in IGNORED and key not in APPLIED:
                made[key] = value
        properties, required = made.get("properties", {}), made.get("required", ())
        impossible = [name for name in required if properties.get(name) is False]
        if impossible and made.get("type") == "object":
            self.reasons.add(f"{path} has a required property {impossible[0]!r} that may not be there")
            return False
        return all_of([made, form]) if form.keys() & made.keys() else {**made, **form}

    def applied(self, key: str, node: Mapping[str, Any], at: Resolver, path: str) -> Iterable[PlainSchema]:
        """The meaning of one keyword of `APPLIED`, which are alternatives or negations."""
        return APPLIED[key](self, node, at, f"{path}/{key}")

    def reference(self, node: Mapping[str, Any], at: Resolver, path: str, *, allowed: bool) -> PlainSchema:
        """Returns a schema of what the reference at `path` allows, or of a part of what it excludes."""
        target = node[path.rpartition("/")[2]]
        contents, there = self.resolve(target, at, path)
        key = id(contents), allowed
        if key not in self._names:
            name = self._names[key] = f"{len(self._names)}{re.sub('[^A-Za-z0-9]+', '-', target)}"
            self.definitions[name] = (self.said if allowed else self.negated)(contents, there, target)
        return {"$ref": f"#/$defs/{self._names[key]}"}

    def resolve(self, target: str, at: Resolver, path: str) -> tuple[Schema, Resolver]:
        """The target of a reference, and the resolver for references within it."""
        try:
            found = at.lookup(target)
        except Unresolvable as error:
            raise InvalidParameter(
                f"structured: {path} {target!r} names nothing in the schema: what lies elsewhere is never fetched"
            ) from error
        contents = found.contents
        if isinstance(contents, Mapping) and "$dynamicAnchor" in contents and path.endswith("$dynamicRef"):
            raise InvalidParameter(f"structured: {path} cannot be expressed: use $ref")
        return contents, found.resolver

    # keywords that are alternatives or negations

    def _all_of(self, node: Mapping[str, Any], at: Resolver, path: str) -> Iterable[PlainSchema]:
        yield from (self.said(item, at, f"{path}/{index}") for index, item in enumerate(node["allOf"]))

    def _any_of(self, node: Mapping[str, Any], at: Resolver, path: str) -> Iterable[PlainSchema]:
        yield any_of(self.said(item, at, f"{path}/{index}") for index, item in enumerate(node["anyOf"]))

    def _one_of(self, node: Mapping[str, Any], at: Resolver, path: str) -> Iterable[PlainSchema]:
        yield any_of(
            all_of([self.said(item, at, f"{path}/{index}"), *self.others(node["oneOf"], index, at, path)])
            for index, item in enumerate(node["oneOf"])
        )

    def others(self, items: Sequence[Schema], index: int, at: Resolver, path: str) -> list[PlainSchema]:
        """Schemas that exclude the other alternatives, where they do not obviously exclude each other."""
        if id(items) not in self._apart:
            self._apart[id(items)] = tell_apart(items)
        if self._apart[id(items)]:
            return []
        return [
            self.negated(other, at, f"{path}/{number}")
            for number, other in enumerate(items)
            if number != index and not disjoint(self, items[index], other, at, path)
        ]

    def _if(self, node: Mapping[str, Any], at: Resolver, path: str) -> Iterable[PlainSchema]:
        if "then" in node or "else" in node:
            above = path.rpartition("/")[0]
            then, otherwise = node.get("then", True), node.get("else", True)
            yield any_of(
                [
                    all_of([self.said(node["if"], at, path), self.said(then, at, f"{above}/then")]),
                    all_of([self.negated(node["if"], at, path), self.said(otherwise, at, f"{above}/else")]),
                ]
            )

    def _dependent_required(self, node: Mapping[str, Any], at: Resolver, path: str) -> Iterable[PlainSchema]:
        for name, names in node["dependentRequired"].items():
            if names:
                yield {"anyOf": [{"properties": {name: False}}, {"required": sorted({name, *names})}]}

    def _dependent_schemas(self, node: Mapping[str, Any], at: Resolver, path: str) -> Iterable[PlainSchema]:
        for name, schema in node["dependentSchemas"].items():
            said = self.said(schema, at, f"{path}/{name}")
            yield any_of([{"properties": {name: False}}, all_of([{"required": [name]}, said])])

    def _contains(self, node: Mapping[str, Any], at: Resolver, path: str) -> Iterable[PlainSchema]:
        least, most = node.get("minContains", 1), node.get("maxContains")
        if max(least, most or 0) > MOST_CONTAINED:
            raise InvalidParameter(f"structured: {path} wants up to {max(least, most or 0)}: at most {MOST_CONTAINED}")
        if most is not None and most < least:
            yield {"type": sorted(TYPES - {"array"})}
            return
        made: dict[str, Any] = {"prefixItems": [self.said(node["contains"], at, path)] * least, "minItems": least}
        if most is not None:
            made["prefixItems"] = made["prefixItems"] + [True] * (most - least)
            made["items"] = self.negated(node["contains"], at, path)
        yield any_of([{"type": sorted(TYPES - {"array"})}, {"type": "array", **made}])

    def _property_names(self, node: Mapping[str, Any], at: Resolver, path: str) -> Iterable[PlainSchema]:
        schema = node["propertyNames"]
        rules = {
            key: value for key, value in ({} if isinstance(schema, bool) else schema).items() if key not in IGNORED
        }
        rules.pop("type", None)
        if schema is False:
            yield {"maxProperties": 0}
        elif len(rules) == 1 and rules.keys() <= {"pattern", "maxLength", "minLength"}:
            [(key, value)] = rules.items()
            pattern = {"pattern": value, "maxLength": f"^(?s:.){{0,{value}}}$", "minLength": f"^(?s:.){{{value}}}"}[key]
            yield {"patternProperties": {pattern: True}, "additionalProperties": False}
        elif rules.keys() in ({"enum"}, {"const"}):
            names = [name for name in rules.get("enum", [rules.get("const")]) if isinstance(name, str)]
            yield {"properties": dict.fromkeys(names, True), "additionalProperties": False}
        elif rules:
            raise InvalidParameter(
                f"structured: {path} cannot be expressed: it may be one pattern, enum, const, minLength or maxLength"
            )

    # what a schema does not allow

    def _opposites(self, node: Mapping[str, Any], at: Resolver, path: str) -> Iterable[PlainSchema]:
        for key, value in node.items():
            here = f"{path}/{key}"
            if key in OPPOSITES:
                self.count(4 * len(str(value)))
                yield OPPOSITES[key](value)
            elif key == "properties":
                for name, item in value.items():
                    other = self.negated(item, at, f"{here}/{name}")
                    yield other is not False and {"type": "object", "required": [name], "properties": {name: other}}
            elif key in ("prefixItems", "items"):
                before = len(node.get("prefixItems", ())) if key == "items" else 0
                for index, item in enumerate(value if key == "prefixItems" else [value], before):
                    self.count(index)
                    other, first = self.negated(item, at, f"{here}/{index}"), [True] * index
                    yield other is not False and {
                        "type": "array",
                        "prefixItems": [*first, other],
                        "minItems": index + 1,
                    }
            elif key in REFERENCES:
                yield self.reference(node, at, here, allowed=False)
            elif key == "not":
                yield self.said(value, at, here)
            elif key == "allOf":
                yield from (self.negated(item, at, f"{here}/{index}") for index, item in enumerate(value))
            elif key in ("anyOf", "oneOf"):
                yield all_of(self.negated(item, at, f"{here}/{index}") for index, item in enumerate(value))
            elif key == "if":
                then, otherwise = node.get("then", True), node.get("else", True)
                yield all_of([self.said(value, at, here), self.negated(then, at, f"{path}/then")])
                yield all_of([self.negated(value, at, here), self.negated(otherwise, at, f"{path}/else")])
            elif key == "contains" and node.get("minContains", 1) > 0:
                yield {"type": "array", "items": self.negated(value, at, here)}
            elif key == "dependentRequired":
                for name, names in value.items():
                    missing = (all_of([{"required": [name]}, {"properties": {other: False}}]) for other in names)
                    yield all_of([{"type": "object"}, any_of(missing)])
            elif key == "dependentSchemas":
                for name, item in value.items():
                    yield all_of([{"type": "object", "required": [name]}, self.negated(item, at, f"{here}/{name}")])
            elif key not in IGNORED and key not in ("then", "else", "minContains", "maxContains") and value is not True:
                self.reasons.add(f"not {key} cannot be expressed ({here})")


APPLIED: dict[str, Callable[[Rewriter, Mapping[str, Any], Resolver, str], Iterable[PlainSchema]]] = {
    **dict.fromkeys(REFERENCES, lambda self, node, at, path: [self.reference(node, at, path, allowed=True)]),
    "allOf": Rewriter._all_of,
    "anyOf": Rewriter._any_of,
    "oneOf": Rewriter._one_of,
    "not": lambda self, node, at, path: [self.negated(node["not"], at, path)],
    "if": Rewriter._if,
    "then": lambda *_: (),
    "else": lambda *_: (),
    "dependentRequired": Rewriter._dependent_required,
    "dependentSchemas": Rewriter._dependent_schemas,
    "contains": Rewriter._contains,
    "minContains": lambda *_: (),
    "maxContains": lambda *_: (),
    "propertyNames": Rewriter._property_names,
}


@dataclass
class _Alternative:
    """One way to satisfy a schema: a conjunction, and which properties and items it looks at."""

    schemas: list[PlainSchema] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    patterns: set[str] = field(default_factory=set)
    items: int = 0
    every_property: bool = False
    every_item: bool = False

    def __and__(self, other: "_Alternative") -> "_Alternative":
        return _Alternative(
            self.schemas + other.schemas,
            self.names | other.names,
            self.patterns | other.patterns,
            max(self.items, other.items),
            self.every_property or other.every_property,
            self.every_item or other.every_item,
        )


def closed(rewriter: Rewriter, node: Mapping[str, Any], at: Resolver, path: str) -> PlainSchema:
    """A schema in which each alternative excludes unevaluated properties or items."""
    rest = {key: value for key, value in node.items() if key not in ("unevaluatedProperties", "unevaluatedItems")}
    made = []
    for way in _ways(rewriter, rest, at, path, 0):
        closing: dict[str, Any] = {}
        if "unevaluatedProperties" in node and not way.every_property:
            closing["properties"] = dict.fromkeys(sorted(way.names), True)
            closing["patternProperties"] = dict.fromkeys(sorted(way.patterns), True)
            unevaluated = node["unevaluatedProperties"]
            closing["additionalProperties"] = rewriter.said(unevaluated, at, f"{path}/unevaluatedProperties")
        if "unevaluatedItems" in node and not way.every_item:
            closing["prefixItems"] = [True] * way.items
            closing["items"] = rewriter.said(node["unevaluatedItems"], at, f"{path}/unevaluatedItems")
        made.append(all_of([*way.schemas, closing]))
    return any_of(made)


def _ways(rewriter: Rewriter, schema: Schema, at: Resolver, path: str, depth: int) -> list[_Alternative]:
    """The ways to satisfy a schema, with the properties and items that each way covers."""
    if isinstance(schema, bool):
        return [_Alternative()] if schema else []
    if depth > DEEPEST:
        raise InvalidParameter(f"structured: {path} refers to itself, which unevaluatedProperties cannot look into")
    node, at = rewriter.enter(schema, at, path)
    if "unevaluatedProperties" in node or "unevaluatedItems" in node:
        inside = _Alternative([closed(rewriter, node, at, path)])
        inside.every_property = "unevaluatedProperties" in node
        inside.every_item = "unevaluatedItems" in node
        return [inside]

    def ways(item: Schema, name: str) -> list[_Alternative]:
        return _ways(rewriter, item, at, f"{path}/{name}", depth + 1)

    def just(made: Iterable[PlainSchema]) -> list[_Alternative]:
        schema = all_of(made)
        return [] if schema is False else [_Alternative([schema])]

    own = _Alternative([rewriter.plain(node, at, path)], set(node.get("properties", ())))
    own.patterns = set(node.get("patternProperties", ()))
    own.every_property, own.every_item = "additionalProperties" in node, "items" in node
    own.items = len(node.get("prefixItems", ()))
    factors: list[list[_Alternative]] = [[own]]
    for key in node.keys() & APPLIED.keys():
        value, here = node[key], f"{path}/{key}"
        if key == "allOf":
            factors += [ways(item, f"allOf/{index}") for index, item in enumerate(value)]
        elif key == "anyOf":
            factors.append([way for index, item in enumerate(value) for way in ways(item, f"anyOf/{index}")])
        elif key == "oneOf":
            alone = [just(rewriter.others(value, index, at, here)) or [] for index in range(len(value))]
            pairs = ([ways(item, f"oneOf/{index}"), alone[index]] for index, item in enumerate(value))
            choices = (_product(rewriter, pair, path) for pair in pairs)
            factors.append(list(itertools.chain(*choices)))
        elif key in REFERENCES:
            target, there = rewriter.resolve(value, at, here)
            factors.append(_ways(rewriter, target, there, here, depth + 1))
        elif key == "if":
            yes = _product(rewriter, [ways(value, "if"), ways(node.get("then", True), "then")], path)
            otherwise = just([rewriter.negated(value, at, here)])
            no = _product(rewriter, [otherwise, ways(node.get("else", True), "else")], path)
            factors.append(yes + no)
        elif key == "dependentSchemas":
            for name, item in value.items():
                without = just([{"properties": {name: False}}])
                present = _product(rewriter, [just([{"required": [name]}]), ways(item, f"{key}/{name}")], path)
                factors.append(without + present)
        else:
            if key == "contains":
                own.items = max(own.items, node.get("minContains", 1))
            factors.append(just(rewriter.applied(key, node, at, path)))
    return _product(rewriter, factors, path)


def _product(rewriter: Rewriter, factors: Sequence[Sequence[_Alternative]], path: str) -> list[_Alternative]:
    """All combinations of one element of each."""
    result = [_Alternative()]
    for factor in factors:
        copied = sum(len(way.schemas) + len(way.names) + len(way.patterns) for way in result)
        rewriter.count(copied * len(factor) // 16)
        result = [way & other for way in result for other in factor]
        if len(result) > MOST_ALTERNATIVES:
            raise InvalidParameter(
                f"structured: {path} has more than {MOST_ALTERNATIVES} alternatives, which its unevaluated parts need "
                "to be looked at one by one: make it smaller"
            )
    return result


def disjoint(rewriter: Rewriter, one: Schema, other: Schema, at: Resolver, path: str, depth: int = 0) -> bool:
    """True if the schemas obviously allow no common value."""
    rewriter.count()
    one, other = looked_up(rewriter, one, at, path), looked_up(rewriter, other, at, path)
    if isinstance(one, bool) or isinstance(other, bool):
        return one is False or other is False
    rewriter.count((_entries(one) + _entries(other)) // 4)
    if not types_of(one) & types_of(other):
        return True
    values, others = rewriter.values(one), rewriter.values(other)
    if values is not None and others is not None:
        return values.isdisjoint(others)
    if types_of(one) != {"object"} and types_of(other) != {"object"}:
        return False
    if depth > DEEPEST:
        return False
    both = set(one.get("required", ())) & set(other.get("required", ()))
    return any(
        disjoint(
            rewriter,
            one.get("properties", {}).get(name, True),
            other.get("properties", {}).get(name, True),
            at,
            path,
            depth + 1,
        )
        for name in both
    ) or any(closed_without(a, set(b.get("required", ()))) for a, b in ((one, other), (other, one)))


def looked_up(rewriter: Rewriter, schema: Schema, at: Resolver, path: str) -> Schema:
    """The target of a schema that is only a reference; other schemas unchanged."""
    for _ in range(DEEPEST):
        if isinstance(schema, bool) or schema.keys() - IGNORED != {"$ref"}:
            break
        schema, at = rewriter.resolve(schema["$ref"], at, path)
    return schema


def _entries(node: Mapping[str, Any]) -> int:
    """The number of entries in its keywords."""
    return sum(len(value) for value in node.values() if isinstance(value, (list, dict)))
