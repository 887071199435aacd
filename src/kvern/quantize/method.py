"""The ways to round weights to codes: to the nearest code, and GPTQ (Frantar et al. 2022).

GPTQ ("Accurate Post-Training Quantization for Generative Pre-trained Transformers") rounds column by column, and the
remaining columns compensate for the error.
"""

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
    """A way to choose codes. `products`: it needs X^T X of the matrices' inputs X; `act_order`: large inputs first."""

    products: bool
    act_order: bool

    def prepare(self, block: Block, plan: Plan) -> None:
        """Change an observed block's tensors and inputs, if that makes rounding cheaper; its outputs stay the same."""

    def round(self, weight: Tensor, inputs: Inputs, scheme: Scheme, scale_dtype: torch.dtype) -> Rounded:
        """The codes of `weight [outputs, inputs]` float32, given statistics of its inputs."""


class RoundToNearest:
    """Rounds to nearest; with few bits, with the range that costs the outputs least by single inputs."""

    products = False
    act_order = False

    def prepare(self, block: Block, plan: Plan) -> None:
        """Nothing to do."""

    def round(self, weight: Tensor, inputs: Inputs, scheme: Scheme, scale_dtype: torch.dtype) -> Rounded:
        grid = fit(weight, scheme, scale_dtype, importance_of(inputs))
        return Rounded(grid.encode(weight), grid)


def importance_of(inputs: Inputs) -> Tensor | None:
    """The importance of an error in each column: the mean square of its inputs; None if no row was seen."""
    squares = inputs.mean_squares
    return squares if inputs.count and bool(squares.any()) else None


DAMPING = 0.01
"""The share of the mean of the Hessian's diagonal that is added to it."""

MOST_DAMPING = 10.0
RUN = 128
"""Columns whose errors are propagated to the others in one product."""


class Gptq(RoundToNearest):
    """GPTQ. `act_order` rounds columns of large inputs first; groups and scales stay those of adjacent columns."""

    products = True

    def __init__(self, *, act_order: bool = True) -> None:
        self.act_order = act_order

    def round(self, weight: Tensor, inputs: Inputs, scheme: Scheme, scale_dtype: torch.dtype) -> Rounded:
        grid = fit(weight, scheme, scale_dtype, importance_of(inputs))
        if inputs.products is None or not inputs.count:
            return Rounded(grid.encode(weight), grid)
        return Rounded(self._codes(weight, inputs.products / inputs.count, grid), grid)

    def _codes(self, weight: Tensor, hessian: Tensor, grid: Grid) -> Tensor:
        order = hessian.diagonal().argsort(descending=True) if self.act_order else torch.arange(len(hessian))
        order = order.to(weight.device)
        upper = inverse_factor(hessian[order][:, order], DAMPING)
        left, codes = weight[:, order].clone(), torch.empty_like(weight)
        columns = order.tolist()
        for first in range(0, len(columns), RUN):
            last = min(first + RUN, len(columns))
            errors = torch.empty_like(left[:, first:last])
            for place in range(first, last):
                column = left[:, place : place + 1]
                code = grid.encode(column, columns[place])
                error = (column - grid.decode(code, columns[place])) / upper[place, place]
                left[:, place + 1 : last].addmm_(error, upper[place : place + 1, place + 1 : last], alpha=-1)
                codes[:, columns[place]], errors[:, place - first] = code[:, 0], error[:, 0]
            left[:, last:].addmm_(errors, upper[first:last, last:], alpha=-1)
        return codes


def inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor of the inverse of the damped Hessian, float32.

    Columns without inputs are independent: they are rounded to the nearest code. A matrix without a factor is damped
    more.
    """
    hessian = hessian.double()
    diagonal = hessian.diagonal()
    mean = float(diagonal.mean())
    diagonal[diagonal == 0] = mean or 1.0
    while True:
        damped = hessian.clone()
        damped.diagonal().add_(damping * (mean or 1.0))
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not failed or damping >= MOST_DAMPING:
            break
        damping *= 10
    upper: Tensor = torch.linalg.cholesky(torch.cholesky_inverse(factor), upper=True)
    return upper.float()
