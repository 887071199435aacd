"""The protocol of the ways to round weights to codes, and rounding to the nearest code."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvern.quantize.blocks import Block
from kvern.quantize.scheme import Grid, Scheme, fit
from kvern.quantize.watched import Inputs

Plan = dict[str, Scheme]
"""Schemes by the matrices' names in the checkpoint; other matrices stay plain."""


class Rounded(NamedTuple):
    """A matrix in codes `[outputs, inputs]`, float32, and the grid of their values."""

    codes: Tensor
    grid: Grid

    def plain(self) -> Tensor:
        """`[outputs, inputs]` float32."""
        return self.grid.decode(self.codes)


class Method(Protocol):
    """A way to choose codes. `products`: it needs X^T X of the matrices' inputs X."""

    products: bool

    def prepare(self, block: Block, plan: Plan) -> None:
        """Change an observed block's tensors and inputs, if that makes rounding cheaper; its outputs stay the same."""

    def round(self, weight: Tensor, inputs: Inputs, scheme: Scheme, scale_dtype: torch.dtype) -> Rounded:
        """The codes of `weight [outputs, inputs]` float32, given statistics of its inputs."""


class RoundToNearest:
    """Rounds to nearest; with few bits, with the range that costs the outputs least by single inputs."""

    products = False

    def prepare(self, block: Block, plan: Plan) -> None:
        """Nothing to do."""

    def round(self, weight: Tensor, inputs: Inputs, scheme: Scheme, scale_dtype: torch.dtype) -> Rounded:
        grid = fit(weight, scheme, scale_dtype, importance_of(inputs))
        return Rounded(grid.encode(weight), grid)


def importance_of(inputs: Inputs) -> Tensor | None:
    """The importance of an error in each column: the mean square of its inputs; None if no row was seen."""
    squares = inputs.mean_squares
    return squares if inputs.count and bool(squares.any()) else None
