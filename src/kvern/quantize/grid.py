"""The values of a matrix's codes: scales and zero points, fitted to its weights."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvern.quantize.scheme import Scheme

SHRINKS = tuple(1.0 - 0.04 * step for step in range(11))
"""Factors for a group's range that are tried with few bits, where clipping costs less than finer steps gain."""

SEARCHED_BITS = 4
"""The most bits for which ranges are searched; with more, the full range is best."""


@dataclass(frozen=True)
class Grid:
    """`value = (code - zero) * scale`; `scale` and `zero`, float32 of `Scheme.scales`, each for a cell of weights.

    Columns may be asked for apart: `first` is that of the numbers given.
    """

    scheme: Scheme
    inputs: int
    scale: Tensor
    zero: Tensor | None = None

    def encode(self, weight: Tensor, first: int = 0) -> Tensor:
        """`[outputs, n]` float32 -> the nearest codes, as float32."""
        codes = weight / self._of(self.scale, weight, first)
        if self.zero is not None:
            codes += self._of(self.zero, weight, first)
        if self.scheme.kind == "int":
            return codes.round_().clamp_(*self.scheme.code_range)
        return codes.clamp_(*self.scheme.code_range).to(torch.float8_e4m3fn).float()

    def decode(self, codes: Tensor, first: int = 0) -> Tensor:
        """`[outputs, n]` codes -> their numbers, float32."""
        scale, zero = self._of(self.scale, codes, first), self.zero
        return codes.float() * scale if zero is None else (codes.float() - self._of(zero, codes, first)) * scale

    def clipped(self, weight: Tensor) -> Tensor:
        """True for weights more than half a step beyond the outermost codes: bool `[outputs, inputs]`."""
        low, high = self.scheme.code_range
        half = 0.5 if self.scheme.kind == "int" else 16.0
        codes = weight / self._of(self.scale, weight, 0)
        codes = codes if self.zero is None else codes + self._of(self.zero, weight, 0)
        return (codes < low - half) | (codes > high + half)

    def _of(self, cells: Tensor, weight: Tensor, first: int) -> Tensor:
        """The cells' entries for each weight, or something that broadcasts."""
        outputs, count = weight.shape
        if self.scheme.group:
            index = torch.arange(first, first + count, device=cells.device) // self.scheme.group
            cells = cells.index_select(1, index)
        if self.scheme.outputs_per_scale > 1:
            cells = cells.repeat_interleave(self.scheme.outputs_per_scale, 0)[:outputs]
        return cells


def fit(
    weight: Tensor,
    scheme: Scheme,
    scale_dtype: torch.dtype,
    importance: Tensor | None = None,
) -> Grid:
    """The grid for `weight [outputs, inputs]` float32, with scales that `scale_dtype` holds.

    Few bits get the range for each cell that has the least squared error, each column times `importance [inputs]`.
    """
    low, high = (cells.float() for cells in _ranges(weight, scheme))
    if scheme.bits > SEARCHED_BITS:
        return _grid(low, high, weight.shape[1], scheme, scale_dtype)
    best = _grid(low, high, weight.shape[1], scheme, scale_dtype)
    least = _errors(best, weight, importance)
    for shrink in SHRINKS[1:]:
        grid = _grid(low * shrink, high * shrink, weight.shape[1], scheme, scale_dtype)
        errors = _errors(grid, weight, importance)
        better = errors < least
        least = torch.where(better, errors, least)
        zero = None if best.zero is None or grid.zero is None else torch.where(better, grid.zero, best.zero)
        best = Grid(scheme, best.inputs, torch.where(better, grid.scale, best.scale), zero)
    return best


def cells_of(weight: Tensor, scheme: Scheme) -> Tensor:
    """`[outputs, inputs]` -> `[rows of scales, outputs in one, groups, inputs in one]`, padded with zeros."""
    outputs, inputs = weight.shape
    rows, groups = scheme.scales(outputs, inputs)
    tall, wide = scheme.outputs_per_scale, scheme.group or inputs
    padded = torch.nn.functional.pad(weight, (0, groups * wide - inputs, 0, rows * tall - outputs))
    return padded.view(rows, tall, groups, wide)


def _ranges(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    cells = cells_of(weight, scheme)
    return cells.amin((1, 3)).clamp(max=0), cells.amax((1, 3)).clamp(min=0)


def _errors(grid: Grid, weight: Tensor, importance: Tensor | None) -> Tensor:
    errors = (grid.decode(grid.encode(weight)) - weight).square_()
    if importance is not None:
        errors *= importance
    return cells_of(errors, grid.scheme).sum((1, 3))


def _grid(low: Tensor, high: Tensor, inputs: int, scheme: Scheme, scale_dtype: torch.dtype) -> Grid:
    """The grid that reaches from `low` to `high`, float32 cells; cells of zeros alone get a scale of 1."""
    least, largest = scheme.code_range
    scale = torch.maximum(-low, high) / largest if scheme.symmetric else (high - low) / (largest - least)
    scale = torch.where(scale > 0, scale, 1.0).to(scale_dtype).float()
    tiny = torch.finfo(scale_dtype).tiny
    scale.clamp_(min=tiny)
    zero = None if scheme.symmetric else (least - low / scale).round_().clamp_(least, largest)
    return Grid(scheme, inputs, scale, zero)
