"""Matrices of a GGUF file: rows of blocks, each with its scales, stored as the file has them.

Kernels of a CPU have codes and scales of rows apart:

    q4_0, iq4_nl, mxfp4   codes in pairs, as other formats of four bits have them
    q8_0                  codes
    q4_k                  codes in pairs; scales and minima a byte each: 148 bytes for 144
    q6_k                  codes and scales a byte each: 274 bytes for 210
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kvern.cpu.packed import STEP, Groups, GroupsProduct, side_by_side
from kvern.errors import UnsupportedModel, shown
from kvern.formats.gguf.blocks import NUMBERS, bits_in_bytes, bits_of, put_together, scales_and_minima, taken_apart
from kvern.formats.gguf.header import PLAIN, QUANTIZED, BlockType
from kvern.formats.groups import pack_pairs, unpack_pairs
from kvern.formats.method import MIDDLE, CpuProduct, Packed, QuantizedMethod, groups_product
from kvern.kernels.packed import E2M1, NON_LINEAR
from kvern.layers.build_options import BuildOptions
from kvern.layers.linear_format import LinearFormat, LinearMethods
from kvern.layers.linear_method import OUTPUTS, RANDOM_SPREAD, Axis, LinearMethod, LinearShape, Part, TensorLayout

INT4 = tuple(number - MIDDLE["int4"] for number in range(16))
OF_CODES = {"q4_0": INT4, "iq4_nl": NON_LINEAR, "mxfp4": E2M1, "q4_k": range(16), "q8_0": None, "q6_k": None}
"""The values of 4-bit codes of each type that kernels support; None: 8-bit codes."""
GROUP = {"q6_k": 16}
"""Inputs that share a scale; 32 in other types."""
PARTS = ("codes", "scale", "zero", "outer", "outer_zero")


def gguf_product(shape: LinearShape, name: str, blocks: Tensor) -> GroupsProduct | None:
    """The product with blocks `[outputs, blocks, bytes]` of a type; None: no kernel supports it."""
    if name not in OF_CODES:
        return None
    parts = _apart(name, blocks)
    lanes = {kind: side_by_side(part, STEP if kind == "codes" else 1) for kind, part in parts.items()}
    found: list[Tensor | None] = [lanes.get(kind) for kind in PARTS]
    codes, scale, zero, outer, outer_zero = found
    assert codes is not None
    assert scale is not None
    group = GROUP.get(name, 32)
    return groups_product(shape, Groups(codes, OF_CODES[name], scale, zero, group, outer=outer, outer_zero=outer_zero))


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


class GgufMethod(QuantizedMethod):
    """`weight [outputs, inputs / numbers, bytes]` uint8, the blocks of each row; kernels read them split."""

    weight: Tensor
    codes: Tensor
    scales: Tensor

    def __init__(self, shape: LinearShape, block: BlockType) -> None:
        if shape.inputs % block.numbers:
            raise UnsupportedModel(
                f"a matrix of {shape.inputs} inputs cannot be stored as {block.name.upper()}: it has blocks of "
                f"{block.numbers}"
            )
        self.name, self.block = block.name, block
        super().__init__(shape)

    def layouts(self) -> Mapping[str, TensorLayout]:
        axes = (OUTPUTS, Axis("inputs", self.block.numbers), Axis("others", self.block.size))
        return {"weight": TensorLayout(torch.uint8, axes)}

    def load(self, kind: str, tensor: Tensor, part: Part, first_row: int = 0) -> None:
        for at, _ in SCALES[self.name]:
            if not bool(tensor.view(torch.float16)[..., at // 2].isfinite().all()):
                raise ValueError("the scale of a block is not finite; the file is damaged, download it again")
        super().load(kind, tensor, part, first_row)

    def rows(self, index: Tensor | slice) -> Tensor:
        if self._cpu_product is not None:
            parts = {name: self.stored_rows(lanes, index) for name, lanes in self.named_parameters()}
            blocks = blocks_of(self.name, parts)
        elif self._products is None:
            blocks = self.weight[index]
        else:
            blocks = put_together(self.name, self.codes[index], self.scales[index])
        numbers = NUMBERS[self.name](blocks.reshape(-1, self.block.size))
        return numbers.view(len(blocks), self.shape.inputs).to(self.shape.dtype)

    def packed(self) -> Packed:
        if hasattr(self, "weight"):
            return Packed(self.name, self.weight)
        return Packed(self.name, self.codes, self.scales)

    def finish(self) -> None:
        if self._products is not None:
            codes, scales = taken_apart(self.name, self.weight)
            del self.weight
            self.codes, self.scales = (nn.Parameter(part, requires_grad=False) for part in (codes, scales))
        super().finish()
        if self._cpu_product is not None:
            del self.weight

    def cpu_product(self) -> CpuProduct | None:
        return gguf_product(self.shape, self.name, self.weight)

    def fill_random(self, generator: torch.Generator) -> None:
        """Fills blocks with random codes, and with scales that give small numbers."""
        self.weight.random_(generator=generator)
        for at, scale in SCALES[self.block.name]:
            value = torch.tensor([scale], dtype=torch.float16).view(torch.uint8)
            self.weight[..., at : at + 2] = value.to(self.weight.device)
        if self.block.name == "mxfp4":
            self.weight[..., 0] = 120


def _scales(largest: float, *places: int) -> list[tuple[int, float]]:
    return [(at, RANDOM_SPREAD / largest) for at in places]


SCALES: dict[str, list[tuple[int, float]]] = {
    "q4_0": _scales(8, 0),
    "q4_1": _scales(16, 0, 2),
    "q5_0": _scales(16, 0),
    "q5_1": _scales(32, 0, 2),
    "q8_0": _scales(128, 0),
    "q2_k": _scales(45, 80, 82),
    "q3_k": _scales(128, 108),
    "q4_k": _scales(945, 0, 2),
    "q5_k": _scales(1953, 0, 2),
    "q6_k": _scales(4096, 208),
    "iq4_nl": _scales(127, 0),
    "iq4_xs": _scales(4064, 0),
    "mxfp4": [],
}
"""The offsets of a block's half-precision numbers, and the limit of each that keeps values in RANDOM_SPREAD."""


@dataclass(frozen=True)
class GgufFormat(LinearFormat):
    block: BlockType

    def linear(self, shape: LinearShape, build: BuildOptions) -> LinearMethod:
        return GgufMethod(shape, self.block)


@dataclass(frozen=True)
class GgufMethods(LinearMethods):
    """The format of each path of `formats`, plain for others."""

    formats: Mapping[str, LinearFormat] = field(default_factory=dict, hash=False)

    def of(self, path: str) -> LinearFormat:
        return self.formats.get(path, self.default)


def gguf(quantization: Mapping[str, Any], unquantized: LinearFormat) -> LinearMethods:
    """Reads `types`, the stored type of each path; all experts of a layer share one."""
    formats: dict[str, LinearFormat] = {item.name: GgufFormat(item) for item in QUANTIZED.values()}
    formats |= {item.name: unquantized for item in PLAIN.values()}
    types = dict(quantization["types"])
    for name in types.values():
        if name not in formats:
            raise UnsupportedModel(f"quantization_config has the GGUF type {shown(name)}; known: {', '.join(formats)}")
    return GgufMethods(unquantized, formats={path: formats[name] for path, name in types.items()})
