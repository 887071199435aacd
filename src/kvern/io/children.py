"""Child processes that may die, and the messages with them: bytes, each after its length.

    parent --descriptor of a child's socket--> server: has imported what children need, forks --> child: serves it

A parent that ends closes its sockets, and both end. Nothing here imports torch.
"""

import ctypes
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

LENGTH = 4
"""The number of bytes of a message's length."""
READY = b"\1"
"""The first byte that a child sends."""
PR_SET_PDEATHSIG = 1
"""A constant of prctl(2)."""


def fork_children(control: socket.socket, serve: Callable[[socket.socket], None]) -> None:
    """Forks a child to `serve` every socket that arrives, until the parent ends."""
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return
        with socket.socket(fileno=descriptors[0]) as connection:
            if os.fork() == 0:
                try:
                    control.close()
                    serve(connection)
                finally:
                    os._exit(0)


def give_way(nice: int) -> None:
    """Lets engine and server go first, and leaves signals to the whole group to them. Children are not waited for."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.nice(nice)


def end_with_parent() -> None:
    """Has this process killed when the thread that started it ends, however that happens; on Linux alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def limit_memory(size: int) -> None:
    """Lets this process allocate so many bytes beside those that it uses now, and leave no core file."""
    used = os.sysconf("SC_PAGE_SIZE") * int(Path("/proc/self/statm").read_text().split()[5])
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used + size, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def send(connection: socket.socket, message: bytes, descriptors: list[int] | None = None) -> None:
    """Sends one message, with these descriptors if there are any."""
    begin = len(message).to_bytes(LENGTH)
    if descriptors:
        socket.send_fds(connection, [begin], descriptors)
        connection.sendall(message)
    else:
        connection.sendall(begin + message)


def receive(connection: socket.socket) -> bytes | None:
    """Receives one message; None if the socket was closed."""
    length = _exactly(connection, LENGTH)
    return None if length is None else _exactly(connection, int.from_bytes(length))


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    parts = []
    while count:
        part = connection.recv(count)
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
