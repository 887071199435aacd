"""Attention over the paged cache."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from kvern.attention.eight_bit import LARGEST_CODE
from kvern.kernels.attention_arguments import CachedLayer, Decodes, Runs
from kvern.kernels.attention_decode import DecodeShape, decode_attention, decode_shape
from kvern.kernels.attention_prefill import prefill_attention, prefill_shape
from kvern.kernels.attention_prefix import SharedPrefix, prefix_members, tiles_for
from kvern.kernels.attention_split import split_attention, split_queries, split_shape
from kvern.kernels.cache_plain import plain_blocks
from kvern.spec.mixers import AttentionSpec
from kvern.spec.model import ModelSpec
from tests.support.kernel_list.entry import Call, Inputs, Kernel

Sizes = Iterator[tuple[Any, ...]]


class Paged(NamedTuple):
    """A cache, the scales of one of 8 bits, and the block table of requests."""

    cache: torch.Tensor
    scales: torch.Tensor | None
    table: torch.Tensor

    @property
    def numbers(self) -> torch.Tensor:
        """What the cache holds, in float64."""
        cache = self.cache.double()
        return cache if self.scales is None else cache * self.scales[:, None, None, :, None]


def _paged(spec: AttentionSpec, inputs: Inputs, requests: int, keys: int, dtype: torch.dtype | None = None) -> Paged:
    """A cache of a dtype, and the block table of requests with so many keys each, whose blocks lie scattered.

    Its rows are as far apart as those of most engines, at a multiple of 16: Triton compiles for that.
    """
    blocks = -(-keys // inputs.block_size)
    shape = 2, requests * blocks, inputs.block_size, spec.kv_heads, spec.head_dim
    cache, scales = inputs.cache(dtype or inputs.stored_dtype, *shape)
    table = inputs.zeros(requests, -(-blocks // 16) * 16)[:, :blocks]
    return Paged(cache, scales, table.copy_(inputs.permutation(requests * blocks).view(requests, blocks)))


def _layer(spec: AttentionSpec, paged: Paged, sinks: torch.Tensor | None) -> CachedLayer:
    """What kernels are told of it."""
    return CachedLayer(paged.cache, spec.scale, spec.window, spec.softcap, paged.scales, sinks)


def _sinks(spec: AttentionSpec, inputs: Inputs) -> torch.Tensor | None:
    """Of a layer that has them, [heads]."""
    return inputs.numbers(spec.heads).float() if spec.sinks else None


def _attended(
    spec: AttentionSpec, query: torch.Tensor, paged: Paged, keys: int, sinks: torch.Tensor | None
) -> torch.Tensor:
    """In float64, of `query [requests, queries, heads, head_dim]` that are the last of so many keys."""
    queries = query.shape[1]
    known = paged.numbers[:, paged.table.long()].flatten(2, 3)[:, :, :keys]
    key, value = known.repeat_interleave(spec.heads // spec.kv_heads, 3)
    scores = torch.einsum("rqhd,rkhd->rhqk", query.double(), key) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * (scores / spec.softcap).tanh()
    at, other = torch.arange(keys - queries, keys)[:, None], torch.arange(keys)[None]
    hidden = other > at
    if spec.window is not None:
        hidden |= other <= at - spec.window
    scores = scores.masked_fill(hidden.to(scores.device), float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None, None].expand(len(scores), -1, queries, 1)), -1)
    return torch.einsum("rhqk,rkhd->rqhd", scores.softmax(-1)[..., :keys], value)


def _decode(
    spec: ModelSpec,
    inputs: Inputs,
    attention: AttentionSpec,
    requests: int,
    keys: int,
    planned: int,
    tiles: int = 0,
    dtype: torch.dtype | None = None,
) -> Call:
    """`planned`: the number of requests that the launch is cut for; `tiles`: what reads a block that all begin with.

    `dtype`: of the cache, if it is not that of `inputs`.
    """
    heads = attention.heads
    kv_heads = attention.kv_heads
    head_dim = attention.head_dim
    paged = _paged(attention, inputs, requests, keys, dtype)
    cache, scales, table = paged
    query = inputs.numbers(requests, heads, head_dim)
    out, sinks = torch.empty_like(query), _sinks(attention, inputs)
    prefix = None
    if tiles:
        shared = inputs.block_size
        table[:, 0] = table[0, 0]
        members = inputs.zeros(tiles, _members(spec, inputs)) - 1
        members[0, :requests] = inputs.integers(range(requests))
        tile_keys = inputs.integers([shared] + [0] * (tiles - 1))
        prefix = SharedPrefix(members, tile_keys, inputs.integers([shared] * requests))
    launch = partial(
        decode_attention,
        query,
        _layer(attention, paged, sinks),
        table,
        Decodes(inputs.integers(range(requests)), inputs.integers([keys - 1] * requests)),
        inputs.zeros(requests * kv_heads),
        out,
        decode_shape(planned, kv_heads, head_dim, inputs.processors, cache.element_size()),
        prefix,
    )
    moved = 2 * requests * keys * kv_heads * head_dim * cache.element_size()
    kind = "" if scales is None else f" {str(cache.dtype).removeprefix('torch.')}"
    return Call(
        f"{requests} x {keys}{kind} keys",
        _into(out, launch),
        lambda: _attended(attention, query[:, None], paged, keys, sinks)[:, 0],
        moved,
    )


def _into(out: torch.Tensor, launch: Callable[[], None]) -> Callable[[], torch.Tensor]:
    def launched() -> torch.Tensor:
        launch()
        return out

    return launched


def _kinds(spec: ModelSpec) -> list[AttentionSpec]:
    """Those with keys and values of heads."""
    return [kind for kind in dict.fromkeys(spec.attentions) if kind.value_dim is None]


def _members(spec: ModelSpec, inputs: Inputs) -> int:
    """How many requests share a tile of a prefix, in all layers that see the whole of it."""
    whole = (kind for kind in _kinds(spec) if kind.window is None)
    size = inputs.stored_dtype.itemsize
    return min(prefix_members(kind.heads // kind.kv_heads, kind.head_dim, size) for kind in whole)


def _decode_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    keys = 2 * inputs.block_size + 1
    for kind in _kinds(spec):
        for planned in _cuts(kind, inputs):
            yield kind, 2, keys, planned
            if kind.window is None:
                members = _members(spec, inputs)
                yield kind, min(2, members), keys, planned, tiles_for(planned, members)


def _cuts(kind: AttentionSpec, inputs: Inputs) -> list[int]:
    """Numbers of requests: one for each shape of a launch."""
    shapes: dict[DecodeShape, int] = {}
    for planned in range(1, inputs.batch_requests + 1):
        size = min(2, inputs.stored_dtype.itemsize)
        shapes.setdefault(decode_shape(planned, kind.kv_heads, kind.head_dim, inputs.processors, size), planned)
    return list(shapes.values())


def _decode_timed(spec: ModelSpec, inputs: Inputs) -> Sizes:
    for attention in _kinds(spec)[:1]:
        yield from ((attention, requests, 1024, requests) for requests in (1, 32, 256))
        yield from ((attention, requests, 1024, requests, 0, dtype) for dtype in LARGEST_CODE for requests in (32, 256))


def _prefill(
    spec: ModelSpec, inputs: Inputs, attention: AttentionSpec, requests: int, queries: int, before: int, long: bool
) -> Call:
    """`before`: keys of each request that were computed earlier."""
    shape = prefill_shape(attention.head_dim, long, inputs.stored_dtype.itemsize)
    return _runs(inputs, attention, requests, queries, before, shape.queries, partial(prefill_attention, shape=shape))


def _split(spec: ModelSpec, inputs: Inputs, attention: AttentionSpec, requests: int, queries: int, before: int) -> Call:
    group = attention.heads // attention.kv_heads
    tile = split_queries(group, attention.head_dim, queries, inputs.stored_dtype.itemsize)
    tiles = requests * -(-queries // tile)
    sizes = attention.kv_heads, attention.head_dim, queries, inputs.processors, inputs.stored_dtype.itemsize
    arrived = inputs.zeros(tiles * attention.kv_heads)
    launch = partial(split_attention, arrived=arrived, shape=split_shape(tiles, group, *sizes))
    return _runs(inputs, attention, requests, queries, before, tile, launch)


def _hopper(
    spec: ModelSpec, inputs: Inputs, attention: AttentionSpec, requests: int, queries: int, before: int
) -> Call:
    from kvern.kernels.attention_hopper import QUERIES, hopper_prefill

    launch = partial(hopper_prefill, processors=inputs.processors)
    return _runs(inputs, attention, requests, queries, before, QUERIES, launch, inputs.dtype)


def _plain(spec: ModelSpec, inputs: Inputs, attention: AttentionSpec, blocks: int, dtype: torch.dtype) -> Call:
    cache, scales, table = paged = _paged(attention, inputs, 1, blocks * inputs.block_size, dtype)
    assert scales is not None
    wanted = table[0].contiguous()
    moved = cache.numel() * (1 + inputs.dtype.itemsize)
    launch = partial(plain_blocks, cache, scales, wanted, inputs.dtype)
    return Call(f"{blocks} blocks", launch, lambda: paged.numbers[:, wanted.long()], moved)


def _plain_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    if inputs.hopper and inputs.stored_dtype in LARGEST_CODE:
        yield from ((kind, 3, inputs.stored_dtype) for kind, *_ in _hopper_launched(spec, inputs))


def _plain_timed(spec: ModelSpec, inputs: Inputs) -> Sizes:
    if inputs.hopper:
        yield from ((kind, 512, dtype) for kind in _kinds(spec)[:1] for dtype in LARGEST_CODE)


def _runs(
    inputs: Inputs,
    attention: AttentionSpec,
    requests: int,
    queries: int,
    before: int,
    tile: int,
    launch: Callable[..., None],
    dtype: torch.dtype | None = None,
) -> Call:
    """Runs of queries in tiles of at most `tile`; `dtype`: of the cache, if it is not that of `inputs`."""
    keys = before + queries
    paged = _paged(attention, inputs, requests, keys, dtype)
    sinks = _sinks(attention, inputs)
    query = inputs.numbers(requests * queries, attention.heads, attention.head_dim)
    out = torch.empty_like(query)
    firsts = range(0, queries, tile)
    tiles = sorted(((first, request) for request in range(requests) for first in firsts), reverse=True)
    runs = Runs(
        inputs.integers(range(requests)),
        inputs.integers([before] * requests),
        inputs.integers(range(0, requests * queries, queries)),
        inputs.integers([queries] * requests),
        inputs.integers(request for _, request in tiles),
        inputs.integers(first for first, _ in tiles),
    )
    launch = partial(launch, query, _layer(attention, paged, sinks), paged.table, runs, out)
    pairs = requests * queries * (before + (queries + 1) / 2)

    def reference() -> torch.Tensor:
        rows = query.view(requests, queries, attention.heads, -1)
        return _attended(attention, rows, paged, keys, sinks).flatten(0, 1)

    moved = 2 * query.numel() * query.element_size()
    operations = 4 * attention.heads * attention.head_dim * pairs
    return Call(f"{requests} x {queries}", _into(out, launch), reference, moved, operations)


def _expanded(spec: ModelSpec) -> list[AttentionSpec]:
    """What is made of latents."""
    return [kind.expanded for kind in dict.fromkeys(spec.attentions) if kind.expanded is not None]


def _prefill_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    yield from ((kind, 2, 5, inputs.block_size + 3, long) for kind in _kinds(spec) for long in (False, True))
    yield from ((kind, 2, 5, inputs.block_size + 3, True) for kind in _expanded(spec) if not _on_hopper(kind, inputs))


def _split_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    yield from ((kind, 2, queries, 3 * inputs.block_size) for kind in _kinds(spec) for queries in (1, 17))


def _split_timed(spec: ModelSpec, inputs: Inputs) -> Sizes:
    sizes = ((1, 19, 26000), (64, 4, 1000))
    yield from ((attention, *size) for attention in _kinds(spec)[:1] for size in sizes)


def _prefill_timed(spec: ModelSpec, inputs: Inputs) -> Sizes:
    sizes = ((2, 4096, 0, True), (16, 512, 0, False))
    yield from ((attention, *size) for attention in _kinds(spec)[:1] for size in sizes)


def _on_hopper(kind: AttentionSpec, inputs: Inputs) -> bool:
    if not inputs.hopper:
        return False
    from kvern.kernels.attention_hopper import hopper_fits

    return hopper_fits(kind.head_dim, inputs.block_size, inputs.dtype)


def _hopper_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    kinds = (*_kinds(spec), *_expanded(spec))
    yield from ((kind, 2, 5, inputs.block_size + 3) for kind in kinds if _on_hopper(kind, inputs))


def _hopper_timed(spec: ModelSpec, inputs: Inputs) -> Sizes:
    attention = spec.attentions[0]
    if any(kind == attention for kind, *_ in _hopper_launched(spec, inputs)):
        yield from ((attention, requests, queries, 0) for requests, queries in ((2, 4096), (16, 512), (1, 32768)))


KERNELS = (
    Kernel("decode attention", "attention", _decode, _decode_launched, _decode_timed),
    Kernel("prefill attention", "attention", _prefill, _prefill_launched, _prefill_timed),
    Kernel("split attention", "attention", _split, _split_launched, _split_timed),
    Kernel("prefill attention on Hopper", "hopper", _hopper, _hopper_launched, _hopper_timed),
    Kernel("plain keys and values for it", "hopper", _plain, _plain_launched, _plain_timed),
)
