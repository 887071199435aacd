"""Whole decode steps as CUDA graphs, from the embedding to the sampled token, or to the last hidden states.

A graph is captured when a batch of its size first comes, and pads smaller batches. It owns the rows and positions that
it reads, and advances them: as long as the same requests decode, a step is one launch and the host sends nothing.
"""

from dataclasses import dataclass
from itertools import chain
from operator import is_not
from typing import Any

import torch

from kvern.adapters.bank import AdapterBank
from kvern.attention.base import AttentionBackend
from kvern.device.device_batch import DeviceBatch, DeviceRows
from kvern.device.transfer import upload
from kvern.kernels import logprobs
from kvern.kernels.attention_prefix import SharedPrefix
from kvern.kernels.batch import read_decodes, write_sampled
from kvern.kernels.constraints import change
from kvern.kernels.sampling import sample
from kvern.layers.attention import NO_ADAPTERS, StepAdapters
from kvern.models.decoder import Decoder
from kvern.sample.logprobs import DeviceLogprobs
from kvern.step import NewRequest
from kvern.worker.shared_prefix import PrefixGroups, find_shared_prefixes, tiles_for


def padded_size(requests: int) -> int:
    """The batch size of the graph that runs this many requests: powers of two, then multiples of 8 and of 16."""
    if requests <= 8:
        return 1 << (requests - 1).bit_length()
    step = 8 if requests <= 64 else 16
    return -(-requests // step) * step


@dataclass
class DecodeGraph:
    """A captured step: reads `inputs` [2, size] int32 (rows and positions), writes `result`.

    That is the sampled tokens [size] int64, or the hidden states [size, hidden] of a graph that ends there, whose
    `next_positions` [size] int64 are those of the tokens to be sampled. `indices` [3, size] int32 are what it reads
    besides: indices of its requests, their first tokens, and ones.
    """

    graph: torch.cuda.CUDAGraph
    inputs: torch.Tensor
    indices: torch.Tensor
    result: torch.Tensor
    next_positions: torch.Tensor
    shared: SharedPrefix | None
    """Which requests begin alike, if the graph was captured to read that once."""
    slots: list[int]
    starts: list[int]
    """What the inputs hold."""
    groups: PrefixGroups | None = None
    """What `shared` holds."""


@dataclass(frozen=True)
class DecodedStates:
    """A step that was run up to its hidden states [R, hidden]: what sampling from them needs, all good until the next.

    `slots` [R] int32, `positions` [R] int64 of the tokens to be sampled, and, of a graph, `starts` [R] int32, which
    whoever writes the tokens has to advance.
    """

    hidden: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    starts: torch.Tensor | None


class DecodeGraphs:
    """Captures and replays. `sizes` that were captured share one pool of memory."""

    def __init__(
        self,
        decoder: Decoder,
        attention: AttentionBackend[DeviceBatch],
        rows: DeviceRows,
        block_size: int,
        prefix_members: int,
        adapters: AdapterBank | None = None,
    ) -> None:
        self._decoder = decoder
        self._attention = attention
        self._rows = rows
        self._block_size = block_size
        self._prefix_members = prefix_members
        self._adapters = adapters
        self._reported = logprobs.empty(len(rows.requests), rows.device)
        self._groups: PrefixGroups | None = None
        self._grouped: list[NewRequest] = []
        self._graphs: dict[tuple[int, bool | None, bool, bool], DecodeGraph] = {}
        self._pool: Any = None
        self._stream: torch.cuda.Stream = torch.cuda.Stream(rows.device)  # type: ignore[no-untyped-call]

    @property
    def captures_adapters(self) -> bool:
        """Whether `adapted` steps can be run."""
        return self._adapters is not None and self._adapters.captures

    def run(
        self,
        slots: list[int],
        starts: list[int],
        options: bool,
        adapted: bool = False,
        exact: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Start a step of one token for each request; the sampled tokens, [R] int64, good until the next call.

        `options`: some of the rows ask for more than a temperature; then `logprobs` has what is reported of the tokens.
        `adapted`: some of the rows use adapters. `exact` [R] int32: where they begin, if `starts` are only bounds.
        """
        return self._replay(slots, starts, options, adapted, exact).result[: len(slots)]

    def logprobs(self, count: int, most: int) -> DeviceLogprobs:
        """Of the first `count` tokens of the last step with options, and of at most so many others beside each."""
        return DeviceLogprobs.of(self._reported, count, most)

    def run_to_states(
        self, slots: list[int], starts: list[int], adapted: bool = False, exact: torch.Tensor | None = None
    ) -> DecodedStates:
        """Start a step of one token for each request, whose sampling takes more than a graph can do."""
        graph, count = self._replay(slots, starts, None, adapted, exact), len(slots)
        rows, positions = graph.inputs[:, :count]
        return DecodedStates(graph.result[:count], rows, graph.next_positions[:count], positions)

    def forget_inputs(self) -> None:
        """What the graphs have read and advanced is not known after a failed step: it is written anew."""
        for graph in self._graphs.values():
            graph.slots, graph.starts, graph.groups = [], [], None

    def _replay(
        self, slots: list[int], starts: list[int], filtered: bool | None, adapted: bool, exact: torch.Tensor | None
    ) -> DecodeGraph:
        size = padded_size(len(slots))
        groups = self._shared_prefixes(slots, starts)
        key = size, filtered, groups is not None, adapted
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._capture(*key)
        if groups is not graph.groups:
            self._write(groups, graph)
        padding = size - len(slots)
        padded_slots = slots + [self._rows.scratch] * padding
        padded_starts = starts + [0] * padding
        if padded_slots != graph.slots or padded_starts != graph.starts:
            graph.inputs.copy_(upload(padded_slots + padded_starts, torch.int32, self._rows.device).view(2, -1))
        graph.slots = padded_slots
        graph.starts = [start + 1 for start in starts] + [0] * padding
        if exact is not None:
            graph.inputs[1, : len(starts)].copy_(exact)
            graph.starts = []  # the next step is told anew
        graph.graph.replay()
        return graph

    def _shared_prefixes(self, slots: list[int], starts: list[int]) -> PrefixGroups | None:
        """What the requests have in common, looked for when others decode than before."""
        if not self._prefix_members:
            return None
        requests = [self._rows.request(slot) for slot in slots]
        if len(requests) != len(self._grouped) or any(map(is_not, requests, self._grouped)):
            tables = [request.shareable_blocks(self._block_size) for request in requests]
            self._groups = find_shared_prefixes(tables, starts, self._block_size, self._prefix_members)
            self._grouped = requests
        return self._groups

    def _write(self, groups: PrefixGroups | None, graph: DecodeGraph) -> None:
        shared, graph.groups = graph.shared, groups
        if groups is None or shared is None:
            return
        tiles, members = shared.members.shape
        padding = tiles - len(groups.members)
        rows = [row + [-1] * (members - len(row)) for row in groups.members] + [[-1] * members] * padding
        keys = groups.tile_keys + [0] * padding + groups.keys + [0] * (len(shared.keys) - len(groups.keys))
        sent = upload([*chain(*rows), *keys], torch.int32, self._rows.device)
        parts = torch.split(sent, [tiles * members, tiles, len(shared.keys)])
        for target, part in zip(shared, parts, strict=True):
            target.copy_(part.view(target.shape))

    def _capture(self, size: int, filtered: bool | None, with_prefix: bool, adapted: bool) -> DecodeGraph:
        rows, device = self._rows, self._rows.device
        inputs = torch.zeros(2, size, dtype=torch.int32, device=device)
        inputs[0] = rows.scratch
        indices = torch.ones(3, size, dtype=torch.int32, device=device)
        torch.arange(size, dtype=torch.int32, device=device, out=indices[0])
        indices[1] = 0
        shared = None
        if with_prefix:
            tiles = tiles_for(size, self._prefix_members)
            members = torch.full((tiles, self._prefix_members), -1, dtype=torch.int32, device=device)
            tile_keys, keys = (torch.zeros(count, dtype=torch.int32, device=device) for count in (tiles, size))
            shared = SharedPrefix(members, tile_keys, keys)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            self._step(inputs, indices, filtered, shared, adapted)  # compiles and loads what the capture may not
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result, next_positions = self._step(inputs, indices, filtered, shared, adapted)
        self._pool = graph.pool()
        torch.cuda.current_stream(device).wait_stream(self._stream)
        return DecodeGraph(graph, inputs, indices, result, next_positions, shared, [], [])

    def _step(
        self,
        inputs: torch.Tensor,
        indices: torch.Tensor,
        options: bool | None,
        shared: SharedPrefix | None,
        adapted: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self._rows
        slots, starts = inputs
        requests, zeros, ones = indices
        size = slots.shape[0]
        token_ids, positions, slot_mapping, next_positions = read_decodes(
            rows.tokens, rows.block_table, slots, starts, self._block_size
        )
        batch = DeviceBatch(
            slots=[rows.scratch] * size,
            starts=[0] * size,
            counts=[1] * size,
            positions=positions,
            token_ids=token_ids,
            slot_mapping=slot_mapping,
            block_table=rows.block_table,
            sample_slots=[],
            logits_indices=requests,
            sample_positions=next_positions,
            decodes=size,
            device_slots=slots,
            device_starts=starts,
            device_counts=ones,
            query_start_loc=requests,
            device_sample_slots=slots,
            tiles=(requests, zeros),
            shared=shared,
        )
        adapter_indices = rows.adapters.index_select(0, slots) if adapted else None
        adapters = NO_ADAPTERS if adapter_indices is None else StepAdapters(adapter_indices, adapter_indices)
        hidden = self._decoder(token_ids, positions, self._attention.plan(batch), adapters=adapters)
        if options is None:
            return hidden, next_positions
        logits = self._decoder.logits(hidden, upcast=False)
        scores = change(logits, slots, next_positions, rows, everything=False) if options else None
        sampled = sample(logits, scores, slots, next_positions, rows)
        if options:
            logprobs.logprobs(logits, slots, rows.logprobs, sampled, self._reported)
        write_sampled(rows.tokens, slots, next_positions, sampled, starts)
        return sampled, next_positions
