"""Attention to latents over the paged cache: all heads read one row for each token, whose first entries are its value.

    cache   [blocks, block_size, width]    a row: the latent, then the rotated key that all heads share
    row     a query of one head            those of a token's heads beside each other, then those of the next token
    tile    rows of up to `queries` tokens of one request; a program takes `rows` of them, and a part of the keys

Keys stand where the matrix units have most rows, queries where they take few: the scores are [keys, rows], and what is
gathered is [latent, rows]. So 16 heads cost what 16 rows cost, and a key that was read is in shared memory for both
products. All scores are kept as powers of two.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kvern.kernels.attention_arguments import CachedLayer, Decodes, Parts, Runs, empty_parts, scored
from kvern.kernels.attention_decode import all_keys
from kvern.kernels.attention_loop import first_blocks
from kvern.kernels.launch import Launcher, Rows, capability, cdiv, next_power_of_2, rows_of, wait_for_previous

QUERIES = 16
"""Tokens of a tile of a run."""
SPAN = 256
"""The least keys of a part: below, joining costs more than it gains."""
MOST_PARTS = 1024
"""The approximate limit of parts of all tiles together; `MOST_SPLITS` is that of one."""
MOST_SPLITS = 128
JOINED = 8
"""Parts that are joined at a time, however many there are: the kernel is compiled once."""
MOST_TURNS = 4
TURN_COST = 0.04
"""The estimated cost of a turn, as a share of a step's time."""


class LatentShape(NamedTuple):
    """The shape of a launch: rows and keys of a program's tiles, and the most programs that share a tile's keys.

    Keys of decodes are shared out so that there are at most about `programs` in all.
    """

    rows: int
    keys: int
    splits: int
    programs: int
    warps: int
    stages: int


class _Batch(NamedTuple):
    """Arguments that kernels are not compiled for: `Runs`, of decodes without tiles, and the shares of keys."""

    slots: Any
    starts: Any
    tokens: Any
    counts: Any
    tile_request: Any
    tile_first: Any
    requests: Any
    splits: Any
    programs: Any


class _TileShape(NamedTuple):
    """The constants of kernels: the layer's sizes, the rows of a tile, and those and the keys of a program.

    `LATENT` and `REST` are the entries of a row, those beyond it of zeros. There is no window.
    """

    heads: int
    width: int
    latent: int
    block_size: int
    WINDOW: int
    TILE_ROWS: int
    ROWS: int
    LATENT: int
    REST: int
    KEYS: int


@Launcher
@triton.jit(do_not_specialize=["batch"])
def _latent_attention_kernel(
    query,
    cache,
    table: Rows,
    batch: _Batch,
    out,
    parts: Parts,
    scale: tl.float32,
    SHAPE: tl.constexpr,
    DECODE: tl.constexpr,
    SPLIT: tl.constexpr,
    SPAN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    tile = tl.program_id(2).to(tl.int64)
    split = tl.program_id(1)
    row = tl.program_id(0) * SHAPE.ROWS + tl.arange(0, SHAPE.ROWS)
    request = tile
    first = 0
    count = 1
    token = tile
    if not DECODE:
        request = tl.load(batch.tile_request + tile).to(tl.int64)
        first = tl.load(batch.tile_first + tile)
        count = tl.load(batch.counts + request)
        token = tl.load(batch.tokens + request).to(tl.int64)
    # The batch's description was written well before the kernel that this one overlaps with.
    start = tl.load(batch.starts + request).to(tl.int32)
    own = table.pointer + tl.load(batch.slots + request).to(tl.int64) * table.stride
    real = (row < SHAPE.TILE_ROWS) & (row < (count - first) * SHAPE.heads)
    position = start + first + row // SHAPE.heads
    length = tl.max(tl.where(real, position + 1, 0), axis=0)
    pieces = batch.splits
    if DECODE and SPLIT:
        fair = tl.cdiv(all_keys(batch, SHAPE, False) * tl.num_programs(0), batch.programs)
        pieces = tl.minimum(tl.maximum(length // tl.maximum(fair, 1), 1), batch.splits)
    span = tl.maximum(tl.cdiv(tl.cdiv(length, pieces), SHAPE.KEYS) * SHAPE.KEYS, SPAN)
    begin = split * span
    end = tl.minimum(begin + span, length)
    place = (tile * batch.splits + split) * SHAPE.TILE_ROWS + row
    if begin >= end:
        wait_for_previous(OVERLAP)
        if SPLIT:
            tl.store(parts.sums + place, float("-inf"), mask=real)
        return
    block = first_blocks(own, begin, end, SHAPE)
    wait_for_previous(OVERLAP)
    column = tl.arange(0, SHAPE.KEYS)
    entry = tl.arange(0, SHAPE.LATENT)
    rest = tl.arange(0, SHAPE.REST)
    in_latent = (entry < SHAPE.latent)[None, :]
    in_rest = (rest < SHAPE.width - SHAPE.latent)[None, :]
    asked = (token + first) * SHAPE.heads + row
    queries = query + asked[:, None] * SHAPE.width
    of_latent = tl.load(queries + entry[None, :], mask=real[:, None] & in_latent, other=0.0)
    of_rest = tl.load(queries + SHAPE.latent + rest[None, :], mask=real[:, None] & in_rest, other=0.0)
    maximum = tl.full([SHAPE.ROWS], float("-inf"), tl.float32)
    total = tl.full([SHAPE.ROWS], 0.0, tl.float32)
    gathered = tl.full([SHAPE.LATENT, SHAPE.ROWS], 0.0, tl.float32)
    offset = column % SHAPE.block_size
    for key in tl.range(begin, end, SHAPE.KEYS):
        at = key + column
        known = at < end
        if SHAPE.KEYS % SHAPE.block_size != 0:
            offset = at % SHAPE.block_size
        rows = cache + (block.to(tl.int64) * (SHAPE.block_size * SHAPE.width) + offset * SHAPE.width)[:, None]
        latents = tl.load(rows + entry[None, :], mask=known[:, None] & in_latent, other=0.0)
        shared = tl.load(rows + SHAPE.latent + rest[None, :], mask=known[:, None] & in_rest, other=0.0)
        # Triton fetches several tiles ahead only if their addresses wait for no other load: the next blocks come here.
        block = tl.load(own + (at + SHAPE.KEYS) // SHAPE.block_size, mask=at + SHAPE.KEYS < end, other=0)
        scores = tl.dot(latents, tl.trans(of_latent), input_precision="ieee")
        scores = tl.dot(shared, tl.trans(of_rest), scores, input_precision="ieee") * scale
        visible = known[:, None]
        if not DECODE:
            visible = visible & (at[:, None] <= position[None, :])
        scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(maximum, tl.max(scores, axis=0))
        higher = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - higher[None, :])
        shrink = tl.exp2(maximum - higher)
        total = total * shrink + tl.sum(weights, axis=0)
        product = tl.dot(tl.trans(latents), weights.to(latents.dtype), input_precision="ieee")
        gathered = gathered * shrink[None, :] + product
        maximum = higher
    divisor = tl.where(total == 0.0, 1.0, total)
    gathered = gathered / divisor[None, :]
    inside = (entry < SHAPE.latent)[:, None] & real[None, :]
    alone = span >= length
    if SPLIT:  # an infinite sum says that there is nothing to join
        tl.store(parts.means + place[None, :] * SHAPE.latent + entry[:, None], gathered, mask=inside & (alone == 0))
        sums = tl.where(total == 0.0, float("-inf"), maximum + tl.log2(divisor))
        tl.store(parts.sums + place, tl.where(alone, float("inf"), sums), mask=real)
    tl.store(
        out + asked[None, :] * SHAPE.latent + entry[:, None], gathered.to(out.dtype.element_ty), mask=inside & alone
    )


@Launcher
@triton.jit(do_not_specialize=["batch"])
def _join_latents_kernel(
    parts: Parts,
    batch: _Batch,
    out,
    SHAPE: tl.constexpr,
    DECODE: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0)
    tile = tl.program_id(1).to(tl.int64)
    asked = tile * SHAPE.heads + row
    wait_for_previous(OVERLAP)
    if not DECODE:
        request = tl.load(batch.tile_request + tile).to(tl.int64)
        first = tl.load(batch.tile_first + tile)
        if row >= (tl.load(batch.counts + request) - first) * SHAPE.heads:
            return
        asked = (tl.load(batch.tokens + request).to(tl.int64) + first) * SHAPE.heads + row
    part = tl.arange(0, PARTS)
    entry = tl.arange(0, SHAPE.LATENT)
    place = tile * batch.splits * SHAPE.TILE_ROWS + row
    if tl.load(parts.sums + place) == float("inf"):
        return
    highest = float("-inf")
    total = 0.0
    mixed = tl.full([SHAPE.LATENT], 0.0, tl.float32)
    for begin in tl.range(0, batch.splits, PARTS):
        at = place + (begin + part) * SHAPE.TILE_ROWS
        sums = tl.load(parts.sums + at, mask=begin + part < batch.splits, other=float("-inf"))
        found = sums > float("-inf")
        higher = tl.maximum(highest, tl.max(sums, axis=0))
        if higher > float("-inf"):
            inside = found[:, None] & (entry < SHAPE.latent)[None, :]
            values = tl.load(parts.means + at[:, None] * SHAPE.latent + entry[None, :], mask=inside, other=0.0)
            weight = tl.exp2(sums - higher)
            shrink = tl.exp2(highest - higher)
            mixed = mixed * shrink + tl.sum(values * weight[:, None], axis=0)
            total = total * shrink + tl.sum(weight, axis=0)
            highest = higher
    total = tl.where(total == 0.0, 1.0, total)
    tl.store(out + asked * SHAPE.latent + entry, (mixed / total).to(out.dtype.element_ty), mask=entry < SHAPE.latent)


@functools.cache
def latent_shape(
    heads: int, tiles: int, is_decode: bool, processors: int, device: torch.device, element_size: int = 2
) -> LatentShape:
    """For so many requests with one query each, or tiles of runs: a program has all heads of a query if it can.

    Numbers of four bytes are multiplied on the ordinary cores; their tiles fit the shared memory of every card.
    """
    known = capability(device)
    rows = heads if is_decode else QUERIES * heads
    if element_size == 4:
        together = 16
        keys = 16
        warps = 4
        stages = 1
    elif known == 90:
        together = max(16, min(64, next_power_of_2(rows)))
        keys = 64
        warps = 4 if together <= 32 else 8
        stages = 2
    else:
        together = max(16, min(32, next_power_of_2(rows)))
        keys = 32
        warps = 4
        stages = 1
    programs = tiles * cdiv(rows, together)
    if is_decode:
        splits = min(MOST_SPLITS, MOST_PARTS // next_power_of_2(programs))
    else:
        splits = min(MOST_SPLITS, 2 * processors // programs)
    return LatentShape(together, keys, max(1, splits), _turns(programs, processors) * processors, warps, stages)


def _turns(programs: int, processors: int) -> int:
    """Returns how many parts a processor should take in turn, so that few processors are idle.

    70 programs leave 62 of 132 processors idle; 490 parts of them leave 38 idle in the last of four turns.
    """

    def filled(turns: int) -> float:
        parts = programs * max(1, turns * processors // programs)
        taken = cdiv(parts, processors)
        return parts / (taken * processors) - TURN_COST * taken

    return max(range(1, MOST_TURNS + 1), key=filled)


def latent_attention(
    query: torch.Tensor,
    layer: CachedLayer,
    table: torch.Tensor,
    requests: Decodes | Runs,
    out: torch.Tensor,
    shape: LatentShape,
) -> None:
    """Causal attention of one query for each of R requests, or of runs of queries, over what the cache holds of them.

    query     [T, heads, width], contiguous
    layer     a cache [1, blocks, block_size, 1, width], whose rows begin with the latent; their own are there
    table     [slots, max_blocks] int32: block tables
    requests  decodes, T = R, or runs in tiles of `QUERIES` queries
    out       [T, heads, latent], contiguous: sums of latents; only the rows of these requests are written

    Moves a row of the cache once for each `shape.rows` queries of a tile: width * itemsize bytes, for
    2 * shape.rows * (width + latent) operations.
    """
    _, heads, width = query.shape
    latent, block_size = out.shape[2], layer.cache.shape[2]
    count = requests.slots.shape[0]
    decode = isinstance(requests, Decodes)
    if isinstance(requests, Decodes):
        requests = Runs(*requests, *[requests.slots] * 4)
    tiles = count if decode else requests.tile_request.shape[0]
    rows = heads if decode else QUERIES * heads
    splits, fits = shape.splits, False
    if decode and capability(query.device) == 90:
        from kvern.kernels.attention_latent_hopper import GROUPS, latent_hopper, latent_hopper_fits

        fits = latent_hopper_fits(heads, width, latent, block_size, layer.cache.dtype)
        if fits:
            splits = GROUPS * min(splits, cdiv(2 * shape.programs, count))
    parts = Parts(out, out)
    if splits > 1:
        parts = empty_parts(tiles, splits, rows, head_dim=latent, device=query.device)
    batch = _Batch(*requests[:6], count, splits, shape.programs)
    rest = max(16, next_power_of_2(width - latent))
    entries = max(16, next_power_of_2(latent))
    of_tile = _TileShape(heads, width, latent, block_size, 0, rows, shape.rows, entries, rest, shape.keys)
    if fits:
        latent_hopper(query, layer, table, requests, parts, programs=shape.programs, span=SPAN)
    else:
        _latent_attention_kernel[(cdiv(rows, shape.rows), splits, tiles)](
            query,
            layer.cache,
            rows_of(table),
            batch,
            out,
            parts,
            scored(layer)[0],
            of_tile,
            decode,
            splits > 1,
            SPAN,
            num_warps=shape.warps,
            num_stages=shape.stages,
        )
    if splits > 1:
        _join_latents_kernel[(rows, tiles)](parts, batch, out, of_tile, decode, JOINED, num_warps=4)
