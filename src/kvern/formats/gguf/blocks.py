"""GGUF's blocks: their numbers, and their codes and scales split for kernels (`kernels/block_codes.py`).

Functions of a type's name decode `uint8 [N, bytes] -> float32 [N, numbers]`. They follow ggml's definition
(https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h) bit for bit: a scale is a half-precision number d, a
product with it is rounded to single precision before a minimum is subtracted.

Codes and scales together are as large as the blocks. Scales are bytes of the block, its d first. Codes are the bytes
with four or eight bits of each number, then 32-bit words with the other bits: for each 16 columns, one word with a bit
for both planes, the low plane first, or two words with two bits, one for each plane. The four bits of q4_k and q6_k are
in the order of the numbers, two in a byte, as kernels store 4-bit integers; planes are then the even numbers and the
odd ones.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from kvern.formats.gguf.header import BY_NAME
from kvern.kernels.packed import NON_LINEAR

E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The half-precision number at a byte: `[N, 1]`."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(data: Tensor, run: int) -> Tensor:
    """`[N, bytes] -> [N, 2 * bytes]`: of each run of bytes the low halves, then the high ones."""
    data = data.reshape(len(data), -1, 1, run)
    return torch.cat((data & 15, data >> 4), 2).flatten(1)


def bits_of(data: Tensor, run: int, width: int) -> Tensor:
    """`[N, bytes] -> [N, 8 / width * bytes]`: of each run of bytes the lowest bits, then the next."""
    data = data.reshape(len(data), -1, 1, run)
    return torch.cat([data >> shift for shift in range(0, 8, width)], 2).flatten(1) & ((1 << width) - 1)


def _fifth_bits(data: Tensor) -> Tensor:
    """`[N, 4] -> [N, 32]`: the bits of each byte from the lowest on."""
    return torch.stack([data >> shift & 1 for shift in range(8)], -1).flatten(1)


def _spread(scales: Tensor, numbers: int) -> Tensor:
    """Repeats each of `[N, S]` for its share of the block's numbers."""
    return scales.repeat_interleave(numbers // scales.shape[1], 1)


def q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:], 16).float() - 8)


def q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:], 16).float() + _half(blocks, 2)


def q5_0(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6]) << 4
    return _half(blocks, 0) * (codes.float() - 16)


def q5_1(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8]) << 4
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
    scales = _nibbles(packed[:, :8], 8) | bits_of(packed[:, 8:], 4, 2) << 4
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
    return _with_minima(blocks, _nibbles(blocks[:, 16:], 32))


def q5_k(blocks: Tensor) -> Tensor:
    return _with_minima(blocks, _nibbles(blocks[:, 48:], 32) | bits_of(blocks[:, 16:48], 32, 1) << 4)


def q6_k(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[:, :128], 64) | bits_of(blocks[:, 128:192], 32, 2) << 4
    scale = _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    return _spread(scale, 256) * (codes.float() - 32)


@cache
def _table(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Kept, since a CUDA graph, which embeds and multiplies, can take nothing from the host."""
    return torch.tensor(numbers, dtype=torch.float32, device=device)


def _looked_up(table: tuple[int, ...], codes: Tensor) -> Tensor:
    return _table(table, codes.device)[codes.int()]


def iq4_nl(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _looked_up(NON_LINEAR, _nibbles(blocks[:, 2:], 16))


def iq4_xs(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, 4:8], 1)
    high = bits_of(blocks[:, 2:4], 1, 2)
    scale = _half(blocks, 0) * ((low | high << 4).float() - 32)
    return _spread(scale, 256) * _looked_up(NON_LINEAR, _nibbles(blocks[:, 8:], 16))


def mxfp4(blocks: Tensor) -> Tensor:
    exponents = blocks[:, :1].int()
    # half of 2^(e - 127), for the table holds doubled numbers; the two smallest are subnormal
    bits = torch.where(exponents < 2, 0x00200000 << exponents.clamp(max=1), (exponents - 1).clamp_min(0) << 23)
    return bits.view(torch.float32) * _looked_up(E2M1_DOUBLED, _nibbles(blocks[:, 1:], 16))


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
        both = codes[..., : last - first]
        numbers = torch.stack((both & 15, both >> 4), -1).flatten(-2)
        blocks[..., first:last] = bits_in_bytes(numbers, 4, run)
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
        parts.append(numbers[..., ::2] | numbers[..., 1::2] << 4)
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
