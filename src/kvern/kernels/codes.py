"""Decoding of quantized weights to tiles of plain numbers, inside of products.

A matrix `[outputs, inputs]` is kept as `Packed` (`formats/method.py`) says. A product goes along the inputs in
steps of INPUTS. In a step, a row has `COLUMNS = INPUTS // planes` columns, and a column gives a number for each plane:
those of one byte are one plane, those of half a byte two, the low and the high halves. Planes are never interleaved:
each is multiplied by the inputs that it belongs to. A number that a code stands for is

    number * scale - offset

where scale and offset are the same for CHUNK neighbouring columns of a plane. Kernels use

    places(first, PLANE, FORM)                [COLUMNS]: the inputs that the columns of a plane belong to
    numbers(matrix, row, first, ...)          a tuple of tiles [rows, COLUMNS] float32, one for each plane
    scales(matrix, row, first, ...)           (scale, offset) [rows, COLUMNS / CHUNK] float32, of a plane
    weights(matrix, row, first, ...)          a tuple of tiles [rows, COLUMNS] float32: what is multiplied by
    row_values(x, ...)                        a tuple of the inputs [COLUMNS] float32 of one row, for each plane

`row [rows]` int64 are rows of `codes`, within the matrix: experts in one stack add their first row to them. `first` is
the input at which the step begins, a multiple of INPUTS, and INPUTS of the code's `block`. `FORM.even` says that no
step goes beyond the inputs; without it what lies beyond are any finite numbers, and products multiply them by zero.
`Packed.factor`, and scales of whole rows (`scales_rows`), are left to whoever has the sum.

A matrix of an INTERLEAVED code, as int4, has the even inputs in one plane and the odd ones in the other. A product of
one row takes pairs of inputs apart in registers (`row_values`); one of several rows has its `x` in planes already: `[T,
2, inputs / 2]`, by `kernels/arrange.py`, which also puts inputs in the `order` of a matrix. Other blocks of GGUF read x
as it is.

Numbers may carry a bias, which their offset takes away again: `kernels/halves.py` makes floats of half bytes so. A
branch for each code is an `else` to the one before, since a compiler of Triton's reads on behind a `return`.

A new code gets an entry in CODES and a branch in `numbers`, and in `places` and `scales` if it is no kind that they
know; those of GGUF's blocks are in `kernels/block_codes.py`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvern.kernels.block_codes import BLOCKS, block_numbers, block_places, block_scales
from kvern.kernels.halves import (
    HIGH_BIAS,
    LOW_BIAS,
    SMALL_FLOATS_UNIT,
    biased_halves,
    e4m3_of_bits,
    nf4_numbers,
    small_floats,
)
from kvern.kernels.launch import capability
from kvern.kernels.packed import NF4, NON_LINEAR, Packed


class Code(NamedTuple):
    """The layout of a code.

    planes       numbers of a column
    run          columns of a plane that share scale and offset at least; 0: `Packed.group / planes`
    block        inputs that stand together: a step has a multiple of them
    """

    planes: int
    run: int = 0
    block: int = 1


CODES: Mapping[str, Code] = {
    "e4m3": Code(1),
    "int8": Code(1),
    "int4": Code(2, block=2),
    "nf4": Code(2, block=2),
    "e2m1": Code(2, block=2),
    **{name: Code(*numbers) for name, numbers in BLOCKS.items()},
}

INTERLEAVED = ("int4", "nf4", "e2m1", "q4_k", "q6_k")
"""Codes whose column is an even input and the odd one after it."""


def readable(weight: Packed) -> Packed:
    """Returns the matrix as kernels of its card read it: cards without e4m3 get its bits as int8."""
    if not 0 < capability(weight.codes.device) < 89:
        return weight
    codes, scale = (
        item.view(torch.int8) if item is not None and item.dtype == torch.float8_e4m3fn else item
        for item in (weight.codes, weight.scale)
    )
    assert codes is not None
    return weight._replace(codes=codes, scale=scale)


_TABLES: dict[torch.device, torch.Tensor] = {}


def table_of(device: torch.device) -> torch.Tensor:
    """The numbers of NF4 and NON_LINEAR on a device, in float16: the interpreter looks them up, cards know them."""
    if device not in _TABLES:
        _TABLES[device] = torch.tensor((*NF4, *NON_LINEAR), dtype=torch.float16, device=device)
    return _TABLES[device]


@triton.constexpr_function
def planes_of(code: str) -> int:
    """Returns how many numbers a column of a code stands for."""
    return CODES[code].planes


def chunk_of(code: str, group: int, columns: int) -> int:
    """CHUNK: so many neighbouring columns, a power of two, share scale and offset in steps of so many columns."""
    known = CODES[code]
    run = known.run or group // known.planes
    return min(columns, run & -run)


def scales_rows(code: str, group: int, inputs: int, zero: torch.Tensor | None) -> bool:
    """True if a row has one scale, which multiplies the products' sums; `weights` leaves it out."""
    return code in ("e4m3", "int8") and group == inputs and zero is None


class Matrix(NamedTuple):
    """The tensors of a packed matrix as one argument of a kernel; `table` is of `table_of`, others None if missing."""

    codes: Any
    scale: Any
    zero: Any
    table: Any
    factor: Any


class Form(NamedTuple):
    """The facts about a packed matrix, and the steps along its inputs, that a kernel is compiled for.

    code, group, per   `Packed.code`, `group` and `outputs_per_scale`
    scales_rows        see `scales_rows`
    even               no step goes beyond the inputs
    inputs             of a step
    chunk              neighbouring columns of a plane with the same scale and offset that are added up together
    """

    code: str
    group: int
    per: int
    scales_rows: bool
    even: bool
    inputs: int
    chunk: int


def matrix_of(weight: Packed) -> Matrix:
    """Returns a matrix's tensors for kernels."""
    return Matrix(weight.codes, weight.scale, weight.zero, table_of(weight.codes.device), weight.factor)


def form_of(weight: Packed, inputs: int, step: int, most_chunk: int = 1 << 30) -> Form:
    """Returns the form of a matrix of so many inputs, in steps of `step`."""
    chunk = min(most_chunk, chunk_of(weight.code, weight.group, step // planes_of(weight.code)))
    by_rows = scales_rows(weight.code, weight.group, inputs, weight.zero)
    return Form(weight.code, weight.group, weight.outputs_per_scale, by_rows, inputs % step == 0, step, chunk)


@triton.constexpr_function
def stands_beside(code: str) -> bool:
    """True if scales are stored apart from the codes."""
    return code not in BLOCKS


@triton.constexpr_function
def interleaved(code: str) -> bool:
    """True if a column is an even input and the odd one after it."""
    return code in INTERLEAVED


@triton.jit
def places(first, PLANE: tl.constexpr, FORM: tl.constexpr):
    """The inputs of a plane's columns, from the input `first` on: [COLUMNS]."""
    CODE: tl.constexpr = FORM.code
    if interleaved(CODE):
        return first + 2 * tl.arange(0, FORM.inputs // 2) + PLANE
    elif stands_beside(CODE):
        return first + tl.arange(0, FORM.inputs)
    else:
        return block_places(first, CODE, FORM.inputs, PLANE)


@triton.jit
def numbers(matrix, row, first, inputs, FORM: tl.constexpr):
    """Numbers before scale and offset: a tile [rows, COLUMNS] float32 for each plane."""
    CODE: tl.constexpr = FORM.code
    INPUTS: tl.constexpr = FORM.inputs
    if stands_beside(CODE):
        PLANES: tl.constexpr = planes_of(CODE)
        column = first // PLANES + tl.arange(0, INPUTS // PLANES)
        # the compiler sees that rows of whole steps begin at multiples of 16, and reads as wide
        width = inputs // INPUTS * (INPUTS // PLANES) if FORM.even else inputs // PLANES
        tile = matrix.codes + row[:, None] * width + column[None, :]
        inside = (column < inputs // PLANES)[None, :]
        found = tl.load(tile) if FORM.even else tl.load(tile, mask=inside, other=0.0)
        if CODE == "e4m3" and matrix.codes.dtype.element_ty == tl.int8:
            return (e4m3_of_bits(found),)
        elif PLANES == 1:
            return (found.to(tl.float32),)
        elif CODE == "int4":
            return biased_halves(found)
        elif CODE == "nf4":
            return nf4_numbers(found, matrix.table)
        else:
            return small_floats(found)
    else:
        return block_numbers(matrix.codes, matrix.table, row, first, inputs, CODE, INPUTS, FORM.even)


@triton.jit
def scales(matrix, row, first, inputs, PLANE: tl.constexpr, FORM: tl.constexpr):
    """Scale and offset of each CHUNK columns of a plane: two tiles [rows, COLUMNS / CHUNK] float32.

    Scales of one byte without a sign are exponents, as MXFP4 has them (E8M0); those with one are the bits of e4m3.
    """
    CODE: tl.constexpr = FORM.code
    CHUNK: tl.constexpr = FORM.chunk
    if stands_beside(CODE):
        PLANES: tl.constexpr = planes_of(CODE)
        begin = first + tl.arange(0, FORM.inputs // PLANES // CHUNK) * (CHUNK * PLANES)
        place = (row // FORM.per)[:, None] * tl.cdiv(inputs, FORM.group) + (begin // FORM.group)[None, :]
        known = (begin < inputs)[None, :]
        if matrix.scale.dtype.element_ty == tl.uint8:
            exponent = tl.load(matrix.scale + place, mask=known, other=0).to(tl.int32)
            by = (exponent << 23).to(tl.float32, bitcast=True)
        elif matrix.scale.dtype.element_ty == tl.int8:
            by = e4m3_of_bits(tl.load(matrix.scale + place, mask=known, other=0))
        else:
            by = tl.load(matrix.scale + place, mask=known, other=0.0).to(tl.float32)
        if CODE == "int4":
            BIAS: tl.constexpr = LOW_BIAS if PLANE == 0 else HIGH_BIAS
            if matrix.zero is not None:
                offset = by * (tl.load(matrix.zero + place, mask=known, other=0).to(tl.float32) + BIAS)
            else:
                offset = by * (BIAS + 8.0)
        elif matrix.zero is not None:
            offset = by * tl.load(matrix.zero + place, mask=known, other=0).to(tl.float32)
        else:
            if CODE == "e2m1":
                by *= SMALL_FLOATS_UNIT
            offset = by * 0.0
        return by, offset
    else:
        return block_scales(matrix.scale, row, first, inputs, CODE, FORM.inputs, CHUNK, FORM.even, PLANE)


@triton.jit
def _scaled(tile, by, offset, CHUNK: tl.constexpr):
    ROWS: tl.constexpr = tile.shape[0]
    COLUMNS: tl.constexpr = tile.shape[1]
    if CHUNK == COLUMNS:
        return tile * by - offset
    else:
        chunks = tl.reshape(tile, [ROWS, COLUMNS // CHUNK, CHUNK])
        return tl.reshape(chunks * by[:, :, None] - offset[:, :, None], [ROWS, COLUMNS])


@triton.jit
def weights(matrix, row, first, inputs, FORM: tl.constexpr):
    """The weights of a step: a tile [rows, COLUMNS] float32 for each plane, without scales of whole rows."""
    tiles = numbers(matrix, row, first, inputs, FORM)
    if FORM.scales_rows:
        return tiles
    else:
        by, offset = scales(matrix, row, first, inputs, 0, FORM)
        low = _scaled(tiles[0], by, offset, FORM.chunk)
        if planes_of(FORM.code) == 1:
            return (low,)
        else:
            by, offset = scales(matrix, row, first, inputs, 1, FORM)
            return low, _scaled(tiles[1], by, offset, FORM.chunk)


@triton.jit
def times_rows(total, matrix, row, FORM: tl.constexpr):
    """The sums of rows of the matrix, [rows] or [rows, columns], with what multiplies whole rows."""
    if FORM.scales_rows:
        by = tl.load(matrix.scale + row // FORM.per).to(tl.float32)
        total *= by if len(total.shape) == 1 else by[:, None]
    if matrix.factor is not None:
        by = tl.load(matrix.factor + row)
        total *= by if len(total.shape) == 1 else by[:, None]
    return total


@triton.jit
def _pairs(x, pair, inputs, EVEN: tl.constexpr):
    """The inputs 2 * pair and 2 * pair + 1 of a row; of two bytes each in one word, so that they come together."""
    known = pair >= 0 if EVEN else 2 * pair < inputs
    if x.dtype.element_ty == tl.bfloat16:
        both = tl.load(x.to(tl.pointer_type(tl.int32)) + pair, mask=known, other=0)
        return (both << 16).to(tl.float32, bitcast=True), (both & -65536).to(tl.float32, bitcast=True)
    elif x.dtype.element_ty == tl.float16:
        both = tl.load(x.to(tl.pointer_type(tl.int32)) + pair, mask=known, other=0)
        low = (both & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
        high = ((both >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
        return low.to(tl.float32), high.to(tl.float32)
    else:
        even = tl.load(x + 2 * pair, mask=known, other=0.0)
        return even.to(tl.float32), tl.load(x + 2 * pair + 1, mask=known, other=0.0).to(tl.float32)


@triton.jit
def row_values(x, first, inputs, FORM: tl.constexpr):
    """The inputs of one row of contiguous numbers at `x`, for each plane: [COLUMNS] float32, zero beyond the last."""
    if interleaved(FORM.code):
        return _pairs(x, first // 2 + tl.arange(0, FORM.inputs // 2), inputs, FORM.even)
    else:
        place = places(first, 0, FORM)
        low = tl.load(x + place, mask=place < inputs, other=0.0).to(tl.float32)
        if planes_of(FORM.code) == 1:
            return (low,)
        else:
            place = places(first, 1, FORM)
            return low, tl.load(x + place, mask=place < inputs, other=0.0).to(tl.float32)
