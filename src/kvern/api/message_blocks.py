"""Blocks of /v1/messages: those of an input as messages, and those of an answer while they grow, with their events."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvern.api.conversation import text_of
from kvern.errors import InvalidRequest, shown
from kvern.tools.pieces import Arguments, CallBegins, Content, Message, Piece, Reasoning

Event = tuple[str, dict[str, Any]]


def chat_messages(message: object, place: str) -> list[dict[str, Any]]:
    """A message, whose blocks may be text, thinking, calls of tools and their results, as messages for templates."""
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant"):
        raise InvalidRequest(f"{place} is {shown(message)}: it must be an object with role user or assistant")
    content = message.get("content")
    if not isinstance(content, list):
        return [{"role": message["role"], "content": text(content)}]
    results: list[dict[str, Any]] = []
    said: dict[str, Any] = {"role": message["role"], "content": ""}
    texts, calls, thoughts = [], [], []
    for number, block in enumerate(content):
        where = f"{place}.content[{number}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result":
            results.append(
                {"role": "tool", "content": _result(block), "tool_call_id": _id(block, "tool_use_id", where)}
            )
        elif kind == "tool_use":
            calls.append(_call(block, where))
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif kind != "redacted_thinking":
            texts.append(block)
    said["content"] = text_of(texts, ("text",))
    if thoughts:
        said["reasoning_content"] = "\n".join(thoughts)
    if calls:
        said["tool_calls"] = calls
    return [*results, said] if texts or calls or thoughts or not results else results


def text(content: object) -> str:
    """A text, or blocks of it. Raises InvalidRequest."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return text_of(content, ("text",))
    raise InvalidRequest(f"messages hold content {shown(content)}: it must be a text or a list of blocks")


def _result(block: Mapping[str, Any]) -> str:
    return text(block.get("content") or "")


def _id(block: Mapping[str, Any], name: str, place: str) -> str:
    value = block.get(name)
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{place}.{name} is {shown(value)}: it must be the id of a call")
    return value


def _call(block: Mapping[str, Any], place: str) -> dict[str, Any]:
    name, arguments = block.get("name"), block.get("input")
    if not isinstance(name, str) or not isinstance(arguments, dict | None):
        raise InvalidRequest(f"{place} is {shown(dict(block))}: it must have a name, and an object as input")
    function = {"name": name, "arguments": arguments or {}}
    return {"id": _id(block, "id", place), "type": "function", "function": function}


def chat_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """Tools in OpenAI's form. Raises InvalidRequest."""
    converted = []
    for number, tool in enumerate(tools):
        if not isinstance(tool, dict) or not isinstance(tool.get("name"), str) or "input_schema" not in tool:
            raise InvalidRequest(f"tools[{number}] is {shown(tool)}: it must have a name and an input_schema")
        kept = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
        function = {**kept, "parameters": tool["input_schema"]}
        converted.append({"type": "function", "function": function})
    return converted


def chat_tool_choice(choice: Mapping[str, Any]) -> tuple[object, bool]:
    """`tool_choice` in OpenAI's form, and whether several calls may stand side by side. Raises InvalidRequest."""
    parallel = choice.get("disable_parallel_tool_use") is not True
    words = {"auto": "auto", "any": "required", "none": "none"}
    kind = choice.get("type", "auto")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}, parallel
    if not isinstance(kind, str) or kind not in words:
        raise InvalidRequest(f"tool_choice.type is {shown(kind)}: it must be auto, any, tool or none")
    return words[kind], parallel


def blocks(message: Message) -> list[dict[str, Any]]:
    """A whole answer."""
    found: list[dict[str, Any]] = []
    if message.reasoning:
        found.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
    if message.content or not message.tool_calls:
        found.append({"type": "text", "text": message.content})
    return found + [
        {"type": "tool_use", "id": call.call_id, "name": call.name, "input": _decoded(call.arguments)}
        for call in message.tool_calls
    ]


def _decoded(arguments: str) -> Any:
    """Arguments that are cut off or wrong are shown as they are, under a name that no tool has."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"": arguments}


class BlockEvents:
    """The events of an answer's blocks, each of which ends before the next begins."""

    def __init__(self) -> None:
        self._index = -1
        self._kind: str | None = None

    def add(self, pieces: Sequence[Piece]) -> list[Event]:
        """What is new."""
        events: list[Event] = []
        for piece in pieces:
            match piece:
                case Content(text):
                    events += self._begin("text", {"text": ""}, again=False)
                    events.append(self._delta("text_delta", text=text))
                case Reasoning(text):
                    events += self._begin("thinking", {"thinking": "", "signature": ""}, again=False)
                    events.append(self._delta("thinking_delta", thinking=text))
                case CallBegins(_, call_id, name):
                    events += self._begin("tool_use", {"id": call_id, "name": name, "input": {}}, again=True)
                case Arguments(_, text):
                    events.append(self._delta("input_json_delta", partial_json=text))
        return events

    def end(self) -> list[Event]:
        """No more will come; an answer without anything is an empty text."""
        begun = self._begin("text", {"text": ""}, again=False) if self._kind is None else []
        return begun + self._stop()

    def _begin(self, kind: str, fields: Mapping[str, Any], again: bool) -> list[Event]:
        if kind == self._kind and not again:
            return []
        stopped = self._stop()
        self._kind = kind
        self._index += 1
        block = {"type": kind, **fields}
        event = {"type": "content_block_start", "index": self._index, "content_block": block}
        return [*stopped, ("content_block_start", event)]

    def _delta(self, kind: str, **fields: str) -> Event:
        delta = {"type": kind, **fields}
        return "content_block_delta", {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _stop(self) -> list[Event]:
        if self._kind is None:
            return []
        return [("content_block_stop", {"type": "content_block_stop", "index": self._index})]
