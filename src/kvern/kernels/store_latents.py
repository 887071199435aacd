"""Norm of latents, rotation of the key that heads share and of their queries, and the write to the paged cache."""

import torch
import triton
import triton.language as tl

from kvern.kernels.launch import Launcher, next_power_of_2, wait_for_previous


@Launcher
@triton.jit(do_not_specialize_on_alignment=["positions", "slot_mapping"])
def _store_latents_kernel(
    rows: tl.tensor,
    asked: tl.tensor,
    positions: tl.tensor,
    slot_mapping: tl.tensor,
    table: tl.tensor,
    weight: tl.tensor,
    cache: tl.tensor,
    query: tl.tensor,
    epsilon: tl.float32,
    row_stride: tl.int64,
    asked_stride: tl.int64,
    heads: tl.constexpr,
    latent: tl.constexpr,
    rotary_dim: tl.constexpr,
    asked_dim: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROTATE: tl.constexpr,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    HALF: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    width: tl.constexpr = latent + rotary_dim
    # Where the token stands was written well before the kernel that this one overlaps with.
    stored = cache + tl.load(slot_mapping + token) * width
    position = tl.load(positions + token)
    wait_for_previous(OVERLAP)
    entry = tl.arange(0, LATENT)
    numbers = tl.load(rows + token * row_stride + entry, mask=entry < latent, other=0.0).to(tl.float32)
    gain = tl.load(weight + entry, mask=entry < latent, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(numbers * numbers, axis=0) / latent + epsilon)
    tl.store(stored + entry, (numbers * inverse * gain).to(cache.dtype.element_ty), mask=entry < latent)
    # The shared key stands behind the queries' heads.
    head = tl.arange(0, HEADS)[:, None]
    half = tl.arange(0, HALF)[None, :]
    first_column = 2 * half if INTERLEAVED else half
    second_column = 2 * half + 1 if INTERLEAVED else half + rotary_dim // 2
    in_half = half < rotary_dim // 2
    is_query, is_key = (head < heads) & in_half, (head == heads) & in_half
    source = asked + token * asked_stride + head * asked_dim + asked_dim - rotary_dim
    key = rows + token * row_stride + latent + head * 0
    first = tl.load(source + first_column, mask=is_query, other=0.0) + tl.load(
        key + first_column, mask=is_key, other=0.0
    )
    second = tl.load(source + second_column, mask=is_query, other=0.0) + tl.load(
        key + second_column, mask=is_key, other=0.0
    )
    first, second = first.to(tl.float32), second.to(tl.float32)
    if ROTATE:
        angles = table + position * 2 * rotary_dim
        cosine = tl.load(angles + first_column, mask=in_half, other=1.0).to(tl.float32)
        sine = tl.load(angles + rotary_dim + second_column, mask=in_half, other=0.0).to(tl.float32)
        turned = first * cosine - second * sine
        second = second * cosine + first * sine
        first = turned
    kind: tl.constexpr = cache.dtype.element_ty
    tl.store(stored + latent + head * 0 + first_column, first.to(kind), mask=is_key)
    tl.store(stored + latent + head * 0 + second_column, second.to(kind), mask=is_key)
    target = query + (token * heads + head) * width + latent
    tl.store(target + first_column, first.to(query.dtype.element_ty), mask=is_query)
    tl.store(target + second_column, second.to(query.dtype.element_ty), mask=is_query)


def store_latents(
    rows: torch.Tensor,
    asked: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    table: torch.Tensor | None,
    weight: torch.Tensor,
    epsilon: float,
    cache: torch.Tensor,
    query: torch.Tensor,
    *,
    interleaved: bool = False,
) -> None:
    """Normalise latents, rotate the shared key, write both to the cache; rotate what of queries meets that key.

    rows          [T, latent + rotary], rows may have gaps: the latent, the key
    asked         [T, heads * asked_dim], rows may have gaps: the last `rotary` of each head are rotated
    positions     [T] int64
    slot_mapping  [T] int64: block * block_size + offset
    table         [positions, 2, 1, rotary]: cosines and signed sines, see `layers.rope`; None: no rotation
    weight        [latent] of a root-mean-square norm
    cache         [1, blocks, block_size, 1, latent + rotary]
    query         [T, heads, latent + rotary], contiguous: its last `rotary` entries are written

    Moves the latents and keys, and what of queries is rotated, in and out once.
    """
    tokens, heads, width = query.shape
    latent = weight.shape[0]
    _store_latents_kernel[(tokens,)](
        rows,
        asked,
        positions,
        slot_mapping,
        rows if table is None else table,
        weight,
        cache,
        query,
        epsilon,
        rows.stride(0),
        asked.stride(0),
        heads,
        latent,
        width - latent,
        asked.shape[1] // heads,
        interleaved,
        table is not None,
        next_power_of_2(heads + 1),
        next_power_of_2(latent),
        next_power_of_2((width - latent) // 2),
        num_warps=4,
    )
