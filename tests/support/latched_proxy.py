"""A proxy that counts the bytes between a store and its server, and sends a process a signal behind one of them.

It is a process of its own, since native code of a store may keep all threads of this one from running:
`python -m tests.support.latched_proxy PORT` says its port, and answers lines of its stdin: `passed` is answered by the
number of bytes that have passed, and `latch BYTES SIGNAL PID` by `done` when so many more have.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

PIECE = 1 << 16


class LatchedProxy:
    """A running proxy before a server's `port`."""

    def __init__(self, port: int) -> None:
        command = [sys.executable, "-m", __name__, str(port)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, cwd=Path(__file__).parents[2], text=True, bufsize=1, **pipes)  # type: ignore[call-overload]
        self.port = int(self._process.stdout.readline())
        self.has_acted = threading.Event()
        self._waits: threading.Thread | None = None

    def passed(self) -> int:
        """The bytes of both directions that it has passed on; to be asked while no latch is set."""
        return int(self._asked("passed"))

    def latch(self, count: int, how: signal.Signals, pid: int) -> None:
        """Sends a process a signal behind so many more bytes; nothing else is passed on before."""

        def wait() -> None:
            if self._asked(f"latch {count} {int(how)} {pid}") == "done\n":
                self.has_acted.set()

        self._waits = threading.Thread(target=wait, daemon=True)
        self._waits.start()

    def _asked(self, line: str) -> str:
        self._process.stdin.write(f"{line}\n")
        return str(self._process.stdout.readline())

    def close(self) -> None:
        """Ends it, and all connections."""
        self._process.kill()
        if self._waits is not None:
            self._waits.join()
        self._process.communicate()


class _Passing:
    """The proxy's process."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._passed = 0
        self._at: int | None = None
        self._how = self._pid = 0
        self._lock = threading.Lock()

    def run(self) -> None:
        threading.Thread(target=self._accept, daemon=True).start()
        print(self._listener.getsockname()[1], flush=True)
        for line in sys.stdin:
            name, *numbers = line.split()
            with self._lock:
                if name == "latch":
                    count, self._how, self._pid = map(int, numbers)
                    self._at = self._passed + count
                else:
                    print(self._passed, flush=True)

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            try:
                far = socket.create_connection(("127.0.0.1", self._port))
            except OSError:
                near.close()
                continue
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=(one, other), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(PIECE):
                with self._lock:
                    self._passed += len(piece)
                    if self._at is not None and self._passed > self._at:
                        first = len(piece) - (self._passed - self._at)
                        target.sendall(piece[:first])
                        piece = piece[first:]
                        self._at = None
                        os.kill(self._pid, self._how)
                        print("done", flush=True)
                target.sendall(piece)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def latched_proxy(port: int) -> Iterator[LatchedProxy]:
    """A proxy before a server."""
    proxy = LatchedProxy(port)
    try:
        yield proxy
    finally:
        proxy.close()


if __name__ == "__main__":
    _Passing(int(sys.argv[1])).run()
