"""Products with weights that stay packed."""

import ctypes
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kvern.cpu import large_pages
from kvern.cpu.library import CODE, DTYPES, INTEGER, NUMBER, POINTER, address, fields, function

LANES = 16
"""Outputs whose codes are interleaved."""
STEP = 4
"""Adjacent bytes of one output."""
RUN = 32
"""The most activations that share one INT8 scale."""

_multiply_int8 = function(
    "kvern_multiply_int8",
    *(POINTER, POINTER, POINTER, POINTER, POINTER, INTEGER, INTEGER, INTEGER, NUMBER, NUMBER, CODE),
)

_int8_rows = function(
    "kvern_int8_rows", *(POINTER, POINTER, POINTER, INTEGER, POINTER, INTEGER, INTEGER, INTEGER, CODE)
)

KINDS = DTYPES | {
    torch.float16: 2,
    torch.float8_e8m0fnu: 3,
    torch.float8_e4m3fn: 4,
    torch.uint8: 5,
    torch.int8: 6,
}
"""Codes of the dtypes of scales and zeros, as `sources/packed_matrix.h` has them."""


class _Description(ctypes.Structure):
    """`KvernGroups` of `sources/packed_matrix.h`."""

    _fields_ = (
        *fields("codes scale zero outer outer_zero factor order numbers", POINTER),
        *fields("inputs group outer_groups run", INTEGER),
        ("step", NUMBER),
        *fields("wide scale_kind zero_kind", CODE),
    )


_multiply_groups = function(
    "kvern_multiply_groups",
    *(ctypes.POINTER(_Description), POINTER, POINTER, POINTER, INTEGER, INTEGER, CODE),
)


def side_by_side(rows: Tensor, together: int = 1) -> Tensor:
    """Reorders `[outputs, N]` to `[outputs / 16, N / together, 16, together]`, padded with zeros."""
    outputs, width = rows.shape
    plain = rows.view(torch.int8) if rows.itemsize == 1 else rows
    padded = F.pad(plain, (0, -width % together, 0, -outputs % LANES))
    lanes = padded.view(-1, LANES, padded.shape[1] // together, together).transpose(1, 2)
    return large_pages.empty(lanes.shape, lanes.dtype).copy_(lanes).view(rows.dtype)


def rows_of(lanes: Tensor, index: Tensor) -> Tensor:
    """The rows of an index [N] int64 of a matrix that was put `side_by_side`: `[N, width]`, with its padding."""
    plain = lanes.view(torch.int8) if lanes.itemsize == 1 else lanes
    return plain[index // LANES, :, index % LANES].flatten(1).view(lanes.dtype)


def int8_rows(
    codes: Tensor, scale: Tensor, sizes: tuple[int, int], dtype: torch.dtype, ids: Tensor, first: int = 0
) -> Tensor:
    """Returns the plain rows `ids [T]` int64 of a matrix `[outputs, inputs]` that is stored as in `Int8Product`.

    The matrix may have only the rows from `first` on of a larger one: the others are 0.
    """
    ids, (outputs, inputs) = ids.contiguous(), sizes
    out = torch.empty(ids.shape[0], inputs, dtype=dtype)
    _int8_rows(
        codes.data_ptr(), scale.data_ptr(), ids.data_ptr(), first, out.data_ptr(), out.shape[0], outputs, inputs,
        DTYPES[dtype],
    )  # fmt: skip
    return out


class Int8Product(NamedTuple):
    """The product with INT8 weights; rows are rounded to INT8 first, and sums of integers are exact.

    codes     [blocks, inputs / 4, 16, 4] int8, see `side_by_side`
    scale     [blocks, 1, 16] float32, for each output
    outputs   of the matrix
    fixed     the scale of all activations; 0: a row has that of its largest number
    limit     clips larger activations; 0: no limit
    """

    codes: Tensor
    scale: Tensor
    outputs: int
    fixed: float = 0.0
    limit: float = 0.0

    def __call__(self, x: Tensor, bias: Tensor | None, first: int = 0, outputs: int | None = None) -> Tensor:
        """See `GroupsProduct.__call__`."""
        codes, scale, count, fixed, limit = self
        x = x.contiguous()
        rows, inputs = x.shape
        out = x.new_empty(rows, outputs or count)
        _multiply_int8(
            x.data_ptr(), codes.data_ptr() + first * codes.stride(0) // LANES,
            scale.data_ptr() + first * scale.itemsize, address(bias), out.data_ptr(), rows, out.shape[1], inputs, fixed,
            limit, DTYPES[x.dtype],
        )  # fmt: skip
        return out

    def stored(self) -> dict[str, Tensor]:
        """The tensors, each `side_by_side`, that replace a method's parameters, by name."""
        return {"codes": self.codes, "scale": self.scale}


class Groups(NamedTuple):
    """A quantized matrix `[outputs, inputs]` with scales for groups of inputs; all but `order` are `side_by_side`.

    codes        4-bit codes, two in a byte, the low ones first, or int8: STEP bytes together
    numbers      values of the 16 codes; None: codes are int8 and stand for themselves
    scale, zero  for each group, of a dtype of KINDS: a number is (number - zero) * scale
    group        inputs of a group, a multiple of 8, or of 4 for int8
    order        [inputs] int32: column i multiplies the activation `order[i]`
    factor       [outputs] float32, multiplies rows
    outer        float16, multiplies the scales of runs of groups
    outer_zero   of the same shape: a number is number * scale * outer - zero * outer_zero
    """

    codes: Tensor
    numbers: Sequence[float] | None
    scale: Tensor
    zero: Tensor | None
    group: int
    order: Tensor | None = None
    factor: Tensor | None = None
    outer: Tensor | None = None
    outer_zero: Tensor | None = None


def _integers(numbers: Sequence[float]) -> tuple[list[int], float] | None:
    """INT8 numbers and a step whose products are `numbers`; None: there are none."""
    for step in (1.0, 0.5):
        whole = [int(number / step) for number in numbers]
        if all(code * step == number and abs(code) < 128 for code, number in zip(whole, numbers, strict=True)):
            return whole, step
    return None


class GroupsProduct:
    """Multiplies by a matrix of so many `outputs`.

    `rounded`: activations are rounded to INT8, with one scale for `RUN` of them or a divisor of the group, and sums are
    sums of integers, if the codes are integers. Otherwise activations stay plain, and sums are float32.
    """

    def __init__(self, matrix: Groups, outputs: int, rounded: bool) -> None:
        numbers = matrix.numbers
        self._matrix = matrix
        self._outputs = outputs
        whole = _integers(numbers or ()) if rounded else None
        codes, step = whole or ((), 1.0)
        self._numbers: Tensor | None = torch.tensor(codes, dtype=torch.int8) if codes else None
        if whole is None:  # of eight bits the low and the high halves count for themselves
            high = (16 * (code - 16 * (code > 7)) for code in range(16))
            self._numbers = torch.tensor([*range(16), *high] if numbers is None else numbers).float()
        self._inputs = matrix.codes.shape[1] * STEP * (1 if numbers is None else 2)
        groups = matrix.scale.shape[1]
        zero = matrix.zero
        outer = matrix.outer
        run = 0 if whole is None else math.gcd(matrix.group, RUN)
        self._sizes = self._inputs, matrix.group, 1 if outer is None else groups // outer.shape[1], run, step
        self._kinds = numbers is None, KINDS[matrix.scale.dtype], 0 if zero is None else KINDS[zero.dtype]
        self._of_output: dict[int, _Description] = {}

    def __call__(self, x: Tensor, bias: Tensor | None, first: int = 0, outputs: int | None = None) -> Tensor:
        """Multiplies `x [T, inputs]`, float32 or bfloat16, and adds `bias [outputs]` of x's dtype: `[T, outputs]`.

        `first`: the output, a multiple of 16, with which the `outputs` begin; None: all.
        """
        x = x.contiguous()
        rows = x.shape[0]
        out = x.new_empty(rows, outputs or self._outputs)
        described = self._of_output.get(first) or self._describe(first)
        _multiply_groups(
            described, x.data_ptr(), address(bias), out.data_ptr(), rows, out.shape[1], DTYPES[x.dtype]
        )  # fmt: skip
        return out

    def stored(self) -> dict[str, Tensor]:
        """See `Int8Product.stored`."""
        names = ("codes", "scale", "zero", "factor", "outer", "outer_zero")
        found = {name: getattr(self._matrix, name) for name in names}
        if found["scale"].dtype == torch.float8_e8m0fnu:
            found["scale"] = found["scale"].view(torch.uint8)
        return {name: lanes for name, lanes in found.items() if lanes is not None}

    def _describe(self, first: int) -> _Description:
        """The matrix from an output on."""

        def at(lanes: Tensor | None) -> int | None:
            return None if lanes is None else lanes[first // LANES :].data_ptr()

        of = self._matrix
        parts = (of.codes, of.scale, of.zero, of.outer, of.outer_zero, of.factor)
        found = _Description(
            *map(at, parts), address(of.order), address(self._numbers), *self._sizes, *self._kinds
        )  # fmt: skip
        return self._of_output.setdefault(first, found)
