"""Paged attention: a Pallas kernel for TPUs, and the same in plain operations of JAX.

Keys and values of one layer lie in `cache [blocks, 2, kv_heads, block_size, lanes]`. A block holds keys, then values,
so that one copy brings both, and `lanes` is the size of a head rounded up to the 128 lanes of a TPU's registers, to
which TPUs pad such arrays anyway; what is beyond the head is 0.

R rows have Q queries each, of which the first `counts [R]` are real; the first of them has the position `starts [R]`.
`tables [R, B]` names the blocks of each row. All of that is int32. A query sees the keys of its row up to its own
position, with a window only the last ones of them. What padding queries get means nothing.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvern.spec.mixers import AttentionSpec

LANES = 128
TILE_BYTES = 4 << 20
"""Bytes of VMEM for a tile of queries and what is computed of it: beside it are two blocks, in 16 MiB on some chips."""
HIDDEN = -1e30
"""The score of a key that a query does not see: finite, so that a row of nothing else is no NaN."""


class Rows(NamedTuple):
    """The places of queries and keys, as the module's text says."""

    tables: Array
    starts: Array
    counts: Array


def lanes_of(head_dim: int) -> int:
    """Entries of a key in the cache."""
    return -(-head_dim // LANES) * LANES


def precision_of(dtype: Any) -> jax.lax.Precision | None:
    """The precision of products: a TPU would round float32 to bfloat16 otherwise."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def write(cache: Array, keys: Array, values: Array, rows: Rows) -> Array:
    """Returns the cache with keys and values `[R, Q, kv_heads, head_dim]` in the places of their tokens."""
    blocks, _, _, block_size, lanes = cache.shape
    places = jnp.arange(keys.shape[1])
    positions = rows.starts[:, None] + places
    found = jnp.take_along_axis(rows.tables, positions // block_size, axis=1, mode="clip")
    found = jnp.where(places < rows.counts[:, None], found, blocks)  # outside the cache: dropped
    both = jnp.stack([keys, values], axis=2)
    both = jnp.pad(both, [(0, 0)] * 4 + [(0, lanes - both.shape[-1])]).astype(cache.dtype)
    return cache.at[found, :, :, positions % block_size].set(both, mode="drop")


def plain(spec: AttentionSpec, query: Array, cache: Array, rows: Rows) -> Array:
    """Attention by gathered keys: `query [R, Q, heads, head_dim]` -> the same shape."""
    found = cache[rows.tables]  # [R, B, 2, kv_heads, block_size, lanes]
    key, value = jnp.moveaxis(found, 2, 0)[..., : spec.head_dim].astype(jnp.float32)
    key, value = (
        jnp.moveaxis(part, 2, 1).reshape(len(part), spec.kv_heads, -1, spec.head_dim) for part in (key, value)
    )
    grouped = query.reshape(*query.shape[:2], spec.kv_heads, -1, spec.head_dim).astype(jnp.float32)
    highest = jax.lax.Precision.HIGHEST
    scores = jnp.einsum("rqhgd,rhkd->rhgqk", grouped, key, precision=highest) * spec.scale
    position = rows.starts[:, None] + jnp.arange(query.shape[1])
    seen = _sees(position[:, :, None], jnp.arange(key.shape[2]), spec.window)
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, HIDDEN), axis=-1)
    end = (rows.starts + rows.counts)[:, None, None, None]
    value = jnp.where(jnp.arange(key.shape[2])[:, None] < end, value, 0)
    return jnp.einsum("rhgqk,rhkd->rqhgd", weights, value, precision=highest).reshape(query.shape).astype(query.dtype)


def _sees(query: Array, key: Array, window: int | None) -> Array:
    """True where queries at positions see keys at others."""
    before = key <= query
    return before if window is None else before & (key > query - window)


def paged(spec: AttentionSpec, query: Array, cache: Array, rows: Rows, interpret: Any = False) -> Array:
    """Attention by the kernel: `query [R, Q, heads, head_dim]` -> the same shape.

    `interpret`: a `pltpu.InterpretParams`, with which JAX's interpreter of TPUs runs the kernel on a CPU.
    """
    count, queries = query.shape[:2]
    group = spec.heads // spec.kv_heads
    tile = min(queries, tile_of(spec, query.dtype))
    tiles = -(-queries // tile)
    _, _, _, block_size, lanes = cache.shape
    padding = [(0, 0), (0, tiles * tile - queries), (0, 0), (0, lanes - spec.head_dim)]
    grouped = jnp.pad(query, padding).reshape(count, tiles * tile, spec.kv_heads, group, lanes)
    grouped = jnp.moveaxis(grouped, 2, 1).reshape(count, spec.kv_heads, tiles * tile * group, lanes)
    held = spec.kv_heads, tile * group
    block = pl.BlockSpec((1, *held, lanes), lambda row, part, *_: (row, 0, part, 0))
    call = pl.pallas_call(
        partial(_kernel, spec, tile),
        out_shape=jax.ShapeDtypeStruct(grouped.shape, query.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(count, tiles),
            in_specs=[block, pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=block,
            scratch_shapes=[
                pltpu.VMEM((2, 2, spec.kv_heads, block_size, lanes), cache.dtype),
                pltpu.VMEM((*held, LANES), jnp.float32),
                pltpu.VMEM((*held, LANES), jnp.float32),
                pltpu.VMEM((*held, lanes), jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        interpret=interpret,
        name="paged_attention",
    )
    out = call(*rows, grouped, cache).reshape(count, spec.kv_heads, tiles * tile, group, lanes)
    return jnp.moveaxis(out, 1, 2)[:, :queries, :, :, : spec.head_dim].reshape(query.shape)


def tile_of(spec: AttentionSpec, dtype: Any) -> int:
    """The most queries of a tile: they and their results, each twice, and sums in float32."""
    itemsize: int = jnp.dtype(dtype).itemsize
    row = lanes_of(spec.head_dim) * (4 * itemsize + 4) + 2 * 4 * LANES
    return max(TILE_BYTES // (spec.heads * row) // 8 * 8, 8)


class Memory(NamedTuple):
    """The memory that the kernel reads and writes for one tile of queries.

    tables, starts, counts  in SMEM, before the grid begins: the addresses of copies are read from them
    query, out              VMEM [1, kv_heads, tile * group, lanes]: heads of a group are neighbours
    cache                   in HBM
    pages                   VMEM [2, 2, kv_heads, block_size, lanes]: the next block comes while one is computed
    highest, total, summed  VMEM [kv_heads, tile * group, ...] float32: the running softmax of each row
    arrived                 a semaphore for each of both blocks
    """

    tables: Any
    starts: Any
    counts: Any
    query: Any
    cache: Any
    out: Any
    pages: Any
    highest: Any
    total: Any
    summed: Any
    arrived: Any


def _kernel(spec: AttentionSpec, tile: int, *references: Any) -> None:
    """One tile of queries of a row, over the blocks that they see."""
    memory = Memory(*references)
    row, part = pl.program_id(0), pl.program_id(1)
    block_size = memory.cache.shape[3]
    first = memory.starts[row] + part * tile
    here = jnp.clip(memory.counts[row] - part * tile, 0, tile)
    begin = 0 if spec.window is None else jnp.maximum(first - spec.window + 1, 0) // block_size
    end = jnp.where(here > 0, pl.cdiv(first + here, block_size), begin)

    def copy(page: Any) -> Any:
        slot = jax.lax.rem(page - begin, 2)
        block = memory.cache.at[memory.tables[row, page]]
        return pltpu.make_async_copy(block, memory.pages.at[slot], memory.arrived.at[slot])

    memory.highest[...] = jnp.full(memory.highest.shape, HIDDEN, jnp.float32)
    memory.total[...] = jnp.zeros(memory.total.shape, jnp.float32)
    memory.summed[...] = jnp.zeros(memory.summed.shape, jnp.float32)
    pl.when(begin < end)(lambda: copy(begin).start())

    def over_block(page: Any, _: None) -> None:
        pl.when(page + 1 < end)(lambda: copy(page + 1).start())
        copy(page).wait()
        shape = memory.query.shape[2], block_size
        position = first + jax.lax.broadcasted_iota(jnp.int32, shape, 0) // (spec.heads // spec.kv_heads)
        seen = _sees(position, page * block_size + jax.lax.broadcasted_iota(jnp.int32, shape, 1), spec.window)
        stored = page * block_size + jax.lax.broadcasted_iota(jnp.int32, (block_size, 1), 0) < first + here
        block = memory.pages.at[jax.lax.rem(page - begin, 2)]
        over_head = partial(_add_block, memory, block, (seen, stored), spec.scale)
        jax.lax.fori_loop(0, spec.kv_heads, over_head, None)

    jax.lax.fori_loop(begin, end, over_block, None)
    sums = memory.total[...][:, :, :1]
    memory.out[0] = (memory.summed[...] / jnp.where(sums > 0, sums, 1)).astype(memory.out.dtype)


def _add_block(memory: Memory, block: Any, masks: tuple[Array, Array], scale: float, head: Any, _: None) -> None:
    """Adds what one KV head's queries see of a block `[2, kv_heads, block_size, lanes]` to the running softmax.

    `masks`: the keys that queries see, `[tile * group, block_size]`, and the tokens that are stored, `[block_size, 1]`.
    """
    seen, stored = masks
    query, key = memory.query[0, head], block[0, head]
    value = jnp.where(stored, block[1, head], 0)
    precision = precision_of(query.dtype)
    both = ((1,), (1,)), ((), ())
    scores = jax.lax.dot_general(query, key, both, precision, preferred_element_type=jnp.float32)
    scores = jnp.where(seen, scores * scale, HIDDEN)
    before = memory.highest[head][:, :1]
    most = jnp.maximum(before, scores.max(axis=1, keepdims=True))
    weights = jnp.where(seen, jnp.exp(scores - most), 0)
    shrunk = jnp.exp(before - most)
    added = jax.lax.dot(weights.astype(value.dtype), value, precision=precision, preferred_element_type=jnp.float32)
    memory.highest[head] = jnp.broadcast_to(most, memory.highest.shape[1:])
    memory.total[head] = memory.total[head] * shrunk + weights.sum(axis=1, keepdims=True)
    memory.summed[head] = memory.summed[head] * shrunk + added
