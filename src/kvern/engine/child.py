"""An engine's process, from the outside; it may start before what it is to load is known."""

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Set
from concurrent.futures import Future
from pathlib import Path

from kvern.bytecode import bytecode_environment


class EngineProcess:
    """A process that imports what engines need, and waits at `address` for the message that names its model.

    In the file `running` it notes what it computes. Both are in a folder that only this user may enter. The process
    ends when this one does.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        """`environment`: what it has beside that of this process."""
        self._folder = tempfile.TemporaryDirectory(prefix="kvern-", ignore_cleanup_errors=True)
        self.address = f"ipc://{Path(self._folder.name, 'engine')}"
        self.running = Path(self._folder.name, "running")
        command = [sys.executable, "-m", "kvern.engine.process", self.address, str(self.running), str(os.getpid())]
        self._process = subprocess.Popen(  # noqa: S603 (no shell, our own words)
            command, stdin=subprocess.DEVNULL, env={**os.environ, **bytecode_environment(), **(environment or {})}
        )
        self._ended: Future[int] = Future()
        threading.Thread(target=self._watch, name="engine-process", daemon=True).start()

    def bind(self, processors: Set[int]) -> None:
        """Let it run on these alone, if any are named."""
        if processors:
            with contextlib.suppress(ProcessLookupError):  # that it has ended is noticed elsewhere
                os.sched_setaffinity(self._process.pid, processors)

    @property
    def returncode(self) -> int | None:
        """How it ended, negative: by which signal; None: it runs."""
        return self._ended.result() if self._ended.done() else None

    async def wait(self) -> int:
        """Its `returncode`, once there is one."""
        return await asyncio.shield(asyncio.wrap_future(self._ended))

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def forget(self) -> None:
        """Remove what it leaves behind."""
        self._folder.cleanup()

    def _watch(self) -> None:
        self._ended.set_result(self._process.wait())
