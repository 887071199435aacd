"""Numbers of one byte and their scales, made of plain numbers: activations as formats round them, weights online."""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Code = Literal["e4m3", "int8"]

DTYPES: dict[Code, torch.dtype] = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}
LARGEST: dict[Code, float] = {"e4m3": 448.0, "int8": 127.0}
SMALLEST_SCALE = 1e-12
"""The scale of rows of zeros."""


class Rounding(NamedTuple):
    """The rounding of activations, with a scale for each token or each `group` inputs of one.

    `limit`: a scale is at most that of this number, so that larger numbers are clipped. Asymmetric int8 has a zero
    point for each scale.
    """

    code: Code
    group: int = 0
    limit: float | None = None
    symmetric: bool = True


def scaled(x: Tensor, code: Code, scale: Tensor) -> Tensor:
    """The codes nearest to `x / scale`; numbers out of range get the largest code."""
    largest = LARGEST[code]
    codes = (x / scale).clamp(-largest, largest)
    return (codes.round() if code == "int8" else codes).to(DTYPES[code])


def quantized_rows(x: Tensor, code: Code, limit: float | None = None) -> tuple[Tensor, Tensor]:
    """Rows `x [..., N]` as codes, and a float32 scale `[..., 1]` for each: that of its largest number."""
    x = x.float()
    largest = x.abs().amax(-1, keepdim=True)
    scale = largest.clamp(SMALLEST_SCALE * LARGEST[code], limit) / LARGEST[code]
    return scaled(x, code, scale), scale


def rounded(x: Tensor, how: Rounding, static: Tensor | None = None) -> Tensor:
    """Rounds `x [T, I]` to the values of its codes, in its own dtype; `static [1]`: a known scale."""
    if static is not None:
        return (scaled(x.float(), how.code, static).float() * static).to(x.dtype)
    width = x.shape[-1]
    group = how.group or width
    grouped = F.pad(x, (0, -width % group)).view(len(x), -1, group)
    if how.symmetric:
        codes, scale = quantized_rows(grouped, how.code, how.limit)
        plain = codes.float() * scale
    else:
        plain = _rounded_asymmetric(grouped.float())
    return plain.flatten(-2)[..., :width].to(x.dtype)


def _rounded_asymmetric(x: Tensor) -> Tensor:
    """Rounds to 256 values from the smallest number, or zero, to the largest."""
    low, high = x.amin(-1, keepdim=True).clamp_max(0), x.amax(-1, keepdim=True).clamp_min(0)
    scale = ((high - low) / 255).clamp_min(SMALLEST_SCALE)
    zero = (-128 - low / scale).round().clamp(-128, 127)
    return ((x / scale + zero).round().clamp(-128, 127) - zero) * scale
