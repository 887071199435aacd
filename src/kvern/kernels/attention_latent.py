"""Attention to latents over the paged cache: all heads read one row for each token, whose first entries are its value.

    cache   [blocks, block_size, width]    a row: the latent, then the rotated key that all heads share
    row     a query of one head            those of a token's heads beside each other, then those of the next token
    tile    rows of up to `queries` tokens of one request; a program takes `rows` of them, and a part of the keys

Keys stand where the matrix units have most rows, queries where they take few: the scores are [keys, rows], and what is
gathered is [latent, rows]. So 16 heads cost what 16 rows cost, and a key that was read is in shared memory for both
products. All scores are kept as powers of two.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvern.kernels.attention_arguments import LOG2_E
from kvern.kernels.attention_decode import all_keys
from kvern.kernels.attention_loop import first_blocks
from kvern.kernels.launch import Launcher, capability, cdiv, next_power_of_2, overlaps, wait_for_previous

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


@Launcher
@triton.jit(
    do_not_specialize=["requests", "splits", "programs"],
    do_not_specialize_on_alignment=["slots", "starts", "tokens", "counts", "tile_request", "tile_first"],
)
def _latent_attention_kernel(
    query: tl.tensor,
    cache: tl.tensor,
    block_table: tl.tensor,
    slots: tl.tensor,
    starts: tl.tensor,
    tokens: tl.tensor,
    counts: tl.tensor,
    tile_request: tl.tensor,
    tile_first: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    partial_sum: tl.tensor,
    scale: tl.float32,
    table_stride: tl.int64,
    requests,
    splits,
    programs,
    heads: tl.constexpr,
    width: tl.constexpr,
    latent: tl.constexpr,
    block_size: tl.constexpr,
    DECODE: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    LATENT: tl.constexpr,
    REST: tl.constexpr,
    KEYS: tl.constexpr,
    SPAN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    tile = tl.program_id(2).to(tl.int64)
    split = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    request = tile
    first = 0
    count = 1
    token = tile
    if not DECODE:
        request = tl.load(tile_request + tile).to(tl.int64)
        first = tl.load(tile_first + tile)
        count = tl.load(counts + request)
        token = tl.load(tokens + request).to(tl.int64)
    # The batch's description was written well before the kernel that this one overlaps with.
    start = tl.load(starts + request).to(tl.int32)
    table = block_table + tl.load(slots + request).to(tl.int64) * table_stride
    real = (row < TILE_ROWS) & (row < (count - first) * heads)
    position = start + first + row // heads
    length = tl.max(tl.where(real, position + 1, 0), axis=0)
    pieces = splits
    if DECODE and SPLIT:
        fair = tl.cdiv(all_keys(starts, starts, requests, block_size, 0, False, KEYS) * tl.num_programs(0), programs)
        pieces = tl.minimum(tl.maximum(length // tl.maximum(fair, 1), 1), splits)
    span = tl.maximum(tl.cdiv(tl.cdiv(length, pieces), KEYS) * KEYS, SPAN)
    begin = split * span
    end = tl.minimum(begin + span, length)
    place = (tile * splits + split) * TILE_ROWS + row
    if begin >= end:
        if OVERLAP:
            wait_for_previous()
        if SPLIT:
            tl.store(partial_sum + place, float("-inf"), mask=real)
        return
    block = first_blocks(table, begin, end, block_size, KEYS)
    if OVERLAP:
        wait_for_previous()
    column = tl.arange(0, KEYS)
    entry = tl.arange(0, LATENT)
    rest = tl.arange(0, REST)
    in_latent = (entry < latent)[None, :]
    in_rest = (rest < width - latent)[None, :]
    asked = (token + first) * heads + row
    queries = query + asked[:, None] * width
    of_latent = tl.load(queries + entry[None, :], mask=real[:, None] & in_latent, other=0.0)
    of_rest = tl.load(queries + latent + rest[None, :], mask=real[:, None] & in_rest, other=0.0)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    gathered = tl.zeros([LATENT, ROWS], tl.float32)
    offset = column % block_size
    for key in tl.range(begin, end, KEYS):
        at = key + column
        known = at < end
        if KEYS % block_size != 0:
            offset = at % block_size
        rows = cache + (block.to(tl.int64) * (block_size * width) + offset * width)[:, None]
        latents = tl.load(rows + entry[None, :], mask=known[:, None] & in_latent, other=0.0)
        shared = tl.load(rows + latent + rest[None, :], mask=known[:, None] & in_rest, other=0.0)
        # Triton fetches several tiles ahead only if their addresses wait for no other load: the next blocks come here.
        block = tl.load(table + (at + KEYS) // block_size, mask=at + KEYS < end, other=0)
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
    inside = (entry < latent)[:, None] & real[None, :]
    alone = span >= length
    if SPLIT:  # an infinite sum says that there is nothing to join
        tl.store(partial + place[None, :] * latent + entry[:, None], gathered, mask=inside & (alone == 0))
        sums = tl.where(total == 0.0, float("-inf"), maximum + tl.log2(divisor))
        tl.store(partial_sum + place, tl.where(alone, float("inf"), sums), mask=real)
    tl.store(out + asked[None, :] * latent + entry[:, None], gathered.to(out.dtype.element_ty), mask=inside & alone)


@Launcher
@triton.jit(
    do_not_specialize=["splits"],
    do_not_specialize_on_alignment=["tokens", "counts", "tile_request", "tile_first"],
)
def _join_latents_kernel(
    partial: tl.tensor,
    partial_sum: tl.tensor,
    tokens: tl.tensor,
    counts: tl.tensor,
    tile_request: tl.tensor,
    tile_first: tl.tensor,
    out: tl.tensor,
    splits,
    heads: tl.constexpr,
    latent: tl.constexpr,
    DECODE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    LATENT: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0)
    tile = tl.program_id(1).to(tl.int64)
    asked = tile * heads + row
    if OVERLAP:
        wait_for_previous()
    if not DECODE:
        request = tl.load(tile_request + tile).to(tl.int64)
        first = tl.load(tile_first + tile)
        if row >= (tl.load(counts + request) - first) * heads:
            return
        asked = (tl.load(tokens + request).to(tl.int64) + first) * heads + row
    part = tl.arange(0, PARTS)
    entry = tl.arange(0, LATENT)
    place = tile * splits * TILE_ROWS + row
    if tl.load(partial_sum + place) == float("inf"):
        return
    highest = float("-inf")
    total = 0.0
    mixed = tl.zeros([LATENT], tl.float32)
    for begin in tl.range(0, splits, PARTS):
        at = place + (begin + part) * TILE_ROWS
        sums = tl.load(partial_sum + at, mask=begin + part < splits, other=float("-inf"))
        found = sums > float("-inf")
        higher = tl.maximum(highest, tl.max(sums, axis=0))
        if higher > float("-inf"):
            inside = found[:, None] & (entry < latent)[None, :]
            values = tl.load(partial + at[:, None] * latent + entry[None, :], mask=inside, other=0.0)
            weight = tl.exp2(sums - higher)
            shrink = tl.exp2(highest - higher)
            mixed = mixed * shrink + tl.sum(values * weight[:, None], axis=0)
            total = total * shrink + tl.sum(weight, axis=0)
            highest = higher
    total = tl.where(total == 0.0, 1.0, total)
    tl.store(out + asked * latent + entry, (mixed / total).to(out.dtype.element_ty), mask=entry < latent)


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


class Runs(NamedTuple):
    """Runs of queries: of R requests, and cut into tiles of at most `QUERIES` of one's queries.

    tokens, counts             [R] int32: the index of each one's first query among all, and their number
    tile_request, tile_first   [tiles] int32: request of each tile, and the tile's first query within it
    """

    tokens: torch.Tensor
    counts: torch.Tensor
    tile_request: torch.Tensor
    tile_first: torch.Tensor


def latent_attention(
    query: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    runs: Runs | None,
    out: torch.Tensor,
    shape: LatentShape,
    *,
    scale: float,
) -> None:
    """Causal attention of one query for each of R requests, or of runs of queries, over what the cache holds of them.

    query        [T, heads, width], contiguous
    cache        [1, blocks, block_size, 1, width], whose rows begin with the latent; their own are there
    block_table  [slots, max_blocks] int32
    slots        [R] integers: the row of the block table
    starts       [R] integers: the position of the first query
    runs         None: one query each, T = R
    out          [T, heads, latent], contiguous: sums of latents; only the rows of these requests are written

    Moves a row of the cache once for each `shape.rows` queries of a tile: width * itemsize bytes, for
    2 * shape.rows * (width + latent) operations.
    """
    _, heads, width = query.shape
    latent, block_size = out.shape[2], cache.shape[2]
    overlap = overlaps(query.device)
    requests = slots.shape[0]
    tiles, rows = (requests, heads) if runs is None else (runs.tile_request.shape[0], QUERIES * heads)
    tokens, counts, tile_request, tile_first = runs or (slots,) * 4
    splits, fits = shape.splits, False
    if runs is None and capability(query.device) == 90:
        from kvern.kernels.attention_latent_hopper import GROUPS, latent_hopper, latent_hopper_fits

        fits = latent_hopper_fits(heads, width, latent, block_size, cache.dtype)
        if fits:
            splits = GROUPS * min(splits, cdiv(2 * shape.programs, requests))
    partial = partial_sum = out
    if splits > 1:
        partial = torch.empty(tiles, splits, rows, latent, dtype=torch.float32, device=query.device)
        partial_sum = torch.empty(tiles, splits, rows, dtype=torch.float32, device=query.device)
    entries = max(16, next_power_of_2(latent))
    if fits:
        latent_hopper(
            query,
            cache,
            block_table,
            slots,
            starts,
            partial,
            partial_sum,
            programs=shape.programs,
            span=SPAN,
            scale=scale,
        )
    else:
        _latent_attention_kernel[(cdiv(rows, shape.rows), splits, tiles)](
            query,
            cache,
            block_table,
            slots,
            starts,
            tokens,
            counts,
            tile_request,
            tile_first,
            out,
            partial,
            partial_sum,
            scale * LOG2_E,
            block_table.stride(0),
            requests,
            splits,
            shape.programs,
            heads,
            width,
            latent,
            block_size,
            runs is None,
            splits > 1,
            rows,
            shape.rows,
            entries,
            max(16, next_power_of_2(width - latent)),
            shape.keys,
            SPAN,
            overlap,
            num_warps=shape.warps,
            num_stages=shape.stages,
            launch_pdl=overlap,
        )
    if splits == 1:
        return
    _join_latents_kernel[(rows, tiles)](
        partial,
        partial_sum,
        tokens,
        counts,
        tile_request,
        tile_first,
        out,
        splits,
        heads,
        latent,
        runs is None,
        rows,
        entries,
        JOINED,
        overlap,
        num_warps=4,
        launch_pdl=overlap,
    )
