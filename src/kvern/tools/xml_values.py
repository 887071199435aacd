"""Values of parameters between XML tags: text, unless the tool's schema gives another type.

A parameter that can only be a string is its text, unchanged. Others are read as JSON or as a Python literal if
possible, and as text otherwise.
"""

import ast
import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvern.structured.assertions import IGNORED, OF_TYPE, TYPES, pointed_at

DEEPEST = 16
"""The longest chain of references that is followed."""
ANYTHING = frozenset(TYPES)
WRITABLE_BESIDE_TEXT = frozenset({"string", "null", "boolean"})
REFERENCE = re.compile(r'"\$(ref|dynamicRef|recursiveRef)"')
OTHER_REFERENCE = re.compile(r'"\$(dynamicRef|recursiveRef)"|"\$ref": "(?!#/(\$defs|definitions)/)')
REFERRED = ("$schema", "$id", "$defs", "definitions")
INSIDE_CLASS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)


@dataclass(frozen=True)
class ParameterSchema:
    """The schema of one parameter; its references are resolved in `root`."""

    schema: Any
    root: Mapping[str, Any]

    @classmethod
    def of(cls, root: Mapping[str, Any], key: str) -> "ParameterSchema":
        """The schema of parameter `key` of a tool with the schema `root`."""
        properties = root.get("properties")
        other = root.get("additionalProperties", True)
        return cls(properties.get(key, other) if isinstance(properties, Mapping) else other, root)

    def types(self) -> frozenset[str]:
        """The types that a value may have, in JSON's words; integers are numbers."""
        try:
            return self._types(self.schema, {})
        except RecursionError:
            return ANYTHING

    def inside(self, key: str) -> "ParameterSchema":
        """The schema of the value's property `key`, or of its items."""
        node = self._plain(self.schema)
        node = node if isinstance(node, Mapping) else {}
        if "items" in node and "properties" not in node:
            return ParameterSchema(node["items"], self.root)
        return ParameterSchema(ParameterSchema.of(node, key).schema, self.root)

    def text(self) -> str | None:
        """A terminal (Lark) for the texts of a value; None: the schema cannot be expressed as one."""
        node = self._plain(self.schema)
        if not isinstance(node, Mapping):
            return None
        said = {key: value for key, value in node.items() if key not in IGNORED}
        kinds = self._types(node, {})
        if "string" in kinds and kinds <= WRITABLE_BESIDE_TEXT and self._is_free(said):
            return ANY_TEXT
        said.pop("type", None)
        if kinds != {"string"} or not said.keys() <= {"enum", "const", "minLength", "maxLength", "pattern"}:
            return None
        terms = [term for key, value in said.items() for term in [_term(key, value)]]
        return None if None in terms else " & ".join(f"({term})" for term in terms)

    def standing_alone(self) -> dict[str, Any] | bool | None:
        """The schema with the definitions that it references; None: it references other parts of the tool's schema."""
        schema = self.schema
        if isinstance(schema, bool):
            return schema
        if (text := json.dumps(schema)) and not REFERENCE.search(text):
            return dict(schema)
        if OTHER_REFERENCE.search(text) or not schema.keys().isdisjoint(REFERRED):
            return None
        return {**{key: self.root[key] for key in REFERRED if key in self.root}, **schema}

    def _types(self, schema: Any, known: dict[int, frozenset[str]]) -> frozenset[str]:
        """`known`: by the ids of schemas, so that each is looked at once; ANYTHING while it is."""
        node = self._plain(schema)
        if not isinstance(node, Mapping):
            return ANYTHING
        if id(node) not in known:
            known[id(node)] = ANYTHING
            known[id(node)] = self._types_of(node, known)
        return known[id(node)]

    def _types_of(self, node: Mapping[str, Any], known: dict[int, frozenset[str]]) -> frozenset[str]:
        found = ANYTHING
        if (kinds := node.get("type")) is not None:
            named = {kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if isinstance(kind, str)}
            found &= {"number" if kind == "integer" else kind for kind in named}
        values = node.get("enum", [node["const"]] if "const" in node else None)
        if isinstance(values, list):
            found &= {OF_TYPE[type(value)] for value in values if type(value) in OF_TYPE}
        for key in ("anyOf", "oneOf"):
            if isinstance(several := node.get(key), list):
                found &= frozenset().union(*(self._types(part, known) for part in several))
        if isinstance(several := node.get("allOf"), list):
            found = found.intersection(*(self._types(part, known) for part in several))
        return found or ANYTHING

    def _plain(self, schema: Any) -> Any:
        """The target of a schema that is only a reference; None if it cannot be resolved."""
        for _ in range(DEEPEST):
            if not isinstance(schema, Mapping) or "$ref" not in schema:
                return schema
            target = schema["$ref"]
            if not isinstance(target, str) or schema.keys() - IGNORED != {"$ref"}:
                return None
            schema = pointed_at(target, self.root)
        return None

    def _is_free(self, said: Mapping[str, Any]) -> bool:
        """True if the schema restricts only the type, directly or in alternatives."""
        if said.keys() == {"anyOf"} and isinstance(said["anyOf"], list):
            parts = [part for part in said["anyOf"] if isinstance(part, Mapping)]
            return len(parts) == len(said["anyOf"]) and all(part.keys() - IGNORED == {"type"} for part in parts)
        return said.keys() == {"type"}


ANY_TEXT = "/(?s:.*)/"


def _term(key: str, value: Any) -> str | None:
    if key in ("enum", "const"):
        texts = value if isinstance(value, list) else [value]
        return " | ".join(json.dumps(text, ensure_ascii=False) for text in texts if isinstance(text, str)) or None
    if key == "pattern":
        return _pattern(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        return None
    return f"/(?s:.{{{value},}})/" if key == "minLength" else f"/(?s:.{{0,{value}}})/"


def _pattern(pattern: Any) -> str | None:
    """A pattern as a terminal for the whole text; None if a terminal cannot express it."""
    if not isinstance(pattern, str):
        return None
    first, last = pattern.startswith("^"), re.search(r"(?<!\\)(?:\\\\)*\$$", pattern) is not None
    body = pattern[first : len(pattern) - last]
    rest = INSIDE_CLASS.sub("", body)
    if re.search(r"[\^$]|\(\?", rest) or re.search(r"\\[bBAZzGkpP0-9]", body):
        return None
    depth = 0
    for sign in re.findall(r"[()|]", rest):
        depth += {"(": 1, ")": -1}.get(sign, 0)
        if depth < 0 or (sign == "|" and not depth):
            return None
    if not body or depth:
        return None
    written = re.sub(r"\\.|/", lambda found: found[0] if found[0] != "/" else "\\/", body, flags=re.DOTALL)
    written = written.replace("\n", "\\n")
    before, after = ("" if first else "(?s:.*)"), ("" if last else "(?s:.*)")
    return f"/{before}({written}){after}/"


def written_value(text: str, types: frozenset[str]) -> str:
    """A parameter's text as JSON, of one of these types if a string is one of them."""
    for read in (_json, _literal):
        try:
            value, written = read(text)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
        if "string" not in types or OF_TYPE[type(value)] in types:
            return written
    return json.dumps(text, ensure_ascii=False)


def _json(text: str) -> tuple[Any, str]:
    try:
        return json.loads(text, parse_constant=_refuse), text.strip()
    except ValueError:
        value = json.loads(text, parse_constant=_refuse, strict=False)  # with line breaks in strings
        return value, json.dumps(value, ensure_ascii=False, allow_nan=False)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _literal(text: str) -> tuple[Any, str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes that Python does not know
        value = ast.literal_eval(text.strip())
    if isinstance(value, str):
        raise ValueError("in quotes that are not JSON's")
    value = list(value) if isinstance(value, tuple) else value
    return value, json.dumps(value, ensure_ascii=False, allow_nan=False)
