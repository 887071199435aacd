"""Products with plain weights."""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from kvern.cpu import large_pages
from kvern.cpu.library import CODE, DTYPES, INTEGER, POINTER, address, function

_pack = function("kvern_pack_linear", POINTER, POINTER, INTEGER, INTEGER, CODE, CODE)
_unpack = function(
    "kvern_unpack_linear", POINTER, POINTER, INTEGER, POINTER, INTEGER, INTEGER, INTEGER, CODE, CODE
)  # fmt: skip
_linear = function(
    "kvern_linear", POINTER, POINTER, POINTER, POINTER, INTEGER, INTEGER, INTEGER, CODE, CODE, CODE, CODE
)  # fmt: skip
_has_tiles = function("kvern_has_tiles", POINTER)
_linear_heads = function(
    "kvern_linear_heads", POINTER, POINTER, POINTER, INTEGER, INTEGER, INTEGER, INTEGER, INTEGER, INTEGER, CODE
)  # fmt: skip

BLOCK = 16
"""The number of outputs in a stored block."""
NO_ACTIVATION = -1


class PackedWeight(NamedTuple):
    """A matrix `[outputs, inputs]` in the order in which products read it, see `sources/linear_layout.h`.

    `gated`: the halves of the outputs are gates and ups, as `gated_linear` needs them.
    """

    numbers: Tensor
    outputs: int
    inputs: int
    gated: bool


def pack(weight: Tensor, *, gated: bool = False) -> PackedWeight:
    """Packs `weight [outputs, inputs]`, float32 or bfloat16."""
    outputs, inputs = weight.shape
    halves, per_step = 1 + gated, 4 // weight.itemsize
    columns, steps = -(-outputs // (halves * BLOCK)) * halves * BLOCK, -(-inputs // per_step)
    numbers = large_pages.empty((columns * steps * per_step,), weight.dtype)
    _pack(weight.contiguous().data_ptr(), numbers.data_ptr(), outputs, inputs, gated, DTYPES[weight.dtype])
    return PackedWeight(numbers, outputs, inputs, gated)


def unpack(packed: PackedWeight, ids: Tensor | None = None, first: int = 0) -> Tensor:
    """The rows `ids [T]` int64 of the matrix, or all: `[T, inputs]`, bit by bit as they were.

    `packed` may have only the rows from `first` on of a larger matrix: the others are 0.
    """
    numbers, outputs, inputs, gated = packed
    count, ids = (outputs, None) if ids is None else (ids.shape[0], ids.contiguous())
    plain = torch.empty(count, inputs, dtype=numbers.dtype)
    _unpack(
        numbers.data_ptr(), address(ids), first, plain.data_ptr(), count, outputs, inputs, gated, DTYPES[numbers.dtype],
    )  # fmt: skip
    return plain


def linear(x: Tensor, packed: PackedWeight, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """Computes `x [T, inputs] @ weight.T + bias [outputs]`, [T, outputs]; all have the dtype of the weight.

    `dtype` of the results is float32 or x's; None: x's. Sums are float32. The results of a row are bit-identical for
    any other rows in the batch and any number of threads.
    """
    return _multiply(x, packed, bias, packed.outputs, NO_ACTIVATION, dtype or x.dtype)


def gated_linear(x: Tensor, packed: PackedWeight, bias: Tensor | None, activation: int) -> Tensor:
    """Computes `activation(gate) * up`, [T, outputs / 2], for x [T, inputs] and a weight that is packed as gated.

    `activation`: a code of `kvern.cpu.rows.ACTIVATIONS`. Gate and up are float32 until they are multiplied.
    """
    return _multiply(x, packed, bias, packed.outputs // 2, activation, x.dtype)


def _multiply(
    x: Tensor, packed: PackedWeight, bias: Tensor | None, width: int, activation: int, dtype: torch.dtype
) -> Tensor:
    numbers, outputs, inputs, gated = packed
    rows, given = x.shape
    assert given == inputs and x.dtype == numbers.dtype, "the kernel reads rows like those of the matrix"
    x = x.contiguous()
    out = torch.empty(rows, width, dtype=dtype)
    _linear(
        numbers.data_ptr(), x.data_ptr(), address(bias), out.data_ptr(), rows, outputs, inputs, gated, activation,
        DTYPES[x.dtype], DTYPES[dtype],
    )  # fmt: skip
    return out


def has_tiles() -> bool:
    """Return whether many rows of bfloat16 are multiplied by matrix tiles, as oneDNN does.

    The library must be loaded. False on other processors, with compilers that know no tiles, and where the system
    refuses them.
    """
    found = ctypes.c_int32()
    _has_tiles(ctypes.addressof(found))
    return found.value != 0


class PackedHeads(NamedTuple):
    """A matrix `[outputs, inputs]` for each head, as `PackedWeight` has one: numbers [heads, ...]."""

    numbers: Tensor
    outputs: int
    inputs: int


def pack_heads(weights: Tensor) -> PackedHeads:
    """Packs `weights [heads, outputs, inputs]`, float32 or bfloat16."""
    _, outputs, inputs = weights.shape
    numbers = torch.stack([pack(weight).numbers for weight in weights.contiguous()])
    return PackedHeads(numbers, outputs, inputs)


def linear_heads(packed: PackedHeads, x: Tensor) -> Tensor:
    """Multiplies each head by its own matrix: `x [T, heads, inputs]`, with any strides, to `[T, heads, outputs]`.

    As with `linear`, the results of a row do not depend on other rows.
    """
    numbers, outputs, inputs = packed
    rows, heads, given = x.shape
    assert given == inputs and heads == len(numbers) and x.dtype == numbers.dtype, "the kernel reads rows of all heads"
    x = x if x.stride(2) == 1 else x.contiguous()
    out = torch.empty(rows, heads, outputs, dtype=x.dtype)
    _linear_heads(
        numbers.data_ptr(), x.data_ptr(), out.data_ptr(), rows, heads, outputs, inputs, x.stride(0), x.stride(1),
        DTYPES[x.dtype],
    )  # fmt: skip
    return out
