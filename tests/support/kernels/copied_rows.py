"""A kernel whose arguments are tuples: it copies a range of columns."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kvern.kernels.launch import Launcher, Rows


class Shape(NamedTuple):
    """The columns of a row, and the next power of two."""

    width: int
    WIDE: int


class Range(NamedTuple):
    """The columns that are copied, in tuples of their own."""

    first: Any
    end: tuple[Any]


@Launcher
@triton.jit(do_not_specialize=["part"])
def copy(x: Rows, out: Rows, part: Range, SHAPE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SHAPE.WIDE)
    inside = (column < SHAPE.width) & (column >= part.first) & (column < part.end[0])
    if out.pointer is not None:
        values = tl.load(x.pointer + row * x.stride + column, mask=inside)
        tl.store(out.pointer + row * out.stride + column, values, mask=inside)
