"""Matrices of a GGUF file: rows of blocks, each with its scales, stored as the file has them.

Kernels of a CPU have codes and scales of rows apart:

    q4_0, iq4_nl, mxfp4   codes in pairs, as other formats of four bits have them
    q8_0                  codes
    q4_k                  codes in pairs; scales and minima a byte each: 148 bytes for 144
    q6_k                  codes and scales a byte each: 274 bytes for 210
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvern.cpu.packed import STEP, Groups, GroupsProduct, side_by_side
from kvern.errors import UnsupportedModel, shown
from kvern.formats.gguf.config import layout_of
from kvern.formats.gguf.files import read_gguf
from kvern.formats.gguf.header import BY_NAME, PLAIN, QUANTIZED, BlockType
from kvern.formats.gguf.names import StoredPart, stored_parts
from kvern.formats.groups import pack_pairs, unpack_pairs
from kvern.formats.method import MIDDLE, CpuProduct, Packed, QuantizedMethod, groups_product
from kvern.kernels.packed import E2M1, NON_LINEAR
from kvern.layers.build_options import BuildOptions
from kvern.layers.linear_format import LinearFormat, LinearMethods
from kvern.layers.linear_method import OUTPUTS, RANDOM_SPREAD, Axis, LinearMethod, LinearShape, Part, TensorLayout
from kvern.models.checkpoint import StoredTensor

E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The half-precision number at a byte: `[N, 1]`."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def bits_of(data: Tensor, run: int, width: int) -> Tensor:
    """`[N, bytes] -> [N, 8 / width * bytes]`: of each run of bytes the lowest bits, then the next."""
    data = data.reshape(len(data), -1, 1, run)
    return torch.cat([data >> shift for shift in range(0, 8, width)], 2).flatten(1) & ((1 << width) - 1)


def _spread(scales: Tensor, numbers: int) -> Tensor:
    """Repeats each of `[N, S]` for its share of the block's numbers."""
    return scales.repeat_interleave(numbers // scales.shape[1], 1)


def q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (bits_of(blocks[:, 2:], 16, 4).float() - 8)


def q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * bits_of(blocks[:, 4:], 16, 4).float() + _half(blocks, 2)


def q5_0(blocks: Tensor) -> Tensor:
    codes = bits_of(blocks[:, 6:], 16, 4) | bits_of(blocks[:, 2:6], 1, 1) << 4
    return _half(blocks, 0) * (codes.float() - 16)


def q5_1(blocks: Tensor) -> Tensor:
    codes = bits_of(blocks[:, 8:], 16, 4) | bits_of(blocks[:, 4:8], 1, 1) << 4
    return _half(blocks, 0) * codes.float() + _half(blocks, 2)


def q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float() * _half(blocks, 0)


def q2_k(blocks: Tensor) -> Tensor:
    scales, codes = blocks[:, :16], bits_of(blocks[:, 16:80], 32, 2).float()
    scale, least = _half(blocks, 80) * (scales & 15).float(), _half(blocks, 82) * (scales >> 4).float()
    return _spread(scale, 256) * codes - _spread(least, 256)


def q3_k(blocks: Tensor) -> Tensor:
    high = blocks[:, :32]
    codes = bits_of(blocks[:, 32:96], 32, 2).float()
    packed = blocks[:, 96:108]
    scales = bits_of(packed[:, :8], 8, 4) | bits_of(packed[:, 8:], 4, 2) << 4
    scale = _half(blocks, 108) * (scales.float() - 32)
    return _spread(scale, 256) * (codes - 4 * (1 - bits_of(high, 32, 1).float()))


def scales_and_minima(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Decodes eight scales and eight minima of 6 bits from 12 bytes: `[N, 12] -> [N, 8]`, twice."""
    low = packed[:, :4]
    middle = packed[:, 4:8]
    high = packed[:, 8:]
    scales = torch.cat((low & 63, high & 15 | low >> 2 & 48), 1)
    return scales.float(), torch.cat((middle & 63, high >> 4 | middle >> 2 & 48), 1).float()


def _with_minima(blocks: Tensor, codes: Tensor) -> Tensor:
    scales, minima = scales_and_minima(blocks[:, 4:16])
    scale, least = _half(blocks, 0) * scales, _half(blocks, 2) * minima
    return _spread(scale, 256) * codes.float() - _spread(least, 256)


def q4_k(blocks: Tensor) -> Tensor:
    return _with_minima(blocks, bits_of(blocks[:, 16:], 32, 4))


def q5_k(blocks: Tensor) -> Tensor:
    return _with_minima(blocks, bits_of(blocks[:, 48:], 32, 4) | bits_of(blocks[:, 16:48], 32, 1) << 4)


def q6_k(blocks: Tensor) -> Tensor:
    codes = bits_of(blocks[:, :128], 64, 4) | bits_of(blocks[:, 128:192], 32, 2) << 4
    scale = _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    return _spread(scale, 256) * (codes.float() - 32)


@cache
def _table(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Kept, since a CUDA graph, which embeds and multiplies, can take nothing from the host."""
    return torch.tensor(numbers, dtype=torch.float32, device=device)


def _looked_up(table: tuple[int, ...], codes: Tensor) -> Tensor:
    return _table(table, codes.device)[codes.int()]


def iq4_nl(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _looked_up(NON_LINEAR, bits_of(blocks[:, 2:], 16, 4))


def iq4_xs(blocks: Tensor) -> Tensor:
    low = bits_of(blocks[:, 4:8], 1, 4)
    high = bits_of(blocks[:, 2:4], 1, 2)
    scale = _half(blocks, 0) * ((low | high << 4).float() - 32)
    return _spread(scale, 256) * _looked_up(NON_LINEAR, bits_of(blocks[:, 8:], 16, 4))


def mxfp4(blocks: Tensor) -> Tensor:
    exponents = blocks[:, :1].int()
    # half of 2^(e - 127), for the table holds doubled numbers; the two smallest are subnormal
    bits = torch.where(exponents < 2, 0x00200000 << exponents.clamp(max=1), (exponents - 1).clamp_min(0) << 23)
    return bits.view(torch.float32) * _looked_up(E2M1_DOUBLED, bits_of(blocks[:, 1:], 16, 4))


NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    function.__name__: function
    for function in (q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs, mxfp4)
}
"""The function that decodes each type."""


Run = tuple[int, int]
"""The first byte of a run in a block, and the byte after its last."""
RUN_NUMBERS = 1 << 24
"""The number of values whose bits are reordered at a time."""

CODES: dict[str, tuple[Run, ...]] = {
    "q4_0": ((2, 18),),
    "q4_1": ((4, 20),),
    "q5_0": ((6, 22), (2, 6)),
    "q5_1": ((8, 24), (4, 8)),
    "q8_0": ((2, 34),),
    "q2_k": (),
    "q3_k": (),
    "q4_k": (),
    "q5_k": ((48, 176),),
    "q6_k": (),
    "iq4_nl": ((2, 18),),
    "iq4_xs": ((8, 136),),
    "mxfp4": ((1, 17),),
}
SCALES: dict[str, tuple[Run, ...]] = {
    "q2_k": ((80, 84), (0, 16)),
    "q3_k": ((108, 110), (96, 108)),
    "q4_k": ((0, 16),),
    "q5_k": ((0, 16),),
    "q6_k": ((208, 210), (192, 208)),
    "q4_1": ((0, 4),),
    "q5_1": ((0, 4),),
    "iq4_xs": ((0, 8),),
    "mxfp4": ((0, 1),),
}
"""Bytes of the scales; other types have them in their first two bytes."""
PAIRS: dict[str, Run] = {"q2_k": (16, 80), "q3_k": (32, 96), "q6_k": (128, 192)}
"""Bytes with two bits of each number: 32 bytes hold those of 128 numbers, the first 32 in the lowest bits."""
HALVES: dict[str, tuple[int, int, int]] = {"q4_k": (16, 144, 32), "q6_k": (0, 128, 64)}
"""Bytes with four bits of each number, and a run: its bytes hold twice as many numbers, the first in low halves."""
SINGLES: dict[str, Run] = {"q3_k": (0, 32), "q5_k": (16, 48)}
"""Bytes with one bit of each number: 32 bytes hold those of 256 numbers."""
PLANE_RUN = {"q5_k": 32, "q6_k": 1, "q2_k": 16, "q3_k": 16}
"""Adjacent numbers of a plane."""


def taken_apart(name: str, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of blocks `[rows, blocks, bytes]`."""
    step = max(1, RUN_NUMBERS // (blocks.shape[1] * BY_NAME[name].numbers))
    codes = torch.cat([_codes(name, run) for run in torch.split(blocks, step)])
    return codes, torch.cat([blocks[..., first:last] for first, last in SCALES.get(name, ((0, 2),))], -1).contiguous()


def put_together(name: str, codes: Tensor, scales: Tensor) -> Tensor:
    """The blocks again."""
    blocks = codes.new_empty(*codes.shape[:-1], BY_NAME[name].size)
    for source, runs in ((codes, CODES[name]), (scales, SCALES.get(name, ((0, 2),)))):
        at = 0
        for first, last in runs:
            blocks[..., first:last] = source[..., at : at + last - first]
            at += last - first
    if name in HALVES:
        first, last, run = HALVES[name]
        blocks[..., first:last] = bits_in_bytes(unpack_pairs(codes[..., : last - first]), 4, run)
    at = sum(last - first for first, last in CODES[name]) + (128 if name in HALVES else 0)
    for width, places in ((2, PAIRS), (1, SINGLES)):
        if name in places:
            first, last = places[name]
            words = codes[..., at : at + last - first].contiguous().view(torch.int32)
            blocks[..., first:last] = bits_in_bytes(_numbers_of_columns(words, width, PLANE_RUN[name]), width)
            at += last - first
    return blocks


def _codes(name: str, blocks: Tensor) -> Tensor:
    parts = [blocks[..., first:last] for first, last in CODES[name]]
    if name in HALVES:
        first, last, run = HALVES[name]
        numbers = bits_of(blocks[..., first:last].flatten(0, 1), run, 4).view(*blocks.shape[:2], 256)
        parts.append(pack_pairs(numbers))
    for width, places in ((2, PAIRS), (1, SINGLES)):
        if name in places:
            first, last = places[name]
            bits = bits_of(blocks[..., first:last].flatten(0, 1), 32, width).view(*blocks.shape[:2], 256)
            parts.append(_words_of_columns(bits, width, PLANE_RUN[name]).view(torch.uint8))
    return torch.cat(parts, -1)


def _words_of_columns(bits: Tensor, width: int, run: int) -> Tensor:
    """`[rows, blocks, 256]`, of each number some bits, to words `[rows, blocks, 8 * width]` int32."""
    planes = bits.reshape(*bits.shape[:2], -1, 2, run).transpose(-3, -2)
    columns = planes.reshape(*bits.shape[:2], 2, 8, 16).int()
    words = (columns << width * torch.arange(16, device=bits.device)).sum(-1, dtype=torch.int32)  # [..., plane, unit]
    if width == 2:
        return words.transpose(-2, -1).flatten(-2)
    return words[..., 0, :] | words[..., 1, :] << 16


def _numbers_of_columns(words: Tensor, width: int, run: int) -> Tensor:
    """The bits of the words again: `[rows, blocks, 256]` uint8."""
    rows, blocks, _ = words.shape
    pairs = words.view(rows, blocks, 8, 2).transpose(-2, -1) if width == 2 else torch.stack((words, words >> 16), -2)
    columns = pairs[..., None] >> width * torch.arange(16, device=words.device) & (1 << width) - 1
    return columns.to(torch.uint8).reshape(rows, blocks, 2, -1, run).transpose(-3, -2).reshape(rows, blocks, 256)


def bits_in_bytes(bits: Tensor, width: int, run: int = 32) -> Tensor:
    """Packs the result of `bits_of` into bytes again."""
    parts = bits.reshape(*bits.shape[:2], -1, 8 // width, run)
    shifts = width * torch.arange(8 // width, device=bits.device, dtype=torch.uint8)[:, None]
    return (parts << shifts).sum(-2, dtype=torch.uint8).flatten(-2)


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
        for at, _ in HALF_SCALES[self.name]:
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
        for at, scale in HALF_SCALES[self.block.name]:
            value = torch.tensor([scale], dtype=torch.float16).view(torch.uint8)
            self.weight[..., at : at + 2] = value.to(self.weight.device)
        if self.block.name == "mxfp4":
            self.weight[..., 0] = 120


def _scales(largest: float, *places: int) -> list[tuple[int, float]]:
    return [(at, RANDOM_SPREAD / largest) for at in places]


HALF_SCALES: dict[str, list[tuple[int, float]]] = {
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


DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def gguf_tensors(file: Path) -> list[StoredTensor]:
    """The tensors of a model whose only or first file is given. Raises CorruptCheckpoint or UnsupportedModel."""
    model = read_gguf(file)
    found = [_stored(part) for part in stored_parts(model.tensors, layout_of(model))]
    return sorted(found, key=lambda tensor: (tensor.file, tensor.begin))


def _stored(part: StoredPart) -> StoredTensor:
    """Blocks are `uint8 [rows, blocks of a row, bytes of a block]`."""
    block, shape = part.tensor.type, part.shape
    if block.name not in DTYPES:
        shape = (*shape[:-1], shape[-1] // block.numbers, block.size)
    change = _heads_unpaired(part.head_rows) if part.head_rows else _change(part)
    dtype = DTYPES.get(block.name, torch.uint8)
    return StoredTensor(part.name, part.tensor.file, dtype, shape, part.begin, change, max(part.head_rows, 1))


def _change(part: StoredPart) -> Callable[[Tensor], Tensor] | None:
    """The change of each row, if any."""
    return _less_one if part.plus_one else _logarithms if part.rates else None


def _heads_unpaired(head_rows: int) -> Callable[[Tensor], Tensor]:
    """Rows of heads, in which each two neighbours turn together: then the first of all pairs, then the second."""

    def unpaired(rows: Tensor) -> Tensor:
        return rows.view(-1, head_rows // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)

    return unpaired


def _less_one(rows: Tensor) -> Tensor:
    return rows - 1


def _logarithms(rates: Tensor) -> Tensor:
    return rates.neg().log()
