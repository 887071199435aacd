"""Errors as answers: their HTTP status, and the formats of OpenAI, Anthropic and ollama."""

import re
from collections.abc import Mapping
from typing import Any

from kvern.api.chat_fields import CHAT_FIELDS
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
    shown,
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


CODES = {403: "permission_denied", 429: "rate_limit_exceeded"}
"""The codes of statuses that have the same one always."""


class HttpError(KvernError):
    """An error with the HTTP status of its answer. `param` names the field that is wrong; `code` is that of CODES
    unless another is given."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code or CODES.get(status)
        self.headers = headers


def wrong_value(name: str, value: object, right: str) -> HttpError:
    """Returns the refusal of a field's value; `right` says what it must be."""
    return HttpError(400, f"{name} is {shown(value)}: it must be {right}", param=name)


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
