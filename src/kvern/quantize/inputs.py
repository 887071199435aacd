"""Statistics of the activations that a matrix multiplies during calibration."""

import torch
from torch import Tensor

SAMPLE = 512
"""The number of a matrix's input rows that are kept, from the whole calibration."""


class Inputs:
    """Statistics of the rows `[T, inputs]` that a matrix multiplies, taken batch by batch.

    count     int: rows so far
    largest   [inputs] float32: the largest |x|
    absolute  [inputs] float32: the sum of |x|
    squares   [inputs] float32: the sum of x^2
    products  [inputs, inputs] float32, the sum of X^T X, if asked for
    rows      [at most SAMPLE, inputs]: some of the rows, evenly spread over the batches
    """

    def __init__(self, inputs: int, batches: int, device: torch.device, *, products: bool = False) -> None:
        self.inputs, self.count = inputs, 0
        self.largest, self.absolute, self.squares = torch.zeros(3, inputs, device=device)
        self.products = torch.zeros(inputs, inputs, device=device) if products else None
        self._share = max(1, SAMPLE // batches)
        self._kept: list[Tensor] = []

    def add(self, x: Tensor) -> None:
        """Adds the rows `[T, inputs]` of a batch."""
        numbers = x.float()
        self.count += len(x)
        self.largest = torch.maximum(self.largest, numbers.abs().amax(0)) if len(x) else self.largest
        self.absolute += numbers.abs().sum(0)
        self.squares += numbers.square().sum(0)
        if self.products is not None:
            self.products.addmm_(numbers.t(), numbers)
        self._kept.append(x[:: max(1, -(-len(x) // self._share))].clone())

    @property
    def rows(self) -> Tensor:
        """float32."""
        if not self._kept:
            return torch.zeros(0, self.inputs, device=self.largest.device)
        self._kept = [torch.cat(self._kept)]
        rows: Tensor = self._kept[0].float()
        return rows

    @property
    def mean_squares(self) -> Tensor:
        """`[inputs]` float32."""
        mean: Tensor = self.squares / max(1, self.count)
        return mean

    def divide(self, scale: Tensor) -> None:
        """Changes the statistics to those of inputs divided by `scale [inputs]`."""
        self.largest, self.absolute = self.largest / scale, self.absolute / scale
        self.squares = self.squares / scale.square()
        if self.products is not None:
            self.products = self.products / scale / scale[:, None]
        self._kept = [(self.rows / scale)] if self._kept else []
