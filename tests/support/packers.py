"""Checkpoints in the formats of four bits, packed with NumPy from the formats' own descriptions.

made = store(make_checkpoint("llama", tmp_path / "model"), tmp_path, gptq, "mlp|self_attn", config)
made.quantized          # a checkpoint whose layers of these paths are stored so
made.rounded            # the same numbers as plain weights
"""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvern.models.loader import llama_name, read_config
from kvern.models.registry import spec_from_config
from tests.support.scaled_rows import Checkpoints

Array = NDArray[Any]
Stored = tuple[Mapping[str, Tensor], Tensor]
"""The tensors of a weight by the endings of their names, and the plain weight that they stand for."""

Pack = Callable[[Tensor], Stored]


def words(codes: Array, bits: int, order: tuple[int, ...] | None = None) -> Array:
    """Codes [R, C] along the rows' entries, some in a 32-bit word: [R, C * bits / 32].

    Bits of `order[i]`, i if there is none, stand at `i * bits`.
    """
    count = 32 // bits
    places = order or tuple(range(count))
    packed = np.zeros((codes.shape[0], codes.shape[1] // count), dtype=np.uint32)
    for place, item in enumerate(places):
        packed |= codes[:, item::count].astype(np.uint32) << np.uint32(place * bits)
    return packed.view(np.int32)


def integers(weight: Array, group: int, bits: int, symmetric: bool) -> tuple[Array, Array, Array]:
    """Codes [O, I] and zeros [O, G] from 0 on, and scales [O, G] that float16 holds, rounded to nearest."""
    most = 2**bits - 1
    groups = weight.reshape(weight.shape[0], -1, group)
    if symmetric:
        scale = np.abs(groups).max(-1) / (most // 2)
        zero = np.full_like(scale, (most + 1) // 2)
    else:
        low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
        scale = (high - low) / most
        zero = np.round(-low / scale)
    scale = scale.astype(np.float16).astype(np.float32)
    zero = np.clip(zero, 0, most)
    codes = np.clip(np.round(groups / scale[..., None]) + zero[..., None], 0, most)
    return codes.reshape(weight.shape).astype(np.int64), zero.astype(np.int64), scale


def gptq(
    weight: Tensor,
    group: int = 16,
    bits: int = 4,
    *,
    symmetric: bool = False,
    version: int = 1,
    act_order: int | None = None,
    bias: bool = False,
) -> Stored:
    """`act_order`: a seed of which inputs a group has. `bias`: one of zeros beside it, as early versions wrote."""
    plain = weight.float().numpy()
    inputs = plain.shape[1]
    group = inputs if group == -1 else group
    g_idx = np.arange(inputs) // group
    if act_order is not None:
        g_idx = np.random.default_rng(act_order).permutation(g_idx)
    order = np.argsort(g_idx, kind="stable")
    sorted_codes, zero, scale = integers(plain[:, order], group, bits, symmetric)
    codes = np.empty_like(sorted_codes)
    codes[:, order] = sorted_codes
    if version == 1:
        zero = np.maximum(zero, 1)  # the version has no zero of 0
    rounded = (codes - zero[:, g_idx]) * scale[:, g_idx]
    tensors = {
        "qweight": words(codes, bits).T,
        "qzeros": words((zero - (version == 1)).T, bits),
        "scales": scale.T.astype(np.float16),
        "g_idx": g_idx.astype(np.int32),
        **({"bias": np.zeros(len(plain), dtype=np.float16)} if bias else {}),
    }
    return _tensors(tensors), torch.from_numpy(rounded.astype(np.float32))


def awq(weight: Tensor, group: int = 16) -> Stored:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    codes, zero, scale = integers(weight.float().numpy(), group, 4, False)
    rounded = (codes - zero.repeat(group, 1)) * scale.repeat(group, 1)
    tensors = {
        "qweight": words(codes.T, 4, order),
        "qzeros": words(zero.T, 4, order),
        "scales": scale.T.astype(np.float16),
    }
    return _tensors(tensors), torch.from_numpy(rounded.astype(np.float32))


def fp4_codes(scaled: Array) -> tuple[Array, Array]:
    """The codes of E2M1 nearest to numbers, and what they are: sign, two bits of exponent, one of fraction."""
    code = np.arange(16)
    sign, exponent, fraction = np.where(code & 8, -1.0, 1.0), code >> 1 & 3, code & 1
    numbers = sign * np.where(exponent == 0, fraction / 2, (1 + fraction / 2) * 2.0 ** (exponent - 1))
    codes = np.abs(scaled[..., None] - numbers).argmin(-1)
    return codes, numbers[codes]


def bytes_of(codes: Array) -> Array:
    """Two codes in a byte, the even one in the low bits."""
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).astype(np.uint8)


def mxfp4(weight: Tensor) -> Stored:
    """`blocks` and `scales` of weights [..., I]."""
    groups = weight.float().numpy().reshape(*weight.shape[:-1], -1, 32)
    exponent = np.floor(np.log2(np.abs(groups).max(-1))) - 2
    codes, numbers = fp4_codes(groups / 2.0 ** exponent[..., None])
    rounded = numbers * 2.0 ** exponent[..., None]
    tensors = {"blocks": bytes_of(codes), "scales": (exponent + 127).astype(np.uint8)}
    return _tensors(tensors), torch.from_numpy(rounded.reshape(weight.shape).astype(np.float32))


def nvfp4(weight: Tensor) -> Stored:
    """NVFP4 as modelopt stores it."""
    groups = weight.float().numpy().reshape(weight.shape[0], -1, 16)
    whole = np.float32(np.abs(groups).max() / (6 * 448))
    scale = torch.from_numpy(np.abs(groups).max(-1) / 6 / whole).to(torch.float8_e4m3fn)
    both = scale.float().numpy() * whole
    codes, numbers = fp4_codes(groups / np.maximum(both, 1e-30)[..., None])
    rounded = torch.from_numpy((numbers * both[..., None]).astype(np.float32))
    tensors = {
        "weight": torch.from_numpy(bytes_of(codes.reshape(weight.shape))),
        "weight_scale": scale,
        "weight_scale_2": torch.tensor(whole),
        "input_scale": torch.tensor(0.5),
    }
    return tensors, rounded.view(weight.shape)


def nf4(weight: Tensor, *, nested: bool = False) -> Stored:
    """Its numbers are quantiles of the normal distribution, eight above zero and seven below."""
    normal = torch.distributions.Normal(0.0, 1.0)
    offset = 0.9677083
    above = normal.icdf(torch.linspace(offset, 0.5, 9)[:-1])
    below = -normal.icdf(torch.linspace(offset, 0.5, 8)[:-1])
    quant_map = torch.cat([above, torch.zeros(1), below]).sort().values
    quant_map = quant_map / quant_map.max()
    blocks = weight.float().reshape(-1, 64)
    absmax = blocks.abs().amax(-1)
    state: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": 64,
        "dtype": "float32",
        "shape": list(weight.shape),
    }
    tensors = {"weight.quant_map": quant_map, "weight.absmax": absmax}
    if nested:
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(absmax.mean())}
        outer = torch.nn.functional.pad(absmax - absmax.mean(), (0, -len(absmax) % 256)).view(-1, 256)
        nested_absmax = outer.abs().amax(-1)
        numbers = torch.linspace(-1, 1, 256)
        codes = (outer[..., None] / nested_absmax[:, None, None] - numbers).abs().argmin(-1)
        absmax_again = (numbers[codes] * nested_absmax[:, None]).flatten()[: len(absmax)] + state["nested_offset"]
        tensors |= {
            "weight.absmax": codes.flatten()[: len(absmax)].to(torch.uint8),
            "weight.nested_absmax": nested_absmax,
            "weight.nested_quant_map": numbers,
        }
        absmax = absmax_again
    codes = (blocks[..., None] / absmax[:, None, None] - quant_map).abs().argmin(-1)
    flat = codes.flatten().to(torch.uint8)
    tensors |= {
        "weight": (flat[0::2] * 16 + flat[1::2])[:, None],
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return tensors, (quant_map[codes] * absmax[:, None]).view(weight.shape)


def plain_int4(weight: Tensor, group: int = 32) -> Stored:
    """INT4 in torchao's packing "plain", with 16-bit scales and zeros: code * scale + zero."""
    groups = weight.float().reshape(len(weight), -1, group)
    scale = ((groups.amax(-1) - groups.amin(-1)) / 15).bfloat16()
    zero = (groups.amin(-1) + 8 * scale.float()).bfloat16()
    codes = ((groups - zero[..., None].float()) / scale[..., None].float()).round().clamp(-8, 7)
    rounded = codes * scale[..., None].float() + zero[..., None].float()
    packed = bytes_of((codes.to(torch.int64) & 15).view(weight.shape).numpy())
    tensors = {
        "weight": torch.from_numpy(packed.view(np.int8)),
        "weight_scale": scale.t(),
        "weight_zero_point": zero.t(),
    }
    return tensors, rounded.view(weight.shape)


def store(model: Path, folder: Path, pack: Pack, layers: str, config: Mapping[str, Any]) -> Checkpoints:
    """Store the weights of layers whose Llama-style paths match the regular expression by `pack`, and rounded so."""
    made = Checkpoints(folder / "quantized", folder / "rounded")
    model_config = read_config(model)
    renames = spec_from_config(model_config).renames
    rounded = load_file(model / "model.safetensors")
    stored: dict[str, Tensor] = {}
    for name, weight in rounded.items():
        path = llama_name(name, renames)[0].removesuffix(".weight")
        if weight.dim() < 2 or not re.search(layers, path):
            stored[name] = weight
            continue
        tensors, rounded[name] = pack(weight)
        separator = "." if name.endswith(".weight") else "_"
        stored |= {name.removesuffix(".weight") + separator + kind: value for kind, value in tensors.items()}
    for target, tensors in zip(made, (stored, rounded), strict=True):
        shutil.copytree(model, target)
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(contiguous, target / "model.safetensors", metadata={"format": "pt"})
    (made.quantized / "config.json").write_text(json.dumps(model_config | {"quantization_config": dict(config)}))
    return made


def stack_experts(model: Path) -> Path:
    """Store the experts of a checkpoint of Mixtral's names in two tensors a layer, in place; the folder."""
    tensors = load_file(model / "model.safetensors")
    experts: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name in list(tensors):
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(w[123])\.weight", name):
            experts.setdefault(match[1], {}).setdefault(int(match[2]), {})[match[3]] = tensors.pop(name)
    for prefix, group in experts.items():
        items = [item for _, item in sorted(group.items())]
        tensors[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat([item["w1"], item["w3"]]) for item in items])
        tensors[f"{prefix}.down_proj"] = torch.stack([item["w2"] for item in items])
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    return model


def _tensors(arrays: Mapping[str, Array]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


def mxfp4_experts(weight: Tensor) -> Stored:
    """Experts' matrices [experts, inputs, outputs], which are published the other way round."""
    tensors, rounded = mxfp4(weight.transpose(1, 2).contiguous())
    return tensors, rounded.transpose(1, 2)
