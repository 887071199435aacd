"""Keys and values in 8 bits: a code for each number, and one float32 scale for a layer's keys, or values, of a KV head.

A number is code * scale. Codes are e4m3 (OCP 8-bit floating point, without infinities), or integers. Attention
computes with the codes, which 16-bit numbers hold exactly: the keys' scale multiplies queries, or scores; the values'
the result.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

LARGEST_CODE = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""The largest code of each cache dtype that has scales."""


@dataclass(frozen=True)
class EightBit:
    """`scales` of each layer, [2, kv_heads] float32: keys, values. PyTorch attends in `compute`."""

    scales: Sequence[torch.Tensor]
    compute: torch.dtype


def codes_of(numbers: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`numbers [T, kv_heads, head_dim]` by `scale [kv_heads]`, rounded to the nearest; the largest codes bound them."""
    largest = LARGEST_CODE[dtype]
    scaled = (numbers.float() * scale.reciprocal()[:, None]).clamp_(-largest, largest)
    return (scaled if dtype.is_floating_point else scaled.round_()).to(dtype)


def store_tokens(cache: torch.Tensor, places: torch.Tensor, tokens: torch.Tensor, scale: torch.Tensor | None) -> None:
    """Write `tokens [T, kv_heads, head_dim]` to the rows `places [T]` of `cache [N, kv_heads, head_dim]`.

    `scale [kv_heads]`: of a cache in 8 bits.
    """
    if scale is None:
        cache.index_copy_(0, places, tokens.to(cache.dtype))
    else:  # PyTorch copies no numbers of 8 bits by index
        codes = codes_of(tokens, scale, cache.dtype)
        cache.view(torch.uint8).index_copy_(0, places, codes.view(torch.uint8))


def of_query_heads(scale: torch.Tensor, heads: int) -> torch.Tensor:
    """`scale [kv_heads]` for each of the query heads, [heads, 1]."""
    return scale.repeat_interleave(heads // len(scale))[:, None]
