"""The stored form of a matrix, and the values of its codes: scales and zero points, fitted to its weights."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvern.errors import ConfigError, shown

GROUPS = (32, 64, 128)
"""Inputs that may share a scale of 4-bit codes."""

E4M3_LARGEST = 448.0


@dataclass(frozen=True)
class Scheme:
    """Codes of `bits` bits: "int", or "float" as float8_e4m3fn.

    A scale belongs to `outputs_per_scale` outputs and `group` inputs; 0: to all inputs of an output. `symmetric` codes
    have no zero points. With `activations` the product rounds each token's activations to as many bits, dynamically.
    """

    kind: Literal["int", "float"]
    bits: int
    group: int = 0
    outputs_per_scale: int = 1
    symmetric: bool = True
    activations: bool = False

    @property
    def name(self) -> str:
        """The name in reports and plans: "fp8", "fp8-block", "int8", "int4-g128", "int4-g128-zero"."""
        if self.kind == "float":
            return "fp8-block" if self.outputs_per_scale > 1 else "fp8"
        group = f"-g{self.group}" if self.group else ""
        return f"int{self.bits}{group}{'' if self.symmetric else '-zero'}"

    @property
    def code_range(self) -> tuple[float, float]:
        """The smallest and the largest code."""
        if self.kind == "float":
            return -E4M3_LARGEST, E4M3_LARGEST
        return -float(1 << (self.bits - 1)), float((1 << (self.bits - 1)) - 1)

    def scales(self, outputs: int, inputs: int) -> tuple[int, int]:
        """The shape of the scales of a matrix."""
        return -(-outputs // self.outputs_per_scale), -(-inputs // self.group) if self.group else 1

    def stored_bytes(self, outputs: int, inputs: int, scale_dtype: torch.dtype) -> int:
        """The bytes of a matrix in a file."""
        rows, groups = self.scales(outputs, inputs)
        zeros = 0 if self.symmetric else 4 * -(-rows * self.bits // 32) * groups
        return outputs * -(-inputs * self.bits // 32) * 4 + rows * groups * scale_dtype.itemsize + zeros

    def bits_per_weight(self, outputs: int, inputs: int, scale_dtype: torch.dtype) -> float:
        """The bits per weight, including scales and zero points."""
        return 8 * self.stored_bytes(outputs, inputs, scale_dtype) / (outputs * inputs)

    def check_fits(self, name: str, inputs: int) -> None:
        """Raises ConfigError if the groups do not divide the inputs of the matrix `name`."""
        if not self.group or inputs % self.group == 0:
            return
        fits = [str(group) for group in GROUPS if inputs % group == 0] if self.bits < 8 else []
        raise ConfigError(
            f"{name} has {inputs} inputs, which groups of {self.group} do not divide: "
            + (f"use --group-size {' or '.join(fits)}" if fits else "use --method fp8 or int8, without --blocks")
        )


FP8 = Scheme("float", 8, activations=True)
FP8_BLOCK = Scheme("float", 8, group=128, outputs_per_scale=128, activations=True)
INT8 = Scheme("int", 8, activations=True)


def int4(group: int, symmetric: bool = True) -> Scheme:
    return Scheme("int", 4, group=group, symmetric=symmetric)


def named(name: str) -> Scheme | None:
    """The scheme of a name as `Scheme.name` writes it; None for "plain". Raises ConfigError."""
    schemes = [FP8, FP8_BLOCK, INT8, *(int4(group, symmetric) for group in GROUPS for symmetric in (True, False))]
    known = {scheme.name: scheme for scheme in schemes}
    if name != "plain" and name not in known:
        raise ConfigError(f"precision {shown(name)} is unknown; choose plain, {', '.join(known)}")
    return known.get(name)


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
