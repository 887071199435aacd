"""A running `kvern serve`, for the tests that drive one as a process."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import openai
from prometheus_client.parser import text_string_to_metric_families

KEY = "secret-key"
ENGINE = "kvern.serving.process"
PATIENCE = 240.0
"""Seconds that something may take on a machine that is busy with other things, before a test gives up."""
QUESTION = [{"role": "user", "content": "What is 17 + 25?"}]


def children_of(pid: int) -> list[int]:
    """The processes that the threads of a process have started."""
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in files for child in file.read_text().split()]


def command_of(pid: int) -> str:
    """Empty where the process has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def child_of(pid: int, module: str) -> int:
    """The child of a process that runs a module."""
    (found,) = [child for child in children_of(pid) if module in command_of(child)]
    return found


def worked(pid: int) -> float:
    """Seconds of processors that a process, and those of its children that have ended, have used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


class Served:
    """A running `kvern serve`."""

    def __init__(self, *arguments: str, log: Path | None = None) -> None:
        """`log`: a file for what it says after its start."""
        command = [sys.executable, "-m", "kvern", "serve", "--port", "0", *arguments]
        self._clients: list[openai.OpenAI] = []
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        lines = []
        for line in self.process.stderr:
            lines.append(line)
            if found := re.search(r"on (?:https?://([\d.]+):(\d+)|unix:)", line):
                self.host, self.port = found[1], int(found[2] or 0)
                break
        else:
            raise AssertionError("".join(lines))
        self.said = "".join(lines)
        """The output before it served, and its address."""
        self._reader = None
        if log is not None:
            self._reader = threading.Thread(target=self._copy, args=(log.open("w", buffering=1),))
            self._reader.start()

    def _copy(self, log: TextIO) -> None:
        assert self.process.stderr is not None
        with log:
            log.writelines(self.process.stderr)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}/v1"

    def client(self, key: str = KEY) -> openai.OpenAI:
        client = openai.OpenAI(base_url=self.url, api_key=key, max_retries=0, timeout=PATIENCE)
        self._clients.append(client)
        return client

    def raw(self, method: str, path: str, body: bytes = b"", key: str | None = KEY) -> tuple[int, dict[str, str], Any]:
        """One request over a socket of its own: status, headers, JSON."""
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
        if key is not None:
            head += f"Authorization: Bearer {key}\r\n"
        with socket.create_connection((self.host, self.port), timeout=PATIENCE) as connection:
            connection.sendall(head.encode() + b"\r\n" + body)
            data = b""
            while part := connection.recv(65536):
                data += part
        top, _, content = data.partition(b"\r\n\r\n")
        status, *lines = top.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        return int(status.split()[1]), headers, json.loads(content) if content else None

    def figure(self, name: str, secret: str = KEY, **labels: str) -> float:
        """One of the metrics: the sum of those with these labels; 0 if there is none."""
        head = f"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nx-api-key: {secret}\r\n\r\n"
        with socket.create_connection((self.host, self.port), timeout=PATIENCE) as connection:
            connection.sendall(head.encode())
            data = b""
            while part := connection.recv(65536):
                data += part
        families = text_string_to_metric_families(data.partition(b"\r\n\r\n")[2].decode())
        samples = [sample for family in families for sample in family.samples if sample.name == f"kvern:{name}"]
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    def kill_engine(self) -> None:
        os.kill(self.engine_pid(), signal.SIGKILL)

    def engine_pid(self) -> int:
        return child_of(self.process.pid, ENGINE)

    def worked(self) -> float:
        """Seconds of processors that the server and its engine have used: no load of the machine changes them."""
        return worked(self.process.pid) + worked(self.engine_pid())

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """No engine computes while the block runs: whatever is asked does not end meanwhile."""
        engines = [child for child in children_of(self.process.pid) if ENGINE in command_of(child)]
        for engine in engines:
            os.kill(engine, signal.SIGSTOP)
        try:
            yield
        finally:
            for engine in engines:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(engine, signal.SIGCONT)

    def child(self, module: str) -> int:
        """The process of the server that runs a module."""
        return child_of(self.process.pid, module)

    def stop(self, how: int = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return self.close()

    def close(self) -> int:
        """Wait for its end, and let go of everything."""
        for client in self._clients:
            client.close()
        assert self.process.stderr is not None
        if self._reader is not None:
            self._reader.join(PATIENCE)
        self.process.stderr.close()
        return self.process.wait(PATIENCE)


def eventually(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


SMALL = ("kvern-1m", "--threads", "1", "--max-model-len", "512", "--dtype", "float32")


STORY: dict[str, Any] = {"model": "kvern-1m", "max_tokens": 300, "temperature": 0.8, "extra_body": {"ignore_eos": True}}

ENDLESS = (*SMALL, "--hf-overrides", '{"max_position_embeddings": 1000000}', "--max-model-len", "200000")
"""A server on which an answer of `FOREVER` lasts for minutes on any machine: it runs until its client leaves."""

FOREVER: dict[str, Any] = STORY | {"max_tokens": 190_000}


@contextlib.contextmanager
def serving(*arguments: str, log: Path | None = None) -> Iterator[Served]:
    served = Served(*arguments, log=log)
    try:
        yield served
    finally:
        if served.process.poll() is None:
            served.stop()
        else:
            served.close()
