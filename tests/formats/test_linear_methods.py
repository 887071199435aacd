"""Formats of weights: a model whose layers store theirs in another way answers as one with the same plain weights."""

import json
import re
import sys
from collections.abc import Hashable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from kvern.adapters.bank import AdapterBank
from kvern.adapters.peft import read_adapter
from kvern.device.measurements import Measurements
from kvern.errors import ConfigError, CorruptCheckpoint, UnsupportedModel
from kvern.layers import linear_format
from kvern.layers.build import Build
from kvern.layers.expert_choice import experts_of_format
from kvern.layers.experts import Experts
from kvern.layers.linear import Linear
from kvern.layers.linear_format import LINEAR_METHODS, LinearMethods
from kvern.layers.linear_method import Axis, LinearMethod, LinearShape, Part, Product, TensorLayout
from kvern.layers.parted import PartedMethod
from kvern.layers.row_experts import SeparateExperts
from kvern.layers.tuning import tune
from kvern.layers.unquantized import PackedMethod, Unquantized, UnquantizedMethod
from kvern.models.decoder import Decoder
from kvern.models.loader import LoadOptions, load_model, read_config
from kvern.plugins import Plugins
from kvern.spec.model import MoeSpec
from tests.support.families import change_tensors, make_checkpoint
from tests.support.model_outputs import PROMPT, logits, methods_by_path
from tests.support.peft_adapters import make_adapter
from tests.support.scaled_rows import ScaledRows, ScaledRowsMethod, quantize

CPU = torch.device("cpu")
ALL = "."

packs = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN packs no bfloat16 on this processor"
)


@pytest.mark.parametrize(
    ("family", "layers"),
    [
        ("llama_bias", ALL),
        ("llama3", ALL),  # tied
        ("gemma3", "embed_tokens"),  # tied and scaled
        ("phi3", ALL),  # stored fused
        ("starcoder2", "mlp|self_attn"),
        ("mixtral", ALL),
        ("mixtral", "mlp.gate$"),
        ("qwen2_moe", "mlp.shared_expert"),
        ("glm4_moe", ALL),  # a router in float32
        ("qwen3", r"layers\.1\.|mlp\.down_proj"),
    ],
)
def test_logits_are_those_of_the_rounded_model(family: str, layers: str, tmp_path: Path) -> None:
    model = make_checkpoint(family, tmp_path / "model")
    made = quantize(model, tmp_path, layers)
    found, expected = logits(load_model(made.quantized), PROMPT), logits(load_model(made.rounded), PROMPT)
    assert (found - expected).abs().max() < 1e-4
    assert (found - logits(load_model(model), PROMPT)).abs().max() > 0.01, "rounding changes too little to be seen"


@packs
def test_each_layer_has_the_format_of_its_path(tmp_path: Path) -> None:
    made = quantize(make_checkpoint("llama", tmp_path / "model"), tmp_path, r"layers\.1\.|lm_head")
    decoder = load_model(made.quantized, LoadOptions(dtype="bf16"))
    for path, method in methods_by_path(decoder).items():
        scaled = ".1." in path or path == "lm_head"
        assert isinstance(method, ScaledRowsMethod) == scaled
        assert isinstance(method, PackedMethod) == (".0." in path or ".2." in path)
        assert hasattr(method, "weight") == (path == "embed_tokens")
    rounded = load_model(made.rounded, LoadOptions(dtype="bf16"))
    torch.testing.assert_close(logits(decoder, PROMPT), logits(rounded, PROMPT), rtol=0.05, atol=0.15)
    meta = Build(torch.bfloat16, torch.device("meta"), 1)
    assert Decoder(decoder.spec, meta).weight_bytes < decoder.weight_bytes + sum(
        method.dequantize().nbytes for method in methods_by_path(decoder).values() if isinstance(method, PackedMethod)
    )


@pytest.mark.parametrize("family", ["llama_bias", "llama3"])
def test_the_parts_of_one_product_may_be_stored_in_different_ways(family: str, tmp_path: Path) -> None:
    model = make_checkpoint(family, tmp_path / "model")
    made = quantize(model, tmp_path, r"k_proj|layers\.1\.mlp\.up_proj")
    decoder = load_model(made.quantized)
    kinds = [type(method).__name__ for method in decoder.layers[1].self_attn.qkv_proj.method.methods()]
    assert kinds == ["UnquantizedMethod", "ScaledRowsMethod", "UnquantizedMethod"]
    found, expected = logits(decoder, PROMPT), logits(load_model(made.rounded), PROMPT)
    assert (found - expected).abs().max() < 1e-4
    assert (found - logits(load_model(model), PROMPT)).abs().max() > 0.01
    again = [logits(load_model(made.quantized, LoadOptions(load_format="dummy")), PROMPT) for _ in range(2)]
    assert torch.equal(*again) and again[0].std() > 0


def test_a_checkpoint_may_add_and_leave_out_dimensions_of_one_entry(tmp_path: Path) -> None:
    folder = quantize(make_checkpoint("llama", tmp_path / "model"), tmp_path, "down_proj").quantized
    expected = logits(load_model(folder), PROMPT)
    name = "model.layers.2.mlp.down_proj.scale"
    change_tensors(folder, **{name: load_file(folder / "model.safetensors")[name][:, None]})
    assert torch.equal(logits(load_model(folder), PROMPT), expected)


def test_a_missing_tensor_of_a_format_is_named(tmp_path: Path) -> None:
    made = quantize(make_checkpoint("llama", tmp_path / "model"), tmp_path, "down_proj")
    change_tensors(made.quantized, **{"model.layers.2.mlp.down_proj.scale": None})
    with pytest.raises(CorruptCheckpoint, match=r"1 missing: model\.layers\.2\.mlp\.down_proj\.scale \[48\]"):
        load_model(made.quantized)


def test_runs_of_rows_fill_every_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = quantize(make_checkpoint("llama", tmp_path / "model"), tmp_path, ALL).quantized
    expected = load_model(folder).state_dict()
    monkeypatch.setattr("kvern.models.checkpoint.RUN_BYTES", 200)
    loaded = load_model(folder).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_random_weights_of_any_dtype(tmp_path: Path) -> None:
    folder = quantize(make_checkpoint("mixtral", tmp_path / "model"), tmp_path, ALL).quantized
    first, second = (logits(load_model(folder, LoadOptions(load_format="dummy")), PROMPT) for _ in range(2))
    assert torch.equal(first, second) and first.isfinite().all() and first.std() > 0


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # within PEFT
def test_adapters_add_to_any_format(tmp_path: Path) -> None:
    model = make_checkpoint("llama_bias", tmp_path / "model")
    made, adapter = quantize(model, tmp_path, ALL), make_adapter(model, tmp_path / "adapter", 3, r=5)
    found = []
    for folder in made:
        decoder = load_model(folder)
        bank = AdapterBank(decoder, places=1, rank=8, kernels=False)
        bank.load(0, read_adapter(adapter, decoder.spec, bank.targets, 8, torch.float32))
        plain = logits(decoder, PROMPT)
        found.append(logits(decoder, PROMPT, bank.select([0], [len(PROMPT)], None)))
        assert (found[-1] - plain).abs().max() > 0.1
    assert (found[0] - found[1]).abs().max() < 1e-4


@pytest.mark.parametrize("waits", [True, False])
def test_stacked_experts_of_a_format_agree_with_separate_ones(waits: bool) -> None:
    """As a checkpoint stores them in one tensor; and both ways to multiply, one of which waits for no device."""
    spec, build = MoeSpec(5, 2, 12), Build(torch.float32, CPU, 16)
    stacked, separate = (experts_of_format(8, spec, build, ScaledRows()) for _ in range(2))
    plain = experts_of_format(8, spec, build, Unquantized())
    for matrix, shape in {"gate_up": (5, 24, 8), "down": (5, 8, 12)}.items():
        codes, scale = torch.randint(-7, 8, shape).half(), torch.rand(shape[:2]) / 9
        parts = {"qweight": codes, "scale": scale}
        for kind, tensor in parts.items():
            name = f"experts.{matrix}_proj_{kind}"
            assert stacked.fused_parts()[name] == tuple(tensor.shape)
            stacked.load(name, tensor[:2])
            stacked.load(name, tensor[2:], 2)
            for expert in range(5):
                halves = {"gate": tensor[expert, :12], "up": tensor[expert, 12:]}
                for part, rows in halves.items() if matrix == "gate_up" else [("down", tensor[expert])]:
                    assert separate.parts()[f"experts.{expert}.{part}_proj.{kind}"] == tuple(rows.shape)
                    separate.load(f"experts.{expert}.{part}_proj.{kind}", rows)
        plain.load(f"experts.{matrix}_proj", codes * scale[..., None])
    x, weights = torch.randn(7, 8), torch.rand(7, 2)
    topk_ids = torch.rand(7, 5).topk(2).indices
    expected = plain(x, weights, topk_ids, x)
    assert isinstance(stacked, SeparateExperts)
    for experts in (stacked, separate, plain):
        assert isinstance(experts, Experts)
        experts.waits = waits
        torch.testing.assert_close(experts(x, weights, topk_ids, x), expected, rtol=0, atol=1e-5)


class BlockMethod(UnquantizedMethod):
    """Tensors in blocks, as formats have them: packed inputs, scales of blocks, one number beside them."""

    def layouts(self) -> Mapping[str, TensorLayout]:
        return {
            "packed": TensorLayout(torch.int32, (Axis("inputs", 4), Axis("outputs"))),
            "scales": TensorLayout(torch.float32, (Axis("outputs", 2), Axis("inputs", 8), Axis("others", 3))),
        }


@pytest.mark.parametrize("run", [1, 3, 100])
def test_shards_take_their_slices_of_every_part(run: int) -> None:
    """The second of two shards of a matrix of two parts, cut along its outputs or along its inputs."""
    whole = BlockMethod(LinearShape(12, 32, torch.float32, CPU))
    assert whole.cuts() == (2, 8)
    tensors = {
        "packed": torch.arange(8 * 12, dtype=torch.int32).view(8, 12),
        "scales": torch.arange(6 * 4 * 3, dtype=torch.float32).view(6, 4, 3),
    }
    by_outputs = BlockMethod(LinearShape(6, 32, torch.float32, CPU))
    by_inputs = BlockMethod(LinearShape(12, 16, torch.float32, CPU))
    parts = {0: 8, 8: 4}  # first output: outputs
    for kind, tensor in tensors.items():
        output_dim, per = (1, 1) if kind == "packed" else (0, 2)
        for first, size in parts.items():
            part = tensor.narrow(output_dim, first // per, size // per)
            for row in range(0, len(part), run):
                rows = part[row : row + run]
                whole.load(kind, rows, Part(first, range(size), range(32)), row)
                by_outputs.load(kind, rows, Part(first // 2, range(size // 2, size), range(32)), row)
                by_inputs.load(kind, rows, Part(first, range(size), range(16, 32)), row)
        assert torch.equal(getattr(whole, kind), tensor)
    assert torch.equal(by_outputs.packed, tensors["packed"][:, [4, 5, 6, 7, 10, 11]])
    assert torch.equal(by_outputs.scales, tensors["scales"][[2, 3, 5]])
    assert torch.equal(by_inputs.packed, tensors["packed"][4:])
    assert torch.equal(by_inputs.scales, tensors["scales"][:, 2:])


def test_parts_of_a_matrix_that_is_stored_in_several_ways_may_begin_within_one() -> None:
    shape, stored = LinearShape(6, 3, torch.float32, CPU), torch.arange(36.0).view(12, 3)
    methods = [UnquantizedMethod(shape._replace(outputs=outputs)) for outputs in (4, 2)]
    for method in methods:
        method.weight.zero_()
    parted = PartedMethod(shape, methods, partial(torch.cat, dim=-1))
    for first_row in (0, 7):
        parted.load("weight", stored[first_row : first_row + 7], Part(1, range(5, 10), range(3)), first_row)
    assert torch.equal(parted.dequantize(), torch.cat((torch.zeros(1, 3), stored[5:10])))


@packs
def test_packed_weights_can_be_had_plain() -> None:
    weight = torch.randn(24, 40).bfloat16()
    method = PackedMethod(LinearShape(24, 40, torch.bfloat16, CPU))
    method.load("weight", weight, Part(0, range(24), range(40)))
    method.finish()
    assert torch.equal(method.dequantize(), weight)
    assert not hasattr(method, "weight")


class Choosing(UnquantizedMethod):
    """Offers three ways to multiply two rows, of which a clock below likes one."""

    name = "choosing"

    def candidates(self) -> Mapping[int, Mapping[Hashable, Product]]:
        return {2: {key: partial(self._by, key) for key in (None, (1, 2), (3, 4))}}

    def _by(self, key: object, x: torch.Tensor, bias: torch.Tensor | None) -> object:
        return key, x.shape

    def choose(self, rows: int, candidate: Hashable) -> None:
        self.chosen = rows, candidate


class Choices(Unquantized):
    """Layers that choose."""

    def linear(self, shape: LinearShape, build: Build) -> LinearMethod:
        return Choosing(shape)


def test_the_fastest_of_what_a_method_offers_is_chosen_once() -> None:
    build = Build(torch.float32, CPU, 1, linear=LinearMethods(Unquantized(), ((re.compile("[ab]$"), Choices()),)))
    layers = [Linear(6, {name: 4}, build) for name in "abc"]
    model = nn.ModuleList(layers)
    asked: list[object] = []

    def clock(calls: list[Any]) -> float:
        results = [call() for call in calls]
        asked.append(results)
        return float({None: 2, (1, 2): 1, (3, 4): 3}[results[0][0]])

    timed = tune(model, clock, {})
    assert timed == {"choosing, 4 x 6, torch.float32, 2 rows": (1, 2)}
    assert asked == [[(key, (2, 6))] * 2 for key in (None, (1, 2), (3, 4))]
    known = {key: list(value) for key, value in timed.items()}  # type: ignore[call-overload]
    assert tune(model, clock, known) == {} and len(asked) == 3
    assert [layer.method.chosen for layer in layers[:2]] == [(2, (1, 2))] * 2
    for stale in ({"a": 1}, [5], "x", None):
        known = dict.fromkeys(timed, stale)
        assert bool(tune(model, clock, known)) == (stale is not None), "None is one of the ways"


def test_what_is_held_plain_for_latents_is_not_timed(tmp_path: Path) -> None:
    make_checkpoint("glm4_moe_lite", tmp_path)
    assert tune(load_model(tmp_path, LoadOptions(dtype="float32")), lambda calls: 1.0, {}) == {}


def test_a_way_to_multiply_that_does_not_run_is_left_out_and_named_at_every_start(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    layers = [
        Linear(inputs, {"a": 4}, Build(torch.float32, CPU, 1, linear=LinearMethods(Choices()))) for inputs in (6, 8)
    ]
    model = nn.ModuleList(layers)
    broken: set[object] = {(1, 2)}

    def clock(calls: list[Any]) -> float:
        key, _ = calls[0]()
        if key in broken:
            raise ArithmeticError(f"{key} is too large\nfor this device")
        return float({None: 2, (1, 2): 1, (3, 4): 3}[key])

    timed = tune(model, clock, {})
    assert [layer.method.chosen for layer in layers] == [(2, None)] * 2
    (warning,) = caplog.messages
    assert warning.endswith("(choosing, 2 rows: (1, 2)): (1, 2) is too large")
    caplog.clear()
    measurements = Measurements(tmp_path, CPU)
    measurements.remember("linear", timed)
    measurements.save()
    broken |= {None, (3, 4)}
    known = Measurements(tmp_path, CPU).section("linear")
    assert tune(model, clock, known) == {} and caplog.messages == [warning], "the choice is kept, and so is the reason"
    assert [layer.method.chosen for layer in layers] == [(2, None)] * 2
    left_out = next(iter(known.values()))
    for spoiled in (left_out | {"left out": ["(1, 2)"]}, {"choice": None}):
        caplog.clear()
        assert tune(model, clock, dict.fromkeys(known, spoiled)) == {} and not caplog.messages
    with pytest.raises(ArithmeticError, match="None is too large"):
        tune(model, clock, {})


class Wrong(Unquantized):
    """Plain layers with ways to multiply of which some are wrong."""

    def __init__(self, factors: Mapping[str | None, float]) -> None:
        self._factors = factors

    def linear(self, shape: LinearShape, build: Build) -> LinearMethod:
        method = super().linear(shape, build)

        def by(factor: float, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            return F.linear(x, method.weight, bias) * factor

        def candidates() -> Any:
            return {1: {key: partial(by, factor) for key, factor in self._factors.items()}}

        method.candidates = candidates  # type: ignore[method-assign]
        return method

    def layer(self, outputs: int) -> Linear:
        layer = Linear(60, {"a": outputs}, Build(torch.float32, CPU, 1, linear=LinearMethods(self)))
        layer.fill_random(torch.Generator().manual_seed(0))
        return layer


FACTORS: Mapping[str | None, float] = {"half as much again": 1.5, "nothing": float("nan"), "codes": 1.05}


@pytest.mark.parametrize("outputs", [40, 1])
@pytest.mark.parametrize("has_plain", [True, False])
@pytest.mark.parametrize(("compare", "fastest"), [(False, "half as much again"), (True, "codes")])
def test_ways_to_multiply_that_are_wrong_are_left_out(
    compare: bool, fastest: str, has_plain: bool, outputs: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether PyTorch's product is one of them or not, and of a single number too, as of a gate."""
    layer = Wrong({None: 1.0} | FACTORS if has_plain else FACTORS).layer(outputs)
    times = iter((4.0,) * has_plain + ((2.0,) if compare else (1.0, 3.0, 2.0)))
    (timed,) = tune(layer, lambda calls: next(times), {}, compare=compare).values()
    assert timed == {"choice": "codes", "left out": ANY} if compare else timed == fastest
    assert ("off by 0.5" in caplog.text, "off by nan" in caplog.text) == (compare, compare)


def test_products_with_weights_of_zero_agree(caplog: pytest.LogCaptureFixture) -> None:
    layer = Wrong({None: 1.0, "negative": -1.0, "nothing": float("nan")}).layer(4)
    layer.method.weight.zero_()
    (timed,) = tune(layer, lambda calls: 1.0, {}, compare=True).values()
    assert timed == {"choice": None, "left out": {"nothing": "its numbers are off by nan of the size of PyTorch's"}}
    layer.method.weight.fill_(torch.inf)
    assert list(tune(layer, lambda calls: 1.0, {}, compare=True).values()) == [None]
    assert "numbers of unquantized are not compared with PyTorch's: ArithmeticError: they are not finite" in caplog.text


def test_a_start_ends_with_one_line_where_every_way_to_multiply_is_wrong() -> None:
    layer = Wrong({"half as much again": 1.5, "double": 2.0}).layer(4)
    with pytest.raises(ConfigError, match=r"here \(unquantized, 1 rows: .* off by 0.5 .*triton_kernels"):
        tune(layer, lambda calls: 1.0, {}, compare=True)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ("aqlm", "quantized by 'aqlm'"),
        ({"bits": 4}, "quantized by 'None'"),
        ({"quant_method": ["scaled_rows"]}, "quantized by"),
        ({"quant_method": "scaled_rows"}, "quantization_config cannot be read as 'scaled_rows'"),
        ({"quant_method": "scaled_rows", "layers": 7}, "cannot be read"),
        ({"quant_method": "scaled_rows", "layers": "("}, "cannot be read"),
    ],
)
def test_what_no_format_can_read_is_refused(quantization: Any, message: str, tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    config = read_config(folder) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=message):
        load_model(folder)


def test_a_name_belongs_to_one_format() -> None:
    with pytest.raises(ConfigError, match="'scaled_rows' is registered already"):
        LINEAR_METHODS.register("scaled_rows")(lambda quantization, unquantized: LinearMethods(unquantized))


def test_an_entry_point_is_a_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_format, "LINEAR_METHODS", Plugins("linear method", "kvern.linear_methods"))
    site = tmp_path / "site"
    site.mkdir()
    (site / "fancy_format.py").write_text("from tests.support.scaled_rows import scaled_rows as fancy\n")
    metadata = site / "fancy_format-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: fancy-format\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[kvern.linear_methods]\nfancy = fancy_format:fancy\n")
    monkeypatch.syspath_prepend(str(site))
    made = quantize(make_checkpoint("llama", tmp_path / "model"), tmp_path, "mlp")
    config = read_config(made.quantized)
    config["quantization_config"]["quant_method"] = "fancy"
    (made.quantized / "config.json").write_text(json.dumps(config))
    assert (logits(load_model(made.quantized), PROMPT) - logits(load_model(made.rounded), PROMPT)).abs().max() < 1e-4
    monkeypatch.delitem(sys.modules, "fancy_format")
