"""Attention over a paged KV cache, in place."""

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvern.cpu.library import CODE, DTYPES, INTEGER, NUMBER, POINTER, address, close_to, fields, function

_attend = function("kvern_attend", POINTER, POINTER, POINTER, INTEGER, POINTER, POINTER, INTEGER)


MOST_AHEAD = 1 << 31
"""The number of visible later keys where a token sees all of them."""


class _Layer(ctypes.Structure):
    """The struct of this name in `sources/attention.h`."""

    _fields_ = [
        *fields("keys values key_scales value_scales sinks", POINTER),
        *fields("heads kv_heads head_dim value_dim block_size window ahead", INTEGER),
        *fields("scale softcap", NUMBER),
        *fields("cache_dtype dtype", CODE),
    ]


class _Step(ctypes.Structure):
    """The struct of this name in `sources/attention.h`."""

    _fields_ = [
        ("block_table", POINTER),
        ("table_stride", INTEGER),
        ("requests", POINTER),
        ("count", INTEGER),
    ]


class AttentionForm(NamedTuple):
    """The attention of one layer.

    heads      query heads
    scale      factor of the scores
    window     keys that a token sees at most on each side; None: all
    softcap    limit of the scores; None: none
    value_dim  entries of a value; None: as many as of a key
    causal     tokens see no later keys; otherwise as many later as earlier ones, within their request
    """

    heads: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    value_dim: int | None = None
    causal: bool = True


class CachedLayer:
    """One layer's cache and the attention over it, for activations of one dtype.

    cache      [2, blocks, block_size, kv_heads, head_dim] float32, bfloat16, int8 or e4m3, without gaps; of keys alone,
               [1, ...], where values are their first `value_dim` entries
    scales     [2, kv_heads] float32: of a cache in 8 bits
    dtype      float32 or bfloat16, of queries, keys and values
    sinks      [heads] float32: of a layer with attention sinks
    """

    def __init__(
        self,
        cache: Tensor,
        scales: Tensor | None,
        dtype: torch.dtype,
        form: AttentionForm,
        sinks: Tensor | None = None,
    ) -> None:
        self._tensors = (cache, scales, sinks)  # kept alive, because their addresses are used
        _, _, block_size, kv_heads, head_dim = cache.shape
        keys, values = cache[0], cache[-1]
        self._value_dim = form.value_dim or head_dim
        key_scales, value_scales = (None, None) if scales is None else scales
        window = form.window
        ahead = 0 if form.causal else MOST_AHEAD if window is None else window - 1
        self._layer = _Layer(
            keys.data_ptr(), values.data_ptr(), address(key_scales), address(value_scales), address(sinks), form.heads,
            kv_heads, head_dim, self._value_dim, block_size, window or 0, ahead, form.scale, form.softcap or 0.0,
            DTYPES[cache.dtype], DTYPES[dtype],
        )  # fmt: skip
        self._address = ctypes.addressof(self._layer)

    def attend(self, step: "Step", query: Tensor, wanted: Tensor | None = None) -> Tensor:
        """Computes attention of the step's tokens over stored keys.

        query    [T, heads, head_dim], whose rows may have gaps
        wanted   [S] int64, ascending: tokens that alone attend; None: all
        returns  [T or S, heads, value_dim]; sums in float32, weights and products with a cache of 16 or 8 bits as the
                 processor multiplies bfloat16, where it does and queries are such
        """
        count = len(query) if wanted is None else len(wanted)
        out = torch.empty((count, query.shape[1], self._value_dim), dtype=query.dtype)
        _attend(
            self._address, step.address, query.data_ptr(), query.stride(0), out.data_ptr(), address(wanted), count
        )  # fmt: skip
        return out


class Step:
    """The requests of a step: `requests` [3, R] int64, without gaps, read when a layer attends.

    Its rows are indices into `block_table` [slots, blocks] int32, first positions, and numbers of tokens.
    """

    def __init__(self, block_table: Tensor, requests: Tensor) -> None:
        self.tensors = (block_table, requests)  # kept alive, because their addresses are used
        self._step = _Step(block_table.data_ptr(), block_table.stride(0), requests.data_ptr(), requests.shape[1])
        self.address = ctypes.addressof(self._step)


def check() -> None:
    """Compare with PyTorch. Raises AssertionError."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Any:
        return torch.randn(shape, generator=generator)

    heads = 6
    kv_heads = 2
    size = 16
    starts, counts = [0, 300, 41], [70, 1, 3]
    table = torch.randperm(60, generator=generator).int().view(3, 20)
    for dtype, head_dim, value_dim in ((torch.float32, 40, None), (torch.bfloat16, 64, None), (torch.float32, 72, 48)):
        cache = random(2 if value_dim is None else 1, 60, size, kv_heads, head_dim).to(dtype)
        query = random(sum(counts), heads, head_dim).to(dtype)
        forms = ((None, True),) if value_dim is not None else ((None, True), (None, False), (20, False))
        for window, causal in forms:
            layer = CachedLayer(cache, None, dtype, AttentionForm(heads, 0.2, window, None, value_dim, causal))
            found = layer.attend(Step(table, torch.tensor([[0, 1, 2], starts, counts])), query)
            expected = []
            for row, start, tokens in zip(table, starts, query.split(counts), strict=True):
                end = start + len(tokens)
                stored = cache[:, row.long()].flatten(1, 2)[:, :end].transpose(1, 2).double()
                key, value = stored[0], stored[-1][..., :value_dim]
                ahead = torch.arange(end) - torch.arange(start, end)[:, None]
                hidden = (ahead > 0) & causal | (ahead.abs() >= (window or end))
                mask = torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, float("-inf"))
                attended = torch.nn.functional.scaled_dot_product_attention(
                    tokens.double().transpose(0, 1)[None], key[None], value[None], mask, scale=0.2, enable_gqa=True
                )
                expected.append(attended[0].transpose(0, 1))
            close_to(found, torch.cat(expected), 1e-5 if dtype == torch.float32 else 1e-2)
