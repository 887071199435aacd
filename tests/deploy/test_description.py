"""What a bundle of somebody else may say, without a model."""

from pathlib import Path
from typing import Any

import pytest

from kvern.deploy.again import CHOSEN, tuned_here
from kvern.deploy.description import ALLOWED, Description, as_toml, read_bundle
from kvern.deploy.plan import Planned
from kvern.deploy.tune import knobs_of
from kvern.deploy.workload import Request, Workload
from kvern.errors import ConfigError


def bundle(folder: Path, engine: dict[str, Any], **fields: Any) -> Path:
    """A bundle with one file of weights."""
    (folder / "weights").mkdir(parents=True)
    (folder / "weights" / "config.json").write_text("{}")
    described = Description(format=1, model="m", kvern="1", torch="2", devices=[], **{"weights": "weights", **fields})
    (folder / "deploy.toml").write_bytes(as_toml(described, engine, []))
    return folder


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("kv_events_config", {"enable_kv_cache_events": True, "endpoint": "tcp://203.0.113.9:5557"}, "no bundle may"),
        ("kv_tier_listen", "0.0.0.0:7000", "no bundle may give it"),
        ("kv_tier", ["host:1GB", "valkey://:secret@203.0.113.9:6379"], r"it has 'valkey://\S*@203.0.113.9:6379', and"),
        ("kv_tier", ["disk:/home/user/.cache:1GB"], "it has 'disk:/home/user/.cache:1GB', and a bundle may name host"),
        ("kv_tier", ["hostile:1GB"], "may name host memory alone"),
        ("kv_tier", "host:1GB disk:/home:1GB", "it is .*, and must be a list"),
        ("proposer", "evil_entry_point", "it is 'evil_entry_point', and a bundle may name ngram and suffix alone"),
        ("proposer", "remote", "may name ngram and suffix alone"),
        ("hf_overrides", {"auto_map": {}}, "no bundle may give it"),
        ("executor", "ray", "no bundle may give it"),
    ],
)
def test_a_bundle_names_no_server_folder_or_code(name: str, value: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"in .engine.: .*{message}.*; remove that line"):
        read_bundle(bundle(tmp_path / "b", {name: value}))


def test_all_that_tuning_chooses_is_read_back(tmp_path: Path) -> None:
    load = Workload("load", [Request(0.0, [1], 1)], shares=True)
    _, knobs = knobs_of(Planned("cpu"), load, lossy=True, limited=True)
    assert {knob.name for knob in knobs} | CHOSEN <= ALLOWED
    values = [(knob.name, value) for knob in knobs for value in knob.values if value not in (None, [])]
    for number, (name, value) in enumerate([*values, ("max_model_len", 64), ("served_model_name", ["m"])]):
        assert read_bundle(bundle(tmp_path / str(number), {name: value})).engine == {name: value}


def test_no_link_leads_out_of_a_bundle(tmp_path: Path) -> None:
    outside = bundle(tmp_path / "outside", {})
    for name in ("calibration", "workload"):
        linked = bundle(tmp_path / name, {}, **{name: f"{name}.txt"})
        (linked / f"{name}.txt").symlink_to("/etc/passwd")
        with pytest.raises(ConfigError, match=f"{name}.txt is a link that leads out of the bundle"):
            read_bundle(linked)
    for number, name in enumerate(("", ".")):
        linked = bundle(tmp_path / str(number), {}, weights=name)
        (linked / "config.json").symlink_to(outside / "weights" / "config.json")
        with pytest.raises(ConfigError, match=r"config.json is a link that leads out of the bundle"):
            read_bundle(linked)
    folder = bundle(tmp_path / "folder", {}, weights="others")
    (folder / "others").symlink_to(outside / "weights")
    file = bundle(tmp_path / "file", {})
    (file / "weights" / "model.safetensors").symlink_to(outside / "weights" / "config.json")
    description = bundle(tmp_path / "description", {})
    (description / "deploy.toml").unlink()
    (description / "deploy.toml").symlink_to(outside / "deploy.toml")
    for linked in (folder, file, description):
        with pytest.raises(ConfigError, match="is a link that leads out of"):
            read_bundle(linked)
    inside = bundle(tmp_path / "inside", {})
    (inside / "weights" / "other.json").symlink_to("config.json")
    (tmp_path / "alias").symlink_to(inside)
    assert read_bundle(tmp_path / "alias").bundle.weights == "weights"


def test_names_that_no_file_can_have_are_told_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="as calibration: "):
        read_bundle(bundle(tmp_path / "b", {}, calibration="a\0"))
    asked = tuned_here(read_bundle(bundle(tmp_path / "c", {}, workload=300 * "a")), tmp_path / "out")
    assert asked.workload == 300 * "a"


def test_digests_are_of_files_of_the_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be a size, a digest and a name"):
        read_bundle(bundle(tmp_path / "b", {}, files=["1 ab ../../secret"]))


def test_a_workload_that_is_not_in_the_bundle_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text("secret")
    with pytest.raises(ConfigError, match=r"has prompts\.jsonl as workload, which is not in the bundle"):
        tuned_here(read_bundle(bundle(tmp_path / "b", {}, workload="prompts.jsonl")), tmp_path / "out")
