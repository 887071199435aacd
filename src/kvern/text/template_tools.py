"""Tool definitions for chat templates that refuse incomplete ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Definition = Mapping[str, Any]


def forms_of(tools: Sequence[Definition] | None) -> list[Sequence[Definition] | None]:
    """Returns the tools as they are, and fuller forms to try in turn if a template refuses them.

    Without tools these are None and an empty list: some templates need its length.
    """
    if tools is None:
        return [None, []]
    return [tools, [_filled(tool, False) for tool in tools], [_filled(tool, True) for tool in tools]]


def _filled(tool: Definition, plain: bool) -> Definition:
    """Returns a definition with a description and parameters; `plain` gives each parameter a description and one
    type."""
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return tool
    parameters = {"type": "object", "properties": {}, "required": [], **_said(function.get("parameters"))}
    if plain:
        parameters = _plain(parameters)
    return {**tool, "function": {"description": "", **_said(function), "parameters": parameters}}


def _plain(schema: object) -> dict[str, Any]:
    plain = {"description": "", **_said(schema)}
    plain["type"] = _type(plain)
    if isinstance(plain.get("properties"), Mapping):
        plain["properties"] = {name: _plain(inner) for name, inner in plain["properties"].items()}
    elif plain["type"] == "object":
        plain = {"properties": {}, "required": [], "additionalProperties": False, **plain}
    if isinstance(plain.get("items"), Mapping):
        plain["items"] = _plain(plain["items"])
    return plain


def _type(schema: Mapping[str, Any]) -> str:
    """Returns one type; of several, the first that is not null."""
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return kinds
    choices = [kind for kind in kinds if kind != "null"] if isinstance(kinds, list) else []
    for name in ("anyOf", "oneOf"):
        inner = schema.get(name)
        choices += [each["type"] for each in inner if isinstance(each, Mapping) and "type" in each] if inner else []
    known = [kind for kind in choices if isinstance(kind, str) and kind != "null"]
    return known[0] if known else "object" if "properties" in schema else "string"


def _said(schema: object) -> dict[str, Any]:
    """Returns a schema without null values."""
    return {name: value for name, value in schema.items() if value is not None} if isinstance(schema, Mapping) else {}
