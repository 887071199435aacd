"""Tools of /v1/responses: the function that the model sees for each type, and the item of a call.

Tools that a client runs are offered. Tools that a service of OpenAI would run are left out, and named.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvern.api.client_tools import client_tools
from kvern.api.custom_tools import custom_function
from kvern.api.fields import inner
from kvern.errors import InvalidRequest, shown
from kvern.tools.checks import MOST_TOOLS

FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
FIXED: dict[str, tuple[str, str]] = {
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "apply_patch_call": ("apply_patch", "operation"),
    "tool_search_call": ("tool_search", "arguments"),
}
"""Items of calls with a type of their own: the tool, and the field that holds its arguments."""
SHAPES = client_tools("openai")
"""Descriptions for the model of tools whose calls have a fixed form."""


@dataclass(frozen=True)
class OfferedTool:
    """A tool as a function. A call of it is an item of type `item` with these `fields`."""

    place: str
    function: dict[str, Any]
    item: str = "function_call"
    fields: dict[str, str] = field(default_factory=dict)

    @property
    def definition(self) -> dict[str, Any]:
        """The tool in the format of chat completions."""
        return {"type": "function", "function": self.function}


@dataclass(frozen=True)
class ToolList:
    """The tools of a request; `left_out` names those that are not offered."""

    offered: list[OfferedTool]
    left_out: list[str]

    def by_function(self) -> dict[str, OfferedTool]:
        """Returns the tools by the names that the model knows."""
        return {tool.function["name"]: tool for tool in self.offered}

    def named(self, choice: Mapping[str, Any]) -> list[str]:
        """Returns the functions that a choice means; none if the tool is not offered."""
        kind, name, namespace = (choice.get(part) for part in ("type", "name", "namespace"))
        if kind == "namespace":
            return [tool.function["name"] for tool in self.offered if tool.fields.get("namespace") == name]
        wanted = "custom_tool_call" if kind == "custom" else f"{kind}_call"
        return [
            tool.function["name"]
            for tool in self.offered
            if tool.item == wanted
            and (wanted in FIXED or name in (tool.fields.get("name"), tool.function["name"]))
            and namespace in (None, tool.fields.get("namespace"))
        ]


def qualified(namespace: object, name: str) -> str:
    """Returns a function's name for the model, which includes its namespace."""
    return f"{namespace}.{name}" if isinstance(namespace, str) and namespace else name


def read_tool_list(tools: Sequence[object], added: Sequence[object] = ()) -> ToolList:
    """Reads `tools` of a body and those that its input adds, possibly several times.

    Unknown types and types that are not offered are left out. Raises InvalidRequest for anything else that is wrong.
    """
    found, more = _read(tools, "tools"), _read(added, "added tools")
    known = found.by_function()
    for tool in more.offered:
        if tool.function["name"] not in known:
            known[tool.function["name"]] = tool
            found.offered.append(tool)
    if len(found.offered) > MOST_TOOLS:
        raise InvalidRequest(f"tools holds {len(found.offered)} tools: at most {MOST_TOOLS}")
    return ToolList(found.offered, found.left_out + more.left_out)


def _read(tools: Sequence[object], where: str) -> ToolList:
    found = ToolList([], [])
    for number, tool in enumerate(tools):
        place = f"{where}[{number}]"
        checked = _check_tool(tool, place)
        add = _add_namespace if checked["type"] == "namespace" else _add
        add(found, checked, place)
    return found


def _check_tool(tool: object, place: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
        raise InvalidRequest(f"{place} is {shown(tool)}: it must be an object with a type")
    return tool


def _add_namespace(found: ToolList, namespace: Mapping[str, Any], place: str) -> None:
    """Adds the tools of a namespace; its description is put before that of its first tool."""
    name, description = namespace.get("name"), namespace.get("description")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{place}.name is {shown(name)}: it must be the name of the namespace")
    for number, tool in enumerate(inner(namespace, "tools", list, place, "a list of tools")):
        where = f"{place}.tools[{number}]"
        _check_tool(tool, where)
        if number == 0 and isinstance(description, str) and description:
            own = tool.get("description")
            tool = {**tool, "description": f"{description}\n\n{own}" if isinstance(own, str) else description}
        _add(found, tool, where, name)


def _add(found: ToolList, tool: Mapping[str, Any], place: str, namespace: str | None = None) -> None:
    kind = tool["type"]
    if kind in ("function", "custom"):
        name = inner(tool, "name", str, place, "the name of the tool")
        fields = {"name": name} if namespace is None else {"name": name, "namespace": namespace}
        function = {part: tool[part] for part in FUNCTION_FIELDS if part in tool}
        if kind == "custom":
            function = custom_function(tool, place)
        function["name"] = qualified(namespace, name)
        item = "function_call" if kind == "function" else "custom_tool_call"
        found.offered.append(OfferedTool(place, function, item, fields))
    elif kind in SHAPES and not _is_hosted(tool):
        found.offered.append(OfferedTool(place, {"name": kind, "strict": True, **SHAPES[kind]}, f"{kind}_call"))
    elif kind == "tool_search" and tool.get("execution") == "client":
        function = {"name": kind, **{part: tool[part] for part in ("description", "parameters") if part in tool}}
        found.offered.append(OfferedTool(place, function, "tool_search_call", {"execution": "client"}))
    else:
        label = tool.get("server_label")
        found.left_out.append(f"{kind}:{label}" if isinstance(label, str) else kind)


def _is_hosted(tool: Mapping[str, Any]) -> bool:
    """True for a shell in a container of the service."""
    environment = tool.get("environment")
    return isinstance(environment, dict) and environment.get("type") != "local"


def chat_tool_choice(choice: object, tools: ToolList) -> tuple[object, str | None]:
    """Returns `tool_choice` in the format of chat completions, and a note if it names a tool that is not offered."""
    if choice == "required" and tools.left_out and not tools.offered:
        return "auto", "auto: no tool is offered"
    if not isinstance(choice, dict) or not isinstance(choice.get("type"), str):
        return choice, None
    if choice["type"] == "allowed_tools":
        return _allowed_tools(choice, tools)
    found = tools.named(choice)
    if found or choice["type"] in ("function", "custom"):
        return _function(found[0] if found else choice.get("name")), None
    return "auto", f"auto: {choice['type']} is not offered"[:512]


def _function(name: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def _allowed_tools(choice: Mapping[str, Any], tools: ToolList) -> tuple[object, str | None]:
    allowed = choice.get("tools")
    if not isinstance(allowed, list) or not all(isinstance(tool, dict) for tool in allowed[: MOST_TOOLS + 1]):
        raise InvalidRequest(f"tool_choice.tools is {shown(allowed)}: it must be a list of tools")
    if len(allowed) > MOST_TOOLS:
        raise InvalidRequest(f"tool_choice.tools holds {len(allowed)} tools: at most {MOST_TOOLS}")
    names: list[object] = []
    for tool in allowed:
        found: Sequence[object] = tools.named(tool)
        names += found or ([tool.get("name")] if tool.get("type") in ("function", "custom") else [])
    if not names:
        return "none", "none: no tool that is allowed is offered"
    functions = [_function(name) for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": functions}}, None
