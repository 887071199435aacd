"""Weights of four bits: checkpoints in each format answer as ones with the same plain weights do."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from kvern.adapters.bank import AdapterBank
from kvern.adapters.peft import read_adapter
from kvern.formats.groups import GroupedMethod
from kvern.formats.method import QuantizedMethod
from kvern.layers.build import Build
from kvern.layers.linear_format import LinearFormat, linear_methods
from kvern.layers.linear_method import LinearShape, Part
from kvern.layers.unquantized import Unquantized
from kvern.models.decoder import Decoder
from kvern.models.loader import LoadOptions, load_model, read_config
from tests.support import packers
from tests.support.families import make_checkpoint
from tests.support.four_bit_checkpoints import AWQ, CASES, FORMATS, GPTQ, SIZES, make, of_tests
from tests.support.model_outputs import PROMPT, logits, methods_by_path
from tests.support.packers import Pack, awq, gptq, mxfp4, nf4, nvfp4, plain_int4, stack_experts, store
from tests.support.peft_adapters import make_adapter

CPU = torch.device("cpu")
GPTQ_2 = GPTQ | {"checkpoint_format": "gptq_v2"}


TOLERANCE = {"nested nf4": 0.02, "torchao": 0.1}
"""Of logits where scales and zeros are rounded to 16 bits; roundings of weights to bfloat16 change them by more."""


@pytest.mark.sample(7)
@pytest.mark.parametrize(("family", "pack", "config"), CASES, ids=[f"{case[0]}-{n}" for n, case in enumerate(CASES)])
def test_logits_are_those_of_the_same_numbers_as_plain_weights(
    family: str, pack: Pack, config: dict[str, Any], tmp_path: Path
) -> None:
    made = make(family, tmp_path, pack, config, tie_word_embeddings=family in ("qwen3", "llama3"))
    decoder = load_model(made.quantized)
    found, expected = logits(decoder, PROMPT), logits(load_model(made.rounded), PROMPT)
    assert (found - expected).abs().max() < TOLERANCE.get(config.get("format", ""), 1e-4)
    assert (found - logits(load_model(tmp_path / "model"), PROMPT)).abs().max() > 0.1
    assert isinstance(decoder.layers[0].self_attn.o_proj.method, GroupedMethod)


@pytest.mark.parametrize(("family", "tied"), [("gemma3", True), ("llama", False)])
@pytest.mark.parametrize(("name", "pack"), [("nvfp4", nvfp4), ("nf4", nf4)])
def test_embeddings_and_heads(family: str, tied: bool, name: str, pack: Pack, tmp_path: Path) -> None:
    layers = "embed_tokens|lm_head"
    made = make(family, tmp_path, pack, of_tests(name) | {"layers": layers}, layers, tie_word_embeddings=tied)
    decoder = load_model(made.quantized)
    assert isinstance(decoder.embed_tokens.method, GroupedMethod)
    assert (decoder.lm_head.method is decoder.embed_tokens.method) == tied
    found, expected = logits(decoder, PROMPT), logits(load_model(made.rounded), PROMPT)
    assert (found - expected).abs().max() < 1e-4
    assert (found - logits(load_model(tmp_path / "model"), PROMPT)).abs().max() > 0.05


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_stacked_experts_in_mxfp4(dtype: torch.dtype, tmp_path: Path) -> None:
    def pack(weight: Tensor) -> packers.Stored:
        tensors, rounded = mxfp4(weight)
        return {**tensors, "scales": tensors["scales"].view(dtype)}, rounded

    model = stack_experts(make_checkpoint("mixtral", tmp_path / "model", **SIZES))
    made = store(model, tmp_path, pack, r"experts\.", {"quant_method": "mxfp4"})
    found, expected = logits(load_model(made.quantized), PROMPT), logits(load_model(made.rounded), PROMPT)
    assert (found - expected).abs().max() < 1e-4
    assert (found - logits(load_model(model), PROMPT)).abs().max() > 0.1


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # within PEFT
def test_adapters_add_to_weights_whose_inputs_are_sorted(tmp_path: Path) -> None:
    made = make("llama", tmp_path, partial(gptq, act_order=1), GPTQ | {"desc_act": True})
    adapter = make_adapter(tmp_path / "model", tmp_path / "adapter", 3, r=5)
    found = []
    for folder in made:
        decoder = load_model(folder)
        bank = AdapterBank(decoder, places=1, rank=8, kernels=False)
        bank.load(0, read_adapter(adapter, decoder.spec, bank.targets, 8, torch.float32))
        found.append(logits(decoder, PROMPT, bank.select([0], [len(PROMPT)], None)))
    assert (found[0] - found[1]).abs().max() < 1e-4


@pytest.mark.parametrize("run_bytes", [128, 300])
@pytest.mark.parametrize(
    ("pack", "config"),
    [
        (partial(gptq, act_order=5), GPTQ | {"desc_act": True}),
        (awq, AWQ),
        (nvfp4, of_tests("nvfp4")),
        (partial(nf4, nested=True), of_tests("nested nf4")),
    ],
    ids=["gptq", "awq", "nvfp4", "nf4"],
)
def test_runs_of_rows_fill_every_tensor(
    pack: Pack, config: dict[str, Any], run_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make("llama", tmp_path, pack, config, num_hidden_layers=1).quantized
    expected = load_model(folder).state_dict()
    monkeypatch.setattr("kvern.models.checkpoint.RUN_BYTES", run_bytes)
    loaded = load_model(folder).state_dict()
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(loaded[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(
    ("pack", "config"),
    [
        (partial(gptq, act_order=5), GPTQ | {"desc_act": True}),
        (partial(gptq, bits=8), GPTQ | {"bits": 8}),
        (nvfp4, of_tests("nvfp4")),
        (nf4, of_tests("nf4")),
    ],
    ids=["act order", "8 bits", "nvfp4", "nf4"],
)
def test_plain_rows_are_rounded_once(pack: Pack, config: dict[str, Any], dtype: str, tmp_path: Path) -> None:
    """In any dtype, of a slice, of an index and as embeddings: the format's numbers, rounded to nearest."""
    made = make("llama", tmp_path, pack, config, num_hidden_layers=1)
    method = load_model(made.quantized, LoadOptions(dtype=dtype)).layers[0].mlp.gate_up_proj.method
    rounded = load_file(made.rounded / "model.safetensors")
    index = torch.tensor([3, 0, 3, 127])
    for linear in method.methods():
        assert isinstance(linear, QuantizedMethod)
        plain = linear.dequantize()
        assert plain.dtype == linear.shape.dtype
        assert torch.equal(linear.rows(index), plain[index]) and torch.equal(linear.embed(index), plain[index])
    plain = method.dequantize()
    expected = torch.cat([rounded[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up")])
    if pack is nf4:
        torch.testing.assert_close(plain, expected.to(plain.dtype))
    else:
        assert torch.equal(plain, expected.to(plain.dtype))


def test_scales_keep_the_precision_of_the_checkpoint(tmp_path: Path) -> None:
    def in_bf16(weight: Tensor) -> packers.Stored:
        tensors, _ = gptq(weight)
        return {**tensors, "scales": tensors["scales"].bfloat16() * 2**-20}, weight

    folder = make("llama", tmp_path, in_bf16, GPTQ, num_hidden_layers=1).quantized
    method = load_model(folder).layers[0].mlp.down_proj.method
    stored = load_file(folder / "model.safetensors")["model.layers.0.mlp.down_proj.scales"]
    assert torch.equal(method.packed().scale, stored.t())


@pytest.mark.parametrize(
    ("pack", "config"),
    [
        (partial(gptq, group=32), GPTQ | {"group_size": 32}),
        (partial(gptq, group=128, act_order=1), GPTQ | {"group_size": 128, "desc_act": True}),
        (partial(gptq, group=64, bits=8), GPTQ | {"group_size": 64, "bits": 8}),
        (partial(awq, group=128), AWQ | {"group_size": 128}),
        (nvfp4, of_tests("nvfp4")),
        (plain_int4, of_tests("torchao")),
        (nf4, of_tests("nf4")),
        (partial(nf4, nested=True), of_tests("nested nf4")),
    ],
    ids=["gptq 32", "gptq act order", "gptq 8 bits", "awq", "nvfp4", "torchao", "nf4", "nested nf4"],
)
def test_weights_take_what_the_format_takes(pack: Pack, config: dict[str, Any], tmp_path: Path) -> None:
    """Within 3 % of the bytes of codes, scales and zeros in the file, before the file is read and after it."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    folder = make("llama", tmp_path, pack, config, **sizes).quantized
    stored = load_file(folder / "model.safetensors")
    beside = re.compile(r"quant_(map|state)|g_idx|input_scale|embed|lm_head|norm")
    expected = sum(tensor.nbytes for name, tensor in stored.items() if not beside.search(name))
    decoder = load_model(folder)
    outline = Decoder(decoder.spec, Build(torch.float32, torch.device("meta"), 1, linear=decoder.build.linear))
    for model in (outline, decoder):
        found = sum(
            parameter.nbytes
            for method in methods_by_path(model).values()
            for part in method.methods()
            if isinstance(part, QuantizedMethod)
            for name, parameter in part.named_parameters()
            if name != "order"
        )
        assert expected * 0.9 < found < expected * 1.03


@pytest.mark.parametrize(
    ("config", "stacked"),
    [
        (GPTQ | {"desc_act": True}, False),
        (GPTQ | {"bits": 8}, False),
        (AWQ, False),
        (of_tests("nvfp4"), False),
        (of_tests("torchao"), False),
        (of_tests("nested nf4"), False),
        ({"quant_method": "mxfp4"}, True),
    ],
    ids=["act order", "8 bits", "awq", "nvfp4", "torchao", "nf4", "mxfp4"],
)
def test_random_weights(config: dict[str, Any], stacked: bool, tmp_path: Path) -> None:
    folder = make_checkpoint("mixtral" if stacked else "llama", tmp_path, **SIZES)
    (folder / "config.json").write_text(json.dumps(read_config(folder) | {"quantization_config": config}))
    first, second = (logits(load_model(folder, LoadOptions(load_format="dummy")), PROMPT) for _ in range(2))
    assert torch.equal(first, second) and first.isfinite().all() and first.std() > 0


def test_layers_by_the_rules_of_gptq(tmp_path: Path) -> None:
    """`dynamic` leaves a layer plain and gives another eight bits; the head is quantized where `lm_head` says so."""
    config = GPTQ | {
        "lm_head": True,
        "dynamic": {r"-:model\.layers\.0\.mlp": {}, r"+:.*down_proj": {"bits": 8, "group_size": 32}},
    }
    model = make_checkpoint("llama", tmp_path / "model", **SIZES, vocab_size=136)
    first = store(model, tmp_path / "first", partial(gptq, bits=8, group=32), r"[12]\.mlp\.down_proj", config)
    layers = r"(self_attn|[12]\.mlp)\.(?!down).*_proj$|lm_head"
    made = store(first.quantized, tmp_path / "second", gptq, layers, config)
    plain = store(first.rounded, tmp_path / "plain", gptq, layers, config).rounded
    decoder = load_model(made.quantized)
    found = {path: method.name for path, method in methods_by_path(decoder).items()}
    assert found["layers.0.mlp.down_proj"] == found["layers.0.mlp.gate_up_proj"] == "unquantized"
    assert found["layers.1.mlp.down_proj"] == "int8 in groups of 32"
    assert found["layers.1.mlp.gate_up_proj"] == found["lm_head"] == "int4 in groups of 16"
    assert (logits(decoder, PROMPT) - logits(load_model(plain), PROMPT)).abs().max() < 1e-4


def test_only_the_modules_that_gptq_names(tmp_path: Path) -> None:
    names = [["self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj"], ["mlp.down_proj"]]
    config = GPTQ | {"modules_in_block_to_quantize": names}
    made = make("llama", tmp_path, gptq, config, r"[qkv]_proj|down_proj")
    found, expected = logits(load_model(made.quantized), PROMPT), logits(load_model(made.rounded), PROMPT)
    assert (found - expected).abs().max() < 1e-4


def test_zeros_of_symmetric_weights_take_no_memory(tmp_path: Path) -> None:
    made = make("llama", tmp_path, partial(gptq, symmetric=True), GPTQ | {"sym": True}, num_hidden_layers=1)
    packed = load_model(made.quantized).layers[0].mlp.down_proj.method.packed()
    assert packed.zero is None and packed.code == "int4" and packed.group == 16
    assert packed.codes.is_contiguous() and packed.codes.shape == (64, 64)


def test_inputs_come_to_groups_in_the_order_that_kernels_read() -> None:
    """The matrix as it is packed, with its inputs taken in `order`, is the matrix of the checkpoint."""
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(0))
    tensors, rounded = gptq(weight, act_order=2)
    quantized = linear_methods({"quantization_config": GPTQ | {"desc_act": True}}, Unquantized()).default
    assert not quantized.joins
    method = quantized.linear(LinearShape(24, 64, torch.float32, CPU), Build(torch.float32, CPU, 1))
    for kind, tensor in tensors.items():
        method.load(kind, tensor, Part(0, range(24), range(64)))
    method.finish()
    assert isinstance(method, GroupedMethod)
    packed = method.packed()
    assert packed.order is not None and packed.scale is not None and packed.zero is not None
    codes = torch.stack([packed.codes & 15, packed.codes >> 4], -1).view(24, 4, 16)
    plain = (codes.float() - packed.zero[..., None]) * packed.scale[..., None].float()
    assert torch.equal(plain.view(24, 64), rounded[:, packed.order.long()])
    x = torch.randn(3, 64)
    torch.testing.assert_close(method.multiply(x, None), x @ rounded.t())


@pytest.mark.parametrize("run", [3, 100])
@pytest.mark.parametrize(
    ("pack", "made"),
    [
        (partial(gptq, version=2), lambda: linear_methods({"quantization_config": GPTQ_2}, Unquantized()).default),
        (awq, lambda: linear_methods({"quantization_config": AWQ}, Unquantized()).default),
        (nvfp4, FORMATS["nvfp4"]),
        (plain_int4, FORMATS["torchao"]),
        (nf4, FORMATS["nf4"]),
    ],
    ids=["gptq", "awq", "nvfp4", "torchao", "nf4"],
)
def test_shards_take_their_slices_of_parts(pack: Pack, made: Callable[[], LinearFormat], run: int) -> None:
    """The second of two shards of a matrix of two parts, cut along its outputs or along its inputs."""
    generator, build = torch.Generator().manual_seed(0), Build(torch.float32, CPU, 1)
    weights = {0: torch.randn(32, 128, generator=generator), 32: torch.randn(16, 128, generator=generator)}
    parts = {first: pack(weight) for first, weight in weights.items()}
    whole, by_outputs, by_inputs = (
        made().linear(LinearShape(outputs, inputs, torch.float32, CPU), build)
        for outputs, inputs in ((48, 128), (24, 128), (48, 64))
    )
    for first, (tensors, rounded) in parts.items():
        size = len(rounded)
        for kind, tensor in tensors.items():
            for row in range(0, len(tensor), run) if tensor.dim() else [0]:
                rows = tensor[row : row + run] if tensor.dim() else tensor
                whole.load(kind, rows, Part(first, range(size), range(128)), row)
                by_inputs.load(kind, rows, Part(first, range(size), range(64, 128), 128), row)
                if not kind.startswith("weight.q"):  # what NF4 says of the whole weight
                    by_outputs.load(kind, rows, Part(first // 2, range(size // 2, size), range(128)), row)
    expected = torch.cat([rounded for _, rounded in parts.values()])
    for method in (whole, by_outputs, by_inputs):
        method.finish()
    near = partial(torch.testing.assert_close, rtol=0, atol=0.004 if pack is plain_int4 else 1e-5)
    near(whole.dequantize(), expected)
    near(by_outputs.dequantize(), torch.cat([expected[16:32], expected[40:]]))
    near(by_inputs.dequantize(), expected[:, 64:])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(("family", "pack", "config"), CASES, ids=[f"{case[0]}-{n}" for n, case in enumerate(CASES)])
def test_what_a_gpu_loads_is_what_a_cpu_loads(family: str, pack: Pack, config: dict[str, Any], tmp_path: Path) -> None:
    folder = make(family, tmp_path, pack, config, num_hidden_layers=1).quantized
    found, expected = load_model(folder, LoadOptions(device="cuda")).state_dict(), load_model(folder).state_dict()
    assert found.keys() == expected.keys()
    stored = [name for name in expected if "_proj." in name]  # norms on a CPU have a factor in their weights
    assert stored
    for name in stored:
        assert torch.equal(found[name].cpu().view(torch.uint8), expected[name].view(torch.uint8)), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_loading_takes_no_more_of_a_gpu_than_the_weights(tmp_path: Path) -> None:
    """Beside them a few runs of rows: not a plain copy of the model, nor one in the checkpoint's order."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 4}
    pack = partial(gptq, group=128, act_order=1)
    folder = make("llama", tmp_path, pack, GPTQ | {"desc_act": True, "group_size": 128}, **sizes).quantized
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    decoder = load_model(folder, LoadOptions(dtype="bf16", device="cuda"))
    runs = 6 * 32 << 20
    assert torch.cuda.max_memory_allocated() - before < decoder.weight_bytes * 1.03 + runs
