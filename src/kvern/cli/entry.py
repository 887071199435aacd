"""The entry point of the command `kvern`, and a relay for a server's stderr, so that no process waits for its reader.

  server, engine, compilers of forms --a pipe--> reader --lines, up to a limit--> writer --> the original stderr

A pipe that nobody reads is full after some kilobytes, and the next write to it blocks for ever: an event loop that logs
a request, or an engine that prints a warning. The relay's pipe is always read, also for output of libraries and of
engines that crash; lines without room are counted and dropped.
"""

import atexit
import importlib
import os
import queue
import select
import stat
import sys
import threading
from contextlib import suppress
from types import ModuleType

from kvern.cpu.cores import limit_spinning
from kvern.errors import INTERRUPTED

STDERR = 2
MOST_LINES = 4096
"""The limit of lines that wait to be written."""
LONGEST_PIECE = select.PIPE_BUF
"""The bytes of a line that are written at once: a pipe with room for them takes them whole."""
LAST_SECONDS = 1.0
"""The time for the reader at the end."""


def relay_stderr() -> None:
    """Replaces stderr of this process, and of those that it starts, by a relay if it is a pipe or socket.

    Files and terminals stay as they are: writes to them do not wait for a reader.
    """
    with suppress(OSError):  # stderr may be closed
        mode = os.fstat(STDERR).st_mode
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            atexit.register(StderrRelay(STDERR).close)


class StderrRelay:
    """A relay before a descriptor: what is written to it is passed on as fast as it is read."""

    def __init__(self, descriptor: int, most_lines: int = MOST_LINES) -> None:
        self._descriptor = descriptor
        self._target = os.dup(descriptor)
        self._lines: queue.Queue[bytes | None] = queue.Queue(most_lines)
        source, sink = os.pipe()
        os.dup2(sink, descriptor)
        os.close(sink)
        self._writer = threading.Thread(target=self._write, name="stderr-writer", daemon=True)
        self._writer.start()
        threading.Thread(target=self._read, args=(source,), name="stderr-reader", daemon=True).start()

    def close(self) -> None:
        """Restores the descriptor; the remaining lines have a moment to be read."""
        os.dup2(self._target, self._descriptor)
        self._writer.join(LAST_SECONDS)

    def _read(self, source: int) -> None:
        left_out = 0
        with os.fdopen(source, "rb") as lines:
            while piece := lines.readline(LONGEST_PIECE):
                try:
                    if left_out:
                        self._lines.put_nowait(_notice(left_out))
                        left_out = 0
                    self._lines.put_nowait(piece)
                except queue.Full:
                    left_out += 1
        if left_out:
            self._lines.put(_notice(left_out))
        self._lines.put(None)

    def _write(self) -> None:
        with suppress(OSError):  # it will never be read
            while (piece := self._lines.get()) is not None:
                while piece:
                    select.select([], [self._target], [])
                    with suppress(BlockingIOError):  # another process has filled it since
                        piece = piece[os.write(self._target, piece) :]


def _notice(left_out: int) -> bytes:
    return b"kvern: %d lines are left out here: nobody read what stood before them\n" % left_out


def main() -> int:
    """Runs the command of `sys.argv` and returns its exit code."""
    first_engine: ModuleType | None = None
    try:
        limit_spinning()
        arguments = sys.argv[1:]
        if arguments[:1] == ["serve"] and not any(argument.startswith(("-h", "--help")) for argument in arguments):
            relay_stderr()
            first_engine = importlib.import_module("kvern.cli.first_engine")
            first_engine.begin()
        from kvern.cli.main import main as run

        return run(arguments)
    except KeyboardInterrupt:  # during imports
        return INTERRUPTED
    finally:
        if first_engine is not None:
            first_engine.kill()
