"""Finding models: by folder, by embedded name, and on a hub that speaks the Hugging Face API on the loopback."""

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

import pytest

from kvern.errors import ModelNotFound
from kvern.models.hub import EMBEDDED_FOLDER, resolve_model

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
                self.wfile.write(body)

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
                if parts[4] == "tree":
                    tree = [
                        {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                        for path, data in FILES.items()
                    ]
                    return 200, {"Content-Type": "application/json"}, json.dumps(tree).encode()
                info = {"id": "kvern-tests/tiny", "sha": commit, "siblings": [{"rfilename": path} for path in FILES]}
                return 200, {"Content-Type": "application/json"}, json.dumps(info).encode()
            commit, data = parts[3], FILES["/".join(parts[4:])]
            return 200, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": commit}, data

        def log_message(self, *args: object) -> None:
            pass

    return Handler


@pytest.fixture
def hub() -> Iterator[Hub]:
    state = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(state))
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield state
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

    def resolve(self, model: str, revision: str = "", weights: bool = True, **environment: str) -> str:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        added = {
            "HF_HOME": str(self.home),
            "HF_ENDPOINT": self.hub.url,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        result = subprocess.run(
            [sys.executable, "-c", SCRIPT, model, revision, str(weights)],
            env={**kept, **added, **environment},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        assert len(result.stdout.splitlines()) == 1
        return result.stdout.strip()


@pytest.fixture
def client(tmp_path: Path, hub: Hub) -> Client:
    return Client(tmp_path / "home", hub)


def test_hub_id_is_downloaded_once_and_found_offline(client: Client) -> None:
    folder = Path(client.resolve("kvern-tests/tiny"))
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert names == {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    client.hub.requests.clear()
    assert client.resolve("kvern-tests/tiny", HF_HUB_OFFLINE="1") == str(folder)
    assert client.hub.requests == []


def test_of_a_tokenizer_no_weights_are_downloaded(client: Client) -> None:
    folder = Path(client.resolve("kvern-tests/tiny", weights=False))
    assert (folder / "tokenizer.json").is_file() and not (folder / "model.safetensors").exists()
    assert client.resolve("kvern-tests/tiny") == str(folder)
    assert (folder / "model.safetensors").is_file()


def test_revision_is_honoured(client: Client) -> None:
    assert Path(client.resolve("kvern-tests/tiny", "v2")).name == COMMITS["v2"]
    assert "has no revision 'v9': name a branch" in client.resolve("kvern-tests/tiny", "v9")


def test_token_is_needed_and_honoured(client: Client) -> None:
    client.hub.token = "secret"
    refused = client.resolve("kvern-tests/tiny")
    assert refused.startswith("ModelNotFound: model 'kvern-tests/tiny' is gated")
    assert "HF_TOKEN" in refused
    assert Path(client.resolve("kvern-tests/tiny", HF_TOKEN="secret")).is_dir()


def test_unknown_repository(client: Client) -> None:
    assert "'kvern-tests/other' is not on http://127.0.0.1" in client.resolve("kvern-tests/other")


def test_offline_without_cache(client: Client) -> None:
    answer = client.resolve("kvern-tests/tiny", HF_HUB_OFFLINE="1")
    assert "is not, or only partly, in the cache" in answer
    assert "HF_HUB_OFFLINE" in answer
    assert client.hub.requests == []


def test_hub_that_cannot_be_used(client: Client) -> None:
    client.hub.status = 403
    assert "could not be downloaded from http://127.0.0.1" in client.resolve("kvern-tests/tiny")
    client.hub.url = "http://127.0.0.1:9"  # the discard port: nothing listens
    assert "check the network and HF_ENDPOINT" in client.resolve("kvern-tests/tiny")


def test_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(tmp_path) == tmp_path
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("empty", r"has no config\.json \(the folder holds nothing\)"),
        ("weights", r"the folder holds model\.safetensors"),
        ("weights/model.safetensors", "is a file: give the folder"),
        ("./missing", "no such folder"),
        ("/missing/model", "no such folder"),
        ("missing/a/b", "no such folder"),
        ("missing", "neither a folder nor an embedded model"),
        ("missing.gguf", "there is no such file"),
        ("", "no such folder"),
    ],
)
def test_what_is_no_model_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, reason: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "model.safetensors").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound, match=reason):
        resolve_model(name)


@pytest.mark.parametrize("name", [None, "kvern-12m", "kvern-1m"])
def test_embedded_models_are_found_by_name(name: str | None) -> None:
    assert resolve_model(name) == EMBEDDED_FOLDER / (name or "kvern-12m")


def test_of_gguf_files_the_one_that_is_named_is_downloaded(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(FILES, "model.safetensors")
    for name in ("tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf", "mmproj-tiny.gguf", "big-Q2_K-00001-of-00002.gguf"):
        monkeypatch.setitem(FILES, name, b"GGUF")
    monkeypatch.setitem(FILES, "big-Q2_K-00002-of-00002.gguf", b"more")
    listed = client.resolve("kvern-tests/tiny")
    assert "holds 3 GGUF files: choose one by its ending, as kvern-tests/tiny:" in listed and "tiny-Q8_0" in listed
    file = Path(client.resolve("kvern-tests/tiny:q8_0"))
    assert file.name == "tiny-Q8_0.gguf" and not (file.parent / "tiny-Q4_K_M.gguf").exists()
    assert client.resolve("kvern-tests/tiny:q8_0", HF_HUB_OFFLINE="1") == str(file)
    split = Path(client.resolve("kvern-tests/tiny:Q2_K"))
    assert split.name == "big-Q2_K-00001-of-00002.gguf" and (split.parent / "big-Q2_K-00002-of-00002.gguf").is_file()
    assert "no, or more than one, GGUF file that ends in 'Q6_K'" in client.resolve("kvern-tests/tiny:Q6_K")


def test_a_gguf_file_is_found_by_path_and_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "one-Q8_0.gguf").touch()
    assert resolve_model(tmp_path) == resolve_model(tmp_path / "one-Q8_0.gguf") == tmp_path / "one-Q8_0.gguf"
    (tmp_path / "one-Q4_0.gguf").touch()
    with pytest.raises(
        ModelNotFound, match=r"holds 2 GGUF files: choose one by its ending, as .*:Q4_0 \(one-Q4_0, one-Q"
    ):
        resolve_model(tmp_path)
    assert resolve_model(f"{tmp_path}:Q8_0") == tmp_path / "one-Q8_0.gguf"
