"""Errors that name fields as the client sent them, where kvern has another name."""

import re
from collections.abc import Mapping
from typing import Any

from kvern.api.errors import HttpError, body_of, status_of
from kvern.api.other_names import RENAMED
from kvern.errors import KvernError


def sent_names(body: Mapping[str, Any]) -> dict[str, str]:
    """Returns a client's names of fields in a body, its `options` or a row's `body`, by kvern's names."""
    parts = (body, body.get("options"), body.get("body"))
    return {
        ours: name
        for values in parts
        if isinstance(values, dict) and not values.keys().isdisjoint(RENAMED)
        for name, ours in RENAMED.items()
        if values.get(name) is not None and values.get(ours) is None
    }


def as_sent(error: Exception, names: Mapping[str, str]) -> Exception:
    """Returns a refusal in which fields have the client's `names`; any other error unchanged."""
    if not names or not isinstance(error, KvernError) or status_of(error) != 400:
        return error
    ours = "|".join(map(re.escape, names))
    message = re.sub(rf"(?<![\w'\"])({ours})(?![\w'\"])", lambda match: names[match[0]], str(error))
    told = body_of(error)["error"]
    headers = error.headers if isinstance(error, HttpError) else None
    return HttpError(400, message, param=names.get(told["param"], told["param"]), code=told["code"], headers=headers)
