"""Norm and rotation of queries and keys, and the write of keys and values to the paged cache, in one pass."""

import torch
import triton
import triton.language as tl

from kvern.kernels.eight_bit import for_kernels, stored_codes
from kvern.kernels.launch import Launcher, cdiv, next_power_of_2, wait_for_previous

FEW_TOKENS = 32
"""Up to so many, a program has a single head, so that there are programs for a whole card."""
MANY_TOKENS = 1024
"""From so many on, a program has 16 heads: on an H200 that takes 19 us for 4096 tokens of 48 heads, with 8 it is 31."""


@Launcher
@triton.jit(do_not_specialize_on_alignment=["positions", "slot_mapping"])
def _rotate_and_store_kernel(
    qkv: tl.tensor,
    positions: tl.tensor,
    slot_mapping: tl.tensor,
    table: tl.tensor,
    norm_weight: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    scales: tl.tensor | None,
    epsilon: tl.float32,
    query_heads: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    rotary_dim: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    NORM_VALUES: tl.constexpr,
    KEYS_ARE_VALUES: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    ROTATE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    # Where the token stands was written well before the kernel that this one overlaps with.
    place = tl.load(slot_mapping + token) * kv_heads * head_dim
    position = tl.load(positions + token)
    wait_for_previous(OVERLAP)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    rotated = head < query_heads + kv_heads
    is_query = head < query_heads
    is_key = (head >= query_heads) & rotated
    is_value = (head >= query_heads + kv_heads) & (head < query_heads + 2 * kv_heads)
    row = qkv + token * (query_heads + (1 if KEYS_ARE_VALUES else 2) * kv_heads) * head_dim
    if KEYS_ARE_VALUES:
        row += tl.where(is_value, head - kv_heads, head) * head_dim
    else:
        row += head * head_dim
    key_row = key_cache + place + (head - query_heads) * head_dim
    value_row = value_cache + place + (head - query_heads - kv_heads) * head_dim

    half = tl.arange(0, HALF)[None, :]
    in_half = half < rotary_dim // 2
    first_column = 2 * half if INTERLEAVED else half
    second_column = 2 * half + 1 if INTERLEAVED else half + rotary_dim // 2
    known = (rotated | is_value) & in_half
    first = tl.load(row + first_column, mask=known, other=0.0).to(tl.float32)
    second = tl.load(row + second_column, mask=known, other=0.0).to(tl.float32)
    if REST > 0:
        rest_column = rotary_dim + tl.arange(0, REST)[None, :]
        in_rest = (rotated | is_value) & (rest_column < head_dim)
        rest = tl.load(row + rest_column, mask=in_rest, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(first * first + second * second, axis=1)
        if REST > 0:
            squares += tl.sum(rest * rest, axis=1)
        inverse = tl.rsqrt(squares / head_dim + epsilon)[:, None]
        weights = norm_weight + head * head_dim
        if not NORM_VALUES:
            inverse = tl.where(is_value, 1.0, inverse)
        wide = rotated & in_half
        first *= inverse * tl.load(weights + first_column, mask=wide, other=1.0)
        second *= inverse * tl.load(weights + second_column, mask=wide, other=1.0)
        if REST > 0:
            rest *= inverse * tl.load(weights + rest_column, mask=in_rest & rotated, other=1.0)
    if ROTATE:
        angles = table + position * 2 * rotary_dim
        cosine = tl.load(angles + first_column, mask=in_half, other=1.0).to(tl.float32)
        sine = tl.load(angles + rotary_dim + second_column, mask=in_half, other=0.0).to(tl.float32)
        cosine = tl.where(is_value, 1.0, cosine)
        sine = tl.where(is_value, 0.0, sine)
        turned = first * cosine - second * sine
        second = second * cosine + first * sine
        first = turned
    kind: tl.constexpr = key_cache.dtype.element_ty
    if scales is None:
        inverse_scales = None
    else:  # those of keys come first, as their heads do
        inverse_scales = 1.0 / tl.load(scales + tl.maximum(head - query_heads, 0), mask=is_key | is_value, other=1.0)
    tl.store(row + first_column, first.to(qkv.dtype.element_ty), mask=is_query & in_half)
    tl.store(row + second_column, second.to(qkv.dtype.element_ty), mask=is_query & in_half)
    tl.store(key_row + first_column, stored_codes(first, inverse_scales, kind), mask=is_key & in_half)
    tl.store(key_row + second_column, stored_codes(second, inverse_scales, kind), mask=is_key & in_half)
    tl.store(value_row + first_column, stored_codes(first, inverse_scales, kind), mask=is_value & in_half)
    tl.store(value_row + second_column, stored_codes(second, inverse_scales, kind), mask=is_value & in_half)
    if REST > 0:
        tl.store(row + rest_column, rest.to(qkv.dtype.element_ty), mask=is_query & in_rest)
        tl.store(key_row + rest_column, stored_codes(rest, inverse_scales, kind), mask=is_key & in_rest)
        tl.store(value_row + rest_column, stored_codes(rest, inverse_scales, kind), mask=is_value & in_rest)


def rotate_and_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    table: torch.Tensor | None,
    cache: torch.Tensor,
    *,
    query_heads: int,
    interleaved: bool = False,
    norm_weight: torch.Tensor | None = None,
    epsilon: float = 0.0,
    norm_values: bool = False,
    keys_are_values: bool = False,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalise and rotate queries and keys, write keys and values to the cache; the queries are changed in place.

    qkv          [T, (query_heads + 2 * kv_heads) * head_dim], contiguous; if `keys_are_values`, the values are the
                 keys as they come, and there are kv_heads fewer
    positions    [T] int64
    slot_mapping  [T] int64: block * block_size + offset
    table        [positions, 2, 1, rotary_dim]: cosines and signed sines, see `layers.rope`; None: no rotation
    cache        [2, blocks, block_size, kv_heads, head_dim]
    scales       [2, kv_heads] float32 of a cache in 8 bits
    norm_weight  [query_heads + kv_heads, head_dim] float32 of a root-mean-square norm of each head; None: no norm
    norm_values  values have that norm, too, without a weight
    returns      the queries, a view [T, query_heads, head_dim] of qkv

    Moves the queries twice, keys and values in and out once.
    """
    cache = for_kernels(cache)
    norm = norm_weight, epsilon, norm_values
    _launch(qkv, positions, slot_mapping, table, cache, scales, query_heads, interleaved, norm, keys_are_values)
    return qkv.view(qkv.shape[0], -1, cache.shape[-1])[:, :query_heads]


def rotate_queries(
    queries: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor | None,
    *,
    heads: int,
    interleaved: bool = False,
    norm_weight: torch.Tensor | None = None,
    epsilon: float = 0.0,
) -> torch.Tensor:
    """Normalise and rotate queries `[T, heads * head_dim]`, contiguous, in place, as `rotate_and_store` does.

    norm_weight  [heads, head_dim] float32
    returns      a view [T, heads, head_dim] of them

    Moves them twice.
    """
    rows = queries.view(queries.shape[0], heads, -1)
    nowhere = rows.new_empty(2, 0, 0, 0, rows.shape[-1])
    _launch(queries, positions, positions, table, nowhere, None, heads, interleaved, (norm_weight, epsilon, False))
    return rows


def _launch(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    table: torch.Tensor | None,
    cache: torch.Tensor,
    scales: torch.Tensor | None,
    query_heads: int,
    interleaved: bool,
    norm: tuple[torch.Tensor | None, float, bool],
    keys_are_values: bool = False,
) -> None:
    """`norm`: weight, epsilon, and whether values have it, too."""
    norm_weight, epsilon, norm_values = norm
    kv_heads, head_dim = cache.shape[3:]
    rotary_dim = 0 if table is None else table.shape[-1]
    # Without a rotation the head is still taken in two halves, which are not turned.
    span = rotary_dim or head_dim - head_dim % 2
    heads = query_heads + 2 * kv_heads
    tokens = qkv.shape[0]
    group = 1 if tokens <= FEW_TOKENS else min(8 if tokens < MANY_TOKENS else 16, next_power_of_2(heads))
    _rotate_and_store_kernel[(tokens, cdiv(heads, group))](
        qkv,
        positions,
        slot_mapping,
        qkv if table is None else table,
        qkv if norm_weight is None else norm_weight,
        cache[0],
        cache[1],
        scales,
        epsilon,
        query_heads,
        kv_heads,
        head_dim,
        span,
        interleaved,
        norm_weight is not None,
        norm_values,
        keys_are_values,
        group,
        next_power_of_2(span // 2),
        next_power_of_2(head_dim - span) if head_dim > span else 0,
        table is not None,
        num_warps=1 if group == 1 else 4,
    )
