"""Items of an input as they are stored and listed: each with an id, a type and a status, texts as parts."""

import re
import uuid
from collections.abc import Sequence
from typing import Any

from kvern.api.response_items import input_messages
from kvern.errors import InvalidRequest

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
