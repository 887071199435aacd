"""The check of a request's tools, as OpenAI's clients send them; errors name the place."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from kvern.errors import InvalidRequest, shown
from kvern.tools.definitions import NO_TOOLS, Tool, ToolUse
from kvern.tools.tool_format import LONGEST_NAME, NAME

MOST_TOOLS = 512
MOST_CHARACTERS = 1 << 18
"""Limit of one tool's definition."""
ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}


def read_tools(
    tools: object, choice: object = None, parallel: object = None, places: Sequence[str] | None = None
) -> ToolUse:
    """OpenAI's `tools`, `tool_choice` and `parallel_tool_calls`. `places`: where the body has each tool.

    Raises InvalidRequest.
    """
    if parallel is not None and not isinstance(parallel, bool):
        raise InvalidRequest(f"parallel_tool_calls is {shown(parallel)}: it must be true or false")
    if tools is not None and (isinstance(tools, str) or not isinstance(tools, Sequence)):
        raise InvalidRequest(f"tools is {shown(tools)}: it must be a list")
    definitions = list(tools or ())
    if len(definitions) > MOST_TOOLS:
        raise InvalidRequest(f"tools holds {len(definitions)} tools: at most {MOST_TOOLS}")
    places = [f"tools[{number}]" for number in range(len(definitions))] if places is None else places
    read = [_tool(definition, place) for definition, place in zip(definitions, places, strict=True)]
    known: dict[str, str] = {}
    for tool in read:
        if tool.name in known:
            raise InvalidRequest(
                f"{tool.place}.function.name is {tool.name!r}, as in {known[tool.name]}: names must differ"
            )
        known[tool.name] = tool.place
    choice, allowed = _allowed(choice, list(known))
    how, named = _choice(choice, list(known))
    if how == "none" or not read:
        return NO_TOOLS
    may = tuple(tool for tool in read if allowed is None or tool.name in allowed)
    return ToolUse(
        may, tuple(_for_template(definition) for definition in definitions), how, named, parallel is not False
    )


def _for_template(definition: Mapping[str, Any]) -> dict[str, Any]:
    """The definition without fields that tell a model nothing."""
    function = {name: value for name, value in definition["function"].items() if name != "strict" and value is not None}
    return {**definition, "type": "function", "function": function}


def _tool(definition: object, place: str) -> Tool:
    if not isinstance(definition, Mapping):
        raise InvalidRequest(f"{place} is {shown(definition)}: it must be an object")
    kind = definition.get("type", "function")
    if kind != "function":
        raise InvalidRequest(f"{place}.type is {shown(kind)}: it must be function, or custom in a request for a chat")
    function = definition.get("function")
    if not isinstance(function, Mapping):
        raise InvalidRequest(f"{place}.function is {shown(function)}: it must be an object with a name")
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InvalidRequest(
            f"{place}.function.name is {shown(name)}: it must be 1 to {LONGEST_NAME} letters, digits, underscores, "
            "dots and dashes"
        )
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise InvalidRequest(f"{place}.function.description is {shown(description)}: it must be a text")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequest(f"{place}.function.strict is {shown(strict)}: it must be true or false")
    parameters = _parameters(function.get("parameters"), f"{place}.function.parameters")
    return Tool(name, parameters, bool(strict), place)


def _parameters(schema: object, place: str) -> dict[str, Any]:
    if schema is None or schema == {}:
        return ANY_ARGUMENTS
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{place} is {shown(schema)}: it must be a JSON schema of an object")
    try:
        size = len(json.dumps(schema))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{place} is no JSON: {error}") from error
    if size > MOST_CHARACTERS:
        raise InvalidRequest(f"{place} has {size} characters: at most {MOST_CHARACTERS}")
    if schema.get("type", "object") != "object":
        raise InvalidRequest(f"{place}.type is {shown(schema['type'])}: arguments are an object")
    properties, required = schema.get("properties"), schema.get("required")
    if properties is not None and not isinstance(properties, dict):
        raise InvalidRequest(f"{place}.properties is {shown(properties)}: it must be an object")
    for name, value in (properties or {}).items():
        if not isinstance(value, dict | bool):
            raise InvalidRequest(f"{place}.properties.{name:.60} is {shown(value)}: it must be a schema")
    if required is not None and not (isinstance(required, list) and all(isinstance(name, str) for name in required)):
        raise InvalidRequest(f"{place}.required is {shown(required)}: it must be a list of names")
    return schema if "type" in schema else {**schema, "type": "object"}


def _allowed(choice: object, names: Sequence[str]) -> tuple[object, frozenset[str] | None]:
    """A choice of type allowed_tools: how it leaves it to the model, and the names."""
    if not isinstance(choice, Mapping) or choice.get("type") != "allowed_tools":
        return choice, None
    allowed = choice.get("allowed_tools")
    tools, mode = (allowed.get("tools"), allowed.get("mode")) if isinstance(allowed, Mapping) else (None, None)
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        raise InvalidRequest(
            f"tool_choice is {shown(dict(choice))}: allowed_tools must hold a mode, auto or required, and a list of "
            "tools"
        )
    if len(tools) > MOST_TOOLS:
        raise InvalidRequest(f"tool_choice.allowed_tools.tools holds {len(tools)} tools: at most {MOST_TOOLS}")
    if not all(isinstance(tool, Mapping) for tool in tools):
        raise InvalidRequest(f"tool_choice.allowed_tools.tools is {shown(tools)}: each must be an object")
    return mode, frozenset(_named(tool, names) for tool in tools)


def _choice(choice: object, names: Sequence[str]) -> tuple[Literal["auto", "required", "none"], str | None]:
    if choice is None:
        return "auto", None
    if isinstance(choice, Mapping):
        return "required", _named(choice, names)
    if choice not in ("auto", "none", "required"):
        raise InvalidRequest(
            f'tool_choice is {shown(choice)}: it must be auto, none, required or {{"type": "function", "function": '
            '{"name": ...}}'
        )
    if choice == "required" and not names:
        raise InvalidRequest("tool_choice is required and there are no tools: give tools")
    return ("auto" if choice == "auto" else "required" if choice == "required" else "none"), None


def _named(choice: Mapping[str, Any], names: Sequence[str]) -> str:
    function = choice.get("function")
    if choice.get("type", "function") != "function" or not isinstance(function, Mapping):
        raise InvalidRequest(f"tool_choice is {shown(dict(choice))}: it must name a function")
    name = function.get("name")
    if name not in names:
        known = ", ".join(names) or "none"
        raise InvalidRequest(f"tool_choice names {shown(name)}, which is none of the tools: there are {known:.200}")
    return str(name)
