"""A real master of Mooncake's pool, and other processes that take part in it."""

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ports import free_port


def _why_not() -> str:
    """Why Mooncake cannot be used here; empty if it can."""
    if importlib.util.find_spec("mooncake") is None:
        return "mooncake-transfer-engine-non-cuda is not installed"
    tried = subprocess.run([sys.executable, "-c", "import mooncake.store"], capture_output=True, text=True)
    return tried.stderr.strip().splitlines()[-1] if tried.returncode else ""


WHY_NOT = _why_not()
needs_mooncake = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


class Master:
    """A master on a port of this machine."""

    def __init__(self) -> None:
        self.port = free_port()
        self._metrics = self.port + 1
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it; when this returns, it takes connections."""
        found = importlib.util.find_spec("mooncake")
        assert found is not None and found.origin is not None
        binary = Path(found.origin).parent / "mooncake_master"
        ports = ["-rpc_port", str(self.port), "-metrics_port", str(self._metrics), "-rpc_address", "127.0.0.1"]
        quiet = os.environ | {"GLOG_minloglevel": "3"}
        self._process = subprocess.Popen(
            [binary, *ports], env=quiet, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while self._process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            time.sleep(0.01)
        raise RuntimeError(f"the master ended with {self._process.returncode}")

    @property
    def pid(self) -> int:
        """The running process."""
        assert self._process is not None
        return self._process.pid

    def send(self, number: signal.Signals) -> None:
        """Sends it a signal; when this returns after SIGSTOP, nothing of it runs."""
        assert self._process is not None
        self._process.send_signal(number)
        if number is signal.SIGSTOP:
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def kill(self) -> None:
        """Kills it; when this returns, it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextlib.contextmanager
def mooncake_master() -> Iterator[Master]:
    """A running master."""
    master = Master()
    try:
        master.start()
        yield master
    finally:
        master.kill()
