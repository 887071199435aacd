"""Tools of /v1/messages: the client's own, tools with a schema defined by Anthropic, and tools that its service
runs."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvern.errors import InvalidRequest, shown

TEXT: dict[str, Any] = {"type": "string"}
LINES: dict[str, Any] = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
LINE: dict[str, Any] = {"type": "integer"}
EDITS = {"path": TEXT, "file_text": TEXT, "old_str": TEXT, "new_str": TEXT, "insert_line": LINE, "view_range": LINES}


def _commands(names: Sequence[str], properties: Mapping[str, Any], required: Sequence[str]) -> dict[str, Any]:
    command = {"type": "string", "enum": list(names)}
    return {"type": "object", "properties": {"command": command, **properties}, "required": ["command", *required]}


CLIENT_TOOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "bash": (
        "Run a command in a bash shell that stays open, or restart the shell.",
        {"type": "object", "properties": {"command": TEXT, "restart": {"type": "boolean"}}},
    ),
    "text_editor": (
        "View a file or folder, create a file, replace a text that occurs once in it, or insert a text after a line.",
        _commands(("view", "create", "str_replace", "insert"), {**EDITS, "insert_text": TEXT}, ("path",)),
    ),
    "memory": (
        "View, create, change, delete or rename the files below /memories, which outlast this conversation.",
        _commands(
            ("view", "create", "str_replace", "insert", "delete", "rename"),
            {**EDITS, "insert_text": TEXT, "old_path": TEXT, "new_path": TEXT},
            (),
        ),
    ),
}
"""Tools that clients run, by the type without its date. Models do not know the description and schema, so they are
given here. The oldest text editors call the inserted text new_str, which is why the schema has it."""
DATED = re.compile(r"(\w{1,64})_\d{8}")


def chat_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Returns the tools that a client runs, in OpenAI's format. Raises InvalidRequest."""
    return [_function(tool, f"tools[{number}]") for number, tool in enumerate(tools) if not is_of_service(tool)]


def ignored_tools(tools: Sequence[Any]) -> list[str]:
    """Returns the names of tools that only Anthropic's service runs, such as web_search, and of unknown ones."""
    names = (tool.get("name", tool.get("type")) for tool in tools if is_of_service(tool))
    return [name for name in names if isinstance(name, str)]


def is_of_service(tool: object) -> bool:
    """True if no client runs the tool."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    return kind not in (None, "custom") and _client_tool(kind) is None


def _client_tool(kind: object) -> tuple[str, dict[str, Any]] | None:
    dated = DATED.fullmatch(kind) if isinstance(kind, str) else None
    return None if dated is None else CLIENT_TOOLS.get(dated[1])


def _function(tool: object, place: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise InvalidRequest(f"{place} is {shown(tool)}: it must be an object with a name")
    known = _client_tool(tool.get("type"))
    if known is not None:
        function = {"name": tool["name"], "description": known[0], "parameters": known[1]}
    elif "input_schema" not in tool:
        raise InvalidRequest(f"{place} is {shown(tool)}: it must have a name and an input_schema")
    else:
        kept = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
        function = {**kept, "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def chat_tool_choice(choice: Mapping[str, Any], tools: Sequence[Any]) -> tuple[object, bool]:
    """Returns `tool_choice` in OpenAI's format, and whether several calls at once are allowed.

    A choice that only an ignored tool could satisfy becomes auto. Raises InvalidRequest.
    """
    parallel = choice.get("disable_parallel_tool_use") is not True
    words = {"auto": "auto", "any": "required", "none": "none"}
    kind = choice.get("type", "auto")
    if kind == "tool" and choice.get("name") not in ignored_tools(tools):
        return {"type": "function", "function": {"name": choice.get("name")}}, parallel
    if kind == "tool" or (kind == "any" and tools and all(map(is_of_service, tools))):
        return "auto", parallel
    if not isinstance(kind, str) or kind not in words:
        raise InvalidRequest(f"tool_choice.type is {shown(kind)}: it must be auto, any, tool or none")
    return words[kind], parallel
