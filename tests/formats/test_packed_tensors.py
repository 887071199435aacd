"""Packed weights of compressed-tensors: made by that package, they are the numbers that it makes of them."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from kvern.errors import CorruptCheckpoint
from kvern.formats.compressed_tensors import packed_format
from kvern.formats.method import QuantizedMethod
from kvern.layers.build import Build
from kvern.layers.linear_format import LinearFormat
from kvern.layers.linear_method import LinearShape, Part
from kvern.models.loader import load_model
from tests.support.families import change_tensors
from tests.support.four_bit_checkpoints import FORMATS, INTEGERS, make, of_tests, packed
from tests.support.model_outputs import PROMPT, logits
from tests.support.packers import Pack, Stored

CPU = torch.device("cpu")
CHANNELS: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "channel", "group_size": None}
FLOATS = {"num_bits": 4, "type": "float", "symmetric": True}
ORDERED = INTEGERS | {"group_size": 16, "symmetric": False, "actorder": "group"}
FORMATS["pack-quantized"] = lambda: packed_format(INTEGERS | {"symmetric": False}, None, "pack-quantized")
FORMATS["ordered"] = lambda: packed_format(ORDERED, None, "pack-quantized")


def loaded(made: LinearFormat, tensors: dict[str, Tensor], outputs: int, inputs: int) -> QuantizedMethod:
    method = made.linear(LinearShape(outputs, inputs, torch.float32, CPU), Build(torch.float32, CPU, 1))
    layouts = method.layouts()
    assert {kind for kind, layout in layouts.items() if layout.needed} <= tensors.keys() <= layouts.keys()
    for kind, tensor in tensors.items():
        shape = layouts[kind].shape(outputs, inputs)
        assert [size for size in tensor.shape if size != 1] == [size for size in shape if size != 1]
        method.load(kind, tensor.view(shape), Part(0, range(outputs), range(inputs)))
    method.finish()
    assert isinstance(method, QuantizedMethod)
    return method


def compressed(weight: Tensor, weights: dict[str, Any], form: str) -> tuple[dict[str, Tensor], Tensor]:
    """What compressed-tensors stores of a weight, and what it reads of that."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    groups = weight.view(len(weight), -1, args.group_size or weight.shape[1])
    state = {"weight": weight}
    if form == "nvfp4-pack-quantized":
        state["weight_global_scale"] = generate_gparam(weight.amin(), weight.amax()).view(1)
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args, state.get("weight_global_scale"))
    state |= {"weight_scale": scale, "weight_zero_point": zero}
    compressor = BaseCompressor.get_value_from_registry(form)
    stored = compressor.compress(state, scheme)
    return dict(stored), compressor.decompress(stored, scheme)["weight"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("weights", "form"),
    [
        (INTEGERS | {"symmetric": True}, "pack-quantized"),
        (INTEGERS | {"symmetric": False}, "pack-quantized"),
        (INTEGERS | {"symmetric": False, "num_bits": 8}, "pack-quantized"),
        (INTEGERS | {"symmetric": True, "num_bits": 8, "group_size": 128}, "pack-quantized"),
        (CHANNELS | {"symmetric": False}, "pack-quantized"),
        (FLOATS | {"strategy": "tensor_group", "group_size": 16}, "nvfp4-pack-quantized"),
        (FLOATS | {"strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}, "mxfp4-pack-quantized"),
    ],
    ids=["symmetric", "with zeros", "8 bits with zeros", "8 bits", "channels", "nvfp4", "mxfp4"],
)
@pytest.mark.parametrize("outputs", [40, 27])
def test_what_compressed_tensors_packs_is_what_it_unpacks(weights: dict[str, Any], form: str, outputs: int) -> None:
    weight = torch.randn(outputs, 256, generator=torch.Generator().manual_seed(0)) / 9
    tensors, expected = compressed(weight, weights, form)
    found = loaded(packed_format(weights, None, form), tensors, outputs, 256).dequantize()
    tolerance = 0 if expected.dtype == torch.float32 and form == "pack-quantized" else 2**-7
    torch.testing.assert_close(found, expected.float(), rtol=tolerance, atol=tolerance * 1e-3)
    assert (found - weight).abs().max() < 0.3 * weight.abs().max()


def with_group_index(weight: Tensor) -> Stored:
    """Beside weights whose inputs are in order, too, some write the groups of inputs."""
    tensors, rounded = packed(weight)
    return {**tensors, "weight_g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // 32}, rounded


@pytest.mark.parametrize(
    ("family", "name", "pack"),
    [
        ("llama_bias", "pack-quantized", packed),
        ("mixtral", "pack-quantized", with_group_index),
        ("phi3", "ordered", partial(packed, act_order=4, group=16)),
    ],
    ids=["llama_bias", "mixtral", "phi3"],
)
def test_logits_of_a_packed_model(
    family: str, name: str, pack: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(family, tmp_path, pack, of_tests(name))
    found, expected = logits(load_model(made.quantized), PROMPT), logits(load_model(made.rounded), PROMPT)
    assert (found - expected).abs().max() < 1e-4
    assert (found - logits(load_model(tmp_path / "model"), PROMPT)).abs().max() > 0.1
    monkeypatch.setattr("kvern.models.checkpoint.RUN_BYTES", 300)
    assert torch.equal(logits(load_model(made.quantized), PROMPT), found)


def test_a_shape_that_disagrees_with_its_weight(tmp_path: Path) -> None:
    folder = make("llama", tmp_path, packed, of_tests("pack-quantized"), num_hidden_layers=1).quantized
    name = "model.layers.0.mlp.down_proj.weight_shape"
    assert load_file(folder / "model.safetensors")[name].tolist() == [64, 128]
    change_tensors(folder, **{name: torch.tensor([64, 96])})
    with pytest.raises(
        CorruptCheckpoint, match=re.escape(f"{name} in") + r".*it is \[64, 96\], the weight has \[64, 128\]"
    ):
        load_model(folder)
