"""ollama's `/api/pull` and `/api/delete`, by its own client, against a hub on the loopback."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ollama
import pytest

from tests.support.hub import Hub, serving_hub
from tests.support.served import KEY, PATIENCE, SMALL, Served, children_of, command_of, eventually, serving

ADMIN = f"{KEY}-admin"
MODEL = "kvern-tests/tiny"
PULLING = "kvern.models.pulling"


@pytest.fixture(scope="module")
def hub(tiny_model: Path) -> Iterator[Hub]:
    with serving_hub() as state:
        state.files = {path.name: path.read_bytes() for path in tiny_model.iterdir()}
        state.files["model.safetensors"] = bytes(24 << 20)  # the hub's client writes 10 MB at once
        yield state


@pytest.fixture
def quiet(hub: Hub) -> Iterator[Hub]:
    """The hub, as it was after the test."""
    yield hub
    hub.status = hub.token = None
    hub.sizes = {}
    hub.gate.set()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


PATIENT = {"HF_HUB_DOWNLOAD_TIMEOUT": str(int(PATIENCE))}
"""A hub that waits for a test to go on is not asked again meanwhile."""


@contextlib.contextmanager
def served_with(home: Path, hub: Hub, **environment: str) -> Iterator[Served]:
    keys = home / "keys"
    keys.write_text(f"user:{KEY}\nadmin:{ADMIN} admin=1\n")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"HF_HOME": str(home), "HF_ENDPOINT": hub.url, **PATIENT, **environment}.items():
            patch.setenv(name, value)
        with serving(*SMALL, "--api-key-file", str(keys)) as served:
            yield served


@pytest.fixture(scope="module")
def server(home: Path, hub: Hub) -> Iterator[Served]:
    with served_with(home, hub) as served:
        yield served


@contextlib.contextmanager
def client_of(server: Served, key: str = ADMIN) -> Iterator[ollama.Client]:
    host = server.url.removesuffix("/v1")
    with ollama.Client(host=host, headers={"Authorization": f"Bearer {key}"}) as client:
        yield client


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[ollama.Client]:
    with client_of(server) as client:
        yield client


def pulls_of(server: Served) -> list[int]:
    return [child for child in children_of(server.process.pid) if PULLING in command_of(child)]


def blobs(home: Path) -> list[str]:
    return [path.name for path in home.glob("hub/models--kvern-tests--tiny/blobs/*")]


def weights_of(parts: Iterator[ollama.ProgressResponse], hub: Hub) -> Iterator[int]:
    """The bytes of weights that have arrived, at each line about them."""
    size = len(hub.files["model.safetensors"])
    return (part.completed or 0 for part in parts if part.total == size)


def test_a_model_is_pulled_with_its_progress_and_deleted(client: ollama.Client, hub: Hub, home: Path) -> None:
    lines = list(client.pull(f"hf.co/{MODEL}:latest", stream=True))
    assert (lines[0].status, lines[-1].status) == ("pulling manifest", "success")
    last = {line.digest: line for line in lines if line.digest}
    assert sorted(line.total for line in last.values() if line.total) == sorted(map(len, hub.files.values()))
    assert all(line.completed == line.total and line.digest.startswith("sha1:") for line in last.values())
    assert all(line.status == f"pulling {line.digest.partition(':')[2][:12]}" for line in last.values())
    sent = hub.sent
    assert client.pull(MODEL).status == "success" and hub.sent == sent, "nothing was missing"
    assert client.delete(MODEL).status == "success" and not blobs(home)
    with pytest.raises(ollama.ResponseError, match="is not among those that were downloaded") as refused:
        client.delete(MODEL)
    assert refused.value.status_code == 404


def test_a_client_that_leaves_ends_its_pull_and_no_other(
    client: ollama.Client, server: Served, quiet: Hub, home: Path
) -> None:
    """Two pull the same; meanwhile the server answers others."""
    quiet.gate.clear()
    with client_of(server) as leaving:
        first = client.pull(MODEL, stream=True)
        half = next(count for count in weights_of(first, quiet) if count)
        assert half < len(quiet.files["model.safetensors"])
        second = leaving.pull(MODEL, stream=True)
        assert next(count for count in weights_of(second, quiet) if count) == half, "what the other has downloaded"
        eventually(lambda: len(pulls_of(server)) == 2)
        assert server.client(KEY).models.list().data
        with pytest.raises(ollama.ResponseError, match="is being pulled") as refused:
            client.delete(MODEL)
        assert refused.value.status_code == 409
        second.close()  # type: ignore[attr-defined]
        eventually(lambda: len(pulls_of(server)) == 1)
    quiet.gate.set()
    assert list(first)[-1].status == "success" and not pulls_of(server)
    assert not any(name.endswith(".incomplete") for name in blobs(home))
    client.delete(MODEL)


def test_the_only_client_leaves(client: ollama.Client, server: Served, quiet: Hub, home: Path) -> None:
    quiet.gate.clear()
    lines = client.pull(MODEL, stream=True)
    assert next(count for count in weights_of(lines, quiet) if count)
    assert any(name.endswith(".incomplete") for name in blobs(home))
    lines.close()  # type: ignore[attr-defined]
    eventually(lambda: not pulls_of(server))
    assert not any(name.endswith(".incomplete") for name in blobs(home)), "what nobody could use is left"


def test_a_pull_whose_process_dies_says_so(client: ollama.Client, server: Served, quiet: Hub) -> None:
    quiet.gate.clear()
    lines = client.pull(MODEL, stream=True)
    assert next(count for count in weights_of(lines, quiet) if count)
    os.kill(server.child(PULLING), signal.SIGKILL)
    with pytest.raises(ollama.ResponseError, match="the process that downloads it was ended"):
        list(lines)


def test_only_administrators_may_change_the_models(client: ollama.Client, server: Served) -> None:
    with client_of(server, KEY) as user:
        assert user.pull("kvern-1m:latest").status == "success", "what is served needs no download"
        for call in (user.pull, user.delete):
            with pytest.raises(ollama.ResponseError, match=r"API key with admin=1.*kvern (pull|rm)") as refused:
                call(MODEL)
            assert refused.value.status_code == 403
    for name in ("kvern-1m", "kvern-12m"):
        assert [line.status for line in client.pull(name, stream=True)] == ["success"]
        with pytest.raises(ollama.ResponseError, match="is served"):
            client.delete(name)


@pytest.mark.parametrize(
    ("name", "hub_says", "status", "said"),
    [
        ("llama3.2", {}, 400, "model is 'llama3.2': it must be a model of the Hugging Face hub, organisation/name"),
        ("x" * 5000, {}, 400, "it must be a model of the Hugging Face hub"),
        ("../secrets", {}, 404, "is no valid hub id"),
        ("kvern-tests/other", {}, 404, "is not on http://127.0.0.1"),
        (f"{MODEL}:Q4_K_M", {}, 404, "has neither safetensors nor GGUF files"),
        (MODEL, {"token": "secret"}, 404, "is gated: accept its terms"),
        (MODEL, {"status": 401}, 502, "refuses it (status 401): set HF_TOKEN"),
        (MODEL, {"status": 500}, 502, "answers with status 500"),
        (MODEL, {"sizes": {"model.safetensors": 1 << 60}}, 507, "free some (kvern rm MODEL)"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_what_is_wrong_is_said(
    client: ollama.Client, quiet: Hub, name: str, hub_says: dict[str, Any], status: int, said: str, stream: bool
) -> None:
    for field, value in hub_says.items():
        setattr(quiet, field, value)
    with pytest.raises(ollama.ResponseError) as refused:
        list(client.pull(name, stream=stream))
    assert refused.value.status_code == status and said in refused.value.error


@pytest.mark.nightly
def test_a_server_that_may_not_download(home: Path, hub: Hub) -> None:
    refused = pytest.raises(ollama.ResponseError, match=r"downloads are off \(HF_HUB_OFFLINE\)")
    with served_with(home, hub, HF_HUB_OFFLINE="1") as served, client_of(served) as client, refused:
        client.pull(MODEL)
