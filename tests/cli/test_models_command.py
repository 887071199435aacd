"""`kvern models MODEL`: precision, memory and whether it fits, from the headers of the files alone."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kvern.cli.main import main
from kvern.cli.model_report import Device, report_of
from kvern.config import EngineConfig
from kvern.formats.scaled import ROWS, TENSOR, Block, Rounding, Scaled
from kvern.models.loader import load_model, read_config
from kvern.quantize import job
from kvern.quantize.calibration import Calibration
from kvern.quantize.checkpoint import Checkpoint
from kvern.quantize.scheme import FP8, INT8, int4
from kvern.runner.memory import CPU_MEMORY_SHARE, GPU_MEMORY_SHARE, MARGIN_BYTES
from kvern.runner.plan import lay_out, sequences_taken
from tests.support.families import make_checkpoint
from tests.support.gguf_files import add_tokenizer, write_gguf
from tests.support.scaled_rows import quantize
from tests.support.tiny_model import make_tiny_model


@pytest.mark.sample(5)
@pytest.mark.parametrize("family", ["llama_bias", "llama3", "gemma3", "mixtral", "qwen2_moe", "glm4_moe", "phi3"])
@pytest.mark.parametrize("layers", ["nothing", "."])
def test_every_parameter_and_byte_is_counted_once(family: str, layers: str, tmp_path: Path) -> None:
    made = quantize(make_checkpoint(family, tmp_path / "model"), tmp_path, layers)
    plain = load_model(made.rounded)
    report = report_of("a model", made.quantized)
    assert report.parameters == sum(parameter.numel() for parameter in plain.parameters())
    assert report.weight_bytes == load_model(made.quantized).weight_bytes
    quantized = [share for share in report.shares if share.format == "scaled_rows"]
    assert bool(quantized) == (layers != "nothing")
    assert all(16 < share.bits < 20 for share in quantized)


def test_each_kind_of_layer_says_how_it_is_stored(tmp_path: Path) -> None:
    made = quantize(make_checkpoint("llama", tmp_path / "model"), tmp_path, r"k_proj|layers\.1\.mlp")
    shares = {(share.kind, share.format): share.matrices for share in report_of("a model", made.quantized).shares}
    assert shares == {
        ("embeddings", "float32"): 1,
        ("attention q, k, v", "float32"): 6,
        ("attention q, k, v", "scaled_rows"): 3,
        ("attention out", "float32"): 3,
        ("MLP gate, up", "float32"): 2,
        ("MLP gate, up", "scaled_rows"): 1,
        ("MLP down", "float32"): 2,
        ("MLP down", "scaled_rows"): 1,
        ("output layer", "float32"): 1,
        ("norms, biases", "float32"): 7,
    }


def test_formats_of_a_byte_have_names_that_tell_them_apart() -> None:
    names = {
        Scaled("e4m3", ROWS, Rounding("e4m3")): "fp8 by row, W8A8",
        Scaled("e4m3", TENSOR, Rounding("e4m3"), static=True): "fp8 by tensor, W8A8 static",
        Scaled("e4m3", Block(128, 128), Rounding("e4m3", 128)): "fp8 by 128 x 128, W8A8",
        Scaled("int8", ROWS): "int8 by row",
        Scaled("int8", Block(1, 32), Rounding("int8")): "int8 by 1 x 32, W8A8",
        Scaled("int8", ROWS, Rounding("int8", 64)): "int8 by row, W8A8 by 64",
    }
    assert {form.name: name for form, name in names.items()} == {name: name for name in names.values()}


def test_no_weight_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint("llama", tmp_path)

    def fail(*given: Any) -> None:
        raise AssertionError("a file was mapped")

    monkeypatch.setattr("kvern.models.checkpoint.open_map", fail)
    monkeypatch.setattr("kvern.models.loader.open_map", fail)
    assert main(["models", str(folder)]) == 0


def test_json_says_what_the_tables_say(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr("kvern.cli.model_report.available_memory", lambda: 21_000_000_000)  # it changes meanwhile
    assert main(["models", "kvern-1m", "--json"]) == 0
    said: Mapping[str, Any] = json.loads(capsys.readouterr().out)
    assert said["parameters"] == sum(layer["parameters"] for layer in said["layers"])
    assert said["bits_per_weight"] == 16
    cache = said["kv_cache"]
    assert cache["token_bytes"] == 2 * cache["token_bytes_8bit"]
    assert cache["context_bytes"] == said["context"] * cache["token_bytes"]
    assert said["weight_bytes"] > said["smaller"]["fp8"] > said["smaller"]["int4"]
    assert said["devices"][-1]["device"] == "CPU" and said["devices"][-1]["fits"]
    assert main(["models", "kvern-1m"]) == 0
    shown = capsys.readouterr().out
    for text in (f"{said['parameters']:,}", "bfloat16", "MLP gate, up", "16.00", said["devices"][-1]["verdict"]):
        assert text in shown


def test_the_verdict_is_that_of_the_memory_there_is(tmp_path: Path) -> None:
    report = report_of("a model", make_checkpoint("llama", tmp_path))
    weights, token = report.weight_bytes, report.token_bytes("float32")
    assert report.cache_tokens(Device("GPU", weights - 1), weights) == 0
    gpu = Device("GPU", weights + MARGIN_BYTES + 1000 * token)
    assert report.cache_tokens(gpu, weights) == int(1000 * GPU_MEMORY_SHARE)
    cpu = Device("CPU", weights + 1000 * token, host=True)
    assert report.cache_tokens(cpu, weights) == 1000 * CPU_MEMORY_SHARE
    assert "fits: " in report.verdict(Device("CPU", weights + 1 << 30, host=True))
    short = report.verdict(Device("CPU", weights + 400 * token, host=True))
    assert "sequences of up to 100 tokens" in short and "256" in short
    assert report.verdict(Device("CPU", weights // 2, host=True)).endswith("it would by kvern quantize --method fp8")
    assert report.verdict(Device("CPU", weights // 99, host=True)).startswith("does not fit: its weights take")
    large = replace(report, shares=[replace(share, nbytes=10**12) for share in report.shares])
    assert "does not fit" in large.verdict(Device("CPU", 10**10, host=True))


@pytest.mark.parametrize("family", ["gemma3", "gemma4", "gpt_oss", "qwen3_next", "llama"])
def test_what_fits_is_what_the_engine_lays_out(family: str, tmp_path: Path) -> None:
    """Layers with a window keep no more than that, and states of requests take their part."""
    folder = make_checkpoint(family, tmp_path, max_position_embeddings=1 << 20)
    report = report_of("a model", folder)
    device = Device("CPU", 200 << 20, host=True)
    room, plan = device.room(report.spec, report.dtype, report.weight_bytes)
    layout = lay_out([room], plan, EngineConfig())
    assert report.cache_tokens(device, report.weight_bytes) == layout.max_model_len < 1 << 20
    assert bool(layout.window_tables) == (family in ("gemma3", "gemma4", "gpt_oss"))
    taken = sequences_taken(1, layout.max_model_len, room, plan, EngineConfig())
    assert 0 <= layout.blocks * layout.block_size // (1 + layout.window_tables) - taken < layout.block_size


def test_a_model_of_windows_alone_fits_at_any_length(tmp_path: Path) -> None:
    folder = make_checkpoint("mistral", tmp_path, max_position_embeddings=1 << 20)
    report = report_of("a model", folder)
    assert report.cache_tokens(Device("CPU", 200 << 20, host=True), report.weight_bytes) >= 1 << 20
    assert report.context_bytes("float32") < 4096 * report.token_bytes("float32")
    assert report.streams_bytes("float32") < 8192 * report.token_bytes("float32")


def refused(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    capsys.readouterr()
    assert main(["models", str(folder), *more]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert captured.err.count("\n") == 1
    return captured.err


def test_what_cannot_be_described_is_refused_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no such folder" in refused(tmp_path / "none", capsys)
    folder = make_checkpoint("llama", tmp_path / "model")
    (folder / "config.json").write_text(
        json.dumps(read_config(folder) | {"quantization_config": {"quant_method": "x"}})
    )
    assert "quantized by 'x'" in refused(folder, capsys)
    folder = make_checkpoint("llama", tmp_path / "wide")
    (folder / "config.json").write_text(json.dumps(read_config(folder) | {"hidden_size": 52}))
    assert "do not fit config.json" in refused(folder, capsys)
    assert main(["models", "--json"]) == 2


def test_statistics_tell_ranges_scales_and_saturated_codes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    model = make_checkpoint("llama", tmp_path / "model", hidden_size=64, intermediate_size=128)
    weights = load_file(model / "model.safetensors")
    checkpoint = Checkpoint(model, torch.device("cpu"))
    plan = dict.fromkeys(checkpoint.matrices, INT8) | {"model.layers.0.self_attn.o_proj": int4(32)}
    plan["model.layers.1.mlp.down_proj"] = FP8
    out = tmp_path / "out"
    rows = torch.randint(3, 131, (2, 16))
    job.quantize(checkpoint, job.Settings(plan, job.make_method("rtn")), Calibration(rows, "numbers"), out)
    capsys.readouterr()
    assert main(["models", str(out), "--statistics", "--json"]) == 0
    found = {item["layer"]: item for item in json.loads(capsys.readouterr().out)["matrices"]}
    assert len(found) == 2 + 3 * 4
    plain = found["embed_tokens"]
    assert plain["least"] == pytest.approx(float(weights["model.embed_tokens.weight"].min()))
    assert plain["saturated"] is None and plain["largest_scale"] is None
    for layer in ("layers.0.mlp.down_proj", "layers.0.self_attn.o_proj", "layers.1.mlp.down_proj"):
        weight, item = weights[f"model.{layer}.weight"], found[layer]
        assert item["largest"] == pytest.approx(float(weight.max()), rel=0.2)
        assert item["deviation"] == pytest.approx(float(weight.std()), rel=0.05)
        assert 0 < item["smallest_scale"] <= item["largest_scale"]
        assert 1 / weight.shape[1] <= item["saturated"] < 0.2
    assert found["layers.0.mlp.down_proj"]["largest_scale"] == pytest.approx(
        float(weights["model.layers.0.mlp.down_proj.weight"].abs().max()) / 127, rel=1e-3
    )
    assert main(["models", str(out), "--statistics"]) == 0
    assert "0.self_attn.o_proj" in capsys.readouterr().out


def test_statistics_of_plain_weights_whose_processor_keeps_them_in_an_order_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tiny_model(tmp_path / "model")
    (model / "config.json").write_text(json.dumps(read_config(model) | {"torch_dtype": "bfloat16"}))
    assert main(["models", str(model), "--statistics", "--json"]) == 0
    found = {item["layer"]: item for item in json.loads(capsys.readouterr().out)["matrices"]}
    weight = load_file(model / "model.safetensors")["model.layers.0.mlp.down_proj.weight"].bfloat16()
    assert found["layers.0.mlp.down_proj"]["format"] == "bfloat16"
    assert found["layers.0.mlp.down_proj"]["largest"] == pytest.approx(float(weight.max()))


def test_a_gguf_file_is_described_by_its_header(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = make_tiny_model(tmp_path / "model")
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"pad_token": "</s>"}))
    file = write_gguf(model, tmp_path, "Q4_0", describe=add_tokenizer(model, "gpt-2")).file
    capsys.readouterr()
    assert main(["models", str(file), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    packed = {layer["kind"]: layer["bits_per_weight"] for layer in said["layers"] if layer["format"] == "q4_0"}
    assert packed["MLP down"] == packed["attention q, k, v"] == 4.5
    assert said["parameters"] == sum(tensor.numel() for tensor in load_file(model / "model.safetensors").values())
