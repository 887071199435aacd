"""The engine's side of `decoder_process.py`: images decoded side by side, none of which can do harm.

    begin --> a thread for each child process --file--> child --pixels--> finished

Processes start with the first image. They end with the engine, however it ends, since their sockets close.
"""

import contextlib
import mmap
import os
import queue
import socket
import subprocess
import sys
import threading
import weakref
from collections import deque
from pathlib import Path

from kvern.io.children import LENGTH, READY
from kvern.runner.decoder_process import DECODED, MEMORY, PIXEL_BYTES, PIXEL_SECONDS, SECONDS

MOST_CHILDREN = 4
LONGEST_START = 60.0
"""Seconds until a child must be ready."""
LONGEST_SECONDS = 600.0
"""The most seconds for one image, even on a busy machine, where computing time passes slowly."""
Decoded = memoryview | str
"""The bytes of an image's patches, or why there are none."""
ENDED = (
    f"an image cannot be decoded: that ends the process that does it. It takes more than {SECONDS:g} s and "
    f"{PIXEL_SECONDS * 1e6:g} s a megapixel of computing time, more than {MEMORY >> 20} MiB and {PIXEL_BYTES} bytes a "
    "pixel of memory, or breaks the library that reads it: send another"
)


class Decoders:
    """Decodes images for the model in a folder, in at most `children` processes."""

    def __init__(self, folder: Path, children: int | None = None) -> None:
        self._count = children or min(MOST_CHILDREN, len(os.sched_getaffinity(0)))
        self._work = _Work(folder)
        self._threads: list[threading.Thread] = []
        weakref.finalize(self, self._work.close)  # the threads know the work alone

    def begin(self, number: int, data: bytes) -> None:
        """Begins to decode a file; `finished` will name its number."""
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._work.run, name=f"image decoder {place}", daemon=True)
                for place in range(self._count)
            ]
            for thread in self._threads:
                thread.start()
        self._work.jobs.put((number, data))

    def cancel(self, number: int) -> None:
        """Nobody wants this image any more: if it has not begun it will not, and `finished` may still name it."""
        self._work.cancelled.add(number)

    def finished(self) -> list[tuple[int, Decoded]]:
        """Returns the images that have been decoded since the last call, and those that could not be."""
        done = self._work.done
        found = [done.popleft() for _ in range(len(done))]
        self._work.cancelled.difference_update(number for number, _ in found)  # cancelled after they were decoded
        return found


class _Work:
    """The images to decode, and the process whose children do it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.jobs: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self.cancelled: set[int] = set()
        self.done: deque[tuple[int, Decoded]] = deque()
        self._lock = threading.Lock()
        self._server: tuple[subprocess.Popen[bytes], socket.socket] | None = None
        self._closed = False

    def run(self) -> None:
        """Decodes images one after the other in a child, until the engine ends."""
        child: socket.socket | None = None
        while (job := self.jobs.get()) is not None:
            number, data = job
            if number not in self.cancelled:
                child, decoded = self._decode(child, data)
                self.done.append((number, decoded))
            self.cancelled.discard(number)
        self.jobs.put(None)  # for the other threads
        if child is not None:
            child.close()

    def _decode(self, child: socket.socket | None, data: bytes) -> tuple[socket.socket | None, Decoded]:
        """The child that lives after it, and what became of the file. A child that has idled may have been killed."""
        if child is not None:
            with contextlib.suppress(OSError):
                return child, _ask(child, data)
            child.close()
        try:
            child = self._fork()
        except OSError as error:
            return None, f"the process that decodes images does not start: {error}: try again later"
        try:
            return child, _ask(child, data)
        except OSError:  # TimeoutError is one
            child.close()
            return None, ENDED

    def close(self) -> None:
        """Ends the processes and the threads."""
        self.jobs.put(None)
        with self._lock:
            self._closed = True
            self._end()

    def _fork(self) -> socket.socket:
        """Returns the socket of a new child, which is ready. Raises OSError."""
        for attempt in range(2):  # a process that died is replaced
            with self._lock:
                if self._closed:
                    raise ConnectionError("the engine ends")
                self._server = self._server or self._start()
                server = self._server
            ours, theirs = socket.socketpair()
            ours.settimeout(LONGEST_START)
            try:
                with theirs:
                    socket.send_fds(server[1], [b"\0"], [theirs.fileno()])
                if ours.recv(len(READY)) != READY:
                    raise ConnectionError("it has ended")
            except OSError:
                ours.close()
                with self._lock:
                    if self._server is server:
                        self._end()
                if attempt:
                    raise
            else:
                ours.settimeout(LONGEST_SECONDS)
                return ours
        raise AssertionError

    def _start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                command = [
                    sys.executable,
                    "-m",
                    "kvern.runner.decoder_process",
                    str(theirs.fileno()),
                    str(self._folder),
                ]
                process = subprocess.Popen(  # noqa: S603 (no shell, our own words)
                    command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
                )
        except BaseException:
            ours.close()
            raise
        return process, ours

    def _end(self) -> None:
        if self._server is not None:
            process, control = self._server
            self._server = None
            control.close()
            process.kill()
            process.wait()


def _ask(child: socket.socket, data: bytes) -> Decoded:
    """Has a child decode a file. Raises OSError if the child ends, or takes too long."""
    child.sendall(len(data).to_bytes(LENGTH))
    child.sendall(data)
    begin, descriptors, _, _ = socket.recv_fds(child, LENGTH, 1)
    try:
        length = int.from_bytes(begin)
        if len(begin) < LENGTH or (said := child.recv(length, socket.MSG_WAITALL)) is None or len(said) < length:
            raise ConnectionError("the process that decodes images has ended")
        if said != DECODED or not descriptors:
            return said.decode(errors="replace")
        memory = mmap.mmap(descriptors[0], 0, mmap.MAP_PRIVATE)
        return memoryview(memory)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
