"""A hub that speaks the Hugging Face API on the loopback, and processes that use it."""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"hello",
    "model.safetensors": b"weights",
    "README.md": b"not needed",
    "pytorch_model.bin": b"not needed",
    "original/consolidated.safetensors": b"not needed",
}
COMMITS = {"main": "a" * 40, "v2": "b" * 40}


@dataclass
class Hub:
    """What the stand-in serves; ``token`` is needed where it is set, ``status`` overrides every answer."""

    url: str = ""
    token: str | None = None
    status: int | None = None
    requests: list[str] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=lambda: dict(FILES))
    sent: int = 0
    """The bytes of files that were sent."""
    knows_ranges: bool = True
    sizes: dict[str, int] = field(default_factory=dict)
    """What it says of files in place of their sizes."""
    gate: threading.Event = field(default_factory=threading.Event)
    """While it is not set, files stop in the middle."""

    def __post_init__(self) -> None:
        self.gate.set()

    def siblings(self) -> list[dict[str, object]]:
        return [
            {"rfilename": path, "size": self.sizes.get(path, len(data)), "blobId": hashlib.sha1(data).hexdigest()}
            for path, data in self.files.items()
        ]


def handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hub.requests.append(self.path)
            status, headers, body = self.answer()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                with contextlib.suppress(ConnectionError):  # a client that has read enough hangs up
                    half = len(body) // 2
                    self.wfile.write(body[:half])
                    if "/resolve/" in self.path:
                        hub.gate.wait()
                    self.wfile.write(body[half:])
                    hub.sent += len(body) * (status in (200, 206) and "/resolve/" in self.path)

        do_HEAD = do_GET  # noqa: N815

        def answer(self) -> tuple[int, dict[str, str], bytes]:
            if hub.status is not None:
                return hub.status, {}, b"out of order"
            if hub.token is not None and self.headers.get("Authorization") != f"Bearer {hub.token}":
                return 401, {"X-Error-Code": "GatedRepo", "X-Error-Message": "restricted"}, b"{}"
            parts = self.path.split("?")[0].strip("/").split("/")
            if "tiny" not in parts:
                return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
            if parts[:2] == ["api", "models"]:
                revision = parts[5] if len(parts) > 5 else "main"
                commit = COMMITS.get(revision, revision if revision in COMMITS.values() else None)
                if commit is None:
                    return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
                if "tree" in parts[4:5]:
                    tree = [
                        {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                        for path, data in hub.files.items()
                    ]
                    return 200, {"Content-Type": "application/json"}, json.dumps(tree).encode()
                card = {"license": "apache-2.0"}
                info = {"id": "kvern-tests/tiny", "sha": commit, "siblings": hub.siblings(), "cardData": card}
                return 200, {"Content-Type": "application/json"}, json.dumps(info).encode()
            commit, data = parts[3], hub.files["/".join(parts[4:])]
            headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": commit}
            if hub.knows_ranges and (asked := self.headers.get("Range")) and self.command == "GET":
                begin, _, last = asked.removeprefix("bytes=").partition("-")
                part = data[int(begin) : int(last) + 1 if last else None]
                return 206, {**headers, "Content-Range": f"bytes {begin}-{last}/{len(data)}"}, part
            return 200, headers, data

        def log_message(self, *args: object) -> None:
            pass

    return Handler


@contextlib.contextmanager
def serving_hub() -> Iterator[Hub]:
    """A hub until the block ends."""
    state = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(state))
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield state
    finally:
        state.gate.set()
        server.shutdown()
        thread.join()
        server.server_close()


SCRIPT = """
import sys
from kvern.errors import ModelNotFound
from kvern.models.hub import resolve_model
try:
    print(resolve_model(sys.argv[1], revision=sys.argv[2] or None, weights=sys.argv[3] == "True"))
except ModelNotFound as error:
    print("ModelNotFound:", error)
"""


@dataclass
class Client:
    """Another process: huggingface_hub reads its environment when it is imported."""

    home: Path
    hub: Hub

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """A Python process with these arguments, whose hub is the stand-in."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        added = {
            "HF_HOME": str(self.home),
            "HF_ENDPOINT": self.hub.url,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        return subprocess.run(
            [sys.executable, *command],
            env={**kept, **added, **environment},
            capture_output=True,
            text=True,
            timeout=120,
        )

    def resolve(self, model: str, revision: str = "", weights: bool = True, **environment: str) -> str:
        result = self.run("-c", SCRIPT, model, revision, str(weights), **environment)
        assert result.returncode == 0, result.stderr
        assert len(result.stdout.splitlines()) == 1
        return result.stdout.strip()
