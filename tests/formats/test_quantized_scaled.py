"""FP8 and INT8 weights: checkpoints of all who write them, and plain ones that are quantized while they are loaded."""

import json
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvern import LLM, SamplingParams
from kvern.adapters.bank import AdapterBank
from kvern.adapters.peft import read_adapter
from kvern.formats.method import QuantizedMethod
from kvern.formats.online import OnlineMethod
from kvern.formats.scaled import ROWS, TENSOR, Block, Rounding, Scaled, ScaledMethod
from kvern.layers.linear_format import linear_methods
from kvern.layers.linear_method import LinearShape, Part
from kvern.layers.unquantized import Unquantized, UnquantizedMethod
from kvern.models.loader import LoadOptions, load_model, read_config
from kvern.models.registry import spec_from_config
from kvern.runner.gpu_checks import weight_bytes
from tests.support.families import change_tensors, make_checkpoint
from tests.support.model_outputs import PROMPT, logits, methods_by_path
from tests.support.peft_adapters import make_adapter
from tests.support.scaled_checkpoints import (
    CHECKPOINTS,
    FP8,
    INT8,
    RE_PLAIN,
    Packing,
    args,
    quantize,
    quantized,
    reference,
)


@pytest.mark.sample(9)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_are_those_of_the_plain_numbers(name: str, tmp_path: Path) -> None:
    family, packing, config = CHECKPOINTS[name]
    made = quantize(make_checkpoint(family, tmp_path / "model"), tmp_path, packing, config)
    decoder, plain = load_model(made.quantized), load_model(made.rounded, LoadOptions(unquantized=reference(packing)))
    found, expected = logits(decoder, PROMPT), logits(plain, PROMPT)
    assert (found - expected).abs().max() < 1e-4
    if packing.round:
        unrounded = logits(load_model(made.rounded), PROMPT)
        assert (found - unrounded).abs().max() > 0.01, "activations are not rounded"
    assert sum(isinstance(method, QuantizedMethod) for method in decoder.modules()) >= 4
    assert decoder.weight_bytes < plain.weight_bytes / 2


@pytest.mark.parametrize(
    ("family", "ignored", "plain", "left"),
    [
        ("llama", ["model.layers.1.mlp.down_proj", "lm_head"], r"layers\.1\.mlp\.down", "layers.1.mlp.down_proj"),
        ("llama", ["re:.*layers.2.*attn.*o_"], r"layers\.2\.self_attn\.o_", "layers.2.self_attn.o_proj"),
        ("phi3", ["model.layers.0.self_attn.qkv_proj"], r"layers\.0\.self_attn\.qkv", "layers.0.self_attn.qkv_proj"),
        ("starcoder2", ["re:.*layers.1.mlp.c_fc$"], r"layers\.1\.mlp\.up_proj", "layers.1.mlp.up_proj"),
        ("gpt_neox", ["gpt_neox.layers.2.attention.dense"], r"layers\.2\.self_attn\.o_", "layers.2.self_attn.o_proj"),
    ],
)
def test_layers_that_a_list_names_stay_plain_by_either_name(
    family: str, ignored: list[str], plain: str, left: str, tmp_path: Path
) -> None:
    _, packing, described = CHECKPOINTS["compressed-tensors, dynamic"]
    config = described | {"ignore": [*RE_PLAIN, "lm_head", "re:embed_out", *ignored]}
    made = quantize(make_checkpoint(family, tmp_path / "model"), tmp_path, packing, config, plain)
    found = methods_by_path(load_model(made.quantized))
    assert {path for path, method in found.items() if not isinstance(method, QuantizedMethod)} == {
        "embed_tokens",
        "lm_head",
        left,
    }


def test_experts_that_a_list_names_by_the_family_s_own_names_stay_plain(tmp_path: Path) -> None:
    _, packing, described = CHECKPOINTS["fp8 of experts"]
    config = described | {"ignored_layers": ["model.layers.1.block_sparse_moe.experts"]}
    model = make_checkpoint("mixtral", tmp_path / "model")
    made = quantize(model, tmp_path, packing, config, r"layers\.1\.mlp\.experts")
    decoder = load_model(made.quantized)
    kinds = [sum(isinstance(item, QuantizedMethod) for item in layer.mlp.modules()) > 0 for layer in decoder.layers]
    assert kinds == [True, False, True]


def test_scales_of_experts_in_one_tensor_have_two_names(tmp_path: Path) -> None:
    packing, config = (
        Packing(block=(8, 16), scale="weight_scale_inv"),
        {"quant_method": "fp8", "weight_block_size": [8, 16]},
    )
    made = quantize(make_checkpoint("qwen3_moe", tmp_path / "model"), tmp_path, packing, config)
    expected = logits(load_model(made.quantized), PROMPT)
    tensors = load_file(made.quantized / "model.safetensors")
    for layer in (0, 2):
        for name, parts in {"gate_up": ("gate", "up"), "down": ("down",)}.items():
            stem = f"model.layers.{layer}.mlp.experts"
            for kind, ending in {"weight": "", "weight_scale_inv": "_scale_inv"}.items():
                separate = [
                    [tensors.pop(f"{stem}.{expert}.{part}_proj.{kind}") for part in parts] for expert in range(6)
                ]
                tensors[f"{stem}.{name}_proj{ending}"] = torch.stack([torch.cat(found) for found in separate])
    save_file(tensors, made.quantized / "model.safetensors")
    assert torch.equal(logits(load_model(made.quantized), PROMPT), expected)


def test_formats_of_modelopt_come_from_a_file_of_their_own(tmp_path: Path) -> None:
    _, packing, _ = CHECKPOINTS["fp8, static"]
    made = quantize(make_checkpoint("mixtral", tmp_path / "model"), tmp_path, packing, {}, r"layers\.2\.self_attn")
    config = read_config(made.quantized)
    del config["quantization_config"]
    (made.quantized / "config.json").write_text(json.dumps(config))
    described = {
        "quant_algo": "FP8",
        "kv_cache_quant_algo": None,
        "exclude_modules": ["lm_head", "model.layers.2.self*"],
    }
    (made.quantized / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": described}))
    found = logits(load_model(made.quantized), PROMPT)
    decoder = load_model(made.rounded, LoadOptions(unquantized=reference(packing)))
    for layer in (decoder.layers[2].self_attn.qkv_proj, decoder.layers[2].self_attn.o_proj):
        layer.method.how = lambda x: x
    assert (found - logits(decoder, PROMPT)).abs().max() < 1e-4


def test_modelopt_gives_each_layer_its_own_format(tmp_path: Path) -> None:
    _, packing, _ = CHECKPOINTS["fp8, static"]
    layers = {
        f"model.layers.{index}.mlp.{name}_proj": {"quant_algo": "FP8"} for index in (0, 2) for name in ("gate", "up")
    }
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    plain = r"self_attn|down_proj|layers\.1\."
    made = quantize(make_checkpoint("llama", tmp_path / "model"), tmp_path, packing, config, plain)
    assert quantized(made.quantized) == {"layers.0.mlp.gate_up_proj", "layers.2.mlp.gate_up_proj"}


def test_groups_of_targets_by_name_expression_and_class(tmp_path: Path) -> None:
    """Names go before expressions, and these before classes; a target may be the embeddings."""
    weights = {"weights": args("float", "channel")}
    config = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "a": {"targets": ["Linear"]},
            "b": {"targets": ["re:.*self_attn.*", "Embedding"], **weights},
            "c": {"targets": ["model.layers.1.self_attn.o_proj"]},
        },
    }
    model = make_checkpoint("llama", tmp_path / "model")
    made = quantize(model, tmp_path, Packing(column=True), config, r"mlp|layers\.1\.self_attn\.o_proj")
    name = "model.embed_tokens.weight"
    packed, dense = Packing().pack(load_file(model / "model.safetensors")[name])
    change_tensors(made.quantized, **{f"model.embed_tokens.{kind}": tensor for kind, tensor in packed.items()})
    change_tensors(made.rounded, **{name: dense})
    assert (logits(load_model(made.quantized), PROMPT) - logits(load_model(made.rounded), PROMPT)).abs().max() < 1e-4
    attention = {f"layers.{index}.self_attn.{part}" for index in range(3) for part in ("qkv_proj", "o_proj")}
    assert quantized(made.quantized) == (attention | {"embed_tokens"}) - {"layers.1.self_attn.o_proj"}


CPU = torch.device("cpu")


def test_parts_with_scales_of_their_own_are_one_matrix() -> None:
    """Scales of tensors become those of rows; the activations of all have the largest scale."""
    method = ScaledMethod(LinearShape(10, 4, torch.float32, CPU), Scaled("e4m3", TENSOR, Rounding("e4m3"), static=True))
    for first, rows, number in ((0, 6, 2.0), (6, 4, 8.0)):
        part = Part(first, range(rows), range(4))
        method.load("weight", torch.full((rows, 4), 1.5).to(torch.float8_e4m3fn), part)
        method.load("weight_scale", torch.tensor(number), part)
        method.load("input_scale", torch.tensor([number / 4]), part)
    assert method.dequantize()[:, 0].tolist() == [3.0] * 6 + [12.0] * 4
    assert method.input_scale.item() == 2.0
    packed = method.packed()
    assert (packed.group, packed.outputs_per_scale, packed.scale.shape) == (4, 1, (10, 1))  # type: ignore[union-attr]


@pytest.mark.parametrize("run", [1, 3, 100])
@pytest.mark.parametrize("form", [Scaled("e4m3"), Scaled("e4m3", Block(4, 8)), Scaled("int8", Block(1, 8), zeros=True)])
def test_shards_take_their_slices(form: Scaled, run: int) -> None:
    """The second of two shards of a matrix, cut along its outputs or along its inputs, from runs of rows."""
    whole = torch.randn(16, 32)
    packing = Packing(
        form.code, (form.block.outputs, form.block.inputs), zero="weight_zero_point" if form.zeros else ""
    )
    tensors, dense = packing.pack(whole)
    for outputs, inputs in ((range(16), range(32)), (range(8, 16), range(32)), (range(16), range(16, 32))):
        method = ScaledMethod(LinearShape(len(outputs), len(inputs), torch.float32, CPU), form)
        for kind, tensor in tensors.items():
            for row in range(0, len(tensor), run):
                method.load(kind, tensor[row : row + run], Part(0, outputs, inputs), row)
        method.finish()
        expected = dense[outputs.start : outputs.stop, inputs.start : inputs.stop]
        torch.testing.assert_close(method.dequantize(), expected)
        torch.testing.assert_close(method.embed(torch.tensor([3, 1, 3])), expected[[3, 1, 3]])


@pytest.mark.sample(4)
@pytest.mark.parametrize(("quantization", "code"), [("fp8", "e4m3"), ("int8", "int8")])
@pytest.mark.parametrize("family", ["llama_bias", "phi3", "qwen2_moe", "gemma3"])
def test_plain_weights_are_quantized_while_they_are_loaded(
    family: str, quantization: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_checkpoint(family, tmp_path / "model")
    packing = Packing(code, round=FP8 if code == "e4m3" else INT8)
    made = quantize(model, tmp_path, packing, {})
    monkeypatch.setattr("kvern.models.checkpoint.RUN_BYTES", 2000)
    decoder = load_model(model, LoadOptions(quantization=quantization))
    plain = load_model(made.rounded, LoadOptions(unquantized=reference(packing)))
    assert (logits(decoder, PROMPT) - logits(plain, PROMPT)).abs().max() < 1e-4
    assert decoder.weight_bytes < plain.weight_bytes / 2
    kinds = {path: type(method) for path, method in methods_by_path(decoder).items()}
    assert kinds["embed_tokens"] == kinds["lm_head"] == UnquantizedMethod
    assert OnlineMethod in kinds.values()
    again = [
        logits(load_model(model, LoadOptions(quantization=quantization, load_format="dummy")), PROMPT) for _ in range(2)
    ]
    assert torch.equal(*again) and again[0].std() > 0


def test_rows_of_zeros_and_of_huge_numbers() -> None:
    method = OnlineMethod(LinearShape(3, 4, torch.float32, CPU), Scaled("e4m3", ROWS))
    weight = torch.tensor([[0.0] * 4, [1e30, -1e30, 0, 1e28], [1e-8, 0, -1e-8, 0]])
    method.load("weight", weight, Part(0, range(3), range(4)))
    found = method.dequantize()
    assert found.isfinite().all() and (found[0] == 0).all()
    torch.testing.assert_close(found[1:], weight[1:], rtol=0.05, atol=0)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # within PEFT
def test_adapters_add_to_rounded_products(tmp_path: Path) -> None:
    model = make_checkpoint("llama_bias", tmp_path / "model")
    _, packing, config = CHECKPOINTS["fp8, a scale for each tensor"]
    made = quantize(model, tmp_path, packing, config)
    adapter = make_adapter(model, tmp_path / "adapter", 3, r=5)
    found = []
    for decoder in (load_model(made.quantized), load_model(made.rounded, LoadOptions(unquantized=reference(packing)))):
        bank = AdapterBank(decoder, places=1, rank=8, kernels=False)
        bank.load(0, read_adapter(adapter, decoder.spec, bank.targets, 8, torch.float32))
        plain = logits(decoder, PROMPT)
        found.append(logits(decoder, PROMPT, bank.select([0], [len(PROMPT)], None)))
        assert (found[-1] - plain).abs().max() > 0.1
    assert (found[0] - found[1]).abs().max() < 1e-4


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
def test_the_engine_answers_alike_whatever_it_keeps(
    quantization: Literal["fp8", "int8", "int4"], tmp_path: Path
) -> None:
    """Rounding is each token's own: chunks, cached prefixes and other requests change nothing."""
    model = make_checkpoint("qwen3", tmp_path / "model")
    prompts = [[*PROMPT, token] for token in (5, 9, 5)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    answers = []
    for prefix_cache, tokens in ((True, None), (False, 7)):
        llm = LLM(
            str(model),
            device="cpu",
            quantization=quantization,
            prefix_cache=prefix_cache,
            max_batch_tokens=tokens,
            max_batch_requests=3,
            kv_cache_tokens=256,
        )
        answers.append([llm.generate([prompt], params)[0].outputs[0].token_ids for prompt in prompts])
        answers.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
        llm.close()
    assert all(answer == answers[0] for answer in answers)


def test_bytes_of_weights_are_known_before_they_are_loaded(tmp_path: Path) -> None:
    model = make_checkpoint("llama", tmp_path)
    spec = spec_from_config(read_config(model))
    for quantization in ("fp8", "int8", "int4"):
        methods = linear_methods(read_config(model), Unquantized(), quantization)
        expected = weight_bytes(spec, torch.float32, methods)
        assert load_model(model, LoadOptions(quantization=quantization)).weight_bytes == expected
    shape = LinearShape(4096, 4096, torch.bfloat16, torch.device("meta"))
    for form in (Scaled("e4m3"), Scaled("e4m3", Block(128, 128)), Scaled("int8", zeros=True), Scaled("e4m3", TENSOR)):
        assert sum(item.nbytes for item in ScaledMethod(shape, form).parameters()) < 1.002 * 4096 * 4096
