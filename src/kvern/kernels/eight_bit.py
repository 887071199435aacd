"""Keys and values that the cache holds in 8 bits, as factors of products in float16, which holds every code exactly.

Queries are divided by QUERY_DIVISOR, a power of two, so that those of bfloat16 models stay within float16's range; what
is left out, and the scales of the codes, multiply scores and results. e4m3 is read by the hardware from compute
capability 8.9 on. Before it arrives as bytes, whose bits are put where float16 has them: the number is then one by
E4M3_BIAS too small.
"""

import torch
import triton
import triton.language as tl

from kvern.kernels.launch import capability, has_ptx, next_power_of_2

QUERY_DIVISOR = tl.constexpr(16.0)
E4M3_BIAS = tl.constexpr(256.0)
"""2^(15 - 7): float16's exponent has the bias 15, e4m3's 7."""
ROUNDING = tl.constexpr(12582912.0)
"""1.5 * 2^23: float32 numbers to which it is added have no fraction, and the nearest is taken, of two the even one."""


@triton.jit
def query_factors(queries, scales, kind: tl.constexpr):
    """Queries as the factor of a product with keys; `kind` is the cache's dtype."""
    if scales is None:
        queries = queries.to(kind)
    else:
        queries = queries.to(tl.float32) / QUERY_DIVISOR
        queries = queries.to(tl.float16)
    return queries


@triton.jit
def factors(stored):
    """Returns numbers read from a cache as a factor of a product."""
    if stored.dtype == tl.float8e4nv or (stored.dtype == tl.int8 and not has_ptx()):
        stored = stored.to(tl.float16)
    elif stored.dtype == tl.uint8:
        bits = stored.to(tl.uint16)
        stored = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    elif stored.dtype == tl.int8:
        # Four numbers at a time: 1024 + 128 + number, by its bits, less 1152. The card converts integers slowly.
        stored = tl.inline_asm_elementwise(
            "{ .reg .b32 high, low, up, less; xor.b32 up, $2, 0x80808080; mov.b32 less, 0x64806480; "
            "prmt.b32 low, up, 0x64646464, 0x4140; prmt.b32 high, up, 0x64646464, 0x4342; "
            "sub.f16x2 $0, low, less; sub.f16x2 $1, high, less; }",
            "=r,=r,r", [stored], dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    return stored


@triton.jit
def factor_pairs(stored, kind: tl.constexpr):
    """Returns pairs of neighbours in a cache of `kind`, read as int16, as factors: the first ones and the second ones.

    Products need the values of one entry of two keys beside each other: matrices of 16 bits are turned so when they
    are read, those of 8 bits would be taken apart byte by byte. Keys read in the same way lie in the same registers'
    places as values, so that addresses are computed once for both.
    """
    if kind == tl.float8e4nv:
        first, second = tl.inline_asm_elementwise(
            "{ .reg .b32 sorted; .reg .b16 low, high; prmt.b32 sorted, $2, 0, 0x3120; mov.b32 {low, high}, sorted; "
            "cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
            "=r,=r,r", [stored], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    elif kind == tl.uint8:
        bits = stored.to(tl.uint16, bitcast=True)
        first = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        second = ((bits & 0x8000) | ((bits >> 1) & 0x3F80)).to(tl.float16, bitcast=True)
    elif not has_ptx():
        first = ((stored << 8) >> 8).to(tl.float16)
        second = (stored >> 8).to(tl.float16)
    else:  # as in `factors`
        first, second = tl.inline_asm_elementwise(
            "{ .reg .b32 first, second, up, less; xor.b32 up, $2, 0x80808080; mov.b32 less, 0x64806480; "
            "prmt.b32 first, up, 0x64646464, 0x4240; prmt.b32 second, up, 0x64646464, 0x4341; "
            "sub.f16x2 $0, first, less; sub.f16x2 $1, second, less; }",
            "=r,=r,r", [stored], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    return first, second


@triton.jit
def score_scale(scale, scales, kv_head, kind: tl.constexpr):
    """Returns the factor from products of `query_factors` and `factors` to scores; `scale` for plain keys."""
    if scales is not None:
        scale *= tl.load(scales + kv_head) * QUERY_DIVISOR
        if kind == tl.uint8:
            scale *= E4M3_BIAS
    return scale


@triton.jit
def in_values(gathered, scales, kv_head, kv_heads: tl.constexpr, kind: tl.constexpr):
    """Sums of `factors` of values as what they are sums of."""
    if scales is not None:
        scale = tl.load(scales + kv_heads + kv_head)
        if kind == tl.uint8:
            scale *= E4M3_BIAS
        gathered *= scale
    return gathered


@triton.jit
def stored_codes(numbers, inverse_scales, kind: tl.constexpr):
    """float32 `numbers` as a cache of `kind` holds them: with scales the nearest code, the largest at most."""
    if inverse_scales is None:
        stored = numbers.to(kind)
    elif kind == tl.int8:
        bounded = tl.minimum(tl.maximum(numbers * inverse_scales, -127.0), 127.0)
        stored = (bounded + ROUNDING - ROUNDING).to(tl.int8)
    else:
        bounded = tl.minimum(tl.maximum(numbers * inverse_scales, -448.0), 448.0)
        if kind == tl.float8e4nv:
            stored = bounded.to(tl.float8e4nv)
        else:
            # float32 less its exponent's excess of bias has e4m3's bits at its upper end, numbers near zero included.
            bits = (bounded * 7.52316384526264e-37).to(tl.int32, bitcast=True)  # 2^-120
            size = bits & 0x7FFFFFFF
            rounded = (size + 0x7FFFF + ((size >> 20) & 1)) >> 20
            stored = (rounded | ((bits >> 24) & 0x80)).to(tl.uint8)
    return stored


def for_kernels(cache: torch.Tensor) -> torch.Tensor:
    """The cache as kernels read it: bytes, where the card does not know e4m3."""
    known = cache.dtype != torch.float8_e4m3fn or capability(cache.device) >= 89
    return cache if known else cache.view(torch.uint8)


def padded_dim(head_dim: int, cache: torch.Tensor) -> int:
    """Numbers of a row in a kernel: a product has at least 16, and of 8 bits there are two, see `factor_pairs`."""
    return max(16 if cache.itemsize > 1 else 32, next_power_of_2(head_dim))
