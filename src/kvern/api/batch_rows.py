"""Rows of OpenAI's batch files.

in   {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...], ...}}
out  {"id": ..., "custom_id": "a", "response": {"status_code": 200, "body": {...}, ...}, "error": null}
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvern.errors import InvalidRequest, shown


@dataclass(frozen=True)
class BatchRow:
    """One row: its route, its body, and the id that its answer carries."""

    custom_id: str
    url: str
    body: dict[str, Any]


def read_row(values: Mapping[str, Any], routes: Sequence[str]) -> BatchRow:
    """Checks a row but for its body, which its route checks. Raises InvalidRequest."""
    custom_id = values.get("custom_id")
    url = values.get("url")
    body = values.get("body")
    if not isinstance(custom_id, str) or not isinstance(body, dict):
        raise InvalidRequest("the row must be an object with custom_id, a text, and body, an object")
    if values.get("method", "POST") != "POST" or not isinstance(url, str) or url not in routes:
        given = f"{shown(values.get('method'))} and {shown(url)}"
        raise InvalidRequest(f"method and url are {given}: they must be POST and {' or '.join(routes)}")
    return BatchRow(custom_id, url, body)


def message_row(custom_id: str, request_id: str, status: int, body: object) -> dict[str, Any]:
    """Returns a line of the results of Anthropic's message batches; the request's id is in the body of an error."""
    result = {"type": "succeeded", "message": body} if status == 200 else {"type": "errored", "error": body}
    return {"custom_id": custom_id, "result": result}


def answer_row(custom_id: str, request_id: str, status: int, body: object) -> dict[str, Any]:
    """Returns the row of an answer."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return {"id": f"batch_req_{request_id}", "custom_id": custom_id, "response": response, "error": None}
