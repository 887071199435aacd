"""kvern quantize: what calibration sees, how weights are rounded, and the folders that are written."""

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kvern.errors import ConfigError
from kvern.models.checkpoint import read_headers
from kvern.models.decoder import Decoder
from kvern.models.loader import load_model
from kvern.quantize import awq, job
from kvern.quantize.blocks import CausalAttend, Walk
from kvern.quantize.calibration import Calibration, calibration
from kvern.quantize.checkpoint import Checkpoint
from kvern.quantize.job import quantization_config, tensors_of
from kvern.quantize.method import Gptq, Method, Rounded, RoundToNearest
from kvern.quantize.scheme import FP8, FP8_BLOCK, INT8, Scheme, fit, int4, named
from kvern.quantize.statistics import REPORT_NAME, plan_of
from kvern.quantize.watched import Inputs
from kvern.quantize.writer import writing
from kvern.spec.mixers import AttentionSpec
from kvern.text.tokenizer import Tokenizer
from tests.support.families import make_checkpoint, reference_logits
from tests.support.model_outputs import logits
from tests.support.tiny_model import make_tiny_model
from tests.support.uniform_plans import uniform_plan

CPU = torch.device("cpu")
ROWS = torch.randint(3, 131, (4, 24), generator=torch.Generator().manual_seed(3))
FAMILIES = [
    "llama_bias",
    "gemma3",
    "mixtral",
    "qwen2_moe",
    "glm4_moe",
    "granitemoe",
    "qwen3_vl_moe",
    "phi",
    "phi3",
    "cohere",
    "olmo2",
    "gpt_neox",
    "stablelm_parallel",
    "falcon_h1",
    "nemotron_h",
    "qwen3_5_moe",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "gemma4",
    "gemma4_experts",
]
"""Norms before, behind, offset, shared and with biases; fused, reordered and stacked weights; experts of all kinds."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def random_rows(count: int, inputs: int) -> torch.Tensor:
    """Rows whose entries depend on each other and differ in size, as those of a model do."""
    generator = torch.Generator().manual_seed(5)
    mixing = torch.randn(inputs // 4, inputs, generator=generator)
    sizes = torch.rand(inputs, generator=generator).mul(4).exp()
    rows = torch.randn(count, inputs // 4, generator=generator) @ mixing
    return (rows + 0.1 * torch.randn(count, inputs, generator=generator)) * sizes


def observed(rows: torch.Tensor) -> Inputs:
    inputs = Inputs(rows.shape[1], 1, CPU, products=True)
    inputs.add(rows)
    return inputs


def logits_of(walk: Walk) -> torch.Tensor:
    ends: Decoder = walk.ends()
    return ends.logits(ends.norm(walk.hidden.flatten(0, 1))).view(*walk.hidden.shape[:2], -1)


@pytest.mark.sample(7)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_walk_computes_the_model_and_scales_that_are_folded_change_nothing(family: str, tmp_path: Path) -> None:
    """Whatever the family; scales of all folds are random here."""
    checkpoint = Checkpoint(make_checkpoint(family, tmp_path / "model"), CPU)
    walk = Walk(checkpoint, ROWS)
    generator = torch.Generator().manual_seed(7)
    folded = 0
    for index in range(walk.layers):
        block = walk.block(index)
        walk.observe(block)
        for fold in awq.folds(block):
            folded += 1
            scale = torch.rand(block.tensors[fold.readers[0]].shape[1], generator=generator) + 0.5
            awq.apply(block, fold, scale)
        walk.advance(block)
    expected = torch.stack([reference_logits(tmp_path / "model", row.tolist()) for row in ROWS])
    torch.testing.assert_close(logits_of(walk), expected, rtol=2e-3, atol=2e-3)
    assert folded >= (1 if family == "gpt_neox" else 3)


def test_calibration_attends_within_windows_and_soft_caps() -> None:
    x = torch.randn(12, 4, 8, generator=torch.Generator().manual_seed(0))
    spec = AttentionSpec(4, 4, 8, 0.3)
    plain = CausalAttend(spec, 6)(0, x, x, x)
    masked = CausalAttend(spec, 6)._masked(*[x.view(2, 6, 4, 8).transpose(1, 2)] * 3)
    torch.testing.assert_close(plain, masked.transpose(1, 2).flatten(0, 1))


@pytest.mark.parametrize("scheme", [FP8, FP8_BLOCK, INT8, int4(32), int4(64, False)], ids=lambda scheme: scheme.name)
def test_codes_are_the_nearest_numbers_that_the_grid_has(scheme: Scheme) -> None:
    weight = torch.randn(160, 192, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    grid = fit(weight, scheme, torch.bfloat16)
    assert tuple(grid.scale.shape) == scheme.scales(160, 192) and bool((grid.scale.bfloat16() == grid.scale).all())
    plain = grid.decode(grid.encode(weight))
    inside = ~grid.clipped(weight)
    step = grid.decode(torch.ones_like(weight)) - grid.decode(torch.zeros_like(weight))
    most = step / 2 if scheme.kind == "int" else torch.maximum(weight.abs() / 16, step * 2**-10)
    assert bool(((plain - weight).abs() <= most * 1.001)[inside].all()) and bool((plain[3] == 0).all())
    columns = grid.decode(grid.encode(weight[:, 70:75], 70), 70)
    torch.testing.assert_close(columns, plain[:, 70:75], rtol=0, atol=0)
    assert named(scheme.name) == (scheme if scheme.outputs_per_scale == 1 else FP8_BLOCK)


@pytest.mark.parametrize("group", [32, 128])
def test_gptq_and_awq_are_better_than_the_nearest_codes(group: int) -> None:
    """On rows whose entries depend on each other, the error of the outputs, on other rows than were calibrated with."""
    rows = random_rows(1200, 256)
    weight = torch.randn(96, 256, generator=torch.Generator().manual_seed(1)) * 0.05
    weight /= rows[:400].abs().mean(0).sqrt()
    held_out = rows[800:]

    def error(method: Method) -> float:
        rounded = method.round(weight, observed(rows[:800]), int4(group), torch.float32)
        return float((held_out @ (rounded.plain() - weight).t()).norm() / (held_out @ weight.t()).norm())

    nearest, ordered, unordered = error(RoundToNearest()), error(Gptq()), error(Gptq(act_order=False))
    assert ordered < 0.7 * nearest and unordered < 0.9 * nearest


def test_gptq_rounds_what_no_input_reached_to_the_nearest() -> None:
    """An expert that got no rows, and columns that were always zero."""
    rows = random_rows(300, 64)
    rows[:, 10:20] = 0
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    rounded = Gptq().round(weight, observed(rows), int4(32), torch.float32)
    assert bool((rounded.codes[:, 10:20] == rounded.grid.encode(weight)[:, 10:20]).all())
    nobody = Inputs(64, 1, CPU, products=True)
    torch.testing.assert_close(
        Gptq().round(weight, nobody, INT8, torch.float32).codes,
        RoundToNearest().round(weight, nobody, INT8, torch.float32).codes,
    )


def spread_checkpoint(folder: Path) -> Path:
    """A model whose norms make inputs of very different sizes, as trained ones do."""
    from safetensors.torch import save_file

    make_tiny_model(folder)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, tensor in weights.items():
        if "layernorm" in name:
            weights[name] = torch.randn(tensor.shape, generator=generator).mul(1.5).exp()
    save_file(weights, folder / "model.safetensors")
    return folder


def quantize(folder: Path, out: Path, method: str, scheme: Scheme, **options: Any) -> job.Result:
    checkpoint = Checkpoint(folder, CPU)
    settings = job.Settings(
        uniform_plan(checkpoint, scheme),
        job.make_method(method),
        about={"method": method, "settings": {}},
        shard_bytes=options.pop("shard_bytes", job.SHARD_BYTES),
    )
    rows = ROWS % checkpoint.spec.vocab_size
    return job.quantize(checkpoint, settings, Calibration(rows, "random"), out, **options)


def test_awq_is_better_than_the_nearest_codes(tmp_path: Path) -> None:
    folder = spread_checkpoint(tmp_path / "model")

    def error(method: str) -> float:
        result = quantize(folder, tmp_path / method, method, int4(32))
        return sum(item.output_error or 0.0 for item in result.matrices)

    assert error("awq") < 0.93 * error("int4")


def logits_by_kvern(folder: Path) -> torch.Tensor:
    """Of the first of ROWS, by the decoder that serves."""
    return logits(load_model(folder), ROWS[0].tolist())


OWN_SIZES = {"deepseek_v2": {"q_lora_rank": 32}, "gemma4_experts": {"num_hidden_layers": 3}}
CASES = [
    ("llama", "fp8", FP8),
    ("llama", "int8", INT8),
    ("llama", "int4", int4(32)),
    ("llama", "gptq", int4(32)),
    ("mixtral", "awq", int4(32)),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("family", "method", "scheme"),
    [
        *CASES,
        ("llama", "awq", int4(32, False)),
        ("mixtral", "int8", INT8),
        ("deepseek_v2", "awq", int4(8)),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                ("gpt_neox", "gptq", int4(32)),
                ("granitemoe", "fp8", FP8),
                ("phi3", "gptq", int4(32)),
                ("nemotron_h", "awq", int4(8)),
                ("nemotron_h", "int8", INT8),
                ("deepseek_v3", "int8", INT8),
                ("gemma4_experts", "gptq", INT8),
            )
        ),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_kvern_reads_what_is_written(family: str, method: str, scheme: Scheme, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "initializer_range": 0.05, "intermediate_size": 96}
    folder = make_checkpoint(family, tmp_path / "model", **sizes | OWN_SIZES.get(family, {}))
    quantize(folder, tmp_path / "out", method, scheme)
    expected = logits_by_kvern(folder)
    error = float((logits_by_kvern(tmp_path / "out") - expected).norm() / expected.norm())
    assert 0 < error < (0.15 if scheme.bits == 8 else 0.3)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("family", "method", "scheme"), CASES, ids=lambda value: getattr(value, "name", value))
def test_transformers_reads_what_is_written(family: str, method: str, scheme: Scheme, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "initializer_range": 0.05}
    folder = make_checkpoint(family, tmp_path / "model", **sizes)
    quantize(folder, tmp_path / "out", method, scheme)
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.inference_mode():
        found = read(ROWS[:1]).logits[0]
    expected = reference_logits(folder, ROWS[0].tolist())
    assert float((found - expected).norm() / expected.norm()) < (0.15 if scheme.bits == 8 else 0.3)


@pytest.mark.parametrize("scheme", [FP8, FP8_BLOCK, INT8, int4(32), int4(64, False)], ids=lambda scheme: scheme.name)
def test_compressed_tensors_reads_the_numbers_that_were_meant(scheme: Scheme) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    weight = torch.randn(256, 128, generator=torch.Generator().manual_seed(0))
    grid = fit(weight, scheme, torch.float32)
    rounded = Rounded(grid.encode(weight), grid)
    config = QuantizationConfig(**quantization_config({"a": scheme}, []))
    reader = BaseCompressor.load_from_registry(config.format)
    stored = dict(tensors_of(rounded, torch.float32))
    assert scheme.stored_bytes(256, 128, torch.float32) == sum(
        tensor.nbytes for name, tensor in stored.items() if name != "weight_shape"
    )
    plain = reader.decompress(stored, config.config_groups["group_0"])["weight"]
    torch.testing.assert_close(plain, rounded.plain(), rtol=1e-6, atol=1e-7)


def test_the_folder_is_whole_in_shards_with_all_that_was_beside_the_weights(model: Path, tmp_path: Path) -> None:
    before = {tensor.name: tensor for tensor in read_headers(model)}
    result = quantize(model, tmp_path / "out", "int4", int4(32), shard_bytes=30_000)
    out = tmp_path / "out"
    assert len(list(out.glob("*.safetensors"))) > 2 and (out / "model.safetensors.index.json").is_file()
    after = {tensor.name: tensor for tensor in read_headers(out)}
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (model / name).read_bytes()
    assert {name for name in before if "proj" not in name} == {name for name in after if "proj" not in name}
    loaded: dict[str, torch.Tensor] = {}
    for file in out.glob("*.safetensors"):
        loaded |= load_file(file)
    plain = load_file(model / "model.safetensors")
    assert all(bool((loaded[name] == plain[name]).all()) for name in before if "proj" not in name)
    assert result.bytes_after == sum(tensor.nbytes for tensor in after.values())
    assert 4 < result.bits_per_weight <= 5  # scales of float32
    quantization = json.loads((out / "config.json").read_text())["quantization_config"]
    assert quantization["quant_method"] == "compressed-tensors" and set(quantization["ignore"]) == {
        "lm_head",
        "model.embed_tokens",
    }


def test_the_report_tells_of_each_matrix_and_can_be_read_as_a_plan(model: Path, tmp_path: Path) -> None:
    quantize(model, tmp_path / "out", "gptq", int4(32))
    told = json.loads((tmp_path / "out" / REPORT_NAME).read_text())
    assert told["kvern_quantization_report"] == 1 and told["method"] == "gptq"
    assert told["calibration"] == {"source": "random", "rows": 4, "row_tokens": 24}
    assert {"weights", "quantized_weights", "bits_per_weight", "bytes_before", "bytes_after"} <= told["totals"].keys()
    assert len(told["matrices"]) == 14 and all(0 < item["output_error"] < 0.5 for item in told["matrices"])
    assert all(0 <= item["clipped_share"] < 0.1 and item["input_rows"] == 96 for item in told["matrices"])
    told["matrices"][0]["scheme"], told["matrices"][1]["scheme"] = "plain", "fp8"
    edited = tmp_path / "report.json"
    edited.write_text(json.dumps(told))
    plan = plan_of(edited)
    assert told["matrices"][0]["name"] not in plan and plan[told["matrices"][1]["name"]] == FP8 and len(plan) == 13
    checkpoint = Checkpoint(model, CPU)
    settings = job.Settings(plan, Gptq())
    job.quantize(checkpoint, settings, Calibration(ROWS, "random"), tmp_path / "mixed")
    mixed = json.loads((tmp_path / "mixed" / "config.json").read_text())["quantization_config"]
    assert mixed["format"] == "mixed-precision" and len(mixed["config_groups"]) == 2
    assert told["matrices"][0]["name"] in mixed["ignore"]


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_one_block_is_alive_at_a_time(
    method: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """No cycle holds one: nothing is collected meanwhile."""
    made: list[weakref.ref[Any]] = []
    make = Walk.block

    def block(walk: Walk, index: int) -> Any:
        assert all(item() is None for item in made)
        result = make(walk, index)
        made.extend(weakref.ref(parameter) for parameter in result.module.parameters())
        return result

    monkeypatch.setattr(Walk, "block", block)
    gc.disable()
    request.addfinalizer(gc.enable)
    quantize(model, tmp_path / "out", method, int4(32))
    assert len(made) > 10


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("No space left on device")])
def test_an_interrupted_run_leaves_nothing_and_the_old_folder_as_it_was(
    model: Path, tmp_path: Path, error: BaseException | type[BaseException]
) -> None:
    out = tmp_path / "within" / "out"

    def stop(matrices: int, weights: int) -> None:
        if matrices == 9:
            raise error

    with pytest.raises((KeyboardInterrupt, ConfigError)):
        quantize(model, out, "int8", INT8, progress=stop)
    assert list(out.parent.iterdir()) == []
    quantize(model, out, "int8", INT8)
    with pytest.raises((KeyboardInterrupt, ConfigError)):
        quantize(model, out, "int4", int4(32), progress=stop, overwrite=True)
    assert list(out.parent.iterdir()) == [out]
    assert json.loads((out / "config.json").read_text())["quantization_config"]["format"] == "int-quantized"
    quantize(model, out, "int4", int4(32), overwrite=True)
    assert list(out.parent.iterdir()) == [out]
    assert json.loads((out / "config.json").read_text())["quantization_config"]["format"] == "pack-quantized"


def test_texts_become_rows_of_tokens(model: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(model)
    own = calibration(tokenizer, None, 8, 64)
    assert own.rows.shape == (8, 64) and torch.equal(own.rows, calibration(tokenizer, None, 8, 64).rows)
    lines = [{"messages": [{"role": "user", "content": "hello"}]}, "plain words", {"prompt": "a\u2028prompt"}]
    (tmp_path / "some.jsonl").write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines))
    rows = calibration(tokenizer, tmp_path / "some.jsonl", 8, 64).rows
    assert tokenizer.decode(rows[0].tolist()) == "helloplain wordsa\u2028prompt"
    assert rows[0, 0] == tokenizer.token_to_id("<|user|>")
    (tmp_path / "some.txt").write_text("the quick brown fox " * 40)
    assert calibration(tokenizer, tmp_path / "some.txt", 2, 32).rows.shape == (2, 32)


def test_the_writer_places_every_tensor_where_its_type_may_stand(tmp_path: Path) -> None:
    tensors = {"odd": torch.ones(3, dtype=torch.int8), "a": torch.arange(4.0), "half": torch.ones(5).bfloat16()}
    tensors |= {"none": torch.empty(0), "one": torch.tensor([7])}
    with writing(tmp_path / "out", len(tensors)) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        writer.finish({}, None, tmp_path, REPORT_NAME)
    read = load_file(tmp_path / "out" / "model.safetensors")
    assert read.keys() == tensors.keys() and all(torch.equal(read[name], tensors[name]) for name in read)
    for stored in read_headers(tmp_path / "out"):
        assert stored.begin % stored.dtype.itemsize == 0
