"""Options and their values as the texts of a command line."""

from __future__ import annotations

import json
from typing import Any

from kvern.errors import ConfigError

Options = list[tuple[str, str | bool]]
"""Options of kvern with their values as texts; switches are booleans."""
MANY = 1 << 30
"""The number of values of a flag that takes all up to the next flag."""


def flag(option: str) -> str:
    """Returns an option as a flag."""
    return f"--{option.replace('_', '-')}"


def as_arguments(option: str, value: str | bool) -> list[str]:
    """Returns an option and its value as arguments of a command line."""
    if isinstance(value, bool):
        return [flag(option if value else f"no_{option}")]
    return [f"{flag(option)}={value}"]  # the value may begin with a dash


def json_object(text: str) -> dict[str, Any]:
    """Returns the decoded object. Raises ConfigError."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{text[:80]!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{text[:80]!r} must be a JSON object")
    return value
