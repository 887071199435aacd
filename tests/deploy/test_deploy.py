"""kvern deploy end to end on a tiny model: a bundle, what goes wrong, and what happens to runs that are killed."""

import errno
import json
import math
import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from kvern import LLM
from kvern.cli import bundles
from kvern.cli.main import main, read_command
from kvern.deploy import again, journal, plan, tune
from kvern.deploy.again import tuned_here
from kvern.deploy.description import Bundled, Description, as_toml, device_names, read_bundle
from kvern.deploy.journal import Journal, write_whole
from kvern.deploy.stage import Asked, Work
from kvern.deploy.tuner import Knob, Trial, Tuner
from kvern.deploy.workload import Run, Workload
from kvern.engine.engine import Engine
from kvern.errors import ConfigError
from kvern.quantize.mixed import Mixture
from tests.support.families import make_checkpoint
from tests.support.killed_deployments import CARD
from tests.support.plain_gguf import write_plain_gguf
from tests.support.served import QUESTION, Served
from tests.support.tiny_model import make_tiny_model

LOAD = "rate=inf,requests=3,input=32,output=8"
FEW = ["--workload", LOAD, "--tune-seconds", "0", "--repetitions", "3"]
SMALL = ["--memory", "400KB", "--max-loss", "5%"]
"""Memory that has no room for a sequence beside plain weights, and has one beside those of 8 bits."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    (folder.parent / "words.txt").write_text("the quick brown fox jumps over the lazy dog " * 60)
    return folder


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """The speed of this machine is not measured."""
    monkeypatch.setattr(plan, "this_machine", lambda config, dtype: [CARD])


def arguments(model: Path, out: Path) -> list[str]:
    return ["deploy", str(model), "--out", str(out), *FEW, "--calibration", str(model.parent / "words.txt")]


@pytest.fixture(scope="module")
def small(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose weights were quantized, as memory asked for it."""
    out = tmp_path_factory.mktemp("bundles") / "small"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "this_machine", lambda config, dtype: [CARD])
        assert main([*arguments(model, out), *SMALL]) == 0
    return out


def test_a_bundle_has_smaller_weights_a_report_and_options_that_serve_takes(small: Path) -> None:
    assert sorted(path.name for path in small.iterdir()) == [
        "calibration.txt",
        "deploy.toml",
        "journal",
        "report.html",
        "report.json",
        "weights",
    ]
    told = json.loads((small / "report.json").read_text())
    stages = {name: found["result"] for name, found in told["stages"].items()}
    assert list(stages) == ["discover", "plan", "shard", "quantize", "tune", "verify", "bundle"]
    assert told["failed"] == [] and "no room for a sequence of 40 tokens" in stages["plan"]["smaller"]
    assert stages["quantize"]["bytes_after"] < 0.7 * stages["quantize"]["bytes_before"]
    assert 0 < stages["verify"]["loss"] <= stages["verify"]["limits"]["loss"] == pytest.approx(0.0488, abs=1e-4)
    assert stages["verify"]["structured"] == 1 and stages["verify"]["agreement"] > 0.8
    assert stages["verify"]["answers"] is None  # the plain model has no room
    assert "<svg" in (small / "report.html").read_text()
    command, _ = read_command(["serve", str(small), "--max-batch-requests", "3", "--port", "0"], {})
    assert command.engine.model == str(small / "weights") and command.divided and command.name is None
    assert command.engine.max_batch_requests == 3 and command.engine.kv_cache_tokens == stages["plan"]["cache_tokens"]
    assert command.engine.served_model_name == ("tiny",)
    llm = LLM(model=command.engine.model, kv_cache_tokens=command.engine.kv_cache_tokens)
    [output] = llm.generate(["the quick"], {"max_tokens": 4, "ignore_eos": True})
    llm.close()
    assert len(output.outputs[0].token_ids) == 4


def test_the_same_command_has_nothing_left_to_do_and_other_options_are_refused(
    small: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in (small / "deploy.toml", *(small / "weights").iterdir())}
    assert main([*arguments(model, small), *SMALL]) == 0
    said = capsys.readouterr().err
    assert all(f"{name}: done before" in said for name in ("plan", "quantize", "tune", "verify", "bundle"))
    assert {path: path.read_bytes() for path in before} == before
    assert main([*arguments(model, small), "--memory", "500KB", "--max-loss", "5%"]) == 2
    assert "has a bundle with memory 400000, and memory is now 500000: give another" in capsys.readouterr().err
    (small.parent / "other").mkdir()
    (small.parent / "other" / "thesis.txt").write_text("years of work")
    assert main(arguments(model, small.parent / "other")) == 2
    assert "holds other files, and no bundle" in capsys.readouterr().err


def test_weights_stay_as_they_are_unless_something_asks_and_are_copied(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bundle"
    assert main([*arguments(model, out), "--max-loss", "5%"]) == 0
    told = json.loads((out / "report.json").read_text())["stages"]
    assert told["quantize"]["result"]["why"] == "neither memory nor the target asks for fewer bits"
    assert told["verify"]["result"]["answers"] == 1 and told["verify"]["result"]["loss"] is None
    described = tomllib.loads((out / "deploy.toml").read_text())
    assert described["bundle"]["weights"] == "weights" and not described["bundle"].get("is_quantized")
    copied = (out / "weights" / "model.safetensors").read_bytes()
    assert copied == (model / "model.safetensors").read_bytes()
    damaged = bytearray(copied)
    damaged[-1] ^= 1
    (out / "weights" / "model.safetensors").write_bytes(damaged)
    assert main(["deploy", str(out / "deploy.toml"), "--out", str(tmp_path / "again")]) == 2
    assert "model.safetensors is not what was written" in capsys.readouterr().err
    (out / "weights" / "model.safetensors").write_bytes(copied[:-1])
    assert main(["serve", str(out)]) == 2
    assert f"has {len(copied) - 1} bytes, and had {len(copied)}" in capsys.readouterr().err
    assert main([*arguments(model, out), "--max-loss", "5%"]) == 0
    assert (out / "weights" / "model.safetensors").read_bytes() == copied


def test_a_model_that_is_quantized_is_not_quantized_again(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "again"
    calibration = ["--max-loss", "5%", "--target", "itl 10s"]
    assert main(["deploy", str(small / "weights"), "--out", str(out), *FEW, *calibration]) == 0
    told = json.loads((out / "report.json").read_text())["stages"]["quantize"]["result"]
    assert told["why"] == "weights are quantized already (compressed-tensors): never twice"


def test_a_quantizer_that_is_good_on_its_own_text_alone_is_caught(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make = Mixture.make

    def bad(self: Mixture, report: object, budget: object, out: Path, **options: object) -> object:
        made = make(self, report, budget, out, **options)  # type: ignore[arg-type]
        [file] = out.glob("*.safetensors")
        tensors = load_file(file)
        spoiled = {name: 1.5 * tensor if name.endswith("scale") else tensor for name, tensor in tensors.items()}
        save_file(spoiled, file)
        return made

    monkeypatch.setattr(Mixture, "make", bad)
    out = tmp_path / "bundle"
    assert main([*arguments(model, out), *SMALL]) == 1
    said = capsys.readouterr().out
    assert "failed: loss is" in said and "0.04879 is allowed (--max-loss)" in said
    assert not (out / "deploy.toml").exists() and (out / "UNFINISHED").exists()
    assert "loss is" in (out / "report.html").read_text()
    assert main(["serve", str(out)]) == 2
    assert "is an unfinished bundle" in capsys.readouterr().err


def test_a_target_that_is_missed_is_told_with_its_number(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments(model, tmp_path / "bundle"), "--target", "ttft 1s, itl 0.0001ms"]) == 1
    assert "(99 of 100): the target is 0.0001 ms (--target)" in capsys.readouterr().out


BAD = [
    ("", "out is missing"),
    ("--out new --max-loss much", "max_loss is 'much': it must be a share"),
    ("--out new --max-loss 0", "max_loss is 0: it must be above 0"),
    ("--out new --target fast", "target is 'fast': it must be limits of ttft and itl"),
    ("--out new --target itl=0ms", "target itl is '0ms': no token takes no time"),
    ("--out new --memory some", "memory: the size 'some' must be a number of bytes"),
    ("--out new --memory 200KB", "does not fit"),
    (f"--out new --memory 400KB --workload {LOAD}", "allow a loss for fewer bits by --max-loss 1%"),
    ("--out new --workload most", "workload 'most' is unknown"),
    ("--out new --workload mixed256", "workload mixed256 has requests of"),
    ("--out new --repetitions 0", "repetitions is 0: it must be at least 3"),
    ("--out new --tune-seconds -1", "tune_seconds is -1: it must be 0 or more"),
    ("--out new --tune-seconds nan", "tune_seconds is nan: it must be 0 or more"),
    ("--out new --calibration none.txt", "calibration none.txt cannot be read: No such file"),
    ("--out new --calibration .", "calibration . cannot be read: "),
    ("--out new --revision main", "is of this machine, without revisions: leave it out"),
]


@pytest.mark.parametrize(("given", "message"), BAD)
def test_bad_input_is_refused_in_one_line(
    given: str,
    message: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["deploy", str(model), *given.split()]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_gguf_file_is_deployed_as_it_is(is_folder: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "files").mkdir()
    file = write_plain_gguf(tmp_path / "files" / "tiny-Q8_0.gguf")
    (file.parent / "tiny-F16.gguf").write_bytes(b"GGUF")
    out = tmp_path / "bundle"
    model = f"{file.parent}:Q8_0" if is_folder else str(file)
    assert main(["deploy", model, "--out", str(out), *FEW, "--max-loss", "1%", "--target", "itl 10s"]) == 0
    assert [path.name for path in (out / "weights").iterdir()] == [file.name]
    told = json.loads((out / "report.json").read_text())["stages"]
    assert told["discover"]["result"]["formats"] == ["GGUF"]
    assert told["quantize"]["result"]["why"] == "weights are quantized already (GGUF): never twice"
    command, _ = read_command(["serve", str(out)], {})
    assert command.engine.model == str(out / "weights")
    with LLM(model=command.engine.model) as llm:
        assert len(llm.generate(["the"], {"max_tokens": 4, "ignore_eos": True})[0].outputs[0].token_ids) == 4
    file.unlink()
    assert main(["deploy", str(out / "deploy.toml"), "--out", str(tmp_path / "again")]) == 0
    one, other = (tomllib.loads((folder / "deploy.toml").read_text()) for folder in (out, tmp_path / "again"))
    assert one["bundle"]["files"] == other["bundle"]["files"] and one["engine"] == other["engine"]
    capsys.readouterr()
    assert main(["deploy", f"{file.parent}:F16", "--out", str(tmp_path / "new")]) == 2
    assert "tiny-F16.gguf" in capsys.readouterr().err.splitlines()[-1] and not (tmp_path / "new").exists()


def untaught(family: str, model: Path, folder: Path) -> Path:
    """A model of a type without a family, with the tokenizer of the tiny model."""
    make_checkpoint(family, folder, vocab_size=288)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(model / name, folder / name)
    return folder


def test_a_description_is_kept_in_the_bundle_also_of_fewer_bits(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder, out = untaught("jais2", model, tmp_path / "jais2"), tmp_path / "bundle"
    assert main(["describe", str(folder)]) == 0
    assert main(["deploy", str(folder), *arguments(model, out)[2:], "--memory", "380KB", "--max-loss", "5%"]) == 0
    assert "described by: kvern_model.json" in capsys.readouterr().err
    assert json.loads((out / "report.json").read_text())["stages"]["quantize"]["result"]["folder"] == "weights"
    command, _ = read_command(["serve", str(out)], {})
    caplog.clear()
    with LLM(model=command.engine.model, max_model_len=40) as llm:
        assert llm.generate(["the"], {"max_tokens": 4, "ignore_eos": True})[0].outputs[0].token_ids
    assert f"kvern computes jais2 by the description in {out / 'weights'}" in caplog.text


def test_a_model_that_transformers_computes_is_deployed_and_one_that_nothing_computes_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = untaught("gpt2", model, tmp_path / "gpt2"), tmp_path / "bundle"
    assert main(["deploy", str(folder), *arguments(model, out)[2:]]) == 0
    told = capsys.readouterr().err
    assert "described by: none: transformers computes it" in told and "kvern describe may find" in told
    assert read_command(["serve", str(out)], {})[0].engine.model == str(out / "weights")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "unheard", "architectures": ["Unheard"]}))
    assert main(["deploy", str(folder), *arguments(model, tmp_path / "new")[2:]]) == 2
    assert "kvern has no description of this model" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "new").exists()


MOMENTS = "discover,plan,shard,among weights,quantize,among measurements,tune,verify,bundle"


@pytest.mark.parametrize(
    "moments",
    [
        pytest.param("among weights,among measurements", id="twice"),
        pytest.param(MOMENTS, id="at each stage", marks=pytest.mark.nightly),
    ],
)
def test_a_deployment_that_is_killed_makes_the_same_bundle(
    moments: str, small: Path, model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "bundle"
    command = [sys.executable, "-m", "tests.support.killed_deployments", moments, *arguments(model, out), *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], env=os.environ)
    ends = dict(line.removeprefix("ended ").split(": ") for line in done.stdout.splitlines() if "ended " in line)
    assert ends.pop("whole") == "0", done.stderr
    assert ends == dict.fromkeys(moments.split(","), "9"), done.stderr
    assert not (out / "UNFINISHED").exists()
    assert not [path for path in out.iterdir() if path.name.startswith(".")]
    for name in ("weights/model.safetensors", "weights/config.json"):
        assert (out / name).read_bytes() == (small / name).read_bytes()
    one, other = (tomllib.loads((folder / "deploy.toml").read_text()) for folder in (out, small))
    assert one == other


def test_a_bundle_is_made_again_with_the_same_weights_and_options(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "again"
    assert main(["deploy", str(small / "deploy.toml"), "--out", str(out)]) == 0
    for name in ("weights/model.safetensors", "weights/config.json"):
        assert (out / name).read_bytes() == (small / name).read_bytes()
    one, other = (tomllib.loads((folder / "deploy.toml").read_text()) for folder in (out, small))
    assert one == other
    assert main(["deploy", str(small / "deploy.toml"), "--out", str(out), "--max-loss", "3%"]) == 2
    assert "max_loss is 3%: the bundle that is made again says it; drop --max-loss" in capsys.readouterr().err
    assert main(["deploy", str(small / "deploy.toml"), "--out", str(small)]) == 2
    assert "is the bundle itself: give another folder" in capsys.readouterr().err
    (tmp_path / "alias").symlink_to(small)
    assert main(["deploy", str(small / "deploy.toml"), "--out", str(tmp_path / "alias"), "--overwrite"]) == 2
    assert "is the bundle itself: give another folder" in capsys.readouterr().err


def changed(bundle: Path, out: Path, *pairs: tuple[str, str]) -> Path:
    """A copy of a bundle whose description is another."""
    shutil.copytree(bundle, out)
    text = (out / "deploy.toml").read_text()
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    (out / "deploy.toml").write_text(text)
    return out


def test_weights_that_are_not_those_of_the_bundle_are_told(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = tomllib.loads((small / "deploy.toml").read_text())["bundle"]["digest"]
    other = changed(small, tmp_path / "other", (digest, "0" * 32))
    assert main(["deploy", str(other / "deploy.toml"), "--out", str(tmp_path / "again")]) == 1
    assert f"weights have the digest {digest}, and those of the bundle {'0' * 32}" in capsys.readouterr().out


def test_another_machine_tunes_again_once_and_says_so(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = changed(
        small,
        tmp_path / "other",
        (device_names()[0], "NVIDIA H300"),
        ("requests = 8", "requests = 2\nmax_model_len = 64"),
    )
    monkeypatch.setenv("KVERN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(again, "tuned_here", lambda bundled, out: replace(tuned_here(bundled, out), tune_seconds=0.0))

    def tune(folder: Path, out: Path) -> int:
        monkeypatch.setattr(sys, "argv", ["again", str(folder), str(out)])
        return again.main()

    monkeypatch.setattr(bundles, "tune", tune)
    command, notes = read_command(["serve", str(other)], {})
    assert "was tuned elsewhere (devices NVIDIA H300, here" in capsys.readouterr().err
    assert command.engine.model == str(other / "weights") and command.engine.max_batch_requests == 8
    assert command.engine.served_model_name == ("tiny",) and command.engine.max_model_len == 64
    assert notes[0].startswith("options are those that were tuned for this machine, in")
    monkeypatch.delattr(bundles, "tune")
    assert read_command(["serve", str(other)], {})[0].engine == command.engine  # the second start measures nothing
    moved = other.rename(tmp_path / "moved")
    assert read_command(["serve", str(moved)], {})[0].engine.model == str(moved / "weights")
    other = moved.rename(other)
    command, notes = read_command(["chat", str(other)], {})
    assert command.engine.max_batch_requests == 2 and "may not be the fastest here" in notes[0]
    assert main(["deploy", str(other / "deploy.toml"), "--out", str(tmp_path / "again"), "--tune-seconds", "0"]) == 0
    assert "it is tuned again" in capsys.readouterr().err
    assert tomllib.loads((tmp_path / "again" / "deploy.toml").read_text())["engine"]["max_batch_requests"] == 8


def test_no_code_or_other_model_comes_from_a_bundle(small: Path, tmp_path: Path) -> None:
    other = changed(small, tmp_path / "other")
    (other / "kernels").mkdir()
    command, notes = read_command(["serve", str(other)], {})
    assert command.engine.cache_dir is None
    assert notes == [f"{other / 'kernels'} is not used: code is loaded from kvern's own cache folder alone"]
    for line, message in (("cache_dir = 'kernels'", "no bundle may give it"), ("sed = 1", "there is no such option")):
        refused = changed(small, tmp_path / line[:3], ("[engine]\n", f"[engine]\n{line}\n"))
        with pytest.raises(ConfigError, match=f"in .engine.: {message}"):
            read_bundle(refused)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('weights = "weights"', 'weights = "../secret"', "has '../secret' as weights, which is outside of the bundle"),
        ('weights = "weights"', 'weights = "/secret"', "has '/secret' as weights, which is outside of the bundle"),
        ('calibration = "calibration.txt"', 'calibration = "/etc/passwd"', "as calibration, which is outside"),
        ("[engine]\n", "[engine]\ndraft_model = '/secret'\n", "has 'draft_model' in .engine.: no bundle may give it"),
        ('weights = "weights"', "", "in place of weights, and no folder is taken from a bundle"),
    ],
)
def test_nothing_outside_of_a_bundle_is_served(old: str, new: str, message: str, small: Path, tmp_path: Path) -> None:
    other = changed(small, tmp_path / "other", (old, new))
    with pytest.raises(ConfigError, match=message):
        read_command(["serve", str(other)], {})


def test_a_model_of_the_hub_is_served_at_its_commit_alone(tmp_path: Path) -> None:
    described = Description(format=1, model="some/model", kvern="1", torch="2", devices=[])
    with pytest.raises(ConfigError, match="nor a model of the hub without its revision"):
        assert Bundled(tmp_path, described, {}).options


def test_a_bundle_is_made_again_of_the_model_alone_that_it_was_made_of(
    small: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("none", "another"):
        other = changed(small, tmp_path / f"of-{name}", (f'model = "{model}"', f'model = "{tmp_path / name}"'))
        config = make_tiny_model(tmp_path / "another") / "config.json"
        config.write_text(config.read_text() + " ")
        assert main(["deploy", str(other / "deploy.toml"), "--out", str(tmp_path / "again")]) == 2
        assert "and it is not that of which the bundle was made" in capsys.readouterr().err


def test_a_folder_with_the_name_of_the_hubs_model_is_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    described = Description(format=1, model="some/model", kvern="1", torch="2", devices=[], revision="a" * 40)
    bundle = Bundled(tmp_path, described, {})
    assert bundle.options == {"model": "some/model", "revision": "a" * 40}
    (tmp_path / "some" / "model").mkdir(parents=True)
    with pytest.raises(ConfigError, match="has the name of the bundle's model, and is another one"):
        assert bundle.options


def test_names_of_all_characters_are_read_back_from_a_description() -> None:
    name = 'wide \U0001d54f "quoted" \x7f\n'
    described = Description(format=1, model=name, kvern="1", torch="2", devices=[])
    read = tomllib.loads(as_toml(described, {"hf_overrides": {"a b": [1, name]}}, [name]).decode())
    assert read["bundle"]["model"] == name and read["engine"]["hf_overrides"] == {"a b": [1, name]}
    with pytest.raises(ConfigError, match="rename the model's folder"):
        as_toml(described, {"tokenizer": "\udcff"}, [])


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_bundle_stays_whole_until_the_one_that_replaces_it_is(
    small: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = changed(small, tmp_path / "out")
    before = contents(out)
    command = [*arguments(model, out), "--memory", "400KB"]
    other = [*command, "--max-loss", "6%", "--target"]
    assert main([*other, "itl 0.0001ms", "--overwrite"]) == 1  # weights are quantized again
    told = capsys.readouterr()
    beside = tmp_path / ".out.next"
    assert f"report: {beside / 'report.html'}" in told.out and f"{out} is the bundle that it was" in told.err
    assert contents(out) == before and read_command(["serve", str(out)], {})
    assert main([*other, "itl 0.0001ms"]) == 1  # goes on, where the option said so once
    assert "quantize: done before" in capsys.readouterr().err
    assert main([*other, "itl 20s"]) == 2
    assert "has a bundle with max_loss" in capsys.readouterr().err

    def dying(source: object, target: object) -> None:
        moved(source, target)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    def refused(*folders: Path) -> None:
        raise OSError(errno.EINVAL, "folders are not exchanged here")

    moved = os.rename
    monkeypatch.setattr(journal, "exchange", refused)
    monkeypatch.setattr(os, "rename", dying)
    main([*other, "itl 20s", "--overwrite"])
    monkeypatch.undo()
    assert not out.exists()
    monkeypatch.setattr(plan, "this_machine", lambda config, dtype: [CARD])
    assert main([*other, "itl 20s"]) == 0
    assert "tune: done before" in capsys.readouterr().err
    assert tomllib.loads((out / "deploy.toml").read_text())["bundle"]["target"] == "itl 20000ms"
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and not (out / ".old").exists()


def test_a_bundle_stays_whole_if_another_run_is_refused(
    small: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = changed(small, tmp_path / "out")
    before = contents(out)
    command = [*arguments(model, out), *SMALL, "--overwrite", "--tune-seconds", "1"]

    def full(self: tune.Tune, work: object) -> tune.Tuned:
        assert (tmp_path / ".out.next" / "UNFINISHED").exists()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "file")

    monkeypatch.setattr(tune.Tune, "run", full)
    for given, message in (
        (["--workload", "nonsense"], "workload 'nonsense' is unknown"),
        (["--target", "itl 20s"], "tune stopped: file: No space left on device"),
    ):
        assert main([*command, *given]) == 2
        assert message in capsys.readouterr().err.splitlines()[-1]
        assert contents(out) == before
    monkeypatch.undo()

    def refused(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refused)
    with pytest.raises(ConfigError, match="a cannot be written: No space left on device"):
        write_whole(tmp_path / "a", b"1")
    (out / "UNFINISHED").touch()
    assert main(["deploy", str(out / "deploy.toml"), "--out", str(tmp_path / "again")]) == 2
    assert "is an unfinished bundle" in capsys.readouterr().err


def test_what_ended_early_stands_unless_there_is_more_time(tmp_path: Path) -> None:
    ended = tune.Tuned({}, 1.0, ended_early=True, allowed=10.0)
    for seconds, stands in ((10.0, True), (5.0, True), (11.0, False)):
        asked = Asked("model", tmp_path, tune_seconds=seconds)
        assert tune.Tune().stands(Work(asked, Journal(tmp_path), print), ended) is stands


def test_an_engine_that_did_not_start_is_tried_again_by_the_next_process(tmp_path: Path) -> None:
    costs = [1.0, math.inf]
    first = tune.Noted(lambda _: costs.pop(0), tmp_path / "runs.json", "key")
    assert [first({"a": 1}), first({"a": 2})] == [1.0, math.inf]
    second = tune.Noted(lambda _: 3.0, tmp_path / "runs.json", "key")
    assert [second({"a": 1}), second({"a": 2})] == [1.0, 3.0]


class Costs:
    """Runs whose time is what the options of the engine cost, without a clock."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, engine: Engine, workload: Workload) -> Run:
        self.runs += 1
        requests, tokens = engine.max_batch_requests, engine.config.max_batch_tokens or 0
        seconds = 10 + abs(math.log2(requests / 16)) + abs(math.log2(tokens / 1024)) + 0.001 * (self.runs % 3)
        return Run(seconds, 0.1, 0.01, 100.0)


def test_what_is_fastest_is_chosen_and_a_killed_run_measures_nothing_twice(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = Costs()
    monkeypatch.setattr(tune, "run_workload", costs)
    out = tmp_path / "bundle"
    slow = [*arguments(model, out), "--tune-seconds", "600"]
    assert main(slow) == 0
    engine = tomllib.loads((out / "deploy.toml").read_text())["engine"]
    assert engine["max_batch_requests"] == 16 and engine["max_batch_tokens"] == 1024
    told = json.loads((out / "report.json").read_text())["stages"]["tune"]["result"]
    assert told["tried"][0]["options"]["max_batch_requests"] == 8 and told["knobs"][0] == "max_batch_tokens"
    assert (
        any(trial["kept"] for trial in told["tried"]) and "max_batch_requests 16" in (out / "report.html").read_text()
    )
    for name in ("tune", "verify", "bundle"):  # as if the process had been killed at the end of tuning
        (out / "journal" / f"{name}.json").unlink()
    before = costs.runs
    assert main(slow) == 0
    assert costs.runs - before < 10  # those of verification


def test_a_tuner_that_chooses_what_is_slow_is_caught(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tune, "run_workload", Costs())
    start = {"max_batch_requests": 16, "max_batch_tokens": 1024}
    monkeypatch.setattr(tune, "knobs_of", lambda *_: (start, [Knob("max_batch_requests", (16, 4))]))

    def last(self: Tuner, best: Trial, name: str, value: object) -> Trial:
        return self._tried({**best.configuration, name: value}, None)

    monkeypatch.setattr(Tuner, "_better", last)
    out = tmp_path / "bundle"
    assert main([*arguments(model, out), "--tune-seconds", "600"]) == 1
    assert "the tuned options take 20% longer than those of the plan: tune again" in capsys.readouterr().out
    assert not (out / "deploy.toml").exists()


@pytest.mark.nightly
def test_a_bundle_of_the_embedded_model_is_quantized_served_and_answers(tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    assert main(["deploy", "kvern-1m", "--out", str(out), "--memory", "3MB", "--max-loss", "1%", *FEW[2:]]) == 0
    found = json.loads((out / "report.json").read_text())["stages"]["verify"]["result"]
    assert 0 < found["loss"] <= found["limits"]["loss"] and found["structured"] == 1
    server = Served(str(out))
    try:
        client = server.client()
        assert [model.id for model in client.models.list()] == ["kvern-1m"]
        answer = client.chat.completions.create(model="kvern-1m", messages=QUESTION, temperature=0)
        assert answer.choices[0].message.content == "42"
    finally:
        server.stop()
