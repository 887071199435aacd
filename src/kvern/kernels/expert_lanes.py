"""MXFP4 weights of experts in the order in which the matrix units' lanes hold them.

Of 64 inputs of a row a lane, j being its number modulo 4, holds the inputs 16b + 8h + 2j + i, where i, h and b count up
to 2, 2 and 4. Their codes stand together, in two words: with 2b + h = 4q + p that of an input is in word q, in the four
bits p + 4i. So x is multiplied as it is, and every word has one scale. The four scales of 128 inputs are one word, and
the words of all rows stand together, those of a step behind those of the step before.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kvern.kernels.packed import Packed

STEP = 128
"""Inputs of a word of scales."""
LARGEST_SCALE = 192
"""Exponent plus 127: what kernels multiply codes by, 2**-64 times a scale, is a number of bfloat16 up to this one."""
RUN_BYTES = 16 << 20
"""The bytes that are arranged at a time."""


class LaneWeight(NamedTuple):
    """A matrix `[outputs, inputs]` in lanes.

    codes    int32 [outputs, inputs / 8]
    scales   int32 [inputs / STEP, outputs], rounded up: the bytes of four, zero behind the last
    """

    codes: Tensor
    scales: Tensor

    def rows(self, first: int, outputs: int) -> tuple[Tensor, Tensor]:
        """Codes and scales of so many outputs from one on, as views."""
        return self.codes[first : first + outputs], self.scales[:, first : first + outputs]


def knows_lanes(code: str, group: int, scale: str, inputs: int) -> bool:
    """True for the form of MXFP4, with a scale of that dtype, in rows that TMA reads."""
    return (code, group, scale) == ("e2m1", 32, "uint8") and inputs % 64 == 0


def fits_lanes(weight: Packed) -> bool:
    """True if a loaded matrix can be stored in lanes; one without memory could, as checkpoints' scales are small."""
    if weight.scale is None or weight.factor is not None:
        return False
    inputs, scale = 2 * weight.codes.shape[-1], str(weight.scale.dtype).removeprefix("torch.")
    if not knows_lanes(weight.code, weight.group, scale, inputs):
        return False
    return weight.scale.is_meta or int(weight.scale.max()) <= LARGEST_SCALE


def in_lanes(weight: Packed) -> LaneWeight:
    """A matrix that `fits_lanes`, whose codes are overwritten."""
    assert weight.scale is not None
    (outputs, width), (_, groups) = weight.codes.shape, weight.scale.shape
    run = max(1, RUN_BYTES // width)
    for first in range(0, outputs, run):
        rows = weight.codes[first : first + run]
        rows.copy_(_in_lanes(rows))
    scales = weight.scale.new_zeros(-(-groups // 4), outputs, 4)
    for step in range(len(scales)):
        four = weight.scale[:, 4 * step : 4 * step + 4]
        scales[step, :, : four.shape[1]] = four
    return LaneWeight(weight.codes.view(torch.int32), scales.view(torch.int32).squeeze(-1))


def _in_lanes(codes: Tensor) -> Tensor:
    """Rows of bytes, the low four bits of which are the even input's."""
    numbers = torch.stack((codes & 15, codes >> 4), -1).view(len(codes), -1, 2, 2, 2, 4, 2)  # q, p >> 1, p & 1, j, i
    placed = numbers.permute(0, 1, 5, 2, 6, 3, 4).reshape(len(codes), -1, 2)  # j, q, i, p
    return placed[..., 0] | placed[..., 1] << 4
