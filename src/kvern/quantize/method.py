"""The protocol of the ways to round weights to codes."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvern.quantize.blocks import Block
from kvern.quantize.grid import Grid
from kvern.quantize.inputs import Inputs
from kvern.quantize.scheme import Scheme

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
