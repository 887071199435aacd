"""A Ray cluster of two nodes on this machine, one process with its children each, for tests of what runs on Ray."""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.ports import free_port

STORE_BYTES = 80_000_000
START_SECONDS = 120
RAY = str(Path(sys.executable).with_name("ray"))


class RayCluster:
    """A head node and another; all of it ends with the block."""

    def __init__(self, cpus: int) -> None:
        """`cpus` that each node says it has."""
        self._folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # paths of sockets are short
        self._cpus = cpus
        self.nodes: list[subprocess.Popen[bytes]] = []
        self.address = f"127.0.0.1:{free_port()}"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            "RAY_ADDRESS": self.address,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_health_check_period_ms": "500",
            "RAY_health_check_failure_threshold": "3",
        }

    def __enter__(self) -> Self:
        try:
            ports = "--port", self.address.rpartition(":")[2], "--ray-client-server-port", str(free_port())
            for arguments in (("--head", *ports, "--include-dashboard", "false"), ("--address", self.address)):
                self._start(*arguments)
            self._wait()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, *arguments: str) -> None:
        log = self._folder / f"node{len(self.nodes)}.log"
        options = {
            "node-ip-address": "127.0.0.1",
            "num-cpus": self._cpus,
            "num-gpus": 0,
            "object-store-memory": STORE_BYTES,
            "min-worker-port": 0,
            "max-worker-port": 0,
            "temp-dir": self._folder / "r",
        }
        command = [RAY, "start", "--block", "--disable-usage-stats", *arguments]
        command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
        with log.open("wb") as out:
            node = subprocess.Popen(
                command, env=self.environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        self.nodes.append(node)

    def _wait(self) -> None:
        """Until all nodes are there."""
        deadline = time.monotonic() + START_SECONDS
        for number, node in enumerate(self.nodes):
            log = self._folder / f"node{number}.log"
            while b"Ray runtime started" not in log.read_bytes():
                assert node.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)

    def remove_node(self, node: subprocess.Popen[bytes]) -> None:
        """Let it be gone at once, with all that runs there."""
        for pid in [*self.processes(node), node.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        node.wait()

    def processes(self, *nodes: subprocess.Popen[bytes]) -> list[int]:
        """The processes on these nodes, or on all."""
        return [pid for node in nodes or self.nodes for pid in descendants(node.pid)]

    def close(self) -> None:
        """End all that runs on any node."""
        for node in reversed(self.nodes):
            if node.poll() is None:
                self.remove_node(node)
        shutil.rmtree(self._folder, ignore_errors=True)


def descendants(pid: int) -> list[int]:
    """The processes that a process, in any of its threads, has begun, and those that these have."""
    children: list[int] = []
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            children += map(int, thread.read_text().split())
    return [found for child in children for found in (child, *descendants(child))]
