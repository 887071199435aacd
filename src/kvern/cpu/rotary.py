"""Norm and rotation of queries and keys, and the write of keys and values to the paged cache, in one pass."""

import ctypes

from torch import Tensor

from kvern.cpu.library import CODE, DTYPES, INTEGER, NUMBER, POINTER, address, fields, function


class Heads(ctypes.Structure):
    """The heads of a layer's queries, keys and values, as in `sources/rotary.cpp`.

    Weights and biases [heads, head_dim] belong to a norm of `cpu.rows.NORMS` (0: none) and may be null. `whole_row`:
    one norm of all heads together. `norm_after`: the norm follows the rotation, which covers the first `rotary_dim`
    entries of a head. `norm_values`: each head of the values is divided by its root mean square. `keys_are_values`:
    values are the keys before norm and rotation.
    """

    _fields_ = (
        *fields("heads kv_heads head_dim rotary_dim", INTEGER),
        *fields("query_weight query_bias key_weight key_bias", POINTER),
        ("epsilon", NUMBER),
        *fields("norm whole_row norm_after interleaved norm_values keys_are_values", CODE),
    )


_rotate_and_store = function(
    "kvern_rotate_and_store",
    POINTER, POINTER, POINTER, POINTER, POINTER, POINTER, POINTER, POINTER, INTEGER, CODE, CODE,
)  # fmt: skip


def rotate(heads: Heads, qkv: Tensor, positions: Tensor, table: Tensor) -> None:
    """Normalise and rotate queries and keys in place; see `rotate_and_store`."""
    _rotate_and_store(
        ctypes.addressof(heads), qkv.data_ptr(), positions.data_ptr(), None, table.data_ptr(), None, None, None,
        qkv.shape[0], DTYPES[qkv.dtype], 0,
    )  # fmt: skip


def rotate_and_store(
    heads: Heads,
    qkv: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    table: Tensor,
    cache: Tensor,
    scales: Tensor | None,
) -> None:
    """Normalise and rotate queries and keys, and write keys and values to the cache; queries are changed in place.

    qkv           [T, (heads + 2 * kv_heads) * head_dim] float32 or bfloat16, without gaps; [T, (heads + kv_heads) *
                  head_dim] where keys are values
    positions     [T] int64
    slot_mapping  [T] int64: block * block_size + offset
    table         [positions, 2, 1, rotary_dim] in the dtype of qkv: cosines and signed sines, see `layers.rope`;
                  not read without a rotation
    cache         [2, blocks, block_size, kv_heads, head_dim] of a dtype of `DTYPES`
    scales        [2, kv_heads] float32 of a cache in 8 bits
    """
    keys = cache.data_ptr()
    _rotate_and_store(
        ctypes.addressof(heads), qkv.data_ptr(), positions.data_ptr(), slot_mapping.data_ptr(), table.data_ptr(),
        keys, keys + cache.nbytes // 2, address(scales), qkv.shape[0], DTYPES[qkv.dtype], DTYPES[cache.dtype],
    )  # fmt: skip
