"""The needs of a server before it serves: certificates, a data folder, open files; and systemd's socket."""

import os
import socket
import ssl
import stat
import time
from collections.abc import Callable
from pathlib import Path

from kvern.errors import ConfigError
from kvern.io.open_files import raise_limit
from kvern.server.config import ServerConfig

SPARE_FILES = 16
"""Open files that are left for other things when a warning is due."""
BETWEEN_WARNINGS = 60.0


def check_tls(server: ServerConfig) -> None:
    """Checks that certificate and key can be used. Raises ConfigError."""
    if server.tls_cert is None:
        return
    for name, path in (("tls_cert", server.tls_cert), ("tls_key", server.tls_key)):
        try:
            if path is not None:
                path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{name} {path} cannot be read: {error.strerror or error}") from error
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(server.tls_cert, server.tls_key)
    except ssl.SSLError as error:
        if server.tls_key is None:
            advice = f"tls_cert {server.tls_cert} is no certificate with its private key: give tls_key"
        elif error.reason == "KEY_VALUES_MISMATCH":
            advice = f"tls_key {server.tls_key} is not the key of tls_cert {server.tls_cert}"
        else:
            advice = f"tls_cert {server.tls_cert} and tls_key {server.tls_key} are no certificate and key in PEM"
        raise ConfigError(f"{advice} ({error.reason or error})") from error


def check_data_folder(server: ServerConfig, say: Callable[[str], None]) -> None:
    """Checks that files can be kept. Raises ConfigError if not, or warns where nobody named the folder."""
    trouble = _trouble(server.data_folder)
    if trouble is None:
        return
    what = f"data_dir {server.data_folder} cannot be used: {trouble}"
    if server.data_dir is not None:
        raise ConfigError(what)
    say(f"warning: {what}; files and batches are refused, and responses are lost at the end")


def _trouble(folder: Path) -> str | None:
    """Returns why a folder, which need not exist, cannot be written; None if it can."""
    for path in (folder, *folder.parents):
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            continue
        except OSError as error:
            return error.strerror or str(error)
        if not stat.S_ISDIR(mode):
            return f"{path} is no folder"
        return None if os.access(path, os.W_OK | os.X_OK) else f"{path} cannot be written"
    return None


class OpenFiles:
    """The limit of open files, raised as far as the system allows; it warns when connections come near."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.most = raise_limit()
        self._say = say
        self._last = -BETWEEN_WARNINGS

    def note(self, descriptor: int) -> None:
        """Warns, once in a while, if a connection's descriptor is one of the last that there are."""
        now = time.monotonic()
        if descriptor >= self.most - SPARE_FILES and now - self._last >= BETWEEN_WARNINGS:
            self._last = now
            what = f"nearly all of the {self.most} files that this process may open are connections"
            self._say(f"warning: {what}: further ones are closed unanswered; raise `ulimit -n` or LimitNOFILE")


def tell_systemd(state: str) -> None:
    """Tells systemd that the service is `READY=1` or `STOPPING=1`, if it asks to be told (Type=notify)."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.connect(address.replace("@", "\0", 1) if address.startswith("@") else address)
        told.sendall(state.encode())
