"""Models of the hub: what is said before anything is downloaded, and the commit that is kept."""

import tomllib
from pathlib import Path

from tests.support.hub import COMMITS, Client, serving_hub
from tests.support.tiny_model import make_tiny_model

FEW = ["--workload", "rate=inf,requests=2,input=16,output=4", "--tune-seconds", "0", "--repetitions", "3"]


def test_a_model_of_the_hub_is_described_then_downloaded_and_pinned(tmp_path: Path) -> None:
    with serving_hub() as hub:
        folder = make_tiny_model(tmp_path / "tiny")
        hub.files = {path.name: path.read_bytes() for path in folder.iterdir()}
        client = Client(tmp_path / "home", hub)
        out = tmp_path / "bundle"
        done = client.run("-m", "kvern", "deploy", "kvern-tests/tiny", "--out", str(out), *FEW)
        assert done.returncode == 0, done.stderr
        told = done.stderr
        assert told.index("licence: apache-2.0") < told.index("shard ...") and "family: llama" in told
        bundle = tomllib.loads((out / "deploy.toml").read_text())["bundle"]
        assert bundle["revision"] == COMMITS["main"] and "weights" not in bundle
        assert not (out / "weights").exists()
