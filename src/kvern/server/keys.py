"""API keys: who asks, and how much of the server one of them may use."""

import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvern.errors import ConfigError
from kvern.server.config import ServerConfig

LINE = re.compile(r"(?:(?P<name>[\w.-]{1,64}):)?(?P<secret>\S+)(?P<limits>(?:\s+\w+=\d+)*)")
LIMITS = ("concurrent", "per_minute", "admin")


@dataclass(frozen=True)
class ApiKey:
    """One key; its name stands in logs, never the secret. Limits of None are none."""

    name: str
    secret: bytes
    concurrent: int | None = None
    per_minute: int | None = None
    admin: bool = False
    """May load and unload adapters."""


def read_keys(config: ServerConfig) -> list[ApiKey]:
    """The keys of the options and of the file that they name. Raises ConfigError."""
    lines = list(config.api_key)
    if config.api_key_file is not None:
        try:
            text = config.api_key_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"api_key_file {config.api_key_file} cannot be read: {reason}") from error
        lines += [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
        if not lines:
            raise ConfigError(f"api_key_file {config.api_key_file} holds no key: write one a line")
    keys = [_read_key(line.strip(), number, config) for number, line in enumerate(lines, 1)]
    if len({key.name for key in keys}) < len(keys):
        raise ConfigError("two API keys have the same name: give each its own")
    return keys


def _read_key(line: str, number: int, config: ServerConfig) -> ApiKey:
    match = LINE.fullmatch(line)
    limits = dict(pair.split("=") for pair in match["limits"].split()) if match else {}
    if match is None or not limits.keys() <= set(LIMITS):
        form = "NAME:KEY concurrent=N per_minute=N admin=1"
        raise ConfigError(f"API key {number} is not of the form {form}: correct its line")
    return ApiKey(
        match["name"] or f"key-{number}",
        match["secret"].encode(),
        int(limits.get("concurrent", 0)) or config.concurrent_per_key,
        int(limits.get("per_minute", 0)) or config.per_minute_per_key,
        limits.get("admin") == "1",
    )


def find_key(keys: Sequence[ApiKey], secret: bytes) -> ApiKey | None:
    """The key with this secret. Takes the same time whichever it is."""
    found = None
    for key in keys:
        if hmac.compare_digest(key.secret, secret):
            found = key
    return found
