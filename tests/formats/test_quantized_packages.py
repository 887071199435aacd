"""Weights packed by the packages that write checkpoints are the numbers that these packages make of them again."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvern.layers.build import Build
from kvern.layers.linear_format import LinearMethods, linear_methods
from kvern.layers.linear_method import LinearMethod, LinearShape, Part
from kvern.layers.unquantized import Unquantized
from kvern.models.loader import llama_name
from kvern.spec.model import Rename

CPU = torch.device("cpu")
OUTPUTS, INPUTS = 48, 80
PATH = "model.layers.0.mlp.down_proj"


def loaded(methods: LinearMethods, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> LinearMethod:
    """What a layer makes of a checkpoint's tensors of these endings."""
    build = Build(dtype, CPU, 1, linear=methods)
    method = methods.of(PATH).linear(LinearShape(OUTPUTS, INPUTS, dtype, CPU), build)
    renames: tuple[Rename, ...] = methods.renames
    found = {llama_name(f"{PATH}.{name}", renames)[0].removeprefix(f"{PATH}."): item for name, item in tensors.items()}
    needed = {kind for kind, layout in method.layouts().items() if layout.needed}
    assert needed <= set(found) <= set(method.layouts())
    for kind, tensor in found.items():
        shape = method.layouts()[kind].shape(OUTPUTS, INPUTS)
        assert [size for size in tensor.shape if size != 1] == [size for size in shape if size != 1]
        method.load(kind, tensor.reshape(shape), Part(0, range(OUTPUTS), range(INPUTS)))
    method.finish()
    return method


COMPRESSED: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
    ({"type": "float", "strategy": "tensor"}, {"type": "float", "strategy": "tensor", "dynamic": True}),
    ({"type": "float", "strategy": "channel"}, {"type": "float", "strategy": "token", "dynamic": True}),
    ({"type": "float", "strategy": "block", "block_structure": [16, 40]}, None),
    ({"type": "int", "strategy": "channel"}, {"type": "int", "strategy": "token", "dynamic": True}),
    ({"type": "int", "strategy": "channel", "symmetric": False}, None),
    ({"type": "int", "strategy": "group", "group_size": 16, "symmetric": False}, None),
]


@pytest.mark.parametrize(("weights", "activations"), COMPRESSED)
def test_compressed_tensors(weights: dict[str, Any], activations: dict[str, Any] | None) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    helpers = pytest.importorskip("compressed_tensors.quantization.utils")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    described = quantization.QuantizationArgs(num_bits=8, **weights)
    inputs = None if activations is None else quantization.QuantizationArgs(num_bits=8, **activations)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=described, input_activations=inputs)
    weight = torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(0))
    rows, columns = {
        "tensor": (OUTPUTS, INPUTS),
        "channel": (1, INPUTS),
        "group": (1, weights.get("group_size")),
        "block": weights.get("block_structure"),
    }[weights["strategy"]]
    blocks = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    scale, zero = helpers.calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), described)
    form = "float-quantized" if weights["type"] == "float" else "int-quantized"
    compressor = compressors.BaseCompressor.get_value_from_registry(form)
    if weights["strategy"] == "tensor":
        scale, zero = scale.view(1), zero.view(1)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero.to(described.pytorch_dtype())}
    packed = compressor.compress(state, scheme)
    expected = compressor.decompress(packed, scheme)["weight"]
    config = quantization.QuantizationConfig(config_groups={"group_0": scheme}, format=form, ignore=["lm_head"])
    written = json.loads(json.dumps(config.to_dict(), default=str)) | {"quant_method": "compressed-tensors"}
    methods = linear_methods({"quantization_config": written}, Unquantized())
    found = loaded(methods, packed, torch.float32).dequantize()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert 0 < (found - weight).abs().max() < 0.3


@pytest.mark.filterwarnings("ignore")  # it warns while it is imported, of parts for GPUs
@pytest.mark.parametrize(
    "kind",
    [
        "Int8WeightOnlyConfig",
        "Int8WeightOnlyConfig PerGroup",
        "Int8DynamicActivationInt8WeightConfig",
        "Float8WeightOnlyConfig",
        "IntxWeightOnlyConfig",
        "Int8DynamicActivationIntxWeightConfig PerGroup",
    ],
)
def test_torchao(kind: str) -> None:
    ao = pytest.importorskip("torchao.quantization")
    support = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
    to_dict = pytest.importorskip("torchao.core.config").config_to_dict
    name, _, grouped = kind.partition(" ")
    key = "weight_granularity" if name.startswith("Int8DynamicActivationIntx") else "granularity"
    options: dict[str, Any] = {key: ao.PerGroup(16)} if grouped else {}
    if "Intx" in name:
        options["weight_dtype"] = torch.int8
    config = getattr(ao, name)(**options)
    torch.manual_seed(0)
    model = nn.ModuleDict({"down_proj": nn.Linear(INPUTS, OUTPUTS, bias=False).bfloat16()})
    ao.quantize_(model, config)
    state = {key: item.data for key, item in model.state_dict().items()}
    tensors, _ = support.flatten_tensor_state_dict(state)
    written = {"quant_method": "torchao", "quant_type": {"default": json.loads(json.dumps(to_dict(config)))}}
    methods = linear_methods({"quantization_config": written}, Unquantized())
    packed = {key.removeprefix("down_proj."): item for key, item in tensors.items()}
    found = loaded(methods, packed, torch.bfloat16).dequantize()
    expected = state["down_proj.weight"].dequantize()
    torch.testing.assert_close(found, expected, rtol=0.008, atol=1e-4)
