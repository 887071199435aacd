"""The arguments of attention over the paged cache: a layer's keys and values, the requests that ask, and tiles of them.

The first three classes are for callers, the others are arguments of kernels.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvern.kernels.eight_bit import for_kernels, padded_dim
from kvern.kernels.launch import stages

LOG2_E = 1.4426950408889634
BESIDE = 8 << 10
"""Bytes of shared memory that a program takes beside tiles."""


class CachedLayer(NamedTuple):
    """The keys and values of a layer, and how they are scored.

    cache   [2, blocks, block_size, kv_heads, head_dim]
    window  a query sees so many keys, its own included; None: all
    scales  [2, kv_heads] float32 of a cache in 8 bits
    sinks   [heads] float32: logits that take part in each head's softmax and have no value
    """

    cache: Tensor
    scale: float
    window: int | None = None
    softcap: float | None = None
    scales: Tensor | None = None
    sinks: Tensor | None = None


class Decodes(NamedTuple):
    """R requests with one query each.

    slots   [R] integers: the row of the block tables
    starts  [R] integers: the position of the query; its key and those before it are in the cache
    """

    slots: Tensor
    starts: Tensor


class Runs(NamedTuple):
    """R requests with a run of queries each, cut into tiles.

    slots, starts    [R] int32: the row of the block table, and the position of the first query
    tokens, counts   [R] int32: the index of the first query among all T, and the number of queries
    tile_request, tile_first   [tiles] int32: for each tile the request, and the first query's index within it
    ends             [T] int32: where the keys end that each query sees; None: behind its own
    """

    slots: Tensor
    starts: Tensor
    tokens: Tensor
    counts: Tensor
    tile_request: Tensor
    tile_first: Tensor
    ends: Tensor | None = None


class Pages(NamedTuple):
    """A layer's keys and values in blocks, the block tables, and what is `None` of most layers."""

    keys: Any
    vals: Any
    table: Any
    table_stride: Any
    scales: Any
    sinks: Any


class Parts(NamedTuple):
    """Results of programs for the same queries, until one joins them: means of values, logarithms of weights."""

    means: Any
    sums: Any


class TileShape(NamedTuple):
    """The constants of a kernel: the layer's heads, the size of a block, and the size of a tile.

    `WINDOW` is 0 where there is none; a tile has `ROWS` of queries, `KEYS`, and `DIM` entries, those beyond `head_dim`
    of zeros.
    """

    kv_heads: int
    group: int
    head_dim: int
    block_size: int
    WINDOW: int
    SOFTCAP: bool
    DIM: int
    ROWS: int
    KEYS: int


def pages_of(layer: CachedLayer, table: Tensor) -> Pages:
    """Returns what kernels read of a layer."""
    keys, vals = for_kernels(layer.cache)
    return Pages(keys, vals, table, table.stride(0), layer.scales, layer.sinks)


def tile_shape(query: Tensor, layer: CachedLayer, rows: int, keys: int) -> TileShape:
    """Returns the shape of tiles for `query [T, heads, head_dim]`."""
    _, heads, head_dim = query.shape
    _, _, block_size, kv_heads, _ = layer.cache.shape
    dim, softcap = padded_dim(head_dim, layer.cache), layer.softcap is not None
    return TileShape(kv_heads, heads // kv_heads, head_dim, block_size, layer.window or 0, softcap, dim, rows, keys)


def stages_of(query: Tensor, layer: CachedLayer, of_tile: TileShape, wanted: int) -> int:
    """The most of `wanted` stages of keys and values that the card's shared memory holds beside what is there."""
    return stages(query.device, wanted, 2 * of_tile.KEYS * of_tile.DIM * layer.cache.element_size(), BESIDE)


def scored(layer: CachedLayer) -> tuple[float, float]:
    """Returns the scale of scores, and their soft cap or 0, for scores that are powers of two."""
    return layer.scale * LOG2_E, (layer.softcap or 0.0) * LOG2_E


def empty_parts(*shape: int, head_dim: int, device: torch.device) -> Parts:
    """Memory for parts of this shape."""
    means = torch.empty(*shape, head_dim, dtype=torch.float32, device=device)
    return Parts(means, torch.empty(shape, dtype=torch.float32, device=device))
