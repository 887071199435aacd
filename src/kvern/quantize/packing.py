"""Codes in the form of compressed-tensors checkpoints, and their quantization_config.

Names and layouts are those of https://github.com/vllm-project/compressed-tensors: "float-quantized" and
"int-quantized" store codes of one byte in `weight`; "pack-quantized" stores 4-bit codes in `weight_packed`, int32, the
first input in the lowest bits, with 8 added to each.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvern.quantize.method import Plan, Rounded
from kvern.quantize.scheme import Scheme


def tensors_of(rounded: Rounded, scale_dtype: torch.dtype) -> dict[str, Tensor]:
    """The stored tensors of a matrix by the end of their names, on the host."""
    codes, grid = rounded
    scheme = grid.scheme
    scale = grid.scale.to(scale_dtype)
    if scheme.bits == 8:
        dtype = torch.float8_e4m3fn if scheme.kind == "float" else torch.int8
        tensors = {"weight": codes.to(dtype), "weight_scale": scale}
    else:
        tensors = {
            "weight_packed": pack(codes, scheme.bits),
            "weight_scale": scale,
            "weight_shape": torch.tensor(codes.shape, dtype=torch.int64),
        }
        if grid.zero is not None:
            tensors["weight_zero_point"] = pack(grid.zero.t(), scheme.bits).t()
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}


def pack(codes: Tensor, bits: int) -> Tensor:
    """`[rows, n]` signed codes -> int32 `[rows, ceil(n / (32 / bits))]`, the first in the lowest bits."""
    count = 32 // bits
    unsigned = codes.to(torch.int64) + (1 << (bits - 1))
    padded = torch.nn.functional.pad(unsigned, (0, -codes.shape[1] % count)).view(len(codes), -1, count)
    shifts = torch.arange(0, 32, bits, device=codes.device)
    words = (padded << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def quantization_config(plan: Plan, plain: list[str], act_order: bool = False) -> dict[str, Any]:
    """The `quantization_config` of config.json; `plain` are the names of linear layers that are not quantized."""
    schemes = list(dict.fromkeys(plan.values()))
    groups: dict[str, Mapping[str, Any]] = {}
    for number, scheme in enumerate(schemes):
        names = [name for name, other in plan.items() if other == scheme]
        groups[f"group_{number}"] = {
            "targets": ["Linear"] if len(schemes) == 1 else names,
            "weights": _weights(scheme, act_order and scheme.bits < 8),
            "input_activations": _activations(scheme) if scheme.activations else None,
            "output_activations": None,
            "format": _format(scheme),
        }
    formats = {_format(scheme) for scheme in schemes}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": plain,
        "kv_cache_scheme": None,
    }


def _format(scheme: Scheme) -> str:
    if scheme.bits < 8:
        return "pack-quantized"
    return "float-quantized" if scheme.kind == "float" else "int-quantized"


def _weights(scheme: Scheme, act_order: bool) -> dict[str, Any]:
    strategy = "block" if scheme.outputs_per_scale > 1 else "group" if scheme.group else "channel"
    return {
        "num_bits": scheme.bits,
        "type": scheme.kind,
        "symmetric": scheme.symmetric,
        "strategy": strategy,
        "group_size": scheme.group if strategy == "group" else None,
        "block_structure": [scheme.outputs_per_scale, scheme.group] if strategy == "block" else None,
        "dynamic": False,
        "actorder": "weight" if act_order else None,
        "observer": "minmax",
    }


def _activations(scheme: Scheme) -> dict[str, Any]:
    """Dynamic, of each token; for blocks of weights, of each run of as many inputs."""
    blocks = scheme.outputs_per_scale > 1
    return {
        "num_bits": scheme.bits,
        "type": scheme.kind,
        "symmetric": True,
        "strategy": "group" if blocks else "token",
        "group_size": scheme.group if blocks else None,
        "block_structure": None,
        "dynamic": True,
        "observer": None,
    }
