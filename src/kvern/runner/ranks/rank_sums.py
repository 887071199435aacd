"""The faster way for sums of ranks on GPUs, the same on all: memory of each other, or NCCL."""

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor

from kvern.device.measurements import Measurements
from kvern.device.timing import time_calls
from kvern.kernels.norm import add_rms_norm
from kvern.kernels.peer_words import PeerMemory, row_words_of
from kvern.layers.block import adds_by_norms, can_fuse
from kvern.layers.halves import TILE_ROWS, least_rows
from kvern.ranks.peer_sums import EPSILON, TIMED_ROWS, WAYS, PeerExchange, PeerSums, Way
from kvern.ranks.ranks import Ranks
from kvern.ranks.shared_norms import SharedNorms
from kvern.spec.model import LayerSpec, MlpSpec, ModelSpec

SECTION = "sums of ranks"
NOT_KNOWN = len(WAYS)
NOT_KNOWN_ROWS = -1
CHECKED_TURNS = 2


def choose_sums(ranks: Ranks, width: int, dtype: torch.dtype, device: torch.device, known: Measurements) -> list[str]:
    """Let `ranks` sum rows of `width` in the ways that are fastest on the first of them; a line about that.

    All ranks call this before a model is built, and then do alike.
    """
    try:
        peers = PeerSums(_mapped(ranks, width, dtype, device), width, dtype)
    except RuntimeError as error:
        return [f"sums of ranks: NCCL, since {error}"]
    key = f"{ranks.size} ranks, {width}, {dtype}"
    ways = _first(ranks, known_ways(known, key), device)
    if not ways:
        ways = _first(ranks, peers.fastest(ranks.group_sum, time_calls), device)
        known.remember(SECTION, {key: ways})
        known.save()
    if set(ways) != {"nccl"}:
        peers.ways = ways
        peers.compile_sums()
        ranks.peers = peers
    return [described(ways)]


def choose_exchange(
    ranks: Ranks, width: int, dtype: torch.dtype, device: torch.device, known: Measurements
) -> list[str]:
    """Let `ranks` in DP attention bring their rows to each other in the faster way, likewise."""
    try:
        exchange = PeerExchange(_mapped(ranks, width, dtype, device), width, dtype)
    except RuntimeError as error:
        return [f"rows between ranks: NCCL, since {error}"]

    def through_nccl(x: Tensor) -> Tensor:
        return ranks.group_sum_scattered(ranks.group_gather(x))

    key = f"own rows of {ranks.size} ranks, {width}, {dtype}"
    stored = known.section(SECTION).get(key)
    rows = _told(ranks, [stored if stored in (0, *TIMED_ROWS) else NOT_KNOWN_ROWS], device)[0]
    if rows == NOT_KNOWN_ROWS:
        rows = _told(ranks, [exchange.fastest(through_nccl, time_calls)], device)[0]
        known.remember(SECTION, {key: rows})
        known.save()
    if rows:
        exchange.rows = rows
        exchange.sum_scattered(exchange.gather(torch.zeros(1, width, dtype=dtype, device=device)))  # compiled now
        ranks.exchange = exchange
    return [f"rows between ranks: {f'own kernels up to {rows} of each, NCCL above' if rows else 'NCCL'}"]


def _mapped(ranks: Ranks, width: int, dtype: torch.dtype, device: torch.device) -> PeerMemory:
    """Memory of each other for such rows. Raises RuntimeError, which says why not, on all ranks."""
    if not row_words_of(width, dtype):
        raise RuntimeError(f"rows are {width} of {dtype}")
    return ranks.map_peers(width, dtype, device)


def share_norms(ranks: Ranks, spec: ModelSpec, rows: int, dtype: torch.dtype, device: torch.device) -> list[str]:
    """Let `ranks` that sum in memory of each other share norms of steps of up to `rows`, of a model that has halves.

    `spec`: a rank's share.
    """
    dense = [layer for layer in spec.layers if isinstance(layer.mlp, MlpSpec) and can_fuse(spec, layer)]
    weights = max((_weights(spec, layer) for layer in dense), default=0)
    if ranks.peers is None or not weights or rows < least_rows(weights) or not adds_by_norms(spec):
        return []
    half = -(-rows // (2 * TILE_ROWS)) * TILE_ROWS
    try:
        norms = ranks.map_norms(half, spec.hidden_size, dtype, device)
    except RuntimeError as error:
        return [f"norms of many rows: on each rank, since {error}"]
    right = are_right(ranks, norms, device)
    torch.cuda.empty_cache()  # what that took is for keys and values
    if not right:
        return ["norms of many rows: on each rank, since what GPUs copied to each other was not what was sent"]
    ranks.norms = norms
    return []


def _weights(spec: ModelSpec, layer: LayerSpec) -> int:
    """The number of weights in the products of a dense layer."""
    attention, mlp = layer.attention, cast("MlpSpec", layer.mlp)
    heads = 2 * attention.heads + 2 * attention.kv_heads
    return spec.hidden_size * (heads * attention.head_dim + 3 * mlp.width)


def are_right(ranks: Ranks, norms: SharedNorms, device: torch.device) -> bool:
    """Returns whether shared norms, and the residual, are on all ranks what each would compute by itself."""
    own, common = (torch.Generator(device).manual_seed(seed) for seed in (ranks.rank + 1, 0))
    shape = norms.rows, norms.width  # whole numbers, whose sums are exact in any order
    made = partial(torch.randint, -2, 3, shape, dtype=norms.dtype, device=device)
    weight, right = torch.ones(norms.width, dtype=norms.dtype, device=device), torch.ones(1, device=device)
    for _ in range(CHECKED_TURNS):
        for half in range(2):
            x, hidden = made(generator=own), made(generator=common)
            whole, total = hidden.clone(), ranks.group_sum(x.clone())
            normal = add_rms_norm(whole, total, weight, EPSILON)
            norms.begin(half, x)
            norms.norm(half, hidden, weight, EPSILON)
            right *= _is_close(norms.normal(half, norms.rows), normal)
            norms.begin(half, x)
            norms.make_whole(half, hidden)
            right *= _is_close(hidden, whole + total)
    return bool(ranks.beside(right[:, None], ranks.size).amin() == 1)  # of this stage, since others may have no halves


def _is_close(found: Tensor, expected: Tensor) -> Tensor:
    """But for how a norm is rounded."""
    return ((found - expected).abs() <= 0.02 * (1 + expected.abs())).all()


def known_ways(known: Measurements, key: str) -> list[Way]:
    """The measurements of each of TIMED_ROWS; empty, if there are none."""
    stored = known.section(SECTION).get(key)
    ways = [name for name in stored if name in WAYS] if isinstance(stored, list) else []
    return ways if len(ways) == len(TIMED_ROWS) else []


def described(ways: Sequence[Way]) -> str:
    """For the report of a start."""
    spans: list[tuple[Way, int]] = []
    for way, rows in zip(ways, TIMED_ROWS, strict=True):
        if spans and spans[-1][0] == way:
            spans.pop()
        spans.append((way, rows))
    parts = [
        f"{'NCCL' if way == 'nccl' else way} up to {rows} rows"
        for way, rows in spans
        if rows < TIMED_ROWS[-1] or way != "nccl"
    ]
    return f"sums of ranks: {', '.join([*parts, 'NCCL above'] if parts else ['NCCL'])}"


def _first(ranks: Ranks, ways: Sequence[Way], device: torch.device) -> list[Way]:
    """The numbers of the first rank."""
    numbers = [WAYS.index(way) for way in ways] or [NOT_KNOWN] * len(TIMED_ROWS)
    return [WAYS[number] for number in _told(ranks, numbers, device) if number != NOT_KNOWN]


def _told(ranks: Ranks, numbers: list[int], device: torch.device) -> list[int]:
    """The numbers that the first rank has."""
    told: list[int] = ranks.first(torch.tensor(numbers, device=device)).tolist()
    return told
