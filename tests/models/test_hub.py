"""Finding models: by folder, by embedded name, and on a hub that speaks the Hugging Face API on the loopback."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvern.errors import ModelNotFound
from kvern.formats.gguf.header import read_gguf_header
from kvern.models.hub import EMBEDDED_FOLDER, resolve_model
from kvern.models.repository import Listing, Repository
from tests.support.hub import COMMITS, Client, Hub, serving_hub
from tests.support.plain_gguf import write_plain_gguf


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving_hub() as state:
        yield state


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


@pytest.mark.nightly
def test_of_a_tokenizer_no_weights_are_downloaded(client: Client) -> None:
    folder = Path(client.resolve("kvern-tests/tiny", weights=False))
    assert (folder / "tokenizer.json").is_file() and not (folder / "model.safetensors").exists()
    assert client.resolve("kvern-tests/tiny") == str(folder)
    assert (folder / "model.safetensors").is_file()


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_hub_that_cannot_be_used(client: Client) -> None:
    client.hub.status = 403
    assert "refuses it (status 403): set HF_TOKEN" in client.resolve("kvern-tests/tiny")
    client.hub.status = 429
    assert "refuses more requests for now" in client.resolve("kvern-tests/tiny")
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
        ("missing", "neither a file or folder here nor an embedded model .* such as Qwen/Qwen3-0.6B"),
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


def test_a_misspelt_name_is_answered_with_the_nearest_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in ("home/Downloads/Small-Q8_0.gguf", "here/other-Q4_K_M.gguf", "here/checkpoint/config.json"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    for wrong, meant in (
        ("Small-Q8_0.gguf", f"{tmp_path}/home/Downloads/Small-Q8_0.gguf"),
        ("./other-Q4_K.gguf", "other-Q4_K_M.gguf"),
        ("other-Q4_K_M", "other-Q4_K_M.gguf"),
        (f"{tmp_path}/here/chekpoint", f"{tmp_path}/here/checkpoint"),
        ("kvern-12n", "kvern-12m"),
    ):
        with pytest.raises(ModelNotFound) as raised:
            resolve_model(wrong)
        assert str(raised.value).endswith(f": did you mean {meant}?")


@pytest.mark.parametrize("name", [None, "kvern-12m", "kvern-1m"])
def test_embedded_models_are_found_by_name(name: str | None) -> None:
    assert resolve_model(name) == EMBEDDED_FOLDER / (name or "kvern-12m")


@pytest.mark.nightly
def test_of_gguf_files_the_one_that_is_named_is_downloaded(client: Client) -> None:
    del client.hub.files["model.safetensors"]
    for name in ("tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf", "mmproj-tiny.gguf", "big-Q2_K-00001-of-00002.gguf"):
        client.hub.files[name] = b"GGUF"
    client.hub.files["big-Q2_K-00002-of-00002.gguf"] = b"more"
    listed = client.resolve("kvern-tests/tiny")
    assert "holds 3 GGUF files: choose one by its ending, as kvern-tests/tiny:" in listed and "tiny-Q8_0" in listed
    file = Path(client.resolve("kvern-tests/tiny:q8_0"))
    assert file.name == "tiny-Q8_0.gguf" and not (file.parent / "tiny-Q4_K_M.gguf").exists()
    assert client.resolve("kvern-tests/tiny:q8_0", HF_HUB_OFFLINE="1") == str(file)
    away = "http://127.0.0.1:9"
    assert client.resolve("kvern-tests/tiny:q8_0", HF_ENDPOINT=away) == str(file)
    assert f"could not be downloaded from {away}" in client.resolve("kvern-tests/tiny:Q4_K_M", HF_ENDPOINT=away)
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


def test_of_gguf_files_the_header_alone_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is longer than what is read at first; nothing behind it is asked for."""
    file = write_plain_gguf(tmp_path / "tiny.gguf")
    asked: list[int] = []

    def beginning(self: Repository, commit: str, name: str, count: int) -> bytes:
        asked.append(count)
        return (tmp_path / name).read_bytes()[:count]

    monkeypatch.setattr(Repository, "_beginning", beginning)
    monkeypatch.setattr("kvern.models.repository.FIRST_BYTES", {".gguf": 40})
    size = file.stat().st_size
    hub = Repository("kvern-tests/tiny", None, None, None, None)
    found = hub.outline(Listing("c" * 40, None, {"tiny.gguf": size}, {}), tmp_path / "outlines")
    expected = read_gguf_header(file)
    header = read_gguf_header(found)
    assert [tensor._replace(file=file) for tensor in header.tensors] == list(expected.tensors)
    assert header.values == expected.values and found.stat().st_size == size
    assert len(asked) > 1 and asked[-1] < size
