"""Blocks of a cache in 8 bits as the 16-bit numbers that they stand for, for kernels which read no codes."""

import torch
import triton
import triton.language as tl

from kvern.kernels.eight_bit import factors, for_kernels, in_values
from kvern.kernels.launch import Launcher


@Launcher
@triton.jit(do_not_specialize=["count"])
def _plain_blocks_kernel(
    cache: tl.tensor,
    scales: tl.tensor,
    blocks: tl.tensor,
    out: tl.tensor,
    part_stride: tl.int64,
    count,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    size: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1).to(tl.int64)
    origin = cache + part * part_stride + tl.load(blocks + place).to(tl.int64) * size
    target = out + (part * count + place) * size
    for first in tl.range(0, size, BLOCK):
        offset = first + tl.arange(0, BLOCK)
        inside = offset < size
        numbers = factors(tl.load(origin + offset, mask=inside, other=0.0)).to(tl.float32)
        head = part.to(tl.int32) * kv_heads + offset // head_dim % kv_heads
        numbers = in_values(numbers, scales, head, 0, cache.dtype.element_ty)
        tl.store(target + offset, numbers.to(out.dtype.element_ty), mask=inside)


def plain_blocks(cache: torch.Tensor, scales: torch.Tensor, blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`cache [2, blocks, block_size, kv_heads, head_dim]` at `blocks [N]` int32, by `scales [2, kv_heads]` float32.

    Returns [2, N, block_size, kv_heads, head_dim] of a dtype of 16 or 32 bits. Moves each number once in and once out.
    """
    _, _, block_size, kv_heads, head_dim = cache.shape
    count, size = len(blocks), block_size * kv_heads * head_dim
    out = torch.empty(2, count, block_size, kv_heads, head_dim, dtype=dtype, device=cache.device)
    _plain_blocks_kernel[(count, 2)](
        for_kernels(cache),
        scales,
        blocks,
        out,
        cache.stride(0),
        count,
        kv_heads,
        head_dim,
        size,
        4096,
        num_warps=4,
    )
    return out
