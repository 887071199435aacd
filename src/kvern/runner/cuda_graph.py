"""Whole decode steps as CUDA graphs, from the embedding to the sampled token.

A graph pads smaller batches. It owns the rows and positions that it reads, and advances them: as long as the same
requests decode, a step is one launch and the host sends nothing. Where sampling takes more than a graph can do, it goes
on behind the graph, from the logits that it leaves, and the graph's own token is overwritten. A stage's graph begins
with the rows that the stage before hands on, or ends with those for the stage behind.
"""

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import is_
from typing import Any, NamedTuple, TypeVar

import torch

from kvern.adapters.bank import AdapterBank
from kvern.attention.base import AttentionBackend
from kvern.device.device_batch import DeviceBatch, DeviceRows, decodes_on_device
from kvern.device.transfer import upload
from kvern.kernels import logprobs
from kvern.kernels.attention_prefix import SharedPrefix, tiles_for
from kvern.kernels.batch import write_sampled
from kvern.kernels.constraints import change
from kvern.kernels.sampling import sample
from kvern.layers.rope import positions_alone
from kvern.layers.step_context import NO_ADAPTERS, StepAdapters, StepContext
from kvern.models.decoder import Decoder
from kvern.request.step import NewRequest
from kvern.runner.device_sampling import sample_plain
from kvern.runner.device_states import DeviceStateMemory
from kvern.runner.graph_captures import Captured, captures, smallest
from kvern.runner.shared_prefix import PrefixGroups, find_shared_prefixes
from kvern.runner.stage_ends import StageEnds
from kvern.sample.logprobs import DeviceLogprobs


class DecodedStep(NamedTuple):
    """What a step that samples R tokens leaves, all good until the next.

    hidden     [R, hidden]      the last hidden states
    logits     [R, vocabulary]  scores of the tokens to be sampled, in the model's dtype unless something scales them;
                                where a graph samples plainly, `Decoder.own_logits`: of several ranks a rank's part of
                                the vocabulary, and padding, of which whoever reads them makes `Decoder.whole_logits`
    positions  [R] int64        of these tokens
    sampled    [R] int64        the tokens
    """

    hidden: torch.Tensor
    logits: torch.Tensor
    positions: torch.Tensor
    sampled: torch.Tensor

    def unowned(self) -> "DecodedStep":
        """The same, where what is large lies in memory that other graphs may write to."""
        return self._replace(hidden=unowned(self.hidden), logits=unowned(self.logits))


class HandedStep(NamedTuple):
    """What a step of a stage before the last leaves: rows `hidden` [R, hidden] to hand on, good until the next."""

    hidden: torch.Tensor

    def unowned(self) -> "HandedStep":
        """As of a `DecodedStep`."""
        return HandedStep(unowned(self.hidden))


@dataclass
class DecodeGraph:
    """A captured step: reads `inputs` [2, size] int32 (rows and positions), writes `outputs`.

    `indices` [3, size] int32 are what it reads besides: indices of its requests, their first tokens, and ones.
    """

    graph: torch.cuda.CUDAGraph
    inputs: torch.Tensor
    indices: torch.Tensor
    outputs: DecodedStep | HandedStep
    shared: SharedPrefix | None
    """Which requests begin alike, if the graph was captured to read that once."""
    slots: list[int]
    starts: list[int]
    """What the inputs hold."""
    groups: PrefixGroups | None = None
    """What `shared` holds."""


@dataclass(frozen=True)
class DecodedStates:
    """Hidden states [R, hidden] and what sampling from them needs, all good until the next step.

    `slots` [R] integers; `positions` [R] int64 of the tokens to be sampled; `logits` [R, vocabulary], if there are.
    """

    hidden: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    logits: torch.Tensor | None = None


class _Memory:
    """The bytes of a tensor, without a hold on them."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "version": 2,
        }


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, in memory of a graph's that other graphs may write to."""
    return torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype).view(tensor.shape)


Left = TypeVar("Left", DecodedStep, DecodedStep | None, DecodedStep | HandedStep)


def capture(step: Callable[[], Left], pool: Any, stream: torch.cuda.Stream) -> tuple[torch.cuda.CUDAGraph, Left]:
    """A step as a graph in a pool of memory, and what it leaves there, if anything."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        # Not torch.cuda.graph, which waits for the device and gives all unused memory back, for the next steps to
        # ask for anew. Relaxed: a library may load a kernel at its first launch.
        graph.capture_begin(pool, capture_error_mode="relaxed")
        try:
            outputs = step()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # what went wrong is said already
                graph.capture_end()
            raise
        graph.capture_end()
    return graph, None if outputs is None else outputs.unowned()


class DecodeGraphs:
    """Captures and replays. All graphs share one pool of memory, since none runs beside another."""

    def __init__(
        self,
        decoder: Decoder,
        attention: AttentionBackend[DeviceBatch],
        rows: DeviceRows,
        block_size: int,
        prefix_members: int,
        adapters: AdapterBank | None = None,
        states: DeviceStateMemory | None = None,
    ) -> None:
        self._states = states
        self._decoder = decoder
        self._attention = attention
        self._rows = rows
        self._block_size = block_size
        self._prefix_members = prefix_members
        self._adapters = adapters
        self._reported = logprobs.empty(len(rows.requests), rows.device)
        self._stage = decoder.build.ranks.stage
        self._grouped: deque[tuple[list[NewRequest], PrefixGroups | None]] = deque(maxlen=self._stage.count)
        self._graphs: dict[Captured, DecodeGraph] = {}
        adapts = adapters is not None and adapters.captures
        self.missing = deque(captures(rows.scratch, prefix_members > 0, adapts, self._stage.is_last))
        self._ends = StageEnds(decoder, self.missing[0].size)
        self.pool = torch.cuda.graph_pool_handle()
        self.stream: torch.cuda.Stream = torch.cuda.Stream(rows.device)  # type: ignore[no-untyped-call]

    def capture_next(self) -> None:
        """Capture the next of those that are `missing`."""
        captured = self.missing.popleft()
        self._graphs[captured] = self._capture(captured)

    def can_run(self, requests: int, adapted: bool, options: bool = False) -> bool:
        """Whether there is a graph for a step of one token for each of so many requests; see `run`."""
        return smallest(self._graphs, requests, options, adapted) is not None

    def run(
        self,
        slots: list[int],
        starts: list[int],
        options: bool,
        adapted: bool = False,
        exact: torch.Tensor | None = None,
        size: int = 0,
    ) -> torch.Tensor:
        """Start a step of one token for each request; the sampled tokens, [R] int64, good until the next call.

        `options`: some of the rows ask for more than a temperature; then `logprobs` has what is reported of the tokens.
        `adapted`: some of the rows use adapters. `exact` [R] int32: where they begin, if `starts` are only bounds.
        `size`: of a graph that is large enough for so many requests, of which there may be none.
        """
        outputs = self._replay(slots, starts, options, adapted, exact, size).outputs
        assert isinstance(outputs, DecodedStep), "a stage before the last hands on"
        return outputs.sampled[: len(slots)]

    def hand_on(self, slots: list[int], starts: list[int], adapted: bool) -> None:
        """Start a step of one token for each request on a stage before the last; arguments as for `run`."""
        self._ends.hand_on(self._replay(slots, starts, False, adapted, None, 0).outputs.hidden[: len(slots)])

    def logprobs(self, count: int, most: int) -> DeviceLogprobs:
        """Of the first `count` tokens of the last step with options, and of at most so many others beside each."""
        return DeviceLogprobs.of(self._reported, count, most)

    def run_to_states(
        self,
        slots: list[int],
        starts: list[int],
        adapted: bool = False,
        exact: torch.Tensor | None = None,
        size: int = 0,
    ) -> DecodedStates:
        """Start a step of one token for each request, whose sampling takes more than a graph can do; as `run`."""
        graph, count = self._replay(slots, starts, False, adapted, exact, size), len(slots)
        outputs, rows = graph.outputs, graph.inputs[0, :count]
        assert isinstance(outputs, DecodedStep), "a stage before the last hands on"
        logits = self._decoder.whole_logits(outputs.logits[:count])
        return DecodedStates(outputs.hidden[:count], rows, outputs.positions[:count], logits)

    def forget_inputs(self) -> None:
        """What the graphs have read and advanced is not known after a failed step: it is written anew."""
        for graph in self._graphs.values():
            graph.slots, graph.starts, graph.groups = [], [], None

    def _replay(
        self, slots: list[int], starts: list[int], options: bool, adapted: bool, exact: torch.Tensor | None, size: int
    ) -> DecodeGraph:
        groups = self._shared_prefixes(slots, starts)
        plain = smallest(self._graphs, max(len(slots), size), options, adapted)
        assert plain is not None, "`can_run` was not asked"
        graph = self._graphs[plain]
        if groups is not None:
            graph = self._graphs.get(plain._replace(prefix=True), graph)
        if groups is not graph.groups:
            self._write(groups, graph)
        padding = plain.size - len(slots)
        padded_slots = slots + [self._rows.scratch] * padding
        padded_starts = starts + [0] * padding
        if padded_slots != graph.slots or padded_starts != graph.starts:
            graph.inputs.copy_(upload(padded_slots + padded_starts, torch.int32, self._rows.device).view(2, -1))
        graph.slots = padded_slots
        graph.starts = [start + 1 for start in starts] + [0] * padding
        if exact is not None:
            graph.inputs[1, : len(starts)].copy_(exact)
        if exact is not None or not self._stage.is_last:
            graph.starts = []  # the next step is told anew
        self._ends.receive(len(slots), plain.size)
        graph.graph.replay()
        return graph

    def _shared_prefixes(self, slots: list[int], starts: list[int]) -> PrefixGroups | None:
        """What the requests have in common, looked for when others decode than before, or than in turns of stages."""
        if not self._prefix_members:
            return None
        requests = [self._rows.request(slot) for slot in slots]
        for grouped, groups in self._grouped:
            if len(requests) == len(grouped) and all(map(is_, requests, grouped)):
                return groups
        tables = [request.shareable_blocks(self._block_size) for request in requests]
        groups = find_shared_prefixes(tables, starts, self._block_size, self._prefix_members)
        self._grouped.append((requests, groups))
        return groups

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

    def _capture(self, captured: Captured) -> DecodeGraph:
        inputs, indices, shared = self._inputs(captured)
        step = partial(self._step, inputs, indices, captured.options, shared, captured.adapted)
        graph, outputs = capture(step, self.pool, self.stream)
        return DecodeGraph(graph, inputs, indices, outputs, shared, [], [])

    def _inputs(self, captured: Captured) -> tuple[torch.Tensor, torch.Tensor, SharedPrefix | None]:
        rows, device, size = self._rows, self._rows.device, captured.size
        inputs = torch.zeros(2, size, dtype=torch.int32, device=device)
        inputs[0] = rows.scratch
        indices = torch.ones(3, size, dtype=torch.int32, device=device)
        torch.arange(size, dtype=torch.int32, device=device, out=indices[0])
        indices[1] = 0
        shared = None
        if captured.prefix:
            tiles = tiles_for(size, self._prefix_members)
            members = torch.full((tiles, self._prefix_members), -1, dtype=torch.int32, device=device)
            tile_keys, keys = (torch.zeros(count, dtype=torch.int32, device=device) for count in (tiles, size))
            shared = SharedPrefix(members, tile_keys, keys)
        return inputs, indices, shared

    def _step(
        self,
        inputs: torch.Tensor,
        indices: torch.Tensor,
        options: bool,
        shared: SharedPrefix | None,
        adapted: bool,
    ) -> DecodedStep | HandedStep:
        rows, decoder = self._rows, self._decoder
        slots, starts = inputs
        batch = decodes_on_device(rows, slots, starts, indices, self._block_size, shared)
        next_positions = batch.sample_positions
        adapter_indices = rows.adapters.index_select(0, slots) if adapted else None
        adapters = NO_ADAPTERS if adapter_indices is None else StepAdapters(adapter_indices, adapter_indices)
        states: Any = None if self._states is None else self._states.plan(batch)  # in the place of `StepStates`
        looked_up, entered = decoder.looked_up(batch.token_ids), self._ends.entered(batch.token_ids)
        attend = self._attention.plan(batch)
        step = StepContext(positions_alone(batch.positions), attend, states, None, adapters)
        hidden = decoder.run(entered, step, looked_up)
        if not self._stage.is_last:
            return HandedStep(hidden)
        if options:
            logits = decoder.logits(hidden, upcast=False)
            scores = change(logits, slots, next_positions, rows, everything=False)
            sampled = sample(logits, scores, slots, next_positions, rows)
            logprobs.logprobs(logits, slots, rows.logprobs, sampled, self._reported)
        else:
            logits, sampled = sample_plain(decoder, hidden, slots, next_positions, rows)
        write_sampled(rows.tokens, slots, next_positions, sampled, starts)
        return DecodedStep(hidden, logits, next_positions, sampled)
