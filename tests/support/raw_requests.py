"""Requests over sockets of their own, as no client library would send them, and what they cost the server."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.served import PATIENCE, Served

MEGABYTE = 1 << 20
SOON = 12.0
"""Seconds of processors that pass at most in the server and its engine until a small request is answered."""


def connect(server: Served) -> socket.socket:
    return socket.create_connection((server.host, server.port), timeout=PATIENCE)


def resident(server: Served) -> int:
    """Megabytes of memory that the server's process has."""
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmRSS"))) // 1024


def most_resident(server: Served) -> int:
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) // 1024


@contextlib.contextmanager
def small_requests_are_answered(server: Served) -> Iterator[None]:
    """While the block runs, and at least once."""
    slowest, ended = [-1.0], threading.Event()

    def ask() -> None:
        body = json.dumps({"prompt": "Once", "max_tokens": 1}).encode()
        while True:
            began = server.worked()
            assert server.raw("GET", "/health")[0] == server.raw("POST", "/v1/completions", body)[0] == 200
            slowest[0] = max(slowest[0], server.worked() - began)
            if ended.wait(0.05):
                return

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    assert 0 <= slowest[0] < SOON


def send_until_closed(connection: socket.socket, part: bytes, most: int) -> int:
    """Send a part again and again until the server closes; how many bytes it took."""
    sent = 0
    with contextlib.suppress(OSError):
        while sent < most:
            connection.sendall(part)
            sent += len(part)
    return sent


def received(connection: socket.socket) -> bytes:
    """All that comes until the server closes."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(65536):
            data += part
    return data


POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


def drip(connection: socket.socket, part: bytes) -> bool:
    """Send a little now and then; whether the server closes meanwhile."""
    connection.settimeout(0.2)
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            connection.sendall(part)
            if connection.recv(65536) == b"":
                return True
        except TimeoutError:
            continue
        except ConnectionError:
            return True
    return False


def form(name: bytes = b"a.jsonl", charset: str = "", content: bytes = b"{}\n") -> tuple[bytes, bytes]:
    """Content type and body of an upload."""
    fields = b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    fields += b'--x\r\nContent-Disposition: form-data; name="file"; filename="' + name + b'"\r\n\r\n'
    return f"multipart/form-data; boundary=x{charset}".encode(), fields + content + b"\r\n--x--\r\n"


def upload(server: Served, kind: bytes, body: bytes) -> bytes:
    with connect(server) as connection:
        head = b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: " + kind
        connection.sendall(head + f"\r\nContent-Length: {len(body)}\r\n\r\n".encode())
        with contextlib.suppress(OSError):
            connection.sendall(body)
        return received(connection)


CHAT, TEXT, SCORE = "/v1/chat/completions", "/v1/completions", "/v1/score"
CLAUDE, RESPONSES = "/v1/messages", "/v1/responses"
