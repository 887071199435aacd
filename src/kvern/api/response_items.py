"""The input items of /v1/responses: as messages of a conversation, and as they are stored and listed.

Reasoning that a client keeps and sends back (`encrypted_content`) is packed, not secret: responses show the reasoning
beside it.
"""

import base64
import re
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from kvern.api.conversation import parts_of, text_of
from kvern.api.custom_tools import INPUT
from kvern.api.fields import inner, typed
from kvern.api.response_tools import FIXED, qualified, read_tool_list
from kvern.errors import InvalidRequest, shown
from kvern.text.content import MessageContent

MARK = "kvern1."
MOST_BYTES = 4 << 20
"""The limit of all packed reasoning in one request."""
PART_BYTES = 1 << 18
"""The bytes that are unpacked at once."""


def packed_reasoning(text: str) -> str:
    """Returns a text in a form that only `opened_reasoning` reads."""
    return MARK + base64.urlsafe_b64encode(zlib.compress(text.encode(errors="replace"))).decode()


def opened_reasoning(content: object, most: int) -> tuple[str | None, int]:
    """Returns the reasoning, and the number of bytes that were unpacked.

    The reasoning is None if it comes from elsewhere, is broken, or has more than `most` bytes.
    """
    if not isinstance(content, str) or not content.startswith(MARK) or len(content) > 2 * most:
        return None, 0
    reader = zlib.decompressobj()
    parts = [b""]
    size = 0
    try:
        packed = base64.urlsafe_b64decode(content[len(MARK) :])
        while size <= most and (part := reader.decompress(packed, PART_BYTES)):
            parts.append(part)
            size += len(part)
            packed = reader.unconsumed_tail
        return b"".join(parts).decode() if reader.eof and size <= most else None, size
    except (ValueError, zlib.error):
        return None, size + PART_BYTES


CALLS = frozenset({"function_call", "custom_tool_call", *FIXED})
OUTPUTS = frozenset({"tool_search_output", *(f"{call}_output" for call in CALLS if call != "tool_search_call")})
PASSED_OVER = frozenset(
    {
        "additional_tools",
        "code_interpreter_call",
        "compaction",
        "compaction_trigger",
        "computer_call",
        "computer_call_output",
        "configuration_update",
        "file_search_call",
        "image_generation_call",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "program",
        "program_output",
        "web_search_call",
    }
)
"""Items without content for the model: of services that run tools themselves, or read elsewhere."""
ADDING = ("additional_tools", "tool_search_output")
SEARCHES = ("tool_search_call", "tool_search_output")
UNSEEN = {"input_image": "an image", "input_file": "a file"}
"""Parts of a tool's output that become a note in the conversation, so that the model can go on."""


def referred(item: object) -> str | None:
    """Returns the id in an item that refers to another item; None for any other item."""
    item_id = item.get("id") if isinstance(item, dict) and _kind(item) == "item_reference" else None
    return item_id if isinstance(item_id, str) else None


def input_messages(value: object) -> list[dict[str, Any]]:
    """Returns `input`, a text or a list of items, as messages. Raises InvalidRequest."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        raise InvalidRequest(f"input is {shown(value)}: it must be a text or a list of items")
    reader = _Reader()
    for number, item in enumerate(value):
        reader.read(item, f"input[{number}]")
    return reader.end()


def _kind(item: Mapping[str, Any]) -> object:
    return item.get("type") or ("message" if "role" in item else "item_reference")


class _Reader:
    """Collects items as messages: a turn of the assistant is several items and one message.

    A message's reasoning is a list of texts until the end.
    """

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._reasoning: list[str] = []
        self._left = MOST_BYTES

    def read(self, item: Mapping[str, Any], place: str) -> None:
        """Adds the next item."""
        kind = _kind(item)
        if not isinstance(kind, str):
            raise InvalidRequest(f"{place}.type is {shown(kind)}: it must be a text")
        if kind == "reasoning":
            self._reasoning += filter(None, [self._thought(item, place)])
        elif kind in SEARCHES and item.get("call_id") is None:
            return  # of a service
        elif kind in CALLS:
            function = {"name": _function_name(item, place), "arguments": _arguments(item, place)}
            call = {"id": _call_id(item, place), "type": "function", "function": function}
            self._add({"role": "assistant", "content": "", "tool_calls": [call]})
        elif kind in OUTPUTS:
            self._add({"role": "tool", "content": _output(item, place), "tool_call_id": _call_id(item, place)})
        elif kind == "message" and isinstance(item.get("role"), str) and isinstance(item.get("content"), str | list):
            self._add({"role": item["role"], "content": _content(item["content"])})
        elif kind == "item_reference":
            item_id = shown(item.get("id"))
            message = f"{place} refers to the item {item_id}, which is not stored, or stands before"
            raise InvalidRequest(f"{message}: send the item itself")
        elif kind not in PASSED_OVER:
            raise InvalidRequest(f"{place} of type {shown(kind)} is not understood: {shown(dict(item))}")

    def end(self) -> list[dict[str, Any]]:
        """Returns all messages."""
        self._end_thought()
        for message in self._messages:
            if "reasoning_content" in message:
                message["reasoning_content"] = "\n".join(message["reasoning_content"])
        return self._messages

    def _add(self, message: dict[str, Any]) -> None:
        if message["role"] != "assistant":
            self._end_thought()
            self._messages.append(message)
            return
        last = self._messages[-1] if self._messages else {}
        if last.get("role") == "assistant" and not (last["content"] and message["content"]):
            last["content"] = last["content"] or message["content"]
            if "tool_calls" in message:
                last.setdefault("tool_calls", []).extend(message["tool_calls"])
            message = last
        else:
            self._messages.append(message)
        if self._reasoning:
            message.setdefault("reasoning_content", []).extend(self._reasoning)
            self._reasoning = []

    def _end_thought(self) -> None:
        """Adds reasoning at the end of an answer that was cut off as a message of its own."""
        if self._reasoning:
            self._add({"role": "assistant", "content": ""})

    def _thought(self, item: Mapping[str, Any], place: str) -> str:
        """Returns the reasoning itself, else its packed form, else its summary."""
        texts: dict[str, str] = {}
        for name, kind in (("content", "reasoning_text"), ("summary", "summary_text")):
            parts = item.get(name) or []
            if not isinstance(parts, list):
                raise InvalidRequest(f"{place}.{name} is {shown(parts)}: it must be a list of parts")
            texts[name] = text_of(parts, (kind, "text"))
        if texts["content"]:
            return texts["content"]
        opened, size = opened_reasoning(item.get("encrypted_content"), self._left)
        self._left -= size
        return opened or texts["summary"]


def _function_name(item: Mapping[str, Any], place: str) -> str:
    if item["type"] in FIXED:
        return FIXED[item["type"]][0]
    return qualified(item.get("namespace"), inner(item, "name", str, place, "the name of a tool"))


def _arguments(item: Mapping[str, Any], place: str) -> dict[str, Any] | str:
    """Returns the arguments as an object, or as JSON text as the model wrote it."""
    kind = item["type"]
    if kind == "custom_tool_call":
        return {INPUT: inner(item, INPUT, str, place, "a text")}
    if kind in FIXED:
        action: dict[str, Any] = inner(item, FIXED[kind][1], dict, place, "an object")
        return {part: value for part, value in action.items() if (part, value) != ("type", "exec")}
    return inner(item, "arguments", str, place, "JSON in a text")


def _call_id(item: Mapping[str, Any], place: str) -> str:
    call_id = item.get("call_id")
    if call_id is None and item["type"] == "local_shell_call_output":
        call_id = item.get("id")
    if not isinstance(call_id, str) or not call_id:
        raise InvalidRequest(f"{place}.call_id is {shown(call_id)}: it must be the id of a call")
    return call_id


def _content(content: str | list[Any]) -> MessageContent:
    if isinstance(content, str):
        return content
    return parts_of([{"type": "text", "text": part["refusal"]} if _is_refusal(part) else part for part in content])


def _is_refusal(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "refusal" and isinstance(part.get("refusal"), str)


def _output(item: Mapping[str, Any], place: str) -> MessageContent:
    """Returns the output of a tool as text."""
    kind, output = item["type"], item.get("output")
    if kind == "tool_search_output":
        return f"Tools that can be called now: {', '.join(_names(item, place))}"
    if kind == "apply_patch_call_output" and isinstance(item.get("status"), str):
        output = item["status"] if output is None else f"{item['status']}\n{output}"
    if isinstance(output, str):
        return output
    if not isinstance(output, list):
        raise InvalidRequest(f"{place}.output is {shown(output)}: it must be a text or a list of parts")
    if kind == "shell_call_output":
        return msgspec.json.encode(output).decode()
    return parts_of(output, note=_note)


def _names(item: Mapping[str, Any], place: str) -> Iterator[str]:
    """Yields the names of functions that a search found."""
    tools = inner(item, "tools", list, place, "a list of tools")
    return (tool.function["name"] for tool in read_tool_list(tools).offered)


def added_tools(value: object) -> list[Any]:
    """Returns the tools that items of a checked input add to those of the body."""
    items = [item for item in value if _kind(item) in ADDING] if isinstance(value, list) else []
    return [tool for item in items for tool in typed(item, "tools", list, [])]


def _note(part: object) -> str | None:
    """Returns the note that takes the place of a part of a tool's output."""
    kind = part.get("type") if isinstance(part, dict) else None
    return f"[{UNSEEN[kind]}, which this model cannot read]" if isinstance(kind, str) and kind in UNSEEN else None


Items = list[dict[str, Any]]

PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
"""The prefixes of ids."""


def kept_items(value: str | Sequence[dict[str, Any]]) -> Items:
    """Returns the items of an input that `input_messages` takes, each with a new id."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    return [_kept(item) for item in value]


def _kept(item: dict[str, Any]) -> dict[str, Any]:
    kind = str(item.get("type") or "message")
    kept = {**item, "id": f"{PREFIXES.get(kind, 'item')}_{uuid.uuid4().hex}", "type": kind, "status": "completed"}
    if kind == "local_shell_call_output":
        kept["call_id"] = item.get("call_id") or item.get("id")
    if kind == "message" and isinstance(item.get("content"), str):
        kept["content"] = [_part(item["role"], item["content"])]
    return kept


def _part(role: object, text: str) -> dict[str, Any]:
    if role == "assistant":
        return {"type": "output_text", "text": text, "annotations": []}
    return {"type": "input_text", "text": text}


def read_items(value: object) -> Items:
    """Reads the `items` of a conversation's body. Raises InvalidRequest."""
    if value is None or value == []:
        return []
    try:
        if not isinstance(value, list):
            raise InvalidRequest("input must be a list of items")
        input_messages(value)
    except InvalidRequest as error:
        raise InvalidRequest(re.sub(r"^input\b", "items", str(error))) from error
    return kept_items(value)
