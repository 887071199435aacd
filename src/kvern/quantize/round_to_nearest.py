"""Rounding of each weight to the nearest code, independent of the others."""

import torch
from torch import Tensor

from kvern.quantize.blocks import Block
from kvern.quantize.grid import fit
from kvern.quantize.inputs import Inputs
from kvern.quantize.method import Plan, Rounded
from kvern.quantize.scheme import Scheme


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
