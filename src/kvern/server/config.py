"""Every option of the HTTP server."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvern.config import LONGEST_SECONDS
from kvern.errors import ConfigError

ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+")


@dataclass(frozen=True)
class ServerConfig:
    """Options of one server; each is a flag, an environment variable and a configuration key of the same name."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every address of this machine."""
    port: int = 8000
    """Port to listen on; 0 takes a free one and prints it."""
    uds: Path | None = None
    """Listen on this Unix socket instead of an address."""
    root_path: str = ""
    """Prefix of all paths that a proxy in front takes away, such as /llm."""
    tls_cert: Path | None = None
    """Certificate chain, PEM: serve HTTPS."""
    tls_key: Path | None = None
    """Private key of the certificate, PEM. None: it is in the certificate's file."""
    api_key: tuple[str, ...] = ()
    """Keys, one of which every request but /health and /ping must then carry."""
    api_key_file: Path | None = None
    """File of more keys, one a line: KEY or NAME:KEY, then, if wanted, concurrent=N, per_minute=N, admin=1 and
    metrics=1, which lets it read /metrics and nothing else."""
    allowed_origins: tuple[str, ...] = ()
    """Origins, such as https://chat.example.org, of sites whose pages may use this server in a browser; * is all."""
    allowed_methods: tuple[str, ...] = ("*",)
    """HTTP methods that pages of allowed origins may use; * is all that there are."""
    allowed_headers: tuple[str, ...] = ("*",)
    """Headers that pages of allowed origins may send; * is whichever they ask for."""
    allow_credentials: bool = False
    """Let browsers send what they keep for this server (a password, cookies) with requests of pages of allowed origins,
    which must then be named."""
    allowed_hosts: tuple[str, ...] = ()
    """Names in the Host header that a server without keys answers to beside its own address, such as a proxy's."""
    adapter_folder: Path | None = None
    """Keys with admin=1 may load adapters from folders below this one while the server runs. None: nobody may."""
    max_queue: int = 2048
    """Sequences that may wait; beyond, requests are refused with 429 and a time to try again. Each of several keys may
    always have its part of them waiting, whatever the others do."""
    concurrent_per_key: int | None = None
    """Requests of one key at the same time, at most."""
    per_minute_per_key: int | None = None
    """Requests of one key in a minute, at most; each row of a batch is one, and waits for its turn."""
    disk_per_key: int = 16 << 30
    """Bytes of files and batches that one key may keep, at most; of responses and of conversations no more either."""
    disk_reserve: int = 256 << 20
    """Bytes of the disk that uploads, responses and conversations leave free, for batches that run."""
    stream_interval: int = 1
    """Tokens that a chunk of a stream waits for; more make streams cheaper and coarser. The first is sent at once."""
    share_prefix_cache: bool = False
    """Let keys reuse each other's cached prompts: each can then find out, by guessing, what others have asked."""
    strip_billing_header: bool = True
    """Leave out the first line of system messages of /v1/messages that begins with x-anthropic-billing-header: which
    changes between conversations and requests, so that no prompt could reuse another's cached blocks."""
    request_timeout: float = 30.0
    """Seconds in which the head of a request must have arrived, then again its body, and in which a client reads some
    of an answer that waits for it."""
    grace_seconds: float = 30.0
    """How long running requests may go on after a signal to end; a second signal ends them at once."""
    data_dir: Path | None = None
    """Folder for files, batches, responses and conversations of the API. None: kvern's among the user's data."""
    log_requests: Literal["none", "summary", "prompts"] = "none"
    """Write a line for each request: not at all, without anything it holds, or with its body."""

    def __post_init__(self) -> None:
        for name in ("allowed_origins", "allowed_methods", "allowed_headers"):
            object.__setattr__(self, name, _listed(name, getattr(self, name)))
        for origin in self.allowed_origins:
            if not ORIGIN.fullmatch(origin):
                raise ConfigError(f"allowed_origins has {origin!r}: an origin is * or like https://chat.example.org")
        for anyone in {"*", "null"} & {*self.allowed_origins} if self.allow_credentials else ():
            what = f"allow_credentials is set and allowed_origins has {anyone}, which any page can be"
            raise ConfigError(f"{what}: name the origins that are trusted")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port is {self.port}: it must be between 0 and 65535")
        if self.tls_key is not None and self.tls_cert is None:
            raise ConfigError(f"tls_key is {self.tls_key} and there is no tls_cert: give both")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f"root_path is {self.root_path!r}: it must begin with / and not end with it")
        for name in ("request_timeout", "grace_seconds"):
            value = getattr(self, name)
            if not value <= LONGEST_SECONDS:
                raise ConfigError(f"{name} is {value}: it must be a number of seconds, {LONGEST_SECONDS} at most")
        for name in (
            "max_queue",
            "stream_interval",
            "concurrent_per_key",
            "per_minute_per_key",
            "disk_per_key",
            "request_timeout",
        ):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} is {value}: it must be above 0")
        for name in ("grace_seconds", "disk_reserve"):
            value = getattr(self, name)
            if value < 0:
                raise ConfigError(f"{name} is {value}: it must not be negative")


def _listed(name: str, values: tuple[str, ...]) -> tuple[str, ...]:
    """Texts, of which each may also be several as a JSON list. Raises ConfigError."""
    found: list[str] = []
    for value in values:
        try:
            several = json.loads(value) if value.startswith("[") else [value]
        except ValueError:
            several = [None]
        if not all(isinstance(text, str) for text in several):
            raise ConfigError(f"{name} has {value!r}: it must be a text, or a JSON list of texts")
        found += several
    return tuple(found)
