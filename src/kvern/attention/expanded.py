"""Attention of long runs to latents: keys and values of some heads at a time are made, and attended to as others are.

    latents of a request --kv_b_proj--> keys, values of `heads` in a cache of its own --prefill kernel--> their values

A query and a key take 2 * (head_dim + v_head_dim) operations a head, not 2 * (2 * kv_lora_rank + qk_rope_head_dim), so
that making keys and values pays from some hundred queries on. What is made lives for a layer, in memory that is kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch

from kvern.device.device_batch import Queries
from kvern.device.transfer import upload
from kvern.kernels.attention_arguments import CachedLayer, Runs
from kvern.kernels.attention_prefill import prefill_attention, prefill_shape
from kvern.kernels.launch import processors
from kvern.spec.mixers import AttentionSpec

LEAST_QUERIES = 384
"""The least tokens of a run: the context of a shorter run costs more to expand than it saves."""
MOST_BYTES = 512 << 20
"""The most bytes of keys and values that are expanded at a time."""


class ExpandedAttention:
    """Plans runs of queries of layers that `AttentionSpec.expanded` describes as `spec`."""

    def __init__(
        self,
        spec: AttentionSpec,
        device: torch.device,
        dtype: torch.dtype,
        block_size: int,
        longest: int,
        is_hopper: bool,
    ) -> None:
        """`longest`: tokens of a sequence. `is_hopper`: the kernel for Hopper knows such heads, and works here."""
        self.spec, self.block_size = spec, block_size
        token_bytes = 2 * spec.heads * spec.head_dim * dtype.itemsize
        most = max(2 * longest, 2 * LEAST_QUERIES) // block_size + 2
        blocks = max(1, min(most, MOST_BYTES // (token_bytes * block_size)))
        self.cache = torch.zeros(2, blocks, block_size, spec.heads, spec.head_dim, dtype=dtype, device=device)
        self.attend: Callable[..., None]
        if is_hopper:
            from kvern.kernels.attention_hopper import QUERIES, hopper_prefill

            self.queries, self.attend = QUERIES, partial(hopper_prefill, processors=processors(device))
        else:
            shape = prefill_shape(spec.head_dim, True, dtype.itemsize)
            self.queries, self.attend = shape.queries, partial(prefill_attention, shape=shape)

    def plan(self, queries: Queries, first: int) -> "ExpandedRuns | None":
        """For those runs that are long enough, and whose context is not too long; None: there are none.

        `first`: the index of the runs' first token in the step.
        """
        if queries.known_tiles is not None:
            return None
        room, parts = self.cache.shape[1], [Part()]
        tokens = accumulate(queries.counts, initial=0)
        for index, (start, count, token) in enumerate(zip(queries.starts, queries.counts, tokens, strict=False)):
            blocks = -(-(start + count) // self.block_size)
            if count < LEAST_QUERIES or blocks > room:
                continue
            if parts[-1].blocks + blocks > room:
                parts.append(Part())
            parts[-1].add(index, token, count, blocks)
        if not parts[0].requests:
            return None
        whole = sum(len(part.requests) for part in parts) == len(queries.counts)
        return ExpandedRuns(self, queries, parts, first, whole)


class Part:
    """Requests whose contexts are expanded together: their places among the runs, tokens, and blocks."""

    def __init__(self) -> None:
        self.requests: list[int] = []
        self.tokens: list[slice] = []
        self.firsts: list[int] = []
        self.blocks = 0

    def add(self, request: int, token: int, count: int, blocks: int) -> None:
        if self.tokens and self.tokens[-1].stop == token:
            self.tokens[-1] = slice(self.tokens[-1].start, token + count)
        else:
            self.tokens.append(slice(token, token + count))
        self.requests.append(request)
        self.firsts.append(self.blocks)
        self.blocks += blocks


@dataclass(frozen=True)
class Planned:
    """A part on the device: what the kernel is told, where it finds latents, and the tokens it attends for."""

    table: torch.Tensor
    runs: Runs
    places: torch.Tensor
    tokens: Sequence[slice]


class ExpandedRuns:
    """Runs of a step, whose tokens begin at `first`. `whole`: they are all runs that it has."""

    def __init__(
        self, kernels: ExpandedAttention, queries: Queries, parts: Sequence[Part], first: int, whole: bool
    ) -> None:
        self._kernels = kernels
        self.first = first
        self.whole = whole
        self.parts = [self._planned(queries, part) for part in parts]

    def _planned(self, queries: Queries, part: Part) -> Planned:
        kernels, device = self._kernels, queries.block_table.device
        ends = [*part.firsts[1:], part.blocks]
        lengths = [end - first for first, end in zip(part.firsts, ends, strict=True)]
        tiles = [
            (queries.starts[request] + first, place, first)
            for place, request in enumerate(part.requests)
            for first in range(0, queries.counts[request], kernels.queries)
        ]
        tiles.sort(reverse=True)
        # Rows of the table are as long as the longest context, since a run reads no further than its own.
        table = [first + block for first in part.firsts for block in range(max(lengths))]
        slots = list(range(len(part.requests)))
        sent = upload(
            [*part.requests, *slots, *(place for _, place, _ in tiles), *(first for *_, first in tiles), *table],
            torch.int32,
            device,
        )
        requests, own_slots, tile_request, tile_first, blocks = torch.split(
            sent, [len(slots), len(slots), len(tiles), len(tiles), len(table)]
        )
        starts, tokens, counts = (
            values.index_select(0, requests)
            for values in (queries.device_starts, queries.query_start_loc, queries.device_counts)
        )
        runs = Runs(own_slots, starts, tokens, counts, tile_request, tile_first)
        held = [
            queries.block_table[queries.slots[request], :length]
            for request, length in zip(part.requests, lengths, strict=True)
        ]
        offsets = torch.arange(kernels.block_size, device=device)
        places = (torch.cat(held).long()[:, None] * kernels.block_size + offsets).flatten()
        return Planned(blocks.view(len(slots), -1), runs, places, part.tokens)

    def attend(
        self,
        cache: torch.Tensor,
        own: torch.Tensor,
        rotated: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Causal attention of the runs' queries; only these tokens of `out` are written.

        cache    [1, blocks, block_size, 1, width], whose rows begin with the latent, behind which is the shared key
        own      [T, heads, qk_nope_head_dim], the queries of the runs, all of them
        rotated  [T, heads, qk_rope_head_dim]
        keys     [heads, qk_nope_head_dim, kv_lora_rank], what makes keys
        values   [heads, kv_lora_rank, v_head_dim]
        out      [T, heads, v_head_dim]
        """
        spec = self._kernels.spec
        cached = CachedLayer(self._kernels.cache, spec.scale)
        latent = values.shape[1]
        entries = own.shape[2] + rotated.shape[2]
        for part in self.parts:
            rows = cache.flatten(0, 3).index_select(0, part.places)
            latents, shared = rows[:, :latent], rows[:, latent : latent + rotated.shape[2]]
            each = latents.expand(spec.heads, -1, -1)
            key, value = (kind.flatten(0, 1)[: len(rows)] for kind in self._kernels.cache)
            key[..., own.shape[2] : entries] = shared[:, None]
            key[..., entries:] = 0
            for first in range(0, keys.shape[0], spec.heads):
                heads = slice(first, first + spec.heads)
                torch.bmm(each, keys[heads].transpose(1, 2), out=key[..., : own.shape[2]].transpose(0, 1))
                torch.bmm(each, values[heads], out=value[..., : values.shape[2]].transpose(0, 1))
                asked = own.new_zeros(len(own), spec.heads, spec.head_dim)
                asked[..., : own.shape[2]] = own[:, heads]
                asked[..., own.shape[2] : entries] = rotated[:, heads]
                result = torch.empty_like(asked)
                self._kernels.attend(asked, cached, part.table, part.runs, result)
                for tokens in part.tokens:
                    out[tokens, heads] = result[tokens, :, : values.shape[2]]
