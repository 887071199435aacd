"""`kvern pull`, `list`, `rm`, `models` and `plan` of hub names, against a hub on the loopback."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvern.io.files import as_size
from tests.support.hub import Client, Hub, serving_hub

MODEL = "kvern-tests/tiny"


@pytest.fixture
def hub(tiny_model: Path) -> Iterator[Hub]:
    with serving_hub() as state:
        state.files = {path.name: path.read_bytes() for path in tiny_model.iterdir()}
        yield state


@pytest.fixture
def client(tmp_path: Path, hub: Hub) -> Client:
    return Client(tmp_path / "home", hub)


def kvern(client: Client, *arguments: str, code: int = 0, **environment: str) -> str:
    """What a command says."""
    result = client.run("-m", "kvern.cli.main", *arguments, COLUMNS="160", **environment)
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    return result.stdout + result.stderr


def test_a_model_is_pulled_listed_and_removed(client: Client) -> None:
    pulled = kvern(client, "pull", MODEL)
    size = sum(map(len, client.hub.files.values()))
    assert f"{as_size(size)} in {len(client.hub.files)} files, licence: apache-2.0" in pulled
    assert "kvern computes it itself" in pulled and f"kvern chat {MODEL}" in pulled
    assert pulled.index("licence") < pulled.index("is here after")
    assert "nothing is missing" in kvern(client, "pull", MODEL)
    assert MODEL in kvern(client, "list")
    assert f"did you mean {MODEL}?" in kvern(client, "rm", "kvern-tests/tinny", code=2)
    assert re.search(r"is deleted: [\d.]+ kB are free again", kvern(client, "rm", MODEL))
    assert MODEL not in kvern(client, "list")
    assert "is a part of kvern" in kvern(client, "rm", "kvern-12m", code=2)


@pytest.mark.nightly
@pytest.mark.parametrize("knows_ranges", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_report_reads_headers_alone(client: Client, knows_ranges: bool, tmp_path: Path) -> None:
    """Of weights that are longer than their headers, whether or not the hub sends parts of files."""
    client.hub.knows_ranges = knows_ranges
    whole = client.hub.files["model.safetensors"]
    told = json.loads(kvern(client, "models", MODEL, "--json", XDG_CACHE_HOME=str(tmp_path / "cache")))
    assert told["weight_bytes"] < len(whole)
    [outline] = (tmp_path / "cache").rglob("outlines/*/model.safetensors")
    assert outline.stat().st_size == len(whole)
    planned = kvern(
        client,
        "plan",
        MODEL,
        "--hardware",
        "1x h200",
        "--input",
        "8",
        "--output",
        "8",
        XDG_CACHE_HOME=str(tmp_path / "cache"),
    )
    assert "tokens/s" in planned
    assert not list((tmp_path / "home").rglob("snapshots/*/*.safetensors")), "weights were downloaded"


@pytest.mark.nightly
def test_what_is_wrong_is_said(client: Client) -> None:
    assert "downloads are off (HF_HUB_OFFLINE)" in kvern(client, "models", MODEL, code=2, HF_HUB_OFFLINE="1")
    assert "downloads are off (HF_HUB_OFFLINE)" in kvern(client, "pull", MODEL, code=2, HF_HUB_OFFLINE="1")
    assert "is not on http://127.0.0.1" in kvern(client, "pull", "kvern-tests/other", code=2)
    client.hub.status = 401
    assert "set HF_TOKEN" in kvern(client, "pull", MODEL, code=2)
    client.hub.status = 500
    assert "answers with status 500" in kvern(client, "models", MODEL, code=2)


def test_a_word_that_is_no_command(client: Client) -> None:
    assert "kvern serv is no command: did you mean kvern serve?" in kvern(client, "serv", code=2)
    assert "did you mean kvern bench offline?" in kvern(client, "bench", "ofline", code=2)
