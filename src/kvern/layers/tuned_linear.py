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
    8: (
        None,
        MatmulShape(8, 64, 64, 4, 3),
        MatmulShape(8, 64, 64, 4, 5, splits=2),
        MatmulShape(8, 64, 128, 4, 3, splits=2),
        MatmulShape(8, 64, 256, 4, 5, splits=2),
    ),
    16: (
        None,
        MatmulShape(16, 64, 64, 4, 5),
        MatmulShape(16, 64, 128, 4, 5),
        MatmulShape(16, 64, 128, 4, 5, splits=2),
        MatmulShape(16, 64, 256, 4, 4, splits=2),
    ),
    32: (
        None,
        MatmulShape(32, 64, 128, 4, 5),
        MatmulShape(32, 128, 64, 8, 5),
        MatmulShape(32, 64, 128, 4, 3, splits=2),
        MatmulShape(32, 64, 128, 4, 5, splits=2),
    ),
    64: (
        None,
        MatmulShape(64, 64, 128, 4, 4),
        MatmulShape(64, 128, 64, 4, 5),
        MatmulShape(64, 64, 128, 4, 4, splits=2),
        MatmulShape(64, 128, 128, 8, 4, splits=2),
    ),
}
"""What is timed for up to this many rows; with more, arithmetic counts and cuBLAS does it."""

DETERMINISTIC = MatmulShape(64, 128, 64, 4, 4)
"""The one way to multiply if a row's result must not depend on the number of rows."""

MOST_TILES = 1 << 14
"""Of a product whose inputs are split: outputs are cut into tiles of at least 64."""

Key = tuple[int, int, int]
"""Outputs, inputs, and the number of rows of a candidate list."""


class TunedLinear:
    """A `Multiply` that looks up what to use; without `cublas`, a Triton kernel always."""

    def __init__(self, device: torch.device, cublas: bool = True) -> None:
        self.choices: dict[Key, Shape] = {}
        self._cublas = cublas
        self._arrived = torch.zeros(MOST_TILES, dtype=torch.int32, device=device)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.shape[0]
        outputs, inputs = weight.shape
        shape: Shape = None if self._cublas else DETERMINISTIC
        for most in CANDIDATES:
            if rows <= most:
                untimed = matvec_shape(outputs, inputs) if rows == 1 else shape
                shape = self.choices.get((outputs, inputs, most), untimed)
                break
        return self._multiply(x, weight, bias, shape)

    def tune(
        self, model: nn.Module, time: Callable[[list[Callable[[], object]]], float], known: Mapping[str, object]
    ) -> dict[str, object]:
        """Choose for every shape of the model. Returns what was timed because it was not `known`.

        `time` runs the calls it is given, of one product over the weights of different layers, and tells how long.
        Keys and values of what is known are plain, to be kept in a file.
        """
        timed: dict[str, object] = {}
        for (outputs, inputs), linears in _by_shape(model).items():
            weight = linears[0].weight
            for most, shapes in CANDIDATES.items():
                key = f"{outputs} x {inputs}, {most} rows, {weight.dtype}{'' if self._cublas else ', triton'}"
                candidates = {_plain(shape): shape for shape in shapes if self._cublas or shape is not None}
                stored = known.get(key, ())
                choice = None if stored is None else tuple(stored) if isinstance(stored, list) else ()
                if choice not in candidates:
                    x = torch.randn(most, inputs, dtype=weight.dtype, device=weight.device)
                    durations = {
                        plain: time([self._call(x, linear, shape) for linear in linears])
                        for plain, shape in candidates.items()
                    }
                    choice = min(durations, key=lambda plain: durations[plain])
                    timed[key] = choice
                self.choices[outputs, inputs, most] = candidates[choice]
        return timed

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None, shape: Shape) -> Tensor:
        if shape is None:
            return F.linear(x, weight, bias)
        if isinstance(shape, MatvecShape):
            return matvec(x, weight, bias, shape)
        return small_matmul(x, weight, bias, shape, self._arrived)

    def _call(self, x: Tensor, linear: Linear, shape: Shape) -> Callable[[], object]:
        return lambda: self._multiply(x, linear.weight, linear.bias, shape)


def deterministic_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A `Multiply` whose every row is computed in the same way however many there are."""
    return small_matmul(x, weight, bias, DETERMINISTIC)


def _plain(shape: Shape) -> tuple[int, ...] | None:
    return None if shape is None else tuple(shape)


def _by_shape(model: nn.Module, most: int = 8) -> dict[tuple[int, int], list[Linear]]:
    """Linear layers by the shape of their weights, a few of each: enough that none stays in the L2 cache."""
    linears: Iterable[Linear] = (module for module in model.modules() if isinstance(module, Linear))
    shapes: dict[tuple[int, int], list[Linear]] = {}
    for linear in linears:
        shapes.setdefault((linear.weight.shape[0], linear.weight.shape[1]), []).append(linear)
    return {shape: list(islice(members, most)) for shape, members in shapes.items()}
