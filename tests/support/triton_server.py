"""A Triton Inference Server, from the package nvidia-pytriton in an environment of its own, and a client of it."""

import contextlib
import itertools
import json
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.served import PATIENCE, eventually

ROOT = Path(__file__).parents[2]
ENVIRONMENT = Path(os.environ.get("TRITON_ENVIRONMENT", ROOT / ".triton-env"))
FOUND = next(iter(ENVIRONMENT.glob("lib/python3.*/site-packages/pytriton/tritonserver")), None)
needs_triton = pytest.mark.skipif(
    FOUND is None, reason=f"no Triton in {ENVIRONMENT}: `make .triton-env` makes one, or name it by TRITON_ENVIRONMENT"
)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as open_ones:
        sockets = [open_ones.enter_context(socket.socket()) for _ in range(count)]
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        return [item.getsockname()[1] for item in sockets]


def make_backends(folder: Path) -> Path:
    """A folder of backends: Triton's Python backend with the stub for the environment's Python."""
    assert FOUND is not None
    version = FOUND.parts[-4].removeprefix("python")
    shutil.copytree(FOUND / "backends" / "python", folder / "python", dirs_exist_ok=True)
    shutil.copy(FOUND / "python_backend_stubs" / version / "triton_python_backend_stub", folder / "python")
    return folder


class Answer:
    """A request to Triton over gRPC, and what has come."""

    def __init__(self, number: int, send: Callable[[dict[str, Any]], None]) -> None:
        self._number, self._send = number, send
        self.lines: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The outputs of each response. Raises RuntimeError for an error."""
        while "end" not in (line := self.lines.get(timeout=PATIENCE)):
            yield line["outputs"]
        self._send({"id": self._number, "cancel": False})  # an open stream would keep the model loaded
        if line["end"] is not None:
            raise RuntimeError(line["end"])

    def cancel(self) -> None:
        self._send({"id": self._number, "cancel": True})

    def text(self, name: str = "text_output") -> str:
        return "".join(text for outputs in self for text in outputs[name])


class TritonServer:
    """A running tritonserver; models are loaded by `load`."""

    def __init__(self, repository: Path, folder: Path) -> None:
        assert FOUND is not None
        self.http, self.grpc, self.metrics = free_ports(3)
        site = FOUND.parents[1]
        (home,) = re.findall(r"^home = (.*)/bin$", (ENVIRONMENT / "pyvenv.cfg").read_text(), re.MULTILINE)
        libraries = f"{site}/nvidia_pytriton.libs:{home}/lib"
        environment = {**os.environ, "PATH": f"{ENVIRONMENT}/bin:{os.environ['PATH']}", "LD_LIBRARY_PATH": libraries}
        command = [str(FOUND / "bin" / "tritonserver"), f"--model-repository={repository}"]
        command += [f"--backend-directory={make_backends(folder / 'backends')}", "--model-control-mode=explicit"]
        command += [f"--{name}-port={getattr(self, name)}" for name in ("http", "grpc", "metrics")]
        self._log_path = folder / "triton.log"
        self._log = self._log_path.open("wb")
        self.process = subprocess.Popen(
            command, env=environment, stdout=self._log, stderr=self._log, start_new_session=True
        )
        client = [str(ENVIRONMENT / "bin" / "python"), str(ROOT / "tests/support/triton_client.py")]
        self._client = subprocess.Popen(
            [*client, f"127.0.0.1:{self.grpc}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answers: dict[int, Answer] = {}
        self._numbers = itertools.count()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _send(self, asked: dict[str, Any]) -> None:
        assert self._client.stdin is not None
        self._client.stdin.write(json.dumps(asked) + "\n")
        self._client.stdin.flush()

    def _read(self) -> None:
        assert self._client.stdout is not None
        for line in self._client.stdout:
            content = json.loads(line)
            self._answers[content["id"]].lines.put(content)

    def _asked(self, asked: dict[str, Any]) -> Answer:
        number = next(self._numbers)
        self._answers[number] = Answer(number, self._send)
        self._send({"id": number, **asked})
        return self._answers[number]

    def ask(
        self, model: str, parameters: dict[str, Any] | None = None, with_status: bool = False, **inputs: Any
    ) -> Answer:
        """A request over gRPC; `sampling` is written as sampling_parameters. An error has its code `with_status`."""
        if "sampling" in inputs:
            inputs["sampling_parameters"] = json.dumps(inputs.pop("sampling"))
        return self._asked({"model": model, "inputs": inputs, "parameters": parameters, "status": with_status})

    def config(self, model: str) -> dict[str, Any]:
        """A model's configuration, as Triton has completed it."""
        return self._asked({"config": model}).lines.get(timeout=PATIENCE)["config"]

    def call(self, path: str, body: Any = None, port: int | None = None) -> tuple[int, bytes]:
        """An HTTP request: status, content."""
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port or self.http}{path}", data, PATIENCE) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()
        except urllib.error.URLError:
            return 0, b""

    def status(self, path: str) -> int:
        return self.call(path)[0]

    def wait(self) -> None:
        """Wait until it answers."""
        eventually(lambda: self.status("/v2/health/live") == 200 or self.process.poll() is not None)
        assert self.process.poll() is None, self._log_path.read_text(errors="replace")[-3000:]

    def load(self, model: str, what: str = "load") -> None:
        """Loads a model, or begins to unload it."""
        status, said = self.call(f"/v2/repository/models/{model}/{what}", {})
        assert status == 200, said

    def close(self) -> None:
        assert self._client.stdin is not None and self._client.stdout is not None
        self._client.stdin.close()
        self._client.wait(PATIENCE)
        self._reader.join(PATIENCE)
        self._client.stdout.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(
                self.process.pid, signal.SIGKILL
            )  # its own end takes seconds, and stubs of models would survive it
        self.process.wait(PATIENCE)
        self._log.close()


@contextlib.contextmanager
def triton(repository: Path, folder: Path) -> Iterator[TritonServer]:
    repository.mkdir(exist_ok=True)
    server = TritonServer(repository, folder)
    try:
        yield server
    finally:
        server.close()
