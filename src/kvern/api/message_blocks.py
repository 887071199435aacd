"""Content blocks of /v1/messages: of an input, converted to messages; of an answer, with their events."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvern.api.conversation import text_of
from kvern.errors import InvalidRequest, shown
from kvern.request.pieces import Arguments, CallBegins, Content, Message, Piece, Reasoning
from kvern.text.content import MediaPart, MessageContent, joined, kind_of

Event = tuple[str, dict[str, Any]]

ROLES = ("user", "assistant", "system")
OF_SERVICE = ("redacted_thinking", "container_upload", "server_tool_use", "mcp_tool_use")
SIGNATURE = "unsigned"
"""The signature of thinking blocks: some clients send back only what has one. No signature is checked."""


def chat_messages(message: object, place: str) -> list[dict[str, Any]]:
    """Returns a message as messages for templates; its blocks may be text, thinking, calls of tools and their
    results."""
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise InvalidRequest(f"{place} is {shown(message)}: it must be an object with role {', '.join(ROLES)}")
    role, content = message["role"], message.get("content")
    if not isinstance(content, list):
        return [{"role": role, "content": text(content)}]
    results: list[dict[str, Any]] = []
    said: dict[str, Any] = {"role": role, "content": ""}
    parts: list[str | MediaPart] = []
    calls, thoughts = [], []
    for number, block in enumerate(content):
        where = f"{place}.content[{number}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result":
            results.append(
                {"role": "tool", "content": _result(block, where), "tool_call_id": _id(block, "tool_use_id", where)}
            )
        elif kind == "tool_use":
            calls.append(_call(block, where))
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif (written := block_text(block)) is not None:
            parts.append(written)
        elif not _is_of_service(kind, role):
            parts.append(_media(block, where))
    said["content"] = joined(parts)
    if thoughts:
        said["reasoning_content"] = "\n".join(thoughts)
    if calls:
        said["tool_calls"] = calls
    return [*results, said] if parts or calls or thoughts or not results else results


def _media(block: object, place: str) -> MediaPart:
    """Returns a block that is no text. Raises InvalidRequest for one of an unknown type."""
    name = block.get("type") if isinstance(block, dict) else None
    refusal = f"{place} is of type {shown(name or block)}: this model reads text only; leave it out"
    kind = kind_of(block)
    if kind is None:
        raise InvalidRequest(refusal)
    return MediaPart(kind, block, refusal)


def _is_of_service(kind: object, role: str) -> bool:
    """True for blocks that only Anthropic's service reads and writes. They are skipped, not refused."""
    return isinstance(kind, str) and (role == "assistant" or kind.endswith("_tool_result") or kind in OF_SERVICE)


def text(content: object) -> str:
    """Returns the text of a text or of blocks. Raises InvalidRequest."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return text_of(content, ("text",))
    raise InvalidRequest(f"messages hold content {shown(content)}: it must be a text or a list of blocks")


def block_text(block: object) -> str | None:
    """Returns the text of a text block, a text document or a search result; None for other blocks.

    Raises InvalidRequest for a block of type text that has none.
    """
    if not isinstance(block, dict):
        return None
    kind, source = block.get("type"), block.get("source")
    if kind == "text":
        return _said(block)
    if kind == "search_result":
        return _titled(block, _text_or_none(block.get("content")))
    if kind == "document" and isinstance(source, dict) and source.get("type") in ("text", "content"):
        return _titled(block, _text_or_none(source.get("data", source.get("content"))))
    return None


def _text_or_none(content: object) -> str | None:
    """Returns the text of a text, or of a list that holds only text blocks; else None."""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "\n".join(map(_said, content))
    return content if isinstance(content, str) else None


def _said(block: Mapping[str, Any]) -> str:
    """Returns the text of a block of type text. Raises InvalidRequest."""
    written = block.get("text")
    if not isinstance(written, str):
        raise InvalidRequest(f"messages hold a block of type text whose text is {shown(written)}: it must be a text")
    return written


def _titled(block: Mapping[str, Any], content: str | None) -> str | None:
    heads = [block.get(name) for name in ("title", "source", "context")]
    return None if content is None else "\n".join([*(head for head in heads if isinstance(head, str)), content])


def _result(block: Mapping[str, Any], place: str) -> MessageContent:
    """Returns a tool's result. An image becomes a note, since an agent cannot take its result back."""
    content = block.get("content") or ""
    if isinstance(content, list):
        content = joined([_result_part(part) for part in content])
    elif not isinstance(content, str):
        raise InvalidRequest(f"{place}.content is {shown(content)}: it must be a text or a list of blocks")
    if block.get("is_error") is not True:
        return content
    head, *rest = [content] if isinstance(content, str) else content
    if isinstance(head, MediaPart):
        return [msgspec.structs.replace(head, note=f"Error: {head.note}"), *rest]
    return joined([f"Error: {head}", *rest])


def _result_part(block: object) -> str | MediaPart:
    written = block_text(block)
    if written is not None:
        return written
    name = block.get("type") if isinstance(block, dict) else block
    note = f"[{shown(name)} left out: this model reads text only]"
    kind = kind_of(block)
    return note if kind is None else MediaPart(kind, block, note, note)


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


def blocks(message: Message) -> list[dict[str, Any]]:
    """Returns the blocks of a whole answer."""
    found: list[dict[str, Any]] = []
    if message.reasoning:
        found.append({"type": "thinking", "thinking": message.reasoning, "signature": SIGNATURE})
    if message.content or not message.tool_calls:
        found.append({"type": "text", "text": message.content})
    return found + [
        {"type": "tool_use", "id": call.call_id, "name": call.name, "input": _decoded(call.arguments)}
        for call in message.tool_calls
    ]


def _decoded(arguments: str) -> Any:
    """Decodes arguments. If they are incomplete or wrong, they are returned as text under the empty name."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"": arguments}


class BlockEvents:
    """The events of an answer's blocks; a block ends before the next begins."""

    def __init__(self) -> None:
        self._index = -1
        self._kind: str | None = None

    def add(self, pieces: Sequence[Piece]) -> list[Event]:
        """Returns the events of new pieces."""
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
        """Returns the last events. An answer without content is an empty text."""
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
        signed = [self._delta("signature_delta", signature=SIGNATURE)] if self._kind == "thinking" else []
        return [*signed, ("content_block_stop", {"type": "content_block_stop", "index": self._index})]
