"""API keys: their names, secrets and limits."""

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvern.errors import ConfigError
from kvern.server.config import ServerConfig

LINE = re.compile(r"(?:(?P<name>[\w.-]{1,64}):)?(?P<secret>\S+)(?P<limits>(?:\s+\w+=\d{1,9})*)")
LIMITS = ("concurrent", "per_minute", "admin", "metrics")


@dataclass(frozen=True)
class ApiKey:
    """One API key. Logs have its name, never the secret. A limit of None is no limit; a limit of 0 allows nothing."""

    name: str
    secret: bytes
    concurrent: int | None = None
    per_minute: int | None = None
    admin: bool = False
    """May load and unload adapters, add and remove engines, and read the metrics of all keys."""
    metrics: bool = False
    """May read metrics and nothing else."""
    is_batch: bool = False
    """The requests are rows of batches."""
    client: str = ""
    """The client of a request without a key, as `client_of` names it."""

    @property
    def line(self) -> str:
        """The queue of its requests: rows of batches have another than requests for which a client waits."""
        return f"{self.name} batch" if self.is_batch else self.name

    @property
    def owner(self) -> str:
        """The name under which rows and blocks are shared: the line, or the client if there are no keys."""
        return f"{self.line} {self.client}" if self.client and not self.is_batch else self.line


ANYONE = "anyone"
"""The name of the key that stands for every client if there are no keys."""


def client_of(address: str) -> str:
    """Returns the name of a client by its IP address: the whole address for IPv4, the /64 network for IPv6."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    return str(found.ipv4_mapped or ipaddress.IPv6Network((found, 64), strict=False))


def users_of(keys: Sequence[ApiKey], config: ServerConfig) -> list[ApiKey]:
    """Returns the keys that may ask a model, or the one that stands for anyone."""
    return [key for key in keys if not key.metrics] or [
        ApiKey(ANYONE, b"", config.concurrent_per_key, config.per_minute_per_key)
    ]


def read_keys(config: ServerConfig) -> list[ApiKey]:
    """Reads the keys of the options and of the file that they name. Raises ConfigError."""
    lines = list(config.api_key)
    if config.api_key_file is not None:
        try:
            text = config.api_key_file.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"api_key_file {config.api_key_file} cannot be read: {reason}") from error
        lines += [line for line in text.split("\n") if line.strip() and not line.startswith("#")]
        if not lines:
            raise ConfigError(f"api_key_file {config.api_key_file} holds no key: write one a line")
    keys = [_read_key(line.removeprefix("\ufeff").strip(), number, config) for number, line in enumerate(lines, 1)]
    if len({key.name for key in keys}) < len(keys):
        raise ConfigError("two API keys have the same name: give each its own")
    if len({key.secret for key in keys}) < len(keys):
        raise ConfigError("two API keys are the same: make a new one for each name")
    return keys


def _read_key(line: str, number: int, config: ServerConfig) -> ApiKey:
    match = LINE.fullmatch(line)
    pairs = [pair.split("=") for pair in match["limits"].split()] if match else []
    limits = {name: int(value) for name, value in pairs}
    if (
        match is None
        or not limits.keys() <= set(LIMITS)
        or len(limits) < len(pairs)
        or not {limits.get("admin", 0), limits.get("metrics", 0)} <= {0, 1}
        or (match["name"] is None and ":" in match["secret"])
    ):
        form = "NAME:KEY concurrent=N per_minute=N admin=1 metrics=1"
        raise ConfigError(f"API key {number} is not of the form {form}: correct its line")
    secret = match["secret"].encode()
    is_admin = limits.get("admin") == 1
    return ApiKey(
        match["name"] or f"key-{hashlib.sha256(secret).hexdigest()[:12]}",
        secret,
        limits.get("concurrent", config.concurrent_per_key),
        limits.get("per_minute", config.per_minute_per_key),
        is_admin,
        limits.get("metrics") == 1 and not is_admin,
    )


def find_key(keys: Sequence[ApiKey], secret: bytes) -> ApiKey | None:
    """Returns the key with this secret. Takes the same time for every key."""
    found = None
    for key in keys:
        if hmac.compare_digest(key.secret, secret):
            found = key
    return found
