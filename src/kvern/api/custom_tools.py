"""Custom tools, whose input is one text: functions of one argument for the model, and its calls as texts again."""

import json
import re
from collections.abc import Mapping
from typing import Any

from kvern.api.fields import inner
from kvern.errors import InvalidRequest, shown

INPUT = "input"
"""The one argument of a custom tool."""
GRAMMARS = {"lark": "Lark grammar", "regex": "regular expression"}
INPUT_BEGINS = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
HEX = "[0-9a-fA-F]"
HIGH, LOW = rf"\\u[dD][89abAB]{HEX}{{2}}", rf"\\u[dD][c-fC-F]{HEX}{{2}}"
CHARACTER = re.compile(
    rf'[^"\\]+|{HIGH}{LOW}|{HIGH}(?=[^\\]|\\[^u]|\\u.{{4}})|(?!{HIGH})\\u{HEX}{{4}}|\\u(?={HEX}{{0,3}}(?!{HEX}).)|\\[^u]',
    re.DOTALL,
)
"""A character in a JSON text whose end is certain, or an invalid escape."""


def custom_function(tool: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Returns a function of one text. A regular expression is enforced, a grammar is only described."""
    name, description = inner(tool, "name", str, place, "the name of the tool"), tool.get("description") or ""
    if not isinstance(description, str):
        raise InvalidRequest(f"{place}.description is {shown(description)}: it must be a text")
    text: dict[str, Any] = {"type": "string"}
    form = tool.get("format")
    syntax = None
    if form is not None and form != {"type": "text"}:
        syntax, definition = _grammar(form, f"{place}.format")
        told = f"The input matches this {GRAMMARS[syntax]}:\n{definition}"
        description = f"{description}\n\n{told}" if description else told
        if syntax == "regex":
            text["pattern"] = f"^(?:{definition})$"
    parameters = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    return {"name": name, "description": description, "parameters": parameters, "strict": syntax == "regex"}


def _grammar(form: object, place: str) -> tuple[str, str]:
    """Returns syntax and definition, which chat completions have in an object `grammar`."""
    values = form if isinstance(form, dict) else {}
    nested = values.get("grammar")
    found = nested if isinstance(nested, dict) else values
    syntax, definition = found.get("syntax"), found.get("definition")
    if values.get("type") != "grammar" or syntax not in ("lark", "regex") or not isinstance(definition, str):
        raise InvalidRequest(
            f"{place} is {shown(form)}: it must be of type text, or of type grammar with a syntax (lark or regex) and "
            "a definition"
        )
    return str(syntax), definition


def as_functions(tools: object, choice: object) -> tuple[object, object, frozenset[str]]:
    """Returns `tools` and `tool_choice` of chat completions with functions for custom tools, and their names.

    What has another form stays as it is. Raises InvalidRequest.
    """
    read: list[object] = []
    names = set()
    for number, tool in enumerate(tools if isinstance(tools, list) else ()):
        if isinstance(tool, dict) and tool.get("type") == "custom":
            place = f"tools[{number}]"
            function = custom_function(inner(tool, "custom", dict, place, "an object"), f"{place}.custom")
            names.add(function["name"])
            tool = {"type": "function", "function": function}
        read.append(tool)
    return (read if isinstance(tools, list) else tools), _choice(choice), frozenset(names)


def _choice(choice: object) -> object:
    if not isinstance(choice, dict):
        return choice
    allowed = choice.get("allowed_tools")
    if isinstance(allowed, dict) and isinstance(allowed.get("tools"), list):
        return {**choice, "allowed_tools": {**allowed, "tools": [_choice(tool) for tool in allowed["tools"]]}}
    return {"type": "function", "function": choice.get("custom")} if choice.get("type") == "custom" else choice


def as_function_call(call: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Returns a call in a message as the model has made it. Raises InvalidRequest."""
    custom = inner(call, "custom", dict, place, "an object")
    name = inner(custom, "name", str, f"{place}.custom", "the name of the tool")
    arguments = {INPUT: inner(custom, "input", str, f"{place}.custom", "a text")}
    kept = {field: value for field, value in call.items() if field != "custom"}
    return {**kept, "type": "function", "function": {"name": name, "arguments": arguments}}


class InputReader:
    """The input of a call, decoded from its JSON arguments as they grow. Other arguments are the input unchanged."""

    def __init__(self) -> None:
        self._waiting = ""
        self._begun = False

    def add(self, arguments: str) -> str:
        """Returns the text that more of the arguments completes."""
        self._waiting += arguments
        if not self._begun:
            found = INPUT_BEGINS.match(self._waiting)
            if found is None:
                return ""
            self._begun, self._waiting = True, self._waiting[found.end() :]
        characters, place = [], 0
        while (found := CHARACTER.match(self._waiting, place)) is not None:
            characters.append(_character(found[0]))
            place = found.end()
        self._waiting = self._waiting[place:]
        return "".join(characters)

    def end(self) -> str:
        """Returns the text that is left."""
        return "" if self._begun else self._waiting


def input_of(arguments: str) -> str:
    """Returns the input of a whole call."""
    reader = InputReader()
    return reader.add(arguments) + reader.end()


def _character(written: str) -> str:
    """Returns the character of an escape; an invalid escape stays as it is."""
    if written[0] != "\\":
        return written
    try:
        text: str = json.loads(f'"{written}"')
    except ValueError:
        return written
    return text.encode(errors="replace").decode() if len(text) == 1 else text
