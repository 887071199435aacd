"""Requests to /v1/responses that run in the background."""

from typing import Any

ASKED: dict[str, Any] = {"model": "kvern-1m", "temperature": 0, "extra_body": {"ignore_eos": True}}
SHORT: dict[str, Any] = ASKED | {"max_output_tokens": 6}
LONG: dict[str, Any] = ASKED | {"max_output_tokens": 450, "input": "Once"}
FOLLOWED: dict[str, Any] = {"background": True, "stream": True}


def plain(events: Any) -> list[dict[str, Any]]:
    return [event.to_dict() for event in events]
