"""How quantized weights are multiplied on a GPU: by kernels that make numbers of codes inside the product.

Few rows read the codes and compute little. Of many rows arithmetic counts: weights are made plain inside the product,
or a run of rows at a time for cuBLAS, or the format's own products multiply codes of eight bits; the tuner times them.
Activations are multiplied as they are, but for a format's own products, whose codes they become first.
"""

import functools
from bisect import bisect_left
from collections.abc import Hashable, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

from kvern.kernels.arrange import arrange
from kvern.kernels.codes import CODES, INTERLEAVED, readable
from kvern.kernels.linear import NOTHING, Around, MatmulShape, MatvecShape
from kvern.kernels.packed_product import packed_product, packed_row
from kvern.kernels.resident_row import ResidentShape, keeps_row, resident_row
from kvern.kernels.scaled_product import multiplies_codes, scaled_product
from kvern.layers.linear_method import Product
from kvern.layers.tuned_linear import MOST_TILES

if TYPE_CHECKING:
    from kvern.kernels.packed import Packed
    from kvern.layers.quantized.method import QuantizedMethod

PLAIN_RUN_NUMBERS = 1 << 25
"""Numbers that are made plain at a time for cuBLAS: enough to fill a card."""


class PlainRuns(NamedTuple):
    """The named fallback: runs of rows of so many numbers are made plain, then multiplied by cuBLAS."""

    numbers: int


class CodesShape(NamedTuple):
    """How a product of codes with codes is cut: as `MatmulShape`."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int
    splits: int = 1
    kind: str = "codes"


RowShape = MatvecShape | ResidentShape
"""Of a kernel that does what is around the product of one row."""
Shape = RowShape | MatmulShape | CodesShape | PlainRuns | str
"""Of a kernel; or the name of a product of the format's own."""
Cut = TypeVar("Cut", MatvecShape, ResidentShape, MatmulShape, RowShape, Shape)

CANDIDATES: Mapping[int, tuple[Shape, ...]] = {
    1: (
        MatvecShape(8, 2048, 4),
        MatvecShape(4, 2048, 4),
        MatvecShape(8, 1024, 4, unroll=2),
        ResidentShape(4, 4, 4),
        ResidentShape(8, 4, 2),
        ResidentShape(2, 4, 4),
        ResidentShape(2, 8, 2),
        ResidentShape(4, 8, 1),
        MatmulShape(8, 64, 128, 4, 4, splits=2),
    ),
    8: (
        MatmulShape(8, 64, 128, 4, 4),
        MatmulShape(8, 64, 128, 4, 4, splits=2),
        MatmulShape(8, 64, 256, 4, 3, splits=2),
        MatmulShape(8, 32, 256, 4, 4),
        MatmulShape(8, 64, 128, 4, 4, splits=4),
    ),
    16: (
        MatmulShape(16, 64, 128, 4, 4),
        MatmulShape(16, 64, 128, 4, 4, splits=2),
        MatmulShape(16, 64, 256, 4, 3, splits=2),
        MatmulShape(16, 64, 128, 4, 4, splits=4),
    ),
    32: (
        MatmulShape(32, 64, 128, 4, 4),
        MatmulShape(32, 64, 128, 4, 4, splits=2),
        MatmulShape(32, 128, 128, 8, 3, splits=2),
        MatmulShape(32, 64, 256, 4, 3, splits=2),
    ),
    64: (
        MatmulShape(64, 64, 128, 4, 4),
        MatmulShape(64, 64, 128, 4, 4, splits=2),
        MatmulShape(64, 128, 128, 8, 3, splits=2),
        MatmulShape(64, 128, 64, 8, 4),
    ),
    256: (MatmulShape(64, 128, 128, 8, 3), MatmulShape(128, 128, 64, 8, 3), PlainRuns(PLAIN_RUN_NUMBERS)),
    1024: (MatmulShape(128, 128, 64, 8, 3), MatmulShape(256, 128, 64, 8, 3), PlainRuns(PLAIN_RUN_NUMBERS)),
    8192: (MatmulShape(128, 128, 64, 8, 3), MatmulShape(256, 128, 64, 8, 3), PlainRuns(PLAIN_RUN_NUMBERS)),
}
"""What is timed for up to this many rows, the last for more too."""

FLOAT32_CANDIDATES: Mapping[int, tuple[Shape, ...]] = {
    1: (MatvecShape(8, 2048, 4), MatvecShape(8, 1024, 4, unroll=2)),
    16: (MatmulShape(16, 32, 64, 4, 3), MatmulShape(16, 32, 64, 4, 3, splits=2)),
    64: (MatmulShape(16, 32, 64, 4, 3),),
    1024: (PlainRuns(PLAIN_RUN_NUMBERS),),
}
"""Numbers of four bytes are multiplied on the ordinary cores, which takes small tiles."""

MANY_ROWS = 64
"""A format's own products, and those of codes with codes, are for more."""
MOST_TIMED_NUMBERS = 1 << 28
"""Of a result: a head, of so many outputs, gets few rows, and its result for many is larger than the weights."""
CODES_SHAPES = (CodesShape(128, 128, 128, 8, 3), CodesShape(64, 128, 128, 4, 4))
DETERMINISTIC = MatmulShape(32, 64, 128, 4, 4)
FLOAT32_DETERMINISTIC = MatmulShape(16, 32, 64, 4, 3)
"""The one way to multiply if a row's result must not depend on the number of rows."""

ONE_ROW = MatvecShape(8, 2048, 4)
"""What multiplies one row, with what is around it, where a kernel was chosen that does nothing around it."""


@functools.cache
def counters(device: torch.device) -> Tensor:
    """Zeros that kernels count in, shared by all products of a device."""
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=device)


def candidates_of(dtype: torch.dtype) -> Mapping[int, tuple[Shape, ...]]:
    """What is timed for activations of this dtype, by the most rows."""
    return CANDIDATES if dtype.itemsize < 4 else FLOAT32_CANDIDATES


def knows(shape: Shape, code: str, group: int, inputs: int, device: torch.device) -> bool:
    """Whether a shape's kernel multiplies such a matrix."""
    return not isinstance(shape, ResidentShape) or keeps_row(code, group, inputs, device)


def multiply_row(x: Tensor, weight: "Packed", bias: Tensor | None, shape: RowShape, around: Around = NOTHING) -> Tensor:
    """One row by the kernel of a shape, with what is around it; a matrix's order is left to the caller."""
    if isinstance(shape, ResidentShape):
        return resident_row(x, weight, bias, shape, around)
    return packed_row(x, weight, bias, shape, around)


def fitted(shape: Cut, code: str) -> Cut:
    """The shape with steps of whole blocks."""
    if isinstance(shape, MatvecShape | MatmulShape) and shape.inputs % CODES[code].block:
        return shape._replace(inputs=CODES[code].block)
    return shape


def row_shape(shape: Shape, code: str, activated: bool) -> RowShape:
    """How one row is multiplied with what is around it, if `shape` was chosen: gate and up are two tiles of half."""
    cut = shape if isinstance(shape, MatvecShape | ResidentShape) else ONE_ROW
    return fitted(cut._replace(outputs=cut.outputs // 2) if activated else cut, code)


class PackedProducts:
    """The products of one matrix: a way to multiply for each number of rows, by guess until they are timed."""

    def __init__(self, method: "QuantizedMethod", deterministic: bool) -> None:
        self._method, self._deterministic = method, deterministic
        dtype, packed = method.shape.dtype, method.packed()
        code, known = packed.code, (packed.code, packed.group, method.shape.inputs, method.shape.device)
        given = {} if deterministic else candidates_of(dtype)
        self._candidates = {
            most: tuple(fitted(shape, code) for shape in shapes if knows(shape, *known))
            for most, shapes in given.items()
            if most <= MANY_ROWS or most * method.shape.outputs <= MOST_TIMED_NUMBERS
        }
        self._most = sorted(self._candidates)
        one_way = fitted(DETERMINISTIC if dtype.itemsize < 4 else FLOAT32_DETERMINISTIC, code)
        self._ways: list[Shape] = [self._candidates[most][0] for most in self._most] or [one_way]
        self._ways.append(self._ways[-1])

    @functools.cached_property
    def weight(self) -> "Packed":
        """What kernels read; once all is loaded."""
        return readable(self._method.packed())

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """As `LinearMethod.multiply`."""
        return self._multiply_by(self._ways[bisect_left(self._most, x.shape[0])], x, bias)

    def multiply_row(self, x: Tensor, bias: Tensor | None, around: Around = NOTHING) -> Tensor:
        """As `RowProduct`, of a matrix without an order of its inputs."""
        weight = self.weight
        shape = row_shape(self._ways[bisect_left(self._most, 1)], weight.code, around.activation is not None)
        return multiply_row(x, weight, bias, shape, around)

    def candidates(self) -> Mapping[int, Mapping[Hashable, Product]]:
        """As `LinearMethod.candidates`."""
        return {
            most: {_plain(shape): partial(self._multiply_by, shape) for shape in self._shapes(most)}
            for most in self._candidates
        }

    def _shapes(self, most: int) -> tuple[Shape, ...]:
        shapes = self._candidates[most]
        if most <= MANY_ROWS:
            return shapes
        codes = CODES_SHAPES if self._multiplies_codes() else ()
        return (*shapes, *codes, *self._method.own_products())

    def _multiplies_codes(self) -> bool:
        weight, shape = self.weight, self._method.shape
        if weight.zero is not None or self._method.activation_codes() is None:
            return False
        return multiplies_codes(weight.code, [weight.group], shape.inputs, shape.device)

    def choose(self, rows: int, candidate: Hashable) -> None:
        """As `LinearMethod.choose`."""
        way = next(shape for shape in self._shapes(rows) if _plain(shape) == candidate)
        self._ways[self._most.index(rows)] = way
        if rows == self._most[-1]:
            self._ways[-1] = way

    def _multiply_by(self, shape: Shape, x: Tensor, bias: Tensor | None) -> Tensor:
        weight = self.weight
        if isinstance(shape, str):
            return self._method.own_products()[shape](x, bias)
        if isinstance(shape, CodesShape):
            make_codes = self._method.activation_codes()
            assert make_codes is not None
            return scaled_product(*make_codes(x), weight, bias, MatmulShape(*shape[:-1]), x.dtype)
        if isinstance(shape, PlainRuns):
            return self._method.multiply_plain(x, bias, shape.numbers)
        if isinstance(shape, MatvecShape | ResidentShape):
            x = x if weight.order is None else arrange(x, weight.order, False)
            return multiply_row(x, weight, bias, shape)
        apart = weight.code in INTERLEAVED
        if apart or weight.order is not None:
            x = arrange(x, weight.order, apart)
        return packed_product(x, weight, bias, shape, counters(x.device))


def _plain(shape: Shape) -> Hashable:
    return shape if isinstance(shape, str) else tuple(shape)


def multiplies(code: str, inputs: int) -> bool:
    """Whether the kernels know a code, and rows of so many inputs of it."""
    return code in CODES and inputs % CODES[code].block == 0
