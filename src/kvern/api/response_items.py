"""Items of /v1/responses: those of an input as messages, and those of an output while they grow, with their events."""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from kvern.api.conversation import plain_call, text_of
from kvern.errors import InvalidRequest, shown
from kvern.tools.pieces import Arguments, CallBegins, Content, Piece, Reasoning

Event = tuple[str, dict[str, Any]]


def input_messages(value: object) -> list[dict[str, Any]]:
    """`input`, a text or a list of items, as messages of a conversation. Raises InvalidRequest.

    A turn of the assistant is several items, and one message: what it thought, what it said, and its calls.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        raise InvalidRequest(f"input is {shown(value)}: it must be a text or a list of items")
    messages: list[dict[str, Any]] = []
    reasoning = ""
    for number, item in enumerate(value):
        place = f"input[{number}]"
        if item.get("type") == "reasoning":
            reasoning = _reasoning(item, place)
            continue
        message = _message(item, place)
        if message["role"] == "assistant" and reasoning:
            message["reasoning_content"], reasoning = reasoning, ""
        last = messages[-1] if messages else {}
        if "tool_calls" in message and last.get("role") == "assistant":
            last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]
        else:
            messages.append(message)
    return messages


def _message(item: Mapping[str, Any], place: str) -> dict[str, Any]:
    kind = item.get("type", "message")
    if kind == "message" and isinstance(item.get("role"), str) and isinstance(item.get("content"), str | list):
        return {"role": item["role"], "content": _text(item["content"])}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = plain_call({"id": _call_id(item, place), "type": "function", "function": function}, place)
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output" and isinstance(item.get("output"), str | list):
        return {"role": "tool", "content": _text(item["output"]), "tool_call_id": _call_id(item, place)}
    raise InvalidRequest(f"{place} of type {shown(kind)} is not understood: {shown(dict(item))}")


def _call_id(item: Mapping[str, Any], place: str) -> str:
    call_id = item.get("call_id")
    if not isinstance(call_id, str) or not call_id:
        raise InvalidRequest(f"{place}.call_id is {shown(call_id)}: it must be the id of a call")
    return call_id


def _text(content: str | list[Any]) -> str:
    return content if isinstance(content, str) else text_of(content)


def _reasoning(item: Mapping[str, Any], place: str) -> str:
    content = item.get("content") or []
    if not isinstance(content, list):
        raise InvalidRequest(f"{place}.content is {shown(content)}: it must be a list of parts")
    return text_of(content, ("reasoning_text",))


def chat_tools(tools: Sequence[Any]) -> list[Any]:
    """Tools in the form of chat completions."""
    return [
        {"type": tool.get("type"), "function": {name: tool[name] for name in tool if name != "type"}}
        if isinstance(tool, dict)
        else tool
        for tool in tools
    ]


def chat_tool_choice(choice: object) -> object:
    """`tool_choice` in the form of chat completions."""
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def event(kind: str, **fields: Any) -> Event:
    """What `OutputItems` tells; it is numbered when it is sent."""
    return kind, fields


class OutputItems:
    """A response's output, item by item."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None

    def add(self, pieces: Sequence[Piece]) -> list[Event]:
        """Let the output grow."""
        events: list[Event] = []
        for piece in pieces:
            match piece:
                case Content(text):
                    events += self._text(text, "message", "output_text")
                case Reasoning(text):
                    events += self._text(text, "reasoning", "reasoning_text")
                case CallBegins(_, call_id, name):
                    call = {"call_id": call_id, "name": name, "arguments": ""}
                    events += [*self.close(), *self._begin("function_call", "fc", call)]
                case Arguments(_, text):
                    assert self._open is not None
                    self._open["arguments"] += text
                    events.append(event("response.function_call_arguments.delta", **self._place, delta=text))
        return events

    def end(self, status: str) -> list[Event]:
        """No more will come; an answer without anything is an empty message."""
        events = [] if self.items else self._text("", "message", "output_text")
        return events + self.close(status)

    def close(self, status: str = "completed") -> list[Event]:
        """End the item that grows, if there is one."""
        item, self._open = self._open, None
        if item is None:
            return []
        item["status"] = status
        place = {"item_id": item["id"], "output_index": len(self.items) - 1}
        done = event("response.output_item.done", output_index=place["output_index"], item=item)
        if item["type"] == "function_call":
            arguments = {"name": item["name"], "arguments": item["arguments"]}
            return [event("response.function_call_arguments.done", **place, **arguments), done]
        [part] = item["content"]
        extra: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
        ended = event(f"response.{part['type']}.done", **place, content_index=0, text=part["text"], **extra)
        return [ended, event("response.content_part.done", **place, content_index=0, part=part), done]

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _text(self, text: str, kind: str, part_kind: str) -> list[Event]:
        events = []
        if self._open is None or self._open["type"] != kind:
            more: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            events += [*self.close(), *self._begin(kind, "msg" if kind == "message" else "rs", {**more, "content": []})]
            assert self._open is not None
            notes: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "message" else {}
            part = {"type": part_kind, "text": "", **notes}
            events.append(event("response.content_part.added", **self._place, content_index=0, part={**part}))
            self._open["content"].append(part)
        assert self._open is not None
        self._open["content"][0]["text"] += text
        if text:
            extra: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            events.append(event(f"response.{part_kind}.delta", **self._place, content_index=0, delta=text, **extra))
        return events

    def _begin(self, kind: str, prefix: str, fields: Mapping[str, Any]) -> list[Event]:
        self._open = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **fields}
        self.items.append(self._open)
        item = {name: list(value) if isinstance(value, list) else value for name, value in self._open.items()}
        return [event("response.output_item.added", output_index=len(self.items) - 1, item=item)]
