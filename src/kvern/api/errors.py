"""Errors with an HTTP status; `error_bodies` has the formats in which they are answered."""

from collections.abc import Mapping

from kvern.errors import KvernError, shown

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
