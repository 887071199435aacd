"""An engine's process, from the outside; it may start before what it is to load is known."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Set
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import zmq

from kvern.engine.step_ring import ring_path
from kvern.engine.step_watch import read_running
from kvern.io.bytecode import bytecode_environment

ORPHAN_SECONDS = 2.0
"""So long ranks may take to notice that their engine has ended, and to remove what they share."""
LOOK_SECONDS = 0.02
"""The interval of checks whether these files exist."""


class EngineProcess(Protocol):
    """An engine's process, wherever it runs."""

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""

    def listen(self, socket: "zmq.Socket[Any]") -> None:
        """Bind the socket to where the process will connect, or has."""

    def bind(self, processors: Set[int]) -> None:
        """Let it run on these alone, if any are named."""

    async def wait(self) -> int:
        """Its `returncode`, once there is one."""

    def kill(self) -> None:
        """End it at once."""

    def last_requests(self) -> list[str]:
        """The requests that it computed when it ended, those of the last step first."""

    def forget(self) -> None:
        """Remove what it leaves behind."""

    def memory(self) -> int:
        """The bytes of this machine's memory that it and its ranks take; what others share counts in part."""

    def processor_seconds(self) -> float | None:
        """The CPU time that it and its ranks have taken so far; None if the system does not tell."""


class EngineChild:
    """A child of this process that imports what engines need, and waits for the message that names its model.

    In the file `running` it notes what it computes. Both are in a folder that only this user may enter. The process
    ends when this one does.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        """`environment`: what it has beside that of this process."""
        self._folder = tempfile.TemporaryDirectory(prefix="kvern-", ignore_cleanup_errors=True)
        self._address = f"ipc://{Path(self._folder.name, 'engine')}"
        self._running = Path(self._folder.name, "running")
        command = [sys.executable, "-m", "kvern.serving.process", self._address, str(self._running), str(os.getpid())]
        self._process = subprocess.Popen(  # noqa: S603 (no shell, our own words)
            command,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **bytecode_environment(), **(environment or {})},
            process_group=0,
        )
        self._ended: Future[int] = Future()
        threading.Thread(target=self._watch, name="engine-process", daemon=True).start()

    def listen(self, socket: "zmq.Socket[Any]") -> None:
        socket.bind(self._address)

    def bind(self, processors: Set[int]) -> None:
        if processors:
            with contextlib.suppress(ProcessLookupError):  # that it has ended is noticed elsewhere
                os.sched_setaffinity(self._process.pid, processors)

    @property
    def returncode(self) -> int | None:
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int:
        return await asyncio.shield(asyncio.wrap_future(self._ended))

    def kill(self) -> None:
        self._process.kill()

    def last_requests(self) -> list[str]:
        return read_running(self._running.read_bytes()) if self._running.exists() else []

    def forget(self) -> None:
        self._folder.cleanup()
        ring_path(self._folder.name).unlink(missing_ok=True)

    def memory(self) -> int:
        return sum(map(_bytes_of, _members(self._process.pid)))

    def processor_seconds(self) -> float | None:
        seconds = [_seconds_of(int(folder.name)) for folder in _members(self._process.pid)]
        return sum(seconds) if seconds else None

    def _watch(self) -> None:
        code = self._process.wait()
        try:
            _end_ranks(self._process.pid)
        finally:
            self._ended.set_result(code)


def _members(group: int) -> Iterator[Path]:
    """Yields the folders in /proc of the processes of a group."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            said = (folder / "stat").read_text(errors="replace")  # a name may be cut within a character
            if int(said.rpartition(")")[2].split()[2]) == group:
                yield folder


def _bytes_of(folder: Path) -> int:
    with contextlib.suppress(OSError):
        for line in (folder / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def _seconds_of(process: int) -> float:
    """The CPU time of a process by its clock, whose number Linux derives from the process's."""
    with contextlib.suppress(OSError):
        return time.clock_gettime(~process << 3 | 2)
    return 0.0


def _end_ranks(group: int) -> None:
    """End what an engine that has ended leaves of its process group: ranks that hang, and do not notice."""
    with contextlib.suppress(ProcessLookupError):  # nobody is left
        os.killpg(group, signal.SIGCONT)
        until = time.monotonic() + ORPHAN_SECONDS
        while time.monotonic() < until:
            _forget_ended(group)
            os.killpg(group, 0)
            time.sleep(LOOK_SECONDS)
        os.killpg(group, signal.SIGKILL)


def _forget_ended(group: int) -> None:
    """Take note of those that have ended: they are this process's children, if it is a container's first."""
    with contextlib.suppress(ChildProcessError):  # they are another one's
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
