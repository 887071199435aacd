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
PROBES = ("/metrics", "/v1/engines", "/load", "/ready", "/version", "/health", "/ping")
"""Routes that a key with metrics=1 may read. Traces, log and metrics leave out what programs ask there all the time."""


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


class KeyRing:
    """The keys of a server. They may change while it runs: whoever needs them asks each time."""

    def __init__(self, config: ServerConfig) -> None:
        """Raises ConfigError."""
        self._config = config
        self.known: list[ApiKey] = []
        self.users = users_of(self.known, config)
        """The keys that may ask a model, or one that stands for anyone."""
        self.read()

    def read(self) -> str:
        """Reads the keys again, and returns what has changed. Raises ConfigError, and then nothing has changed."""
        earlier = {key.name: key for key in self.known}
        self.known = read_keys(self._config)
        self.users = users_of(self.known, self._config)
        now = {key.name: key for key in self.known}
        news = {
            "new": sorted(now.keys() - earlier.keys()),
            "changed": sorted(name for name in now.keys() & earlier.keys() if now[name] != earlier[name]),
            "gone": sorted(earlier.keys() - now.keys()),
        }
        said = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in news.items() if names)
        return f"{len(now)} API keys are read again; {said}" if said else ""


def read_keys(config: ServerConfig) -> list[ApiKey]:
    """Reads the keys of the options and of the file that they name. Raises ConfigError."""
    lines = [(f"api_key {number}", line) for number, line in enumerate(config.api_key, 1)]
    file = config.api_key_file
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"api_key_file {file} cannot be read: {reason}") from error
        numbered = [(f"{file}, line {number}", line.strip()) for number, line in enumerate(text.split("\n"), 1)]
        lines += [(where, line) for where, line in numbered if line and not line.startswith("#")]
        if not lines:
            raise ConfigError(f"api_key_file {file} holds no key: write one a line")
    names: dict[str, str] = {}
    secrets: dict[bytes, str] = {}
    keys = []
    for where, line in lines:
        key = _read_key(line.removeprefix("\ufeff").strip(), where, config)
        if (other := names.setdefault(key.name, where)) != where:
            raise ConfigError(f"{other} and {where} both name a key {key.name}: give each a name of its own")
        if (other := secrets.setdefault(key.secret, where)) != where:
            raise ConfigError(f"{other} and {where} are the same key: make a new one for each name")
        keys.append(key)
    return keys


def _read_key(line: str, where: str, config: ServerConfig) -> ApiKey:
    """Returns the key of a line. Raises ConfigError, without the secret."""
    match = LINE.fullmatch(line)
    pairs = [pair.split("=") for pair in match["limits"].split()] if match else []
    limits = {name: int(value) for name, value in pairs}
    unknown = sorted(limits.keys() - set(LIMITS))
    if unknown:
        raise ConfigError(f"{where}: {unknown[0]} is no limit of a key: there are {', '.join(LIMITS)}")
    if (
        match is None
        or len(limits) < len(pairs)
        or not {limits.get("admin", 0), limits.get("metrics", 0)} <= {0, 1}
        or (match["name"] is None and ":" in match["secret"])
    ):
        form = "NAME:KEY concurrent=N per_minute=N admin=1 metrics=1"
        raise ConfigError(f"{where} is not of the form {form}: correct it")
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
