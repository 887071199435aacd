"""GGUF's blocks as kernels of a CPU have them: codes and scales of rows apart, and put together again.

q4_0, iq4_nl, mxfp4   codes in pairs, as other formats of four bits have them
q8_0                  codes
q4_k                  codes in pairs; scales and minima a byte each: 148 bytes for 144
q6_k                  codes and scales a byte each: 274 bytes for 210
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from kvern.cpu.packed import STEP, Groups, side_by_side
from kvern.formats.cpu_products import MIDDLE, PackedProduct
from kvern.formats.gguf.blocks import bits_of, scales_and_minima
from kvern.formats.gguf.parts import bits_in_bytes, put_together, taken_apart
from kvern.formats.groups import pack_pairs, unpack_pairs
from kvern.kernels.packed import E2M1, NON_LINEAR
from kvern.layers.linear_method import LinearShape

INT4 = tuple(number - MIDDLE for number in range(16))
NUMBERS = {"q4_0": INT4, "iq4_nl": NON_LINEAR, "mxfp4": E2M1, "q4_k": range(16), "q8_0": None, "q6_k": None}
"""The values of 4-bit codes of each type that kernels support; None: 8-bit codes."""
GROUP = {"q6_k": 16}
"""Inputs that share a scale; 32 in other types."""
PARTS = ("codes", "scale", "zero", "outer", "outer_zero")


def gguf_product(shape: LinearShape, name: str, blocks: Tensor) -> PackedProduct | None:
    """The product with blocks `[outputs, blocks, bytes]` of a type; None: no kernel supports it."""
    if name not in NUMBERS:
        return None
    parts = _apart(name, blocks)
    lanes = {kind: side_by_side(part, STEP if kind == "codes" else 1) for kind, part in parts.items()}
    found: list[Tensor | None] = [lanes.get(kind) for kind in PARTS]
    codes, scale, zero, outer, outer_zero = found
    assert codes is not None
    assert scale is not None
    group = GROUP.get(name, 32)
    return PackedProduct(shape, Groups(codes, NUMBERS[name], scale, zero, group, outer=outer, outer_zero=outer_zero))


def _apart(name: str, blocks: Tensor) -> dict[str, Tensor]:
    """The parts of blocks by their names in PARTS: rows `[outputs, ...]`."""
    rows = len(blocks)
    if name == "q4_k":
        codes, scales = taken_apart(name, blocks)
        scale, least = scales_and_minima(scales[..., 4:].reshape(-1, 12))
        return {
            "codes": codes.view(rows, -1),
            "scale": scale.to(torch.uint8).view(rows, -1),
            "zero": least.to(torch.uint8).view(rows, -1),
            "outer": _halves(scales[..., :2]),
            "outer_zero": _halves(scales[..., 2:4]),
        }
    if name == "q6_k":
        flat = blocks.flatten(0, 1)
        codes = bits_of(flat[:, :128], 64, 4) | bits_of(flat[:, 128:192], 32, 2) << 4
        return {
            "codes": (codes.view(torch.int8) - 32).view(rows, -1),
            "scale": blocks[..., 192:208].reshape(rows, -1).view(torch.int8),
            "outer": _halves(blocks[..., 208:]),
        }
    if name == "q8_0":
        return {"codes": blocks[..., 2:].reshape(rows, -1).view(torch.int8), "scale": _halves(blocks[..., :2])}
    first = 1 if name == "mxfp4" else 2
    pairs = pack_pairs(torch.cat((blocks[..., first:] & 15, blocks[..., first:] >> 4), -1))
    scale = blocks[..., 0].view(torch.float8_e8m0fnu) if name == "mxfp4" else _halves(blocks[..., :2])
    return {"codes": pairs.flatten(1), "scale": scale}


def blocks_of(name: str, parts: Mapping[str, Tensor]) -> Tensor:
    """The blocks `[N, blocks, bytes]` of rows of the PARTS."""
    codes, scale = parts["codes"], parts["scale"]
    rows = len(codes)
    if name == "q4_k":
        (low, high), (least, most) = (parts[kind].view(rows, -1, 2, 4).unbind(2) for kind in ("scale", "zero"))
        packed = (low | high >> 4 << 6, least | most >> 4 << 6, high & 15 | most << 4)
        scales = torch.cat((_bytes(parts["outer"]), _bytes(parts["outer_zero"]), *packed), -1)
        return put_together(name, codes.view(rows, -1, 128), scales)
    if name == "q6_k":
        numbers = (codes + 32).view(torch.uint8).view(rows, -1, 256)
        ends = scale.view(torch.uint8).view(rows, -1, 16), _bytes(parts["outer"])
        return torch.cat((bits_in_bytes(numbers & 15, 4, 64), bits_in_bytes(numbers >> 4, 2), *ends), -1)
    if name == "q8_0":
        return torch.cat((_bytes(scale), codes.view(torch.uint8).view(rows, -1, 32)), -1)
    low, high = unpack_pairs(codes).view(rows, -1, 2, 16).unbind(2)
    return torch.cat((scale.unsqueeze(-1) if name == "mxfp4" else _bytes(scale), low | high << 4), -1)


def _halves(data: Tensor) -> Tensor:
    """Numbers of half precision: uint8 [N, blocks, 2] -> [N, blocks]."""
    return data.contiguous().view(torch.float16).squeeze(-1)


def _bytes(numbers: Tensor) -> Tensor:
    """[N, blocks] of half precision -> uint8 [N, blocks, 2]."""
    return numbers.unsqueeze(-1).contiguous().view(torch.uint8)
