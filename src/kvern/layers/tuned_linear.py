"""How linear layers multiply on a GPU: cuBLAS, or a Triton kernel where one was measured to be faster.

Products of few rows read all weights and compute little; there the fastest way depends on the shape. Each shape is
timed once, for a few numbers of rows, over the model's own weights, and the result is remembered.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvern.kernels.linear import MatmulShape, MatvecShape, matvec, small_matmul
from kvern.layers.few_rows import matvec_shape
from kvern.layers.linear import Linear

Shape = MatvecShape | MatmulShape | None
"""Of a Triton kernel; None: cuBLAS."""

CANDIDATES: Mapping[int, tuple[Shape, ...]] = {
    1: (None, MatvecShape(4, 512, 4, stages=3), MatvecShape(2, 1024, 4, unroll=2), MatvecShape(4, 512, 4, unroll=4)),
    16: (None, MatmulShape(16, 16, 128, 2, 6), MatmulShape(16, 32, 256, 4, 3), MatmulShape(16, 64, 128, 4, 4)),
    32: (None, MatmulShape(32, 16, 128, 2, 6), MatmulShape(32, 64, 128, 4, 4)),
    64: (None, MatmulShape(64, 32, 128, 4, 4), MatmulShape(64, 128, 64, 4, 5)),
}
"""What is timed for up to this many rows; with more, arithmetic counts and cuBLAS does it."""

DETERMINISTIC = MatmulShape(64, 128, 64, 4, 4)
"""The one way to multiply if a row's result must not depend on the number of rows."""

Key = tuple[int, int, int]
"""Outputs, inputs, and the number of rows of a candidate list."""


class TunedLinear:
    """A `Multiply` that looks up what to use."""

    def __init__(self, choices: Mapping[Key, Shape] | None = None) -> None:
        self.choices = dict(choices or {})

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.shape[0]
        outputs, inputs = weight.shape
        for most in CANDIDATES:
            if rows <= most:
                untimed = matvec_shape(outputs, inputs) if rows == 1 else None
                shape = self.choices.get((outputs, inputs, most), untimed)
                return F.linear(x, weight, bias) if shape is None else _multiply(x, weight, bias, shape)
        return F.linear(x, weight, bias)

    def tune(self, model: nn.Module, time: Callable[[list[Callable[[], object]]], float]) -> list[Key]:
        """Choose for every shape of the model that has no choice yet; those that were timed.

        `time` runs the calls it is given, of one product over the weights of different layers, and tells how long.
        """
        timed = []
        for (outputs, inputs), linears in _by_shape(model).items():
            for most, candidates in CANDIDATES.items():
                key = (outputs, inputs, most)
                if key in self.choices:
                    continue
                weight = linears[0].weight
                x = torch.randn(most, inputs, dtype=weight.dtype, device=weight.device)
                durations = {shape: time([_call(x, linear, shape) for linear in linears]) for shape in candidates}
                self.choices[key] = min(durations, key=lambda shape: durations[shape])
                timed.append(key)
        return timed


def deterministic_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A `Multiply` whose every row is computed in the same way however many there are."""
    return small_matmul(x, weight, bias, DETERMINISTIC)


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, shape: MatvecShape | MatmulShape) -> Tensor:
    if isinstance(shape, MatvecShape):
        return matvec(x, weight, bias, shape)
    return small_matmul(x, weight, bias, shape)


def _call(x: Tensor, linear: Linear, shape: Shape) -> Callable[[], object]:
    if shape is None:
        return lambda: F.linear(x, linear.weight, linear.bias)
    return lambda: _multiply(x, linear.weight, linear.bias, shape)


def _by_shape(model: nn.Module, most: int = 8) -> dict[tuple[int, int], list[Linear]]:
    """Linear layers by the shape of their weights, a few of each: enough that none stays in the L2 cache."""
    linears: Iterable[Linear] = (module for module in model.modules() if isinstance(module, Linear))
    shapes: dict[tuple[int, int], list[Linear]] = {}
    for linear in linears:
        shapes.setdefault((linear.weight.shape[0], linear.weight.shape[1]), []).append(linear)
    return {shape: list(islice(members, most)) for shape, members in shapes.items()}
