"""The command kvern quantize: what it says, and bad input."""

import json
from pathlib import Path

import pytest

from kvern.cli.main import main
from tests.support.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "binary.txt").write_bytes(b"\x00\x01\xff")
    (tmp_path / "short.txt").write_text("a few words")
    (tmp_path / "bad.jsonl").write_text('"fine"\n{"message": 3}\n')
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("years of work")
    return tmp_path


BAD = [
    ("--method int3", "method is 'int3': it must be one of fp8, int8, int4, awq, gptq"),
    ("--method int4 --group-size 48", "group_size is 48: it must be one of 32, 64, 128"),
    ("--method int4 --group-size 128", "model.layers.0.mlp.down_proj has 96 inputs, which groups of 128 do not"),
    ("--method fp8 --group-size 64", "group_size and zero_points are for int4, awq, gptq; method is fp8"),
    ("--method fp8 --blocks", "use --method fp8 or int8, without --blocks"),
    ("--method fp8 --calibration empty.txt", "calibration file empty.txt is empty"),
    ("--method fp8 --calibration binary.txt", "calibration file binary.txt is not UTF-8 text: byte 2"),
    ("--method fp8 --calibration missing.txt", "calibration file missing.txt cannot be read: No such file"),
    ("--method fp8 --calibration short.txt", "calibration file short.txt has"),
    ("--method fp8 --calibration bad.jsonl", "bad.jsonl, line 2 is None: it must be a string, or hold messages"),
    ("--method fp8 --calibration-rows 0", "calibration_rows is 0: it must be at least 1"),
    ("--method fp8 --out other", "--out"),
    ("--method fp8 --out other --overwrite", "is not a model's folder: --overwrite replaces no other"),
    ("--method fp8 --out other/thesis.txt/out", "cannot be written"),
    ("--method fp8 --ignore proj", "the plan leaves every matrix plain"),
    ("--method fp8 --ignore (", "ignore is '(': that is no regular expression"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_input_is_refused_in_one_line(
    arguments: str, message: str, model: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(here.rglob("*"))
    assert main(["quantize", str(model), *arguments.split()]) == 2
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1
    assert sorted(here.rglob("*")) == before


def test_the_command_writes_a_folder_says_what_and_refuses_to_do_it_again(
    model: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "words.txt").write_text("the quick brown fox " * 40)
    few = ["--calibration", "words.txt", "--calibration-tokens", "32", "--calibration-rows", "900"]
    assert main(["quantize", str(model), "--method", "fp8", "--out", "few", *few]) == 0
    assert "rows of 32 tokens, not 900: give more text with --calibration" in capsys.readouterr().err
    command = ["quantize", str(model), "--method", "gptq", "--group-size", "32", "--calibration-rows", "4"]
    assert main([*command, "--ignore", "layers.0.", "--out", "out"]) == 0
    told = capsys.readouterr().out
    assert "4 x " in told and "int4-g32" in told and "bits per weight" in told and "kvern chat out" in told
    plain = json.loads((here / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert "model.layers.0.mlp.up_proj" in plain and "model.layers.1.mlp.up_proj" not in plain
    assert main([*command, "--out", "out"]) == 2
    assert "exists: give another folder, or --overwrite" in capsys.readouterr().err
    assert main(["quantize", str(here / "out"), "--method", "fp8", "--out", "again"]) == 2
    assert "is quantized already ('compressed-tensors')" in capsys.readouterr().err
    (here / "model.gguf").write_bytes(b"GGUF")
    assert main(["quantize", "model.gguf", "--out", "again"]) == 2
    assert "model.gguf is a file: quantize the model's folder of safetensors" in capsys.readouterr().err
    assert main(["quantize", str(model), "--method", "fp8", "--out", str(model), "--overwrite"]) == 2
    assert "holds the model itself" in capsys.readouterr().err
