"""Errors in the formats of OpenAI, Anthropic and ollama, with their HTTP status. It is loaded with the first error."""

import re
from collections.abc import Mapping
from typing import Any

from kvern.api.chat_fields import CHAT_FIELDS
from kvern.api.errors import HttpError
from kvern.errors import (
    DeadlineExceeded,
    EngineClosed,
    EngineDied,
    EngineUnavailable,
    InvalidParameter,
    InvalidRequest,
    KvernError,
    PromptTooLong,
    RequestFailed,
    ServerBusy,
    UnreadableContent,
)
from kvern.request.sampling_params import SamplingParams

NAMED_FIELDS = {*SamplingParams.__struct_fields__, *CHAT_FIELDS, "dimensions", "input", "suffix", "top_logprobs"}
ANTHROPIC_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""Anthropic's name of each status."""


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Returns OpenAI's format of an error."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def body_of(error: Exception) -> dict[str, Any]:
    """Returns an error in OpenAI's format, with the field's name if it is known."""
    if isinstance(error, HttpError):
        return error_body(error.status, error.message, error.param, error.code)
    param = None
    if isinstance(error, InvalidParameter | InvalidRequest):  # its message begins with the field's name
        first = re.match(r"\w+", str(error))
        param = first[0] if first is not None and first[0] in NAMED_FIELDS else None
    code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
    return error_body(status_of(error), str(error), param, code)


def status_of(error: Exception) -> int:
    """Returns the HTTP status of an error: 4xx for the request, 5xx for the server."""
    if isinstance(error, HttpError):
        return error.status
    statuses = {
        EngineUnavailable | EngineClosed: 503,
        UnreadableContent: 400,
        EngineDied | RequestFailed: 500,
        DeadlineExceeded: 408,
        ServerBusy: 429,
    }
    return next((status for kind, status in statuses.items() if isinstance(error, kind)), 400)


def anthropic_error(error: Exception, request_id: str) -> dict[str, Any]:
    """Returns an error in Anthropic's format. Clients recognize a prompt that is too long by this text."""
    status, message = status_of(error), str(error)
    if isinstance(error, PromptTooLong):
        message = f"prompt is too long: {error.tokens} tokens > {error.most} maximum"
    kind = ANTHROPIC_KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def ollama_error(error: Exception) -> dict[str, Any]:
    """Returns an error in ollama's format."""
    return {"error": str(error)}


def as_sent(error: Exception, names: Mapping[str, str]) -> Exception:
    """Returns a refusal in which fields have the client's `names`; any other error unchanged."""
    if not names or not isinstance(error, KvernError) or status_of(error) != 400:
        return error
    ours = "|".join(map(re.escape, names))
    message = re.sub(rf"(?<![\w'\"])({ours})(?![\w'\"])", lambda match: names[match[0]], str(error))
    told = body_of(error)["error"]
    headers = error.headers if isinstance(error, HttpError) else None
    return HttpError(400, message, param=names.get(told["param"], told["param"]), code=told["code"], headers=headers)
