"""A store in the pool of memory that a Mooncake master manages: mooncake://master:port?segment=4GB.

Mooncake is a library of native code that runs in this process. By itself it waits for a stopped master until that goes
on, and 30 s for an owner of memory, so it is told shorter times here; the first call that meets a stopped owner still
waits for it. Pages are copied through memory of the library, so that it never writes to a place later. There is no
proof of who wrote a page: the network must be trusted.
"""

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlsplit

from kvern.tiers.rare_warnings import RareWarnings
from kvern.tiers.store import Identity, read_bytes

for _name in ("MC_TCP_STATUS_TIMEOUT_SEC", "MC_TCP_PROGRESS_TIMEOUT_SEC"):
    os.environ.setdefault(_name, "5")
os.environ.setdefault("MC_RPC_TIMEOUT_MS", "5000")
os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # each connection is reported otherwise

try:
    from mooncake.store import MooncakeDistributedStore
except ImportError as error:
    raise ImportError(
        f"{error}: pip install 'kvern[mooncake]', and the system's packages libibverbs1, libnl-3-200, libnl-route-3-200"
    ) from error

PORT = 50051
CONNECT_SECONDS = 1.0
TRY_SECONDS = 10.0
TRY = """
import os, sys
from mooncake.store import MooncakeDistributedStore
local, *way = sys.argv[1:]
error = MooncakeDistributedStore().setup(local, "P2PHANDSHAKE", 0, 1 << 24, *way)
sys.stderr.write(f"error {error}")
sys.stderr.flush()
os._exit(error != 0)
"""
BUFFER_BYTES = 256 << 20
"""The library's memory for pages on their way."""
NO_ANSWER = -900
"""This error and those below mean that the master was not reached."""
PROTOCOLS = ("tcp", "rdma")
SETTINGS = ("segment", "protocol", "device", "local")
FORM = "mooncake://master[:port][?segment=4GB&protocol=tcp&device=mlx5_0&local=address]"


def mooncake(rest: str, identity: Identity) -> "MooncakeStore":
    """Makes the store of an option mooncake://master:port. Raises ValueError."""
    if identity.max_age is not None:
        raise ValueError("Mooncake does not know how old a page is: leave the greatest age out")
    url = urlsplit(f"mooncake:{rest}")
    try:
        port = url.port or PORT
    except ValueError:
        raise ValueError(f"the port must be a number from 1 to 65535, as in {FORM}") from None
    if not rest.startswith("//") or not url.hostname or url.path.strip("/"):
        raise ValueError(f"it must name a master, as {FORM}")
    return MooncakeStore((url.hostname, port), _settings(url))


class MooncakeStore:
    """Pages in the memory of all who take part. Methods raise OSError if the master does not answer.

    `settings`: segment is the memory that this process adds to the pool, in bytes; protocol tcp or rdma; device the
    names of RDMA devices; local the address under which others find this process.
    """

    is_local = False

    def __init__(self, master: tuple[str, int], settings: dict[str, Any]) -> None:
        self._master = master
        self._settings = settings
        self._store: Any = None
        self._lock = threading.Lock()
        self._warnings = RareWarnings(f"mooncake at {master[0]}:{master[1]}")
        try:
            self._connected()
        except OSError as error:
            self._warnings.warn("start", f"the master does not answer, and is tried again later: {error}")

    def has(self, names: Sequence[bytes]) -> list[bool]:
        """Asks the master which pages there are. Pages of an owner that has died may be among them."""
        found = self._connected().batch_is_exist([*map(_key, names)]) if names else []
        if any(answer < 0 for answer in found):
            raise OSError(f"the Mooncake master does not answer: error {min(found)}")
        return [answer == 1 for answer in found]

    def get(self, names: Sequence[bytes], places: Sequence[memoryview]) -> list[bool]:
        """Copies pages that came whole to their places."""
        store = self._connected()
        found = store.batch_get_buffer([*map(_key, names)]) if names else []
        filled = []
        for buffer, place in zip(found, places, strict=True):
            page = b"" if buffer is None else memoryview(buffer).cast("B")
            filled.append(len(page) == len(place))
            if filled[-1]:
                place[:] = page
        return filled

    def put(self, names: Sequence[bytes], places: Sequence[memoryview]) -> list[bool]:
        """Sends pages to the pool; one that it has is not written again."""
        store = self._connected()
        errors = [store.put(_key(name), place) for name, place in zip(names, places, strict=True)]
        if min(errors, default=0) <= NO_ANSWER:
            raise OSError(f"the Mooncake master does not answer: error {min(errors)}")
        if refused := [error for error in errors if error]:
            self._warnings.warn(
                "put", f"the pool refuses pages, since it is full or has no segment: error {refused[0]}"
            )
        return [not error for error in errors]

    def drop(self, names: Sequence[bytes]) -> None:
        """Removes pages, also those that others have read a moment ago."""
        store = self._connected()
        for name in names:
            store.remove(_key(name), True)

    def close(self) -> None:
        """Leaves the pool; pages in this process's segment are lost."""
        with self._lock:
            if self._store is not None:
                self._store.close()
                self._store = None

    def _connected(self) -> Any:
        """Returns the library's store, which takes part in the pool. Raises OSError.

        The library waits 100 s for a master that is not there or does not answer, and no thread of this process runs
        meanwhile: so another process tries first.
        """
        with self._lock:
            if self._store is None:
                local = self._address()
                self._try(local)
                store = MooncakeDistributedStore()
                segment, *way = (self._settings[name] for name in ("segment", "protocol", "device"))
                master = f"{self._master[0]}:{self._master[1]}"
                error = store.setup(local, "P2PHANDSHAKE", segment, BUFFER_BYTES, *way, master)
                if error:
                    raise OSError(f"the Mooncake master {master} refuses to connect: error {error}")
                self._store = store
            return self._store

    def _try(self, local: str) -> None:
        """Raises OSError if the master does not answer a process that connects to it."""
        way = (self._settings["protocol"], self._settings["device"], f"{self._master[0]}:{self._master[1]}")
        command = [sys.executable, "-c", TRY, local, *way]
        try:
            tried = subprocess.run(  # noqa: S603
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=TRY_SECONDS
            )
        except subprocess.TimeoutExpired:
            raise OSError(f"the Mooncake master {way[-1]} does not answer within {TRY_SECONDS:g} s") from None
        if tried.returncode:
            raise OSError(f"the Mooncake master {way[-1]} cannot be used: {_last_line(tried.stderr)}")

    def _address(self) -> str:
        """Returns the address of this machine on the way to the master. Raises OSError if that does not answer."""
        with contextlib.closing(socket.create_connection(self._master, CONNECT_SECONDS)) as connection:
            return str(self._settings["local"] or connection.getsockname()[0])


def _last_line(text: bytes) -> str:
    return (text.decode(errors="replace").strip().splitlines() or ["no reason is given"])[-1]


def _key(name: bytes) -> str:
    return f"kvern:{name.hex()}"


def _settings(url: SplitResult) -> dict[str, Any]:
    given = dict(parse_qsl(url.query, keep_blank_values=True))
    if unknown := [name for name in given if name not in SETTINGS]:
        raise ValueError(f"there is no setting {unknown[0]!r}, only {', '.join(SETTINGS)}: {FORM}")
    protocol = given.get("protocol", "tcp")
    if protocol not in PROTOCOLS:
        raise ValueError(f"the protocol {protocol!r} must be one of {', '.join(PROTOCOLS)}")
    segment = read_bytes(given["segment"]) if "segment" in given else 0
    return {"segment": segment, "protocol": protocol, "device": given.get("device", ""), "local": given.get("local")}
