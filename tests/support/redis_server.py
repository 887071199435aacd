"""A real server for stores on Valkey and Redis."""

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ports import free_port

BINARY = shutil.which("valkey-server") or shutil.which("redis-server")
needs_server = pytest.mark.skipif(BINARY is None, reason="neither valkey-server nor redis-server is installed")


class RedisServer:
    """A server process on a port of this machine that keeps its data in memory alone."""

    def __init__(self, folder: Path, *options: str, tls: bool = False) -> None:
        self.port = free_port()
        ports = ["--port", "0", "--tls-port", str(self.port)] if tls else ["--port", str(self.port)]
        quiet = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(folder), "--io-threads", "1"]
        self._command = [str(BINARY), *ports, *quiet, *options]
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Starts it; when this returns, it takes connections."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert self._process.stdout is not None
        said = list[str]()
        for line in self._process.stdout:
            said.append(line)
            if "Ready to accept connections" in line:
                return
        raise RuntimeError("".join(said))

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
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None


@contextlib.contextmanager
def redis_server(folder: Path, *options: str, tls: bool = False) -> Iterator[RedisServer]:
    """A running server with these options."""
    server = RedisServer(folder, *options, tls=tls)
    try:
        server.start()
        yield server
    finally:
        server.kill()
