"""The numbers in GGUF's blocks: `uint8 [N, bytes] -> float32 [N, numbers]`, one function for each type.

They follow ggml's definition (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h) bit for bit: a scale is
a half-precision number d, a product with it is rounded to single precision before a minimum is subtracted.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

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
