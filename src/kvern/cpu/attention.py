"""Attention over a paged KV cache, in place."""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from kvern.cpu.library import CODE, DTYPES, INTEGER, NUMBER, POINTER, address, fields, function

_attend = function("kvern_attend", POINTER, POINTER, POINTER, INTEGER, POINTER, POINTER, INTEGER)


MOST_AHEAD = 1 << 31
"""The number of visible later keys where a token sees all of them."""


class _Layer(ctypes.Structure):
    """The struct of this name in `sources/attention.h`."""

    _fields_ = [
        *fields("keys values key_scales value_scales sinks", POINTER),
        *fields("heads kv_heads head_dim value_dim block_size window ahead spans", INTEGER),
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
        ("ends", POINTER),
    ]


class AttentionForm(NamedTuple):
    """The attention of one layer.

    heads      query heads
    scale      factor of the scores
    window     keys that a token sees at most on each side; None: all
    softcap    limit of the scores; None: none
    value_dim  entries of a value; None: as many as of a key
    causal     tokens see no later keys; otherwise as many later as earlier ones, within their request
    spans      tokens see keys up to the ends that a step has for them
    """

    heads: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    value_dim: int | None = None
    causal: bool = True
    spans: bool = False


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
            kv_heads, head_dim, self._value_dim, block_size, window or 0, ahead, form.spans, form.scale,
            form.softcap or 0.0, DTYPES[cache.dtype], DTYPES[dtype],
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

    Its rows are indices into `block_table` [slots, blocks] int32, first positions, and numbers of tokens. `ends` [T]
    int64: where the keys end that tokens see in layers with spans.
    """

    def __init__(self, block_table: Tensor, requests: Tensor, ends: Tensor | None = None) -> None:
        self.tensors, self._ends = (block_table, requests), ends  # kept alive, because their addresses are used
        self._step = _Step(
            block_table.data_ptr(), block_table.stride(0), requests.data_ptr(), requests.shape[1], address(ends)
        )
        self.address = ctypes.addressof(self._step)
