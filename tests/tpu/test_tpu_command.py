"""The command kvern tpu: what it prints, and bad input."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvern.cli.main import main
from kvern.tpu import ahead
from tests.support.tiny_model import make_tiny_model
from tests.support.tpu import needs_jax, write_config


@pytest.mark.parametrize(
    ("arguments", "missing", "what"),
    [
        ([], "jax", "kvern tpu needs the package jax, which is not installed: pip install 'kvern[tpu]'"),
        (["--compile", "v5e"], "libtpu", "needs the package libtpu"),
        (["--check", "--dtype", "bfloat16"], None, "dtype is bfloat16: --check compares"),
        (["--rows", "4"], None, "rows is 4: it is a size of steps that --compile compiles; drop --rows"),
        (["--compile", "all", "--check"], None, "check is True: with --compile nothing runs; drop --check"),
        (["--max-tokens", "0"], None, "max_tokens is 0"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str],
    missing: str | None,
    what: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if missing == "libtpu":
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "libtpu" else name)
    elif missing is not None:
        monkeypatch.setitem(sys.modules, missing, None)
    assert main(["tpu", "kvern-1m", *arguments]) == 2
    said = capsys.readouterr().err
    assert what in said
    assert said.count("\n") == 1


@needs_jax
def test_a_model_answers_as_pytorch_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tiny_model(tmp_path)
    given = ["tpu", str(tmp_path), "--prompt", "the quick", "--max-tokens", "3"]
    assert main([*given, "--check"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("the quick")
    assert "of the answer's tokens" in said
    assert main([*given[:-1], "1", "--check"]) == 0
    said = capsys.readouterr().out
    assert "of the prompt's last token" in said and "of the answer's tokens" not in said
    for wrong, what in ((["--prompt", ""], "prompt is empty"), (["--max-model-len", "9999"], "above the model's 512")):
        assert main([*given, *wrong]) == 2
        assert what in capsys.readouterr().err


@needs_jax
@pytest.mark.parametrize(
    ("prefill", "decode", "code"), [(1e-5, 1e-5, 0), (float("nan"), 1e-5, 1), (1e-5, float("nan"), 1), (1e-3, 0.0, 1)]
)
def test_logits_that_differ_or_are_no_numbers_are_exit_code_1(
    prefill: float, decode: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvern.tpu.generate import Difference

    make_tiny_model(tmp_path)
    answers = [SimpleNamespace(tokens=[5, 6])]
    model = SimpleNamespace(generate=lambda *_: answers)
    monkeypatch.setattr("kvern.tpu.generate.JaxModel", lambda *_: model)
    monkeypatch.setattr("kvern.tpu.generate.compare", lambda *_: Difference(prefill, decode, 1.0))
    assert main(["tpu", str(tmp_path), "--check"]) == code


@needs_jax
def test_lengths_are_checked_before_anything_is_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("allocated")

    make_tiny_model(tmp_path)
    monkeypatch.setattr("kvern.models.loader.load_model", fail)
    monkeypatch.setattr("kvern.tpu.generate.JaxModel", fail)
    assert main(["tpu", str(tmp_path), "--max-model-len", "20", "--max-tokens", "20"]) == 2
    assert "max_tokens is 20: together they are above max_model_len 20; lower max_tokens" in capsys.readouterr().err


@needs_jax
def test_what_jax_cannot_run_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(name: str) -> None:
        raise RuntimeError(f"no backend for\n{name}")

    make_tiny_model(tmp_path)
    monkeypatch.setattr("kvern.tpu.generate.attention_named", fail)
    assert main(["tpu", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "kvern tpu: error: JAX cannot run this: RuntimeError: no backend for auto\n"


@pytest.mark.parametrize(("found", "code"), [("0.9.2", 2), ("0.10.2", 1), ("1.0", 1)])
def test_an_older_jax_is_refused(
    found: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("kvern.cli.tpu.version", lambda name: found)
    monkeypatch.setattr(ahead, "compiled", lambda request: [ahead.Step("decode", error="full")])
    assert main(["tpu", str(write_config(tmp_path, {})), "--compile", "v5e"]) == code
    assert ("needs JAX 0.10 or newer, and 0.9.2 is here" in capsys.readouterr().err) == (code == 2)


@pytest.mark.parametrize(("given", "code"), [([], 2), (["--dtype", "bfloat16"], 0)])
def test_float16_is_compiled_as_another_dtype(
    given: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("kvern.cli.tpu.version", lambda name: "0.10.2")
    monkeypatch.setattr(ahead, "compiled", lambda request: [ahead.Step("decode")])
    folder = write_config(tmp_path, {"torch_dtype": "float16"})
    assert main(["tpu", str(folder), "--compile", "v5e", *given]) == code
    assert ("dtype is float16" in (said := capsys.readouterr().err)) == (code == 2)
    assert ("give --dtype bfloat16" in said) == (code == 2)


@needs_jax
def test_other_models_are_refused_before_they_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_config(tmp_path, {"hidden_act": "gelu"})
    assert main(["tpu", str(tmp_path)]) == 2
    assert "layers.mlp.activation is 'gelu'" in capsys.readouterr().err


def test_compiled_steps_are_a_table_and_errors_are_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What libtpu answers stands in tests/tpu/test_tpu_ahead.py."""
    found = [
        ahead.Step("prefill", 10**9, 3 * 10**9, 10**9, 10**9, 5 * 10**8, 10**7),
        ahead.Step("decode", error="full"),
    ]
    asked: list[ahead.Request] = []
    monkeypatch.setattr(ahead, "compiled", lambda request: asked.append(request) or found)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("kvern.cli.tpu.version", lambda name: "0.10.2")
    write_config(tmp_path, {})
    assert main(["tpu", str(tmp_path), "--compile", "all", "--rows", "3"]) == 1
    said = capsys.readouterr().out
    assert [f"{number} GB" for number in said.partition("prefill")[2].split("\n")[0].replace("GB", "").split()] == [
        "2.000 GB",
        "1.000 GB",
        "0.500 GB",
        "0.010 GB",
        "3.510 GB",
        "16.000 GB",
    ]
    assert "v5p, decode: full" in said
    assert [(request.chip, request.rows, request.max_model_len) for request in asked] == [
        (chip, 3, 512) for chip in ("v5e", "v6e", "v5p")
    ]
