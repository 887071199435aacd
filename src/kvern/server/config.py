"""Every option of the HTTP server."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvern.config import LONGEST_SECONDS
from kvern.errors import ConfigError

BATCHES = "kvern.db"
"""The database of files and batches in the data folder."""
LARGEST_IMAGES = 64 << 20
"""The limit of one request's images together."""
MEDIA_HOST = re.compile(r"(\*\.)?([a-z0-9]([a-z0-9-]*[a-z0-9])?\.)*[a-z]([a-z0-9-]*[a-z0-9])?", re.IGNORECASE)
ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+")


@dataclass(frozen=True)
class ServerConfig:
    """Options of one server; each is a flag, an environment variable and a configuration key of the same name."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every address of this machine."""
    port: int = 8000
    """Port to listen on; 0 takes a free one and prints it."""
    uds: Path | None = None
    """Unix socket to listen on, in place of an address."""
    root_path: str = ""
    """Prefix of all paths that a proxy in front of the server removes, such as /llm."""
    tls_cert: Path | None = None
    """Certificate chain (PEM); with it the server speaks HTTPS."""
    tls_key: Path | None = None
    """Private key of the certificate (PEM). None: it is in the certificate's file."""
    api_key: tuple[str, ...] = ()
    """API keys; every request but /health and /ping must carry one of them."""
    api_key_file: Path | None = None
    """File of more API keys, one a line: KEY or NAME:KEY, followed by any of concurrent=N, per_minute=N, admin=1 and
    metrics=1. A key with metrics=1 may read /metrics and similar routes, nothing else."""
    allowed_origins: tuple[str, ...] = ()
    """Origins, such as https://chat.example.org, of web pages that may use this server from a browser; * allows all."""
    allowed_methods: tuple[str, ...] = ("*",)
    """HTTP methods that pages of allowed origins may use; * allows all."""
    allowed_headers: tuple[str, ...] = ("*",)
    """Headers that pages of allowed origins may send; * allows all."""
    allow_credentials: bool = False
    """Let browsers send credentials (passwords, cookies) with requests of pages of allowed origins. The origins must
    then be named: * is refused."""
    allowed_hosts: tuple[str, ...] = ()
    """Names in the Host header that a server without API keys accepts beside its own address, such as a proxy's name.
    """
    models: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """JSON object of several models by name, each a model or an object of its options; in a configuration file a table.
    Beside engine options a model has aliases, pin, keep_alive and weight. --model NAME=MODEL adds one."""
    models_dir: Path | None = None
    """Folder of models: folders with config.json, and GGUF files. Requests wake the models that they name."""
    models_memory: str | None = None
    """Memory for all awake models of models and models_dir, such as 24GB. None: 80 % of what is free at the start, of a
    GPU 97 %."""
    adapter_folder: Path | None = None
    """Folder below which keys with admin=1 may load adapters while the server runs. None: no adapter may be loaded."""
    max_queue: int = 2048
    """Most sequences that may wait; further requests are refused with 429 and a time after which to try again. Each of
    several keys always has its share of the queue."""
    image_memory: int = 1 << 30
    """Most bytes of images, as they were sent, of all requests that wait or run; further ones are refused with 429.
    The engine holds them too. Each of several keys has its share."""
    allowed_media_domains: tuple[str, ...] = ()
    """Hosts, such as images.example.org or *.example.org, from whose public addresses images are fetched (https).
    Without any, addresses in requests are refused."""
    concurrent_per_key: int | None = None
    """Most requests of one key at the same time."""
    per_minute_per_key: int | None = None
    """Most requests of one key in a minute. Each row of a batch counts as one, and waits until it is allowed."""
    disk_per_key: int = 16 << 30
    """Most bytes of files and batches that one key may keep; the same limit holds for responses and for conversations.
    """
    disk_reserve: int = 256 << 20
    """Bytes of the disk that uploads, responses and conversations leave free for running batches."""
    stream_interval: int = 1
    """Tokens in one chunk of a stream; more make streams cheaper and coarser. The first token is sent at once."""
    share_prefix_cache: bool = False
    """Let keys reuse each other's cached prompts. Each can then find out, by guessing, what others have asked."""
    strip_billing_header: bool = True
    """Drop the first line of /v1/messages system messages if it begins with x-anthropic-billing-header: as it changes
    between requests, it would keep prompts from reusing each other's cached blocks."""
    request_timeout: float = 30.0
    """Seconds in which the head of a request must arrive, then its body, and in which a client must read some of a
    waiting answer."""
    grace_seconds: float = 30.0
    """Seconds that running requests may go on after a signal to end; a second signal ends them at once."""
    data_dir: Path | None = None
    """Folder for files, batches, responses and conversations of the API. None: kvern's folder in the user's data
    folder."""
    otlp_traces_endpoint: str | None = None
    """URL of a collector of OpenTelemetry (OTLP over HTTP) for traces of requests, such as http://localhost:4318.
    None: that of OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT, or none."""
    trace_share: float = 0.05
    """Share of requests that are traced, 0 to 1, beside those that fail and the slowest 1 %. What a client's
    `traceparent` header decides comes first."""
    record: str | None = None
    """File, as FILE or FILE:SIZE (1GB), for the load, which `kvern bench serve --replay` repeats: times, lengths and
    hashes of prompts, no texts. One that is there becomes FILE.1."""
    log_requests: Literal["none", "summary", "prompts"] = "none"
    """Entries of the log for each request: none, a line without its content, or its body as well."""

    @property
    def data_folder(self) -> Path:
        """`data_dir`, or kvern's folder among the user's data (XDG base directory specification)."""
        return self.data_dir or Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "kvern"

    @property
    def may_trace(self) -> bool:
        """True if an option or OpenTelemetry's variables name a collector."""
        return self.otlp_traces_endpoint is not None or any(
            name.startswith("OTEL_EXPORTER_OTLP_") for name in os.environ
        )

    @property
    def reread_files(self) -> list[Path]:
        """The files of keys and of TLS, which are read again when they change."""
        return [path for path in (self.api_key_file, self.tls_cert, self.tls_key) if path is not None]

    def __post_init__(self) -> None:
        for name in ("allowed_origins", "allowed_methods", "allowed_headers"):
            object.__setattr__(self, name, _listed(name, getattr(self, name)))
        for origin in self.allowed_origins:
            if not ORIGIN.fullmatch(origin):
                raise ConfigError(f"allowed_origins has {origin!r}: an origin is * or like https://chat.example.org")
        for anyone in {"*", "null"} & {*self.allowed_origins} if self.allow_credentials else ():
            what = f"allow_credentials is set and allowed_origins has {anyone}, which any page can be"
            raise ConfigError(f"{what}: name the origins that are trusted")
        hosts = ",".join(_listed("allowed_media_domains", self.allowed_media_domains)).split(",")
        object.__setattr__(self, "allowed_media_domains", tuple(filter(None, hosts)))
        for host in self.allowed_media_domains:
            if not MEDIA_HOST.fullmatch(host):
                raise ConfigError(f"allowed_media_domains has {host!r}: a host is a name, or *. and a domain")
        if not 0 <= self.trace_share <= 1:
            raise ConfigError(f"trace_share is {self.trace_share}: it must be between 0 and 1")
        if self.image_memory < LARGEST_IMAGES:
            raise ConfigError(f"image_memory is {self.image_memory}: one request may need {LARGEST_IMAGES}; raise it")
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
    """Returns the texts, where each may be several texts as a JSON list. Raises ConfigError."""
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
