"""What all formats of quantized weights have in common: how they multiply, whatever their codes are.

A format keeps a matrix as rows of codes, and says in `rows` which numbers they are and in `packed` how a kernel reads
them. Without kernels a product makes plain numbers of a few rows at a time.
"""

from abc import abstractmethod
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from kvern.kernels.packed import Packed as Packed
from kvern.layers.linear_method import LinearMethod

RUN_NUMBERS = 1 << 20
"""Plain numbers that a product without kernels makes at a time: they should be read again while still in a cache."""


class QuantizedMethod(LinearMethod):
    """A matrix of codes, of which the rows can be made plain alone."""

    @abstractmethod
    def rows(self, index: Tensor | slice) -> Tensor:
        """The plain rows, of the index [N] int64 or a slice of the outputs: `[N, inputs]` in the shape's dtype."""

    @abstractmethod
    def packed(self) -> Packed:
        """What kernels read, once all is loaded."""

    def rounded(self, x: Tensor) -> Tensor:
        """The activations `x [T, inputs]` as the format has them multiplied: plain, or rounded to what it says."""
        return x

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The named fallback: some rows at a time are made plain, then multiplied by PyTorch."""
        x = self.rounded(x)
        out = torch.cat([F.linear(x, self.rows(run)) for run in self._runs()], -1)
        return out if bias is None else out + bias

    def dequantize(self) -> Tensor:
        return self.rows(slice(0, self.shape.outputs))

    def embed(self, ids: Tensor) -> Tensor:
        return self.rows(ids)

    def _runs(self) -> Iterator[slice]:
        step = max(1, RUN_NUMBERS // self.shape.inputs)
        for first in range(0, self.shape.outputs, step):
            yield slice(first, min(first + step, self.shape.outputs))
