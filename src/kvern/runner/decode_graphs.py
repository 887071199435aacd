"""Whole decode steps as CUDA graphs, from the embedding to the sampled token.

A graph pads smaller batches. It owns the rows and positions that it reads, and advances them: as long as the same
requests decode, a step is one launch and the host sends nothing. Where sampling takes more than a graph can do, it goes
on after the graph, from the logits that it leaves, and the token of the graph is overwritten. The graph of a pipeline
stage begins with the rows that the stage before hands on, or ends with those for the next stage.

    received --> rows --replay--> what the graph leaves --copied--> sent

Graphs hold no messages of stages: rows are received before a replay, once the step before has read its own, and copied
after it, before the next step may overwrite them. A message takes as long as it takes.
"""

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import is_
from typing import NamedTuple

import torch
from torch import Tensor

from kvern.device.device_batch import decodes_on_device
from kvern.device.transfer import upload
from kvern.kernels import logprobs
from kvern.kernels.attention_prefix import SharedPrefix, tiles_for
from kvern.kernels.batch import write_sampled
from kvern.layers.rope import positions_alone
from kvern.layers.stages import ReceivedRows
from kvern.layers.step_context import NO_ADAPTERS, StepAdapters, StepContext
from kvern.models.decoder import DeviceLanguageModel
from kvern.request.step import NewRequest, ScheduledTokens
from kvern.runner.device_sampling import sample_as_asked, sample_plain
from kvern.runner.step_graphs import (
    IN_GRAPHS,
    DeviceModel,
    GraphInputs,
    PlannedStep,
    Priority,
    StepGraph,
    StepKind,
    StepOutputs,
)


class StageEnds:
    """The ends of the stage that `decoder` is, for steps of at most `most` rows."""

    def __init__(self, decoder: DeviceLanguageModel, most: int) -> None:
        self._entry, self._stage = decoder.entry, decoder.build.ranks.stage
        self._rows = self._entry.room(most).zero_() if isinstance(self._entry, ReceivedRows) else None

    def entered(self, token_ids: Tensor) -> Tensor:
        """The rows that the layers of the stage begin with, `[T, width]`: this is part of a graph."""
        if isinstance(self._entry, ReceivedRows) and self._rows is not None:
            # A kernel that waits for the one that describes the batch, as those behind read that before they wait.
            return self._entry.taken(self._rows[: len(token_ids)].mul(1))
        embedded: Tensor = self._entry(token_ids)
        return embedded

    def receive(self, count: int, size: int) -> None:
        """Have what a graph of `size` rows begins with, the first `count` of them those of the step."""
        if self._rows is None:
            return
        self._stage.receive(self._rows[:count])
        if count < size:  # they ask for no other experts
            self._rows[count:size] = self._rows[0]

    def hand_on(self, hidden: Tensor) -> None:
        """Send rows `hidden [T, ...]`, which are good until the next step, to the stage behind."""
        self._stage.send(hidden.clone())


LEAST_KEYS = 256
LEAST_REQUESTS = 4
"""Below, a pass of its own for the prefix costs more than it saves."""


@dataclass
class PrefixGroups:
    """Tiles of at most `members` requests with a common prefix, as lists for a `SharedPrefix`."""

    members: list[list[int]] = field(default_factory=list)
    tile_keys: list[int] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)


def common_length(tables: Sequence[list[int]]) -> int:
    """Returns how many first entries all lists have in common: as many as the least and the greatest of them."""
    least, greatest = min(tables), max(tables)
    pairs = enumerate(zip(least, greatest, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(least), len(greatest)))


def find_shared_prefixes(
    tables: Sequence[list[int]], starts: Sequence[int], block_size: int, members: int
) -> PrefixGroups | None:
    """Group decodes by the blocks they begin with. None if no group is worth it.

    tables  the blocks of each request, of which it may have more by now
    starts  the position of each request's query: what it shares lies before
    """
    by_first: dict[int, list[int]] = {}
    for index, table in enumerate(tables):
        if table:
            by_first.setdefault(table[0], []).append(index)
    groups = PrefixGroups(keys=[0] * len(tables))
    most = tiles_for(len(tables), members)
    for requests in sorted(by_first.values(), key=len, reverse=True):
        needed = -(-len(requests) // members)
        if len(requests) < LEAST_REQUESTS or len(groups.members) + needed > most:
            break
        common = common_length([tables[index] for index in requests])
        keys = min(common * block_size, min(starts[index] for index in requests) // block_size * block_size)
        if keys < LEAST_KEYS:
            continue
        for first in range(0, len(requests), members):
            groups.members.append(requests[first : first + members])
            groups.tile_keys.append(keys)
        for index in requests:
            groups.keys[index] = keys
    return groups if groups.members else None


class DecodeShape(NamedTuple):
    """A decode step of `size` rows.

    `options`: some of them ask for more than a temperature; `prefix`: what requests begin with in common is read once;
    `adapted`: rows may use adapters.
    """

    size: int
    options: bool
    prefix: bool
    adapted: bool


def padded_size(requests: int) -> int:
    """The batch size of the graph that runs this many requests: a power of two, a multiple of 8, or a quarter more."""
    if requests <= 8:
        return 1 << (requests - 1).bit_length()
    step = max(8, 1 << ((requests - 1).bit_length() - 3))
    return -(-requests // step) * step


def smallest(captured: Collection[DecodeShape], requests: int, options: bool, adapted: bool) -> DecodeShape | None:
    """The smallest graph that runs so many requests without looking for common prefixes; None: there is none."""
    exact = DecodeShape(padded_size(requests), options, False, adapted)
    if exact in captured:
        return exact
    return min((other for other in captured if other[1:] == exact[1:] and other.size > requests), default=None)


def decode_shapes(requests: int, prefixes: bool, adapters: bool, samples: bool = True) -> Iterator[DecodeShape]:
    """All graphs of an engine that runs so many requests at once, as `StepKind.shapes`.

    `samples`: it is no pipeline stage before the last.
    """
    sizes = sorted({padded_size(count) for count in range(1, requests + 1)}, reverse=True)
    for adapted in (False, True) if adapters else (False,):
        for prefix in (False, True) if prefixes else (False,):
            for options in (False, True) if samples else (False,):
                for size in sizes:
                    if size >= LEAST_REQUESTS or not prefix:
                        yield DecodeShape(size, options, prefix, adapted)


class DecodeInputs(GraphInputs):
    """Rows and positions [2, size] int32 of a decode step; the graph advances the positions.

    indices  [3, size] int32, which never change: indices of the requests, zeros and ones
    shared   which requests begin alike, if the graph was captured to read that once; `groups`: what it holds
    """

    def __init__(self, numbers: Tensor, indices: Tensor, shared: SharedPrefix | None) -> None:
        super().__init__(numbers)
        self.indices, self.shared = indices, shared
        self.groups: PrefixGroups | None = None

    def write_groups(self, groups: PrefixGroups | None) -> None:
        """Let `shared` be these groups."""
        shared, self.groups = self.shared, groups
        if groups is None or shared is None:
            return
        tiles, members = shared.members.shape
        padding = tiles - len(groups.members)
        rows = [row + [-1] * (members - len(row)) for row in groups.members] + [[-1] * members] * padding
        keys = groups.tile_keys + [0] * padding + groups.keys + [0] * (len(shared.keys) - len(groups.keys))
        sent = upload([*chain(*rows), *keys], torch.int32, self.numbers.device)
        parts = torch.split(sent, [tiles * members, tiles, len(shared.keys)])
        for target, part in zip(shared, parts, strict=True):
            target.copy_(part.view(target.shape))


DecodeGraph = StepGraph[DecodeShape, DecodeInputs]


class DecodeKind(StepKind[DecodeShape, DecodeInputs]):
    """Steps of one token for each request."""

    def __init__(self, model: DeviceModel, prefix_members: int) -> None:
        """`prefix_members`: as of an `AttentionBackend`; 0: common prefixes are not looked for."""
        self._model = model
        self._rows = model.rows
        self._prefix_members = prefix_members
        self._stage = model.decoder.build.ranks.stage
        self._reported = logprobs.empty(len(self._rows.requests), self._rows.device)
        self._grouped: deque[tuple[list[NewRequest], PrefixGroups | None]] = deque(maxlen=self._stage.count)
        adapts = model.adapters is not None and model.adapters.captures
        self.shapes = list(decode_shapes(self._rows.scratch, prefix_members > 0, adapts, self._stage.is_last))
        self._ends = StageEnds(model.decoder, self.shapes[0].size)

    def priority(self, shape: DecodeShape) -> Priority:
        return Priority.FEW_STEPS if any(shape[1:]) else Priority.MOST_STEPS

    def largest_step(self) -> list[ScheduledTokens]:
        return [ScheduledTokens(slot, 0, 1, 1) for slot in range(self._rows.scratch)]

    def run(self, step: PlannedStep, captured: Mapping[DecodeShape, DecodeGraph]) -> StepOutputs | None:
        """Start a step as `StepKind.run`; it may have fewer rows than the graph, or none."""
        if step.size is None or step.drafting or not step.size.is_plain:
            return None
        rows, in_graph = self._rows, not step.needs & ~IN_GRAPHS
        shape = None
        if options := bool(step.needs) and in_graph and self._stage.is_last:
            shape = smallest(captured, step.size.decodes, True, step.adapted)
        if shape is None:
            shape, in_graph = smallest(captured, step.size.decodes, False, step.adapted), in_graph and not options
        if shape is None:
            return None
        scheduled, count = step.scheduled, len(step.scheduled)
        starts = rows.starts(scheduled) if step.uncertain and self._stage.is_last else None
        outputs = self._replay(shape, captured, scheduled, starts).outputs
        if not self._stage.is_last:
            assert outputs.hidden is not None
            self._ends.hand_on(outputs.hidden[:count])
            return StepOutputs()
        if not in_graph:
            return outputs.unsampled(self._model.decoder, count)._replace(starts=starts)
        if starts is not None:
            rows.advance(scheduled, starts)
        assert outputs.sampled is not None
        return StepOutputs(sampled=outputs.sampled[:count], reported=self._reported)

    def forget_inputs(self, captured: Collection[DecodeGraph]) -> None:
        super().forget_inputs(captured)
        for graph in captured:
            graph.inputs.groups = None

    def _replay(
        self,
        plain: DecodeShape,
        captured: Mapping[DecodeShape, DecodeGraph],
        scheduled: Sequence[ScheduledTokens],
        exact: Tensor | None,
    ) -> DecodeGraph:
        """Start a step; `exact` [R] int32: where the requests begin, if what is scheduled are only bounds."""
        slots, starts = [item.slot for item in scheduled], [item.start for item in scheduled]
        graph, groups = captured[plain], self._shared_prefixes(slots, starts)
        if groups is not None:
            graph = captured.get(plain._replace(prefix=True), graph)
        inputs, padding = graph.inputs, plain.size - len(slots)
        if groups is not inputs.groups:
            inputs.write_groups(groups)
        padded = slots + [self._rows.scratch] * padding
        inputs.write(padded + starts + [0] * padding)
        if exact is not None:
            inputs.numbers[plain.size :][: len(slots)].copy_(exact)
        known = exact is None and self._stage.is_last  # else the next step is told anew
        inputs.known = padded + [start + 1 for start in starts] + [0] * padding if known else ()
        self._ends.receive(len(slots), plain.size)
        graph.replay()
        return graph

    def _shared_prefixes(self, slots: Sequence[int], starts: Sequence[int]) -> PrefixGroups | None:
        """Groups of requests with a common prefix; they are searched when other requests decode than before."""
        if not self._prefix_members:
            return None
        requests = [self._rows.request(slot) for slot in slots]
        for grouped, groups in self._grouped:
            if len(requests) == len(grouped) and all(map(is_, requests, grouped)):
                return groups
        size = self._model.block_size
        tables = [request.shareable_blocks(size) for request in requests]
        groups = find_shared_prefixes(tables, starts, size, self._prefix_members)
        self._grouped.append((requests, groups))
        return groups

    def inputs(self, shape: DecodeShape) -> DecodeInputs:
        device, size = self._rows.device, shape.size
        numbers = torch.zeros(2, size, dtype=torch.int32, device=device)
        numbers[0] = self._rows.scratch
        indices = torch.ones(3, size, dtype=torch.int32, device=device)
        torch.arange(size, dtype=torch.int32, device=device, out=indices[0])
        indices[1] = 0
        shared = None
        if shape.prefix:
            tiles = tiles_for(size, self._prefix_members)
            members = torch.full((tiles, self._prefix_members), -1, dtype=torch.int32, device=device)
            tile_keys, keys = (torch.zeros(count, dtype=torch.int32, device=device) for count in (tiles, size))
            shared = SharedPrefix(members, tile_keys, keys)
        return DecodeInputs(numbers.view(-1), indices, shared)

    def compute(self, shape: DecodeShape, inputs: DecodeInputs) -> StepOutputs:
        model = self._model
        rows = self._rows
        decoder = self._model.decoder
        slots, starts = inputs.numbers.view(2, -1)
        batch = decodes_on_device(rows, slots, starts, inputs.indices, model.block_size)
        batch.shared = inputs.shared
        positions = batch.sample_positions
        of_rows = rows.adapters.index_select(0, slots) if shape.adapted else None
        adapters = NO_ADAPTERS if of_rows is None else StepAdapters(of_rows, of_rows)
        states = None if model.states is None else model.states.plan(batch)
        looked_up, entered = decoder.looked_up(batch.token_ids), self._ends.entered(batch.token_ids)
        attend = model.attention.plan(batch)
        step = StepContext(positions_alone(batch.positions), attend, states, None, adapters)
        hidden = decoder.run(entered, step, looked_up)
        if not self._stage.is_last:
            return StepOutputs(hidden)
        if shape.options:
            logits, sampled = sample_as_asked(decoder, hidden, slots, positions, rows, self._reported)
        else:
            logits, sampled = sample_plain(decoder, hidden, slots, positions, rows)
        write_sampled(rows.tokens, slots, positions, sampled, starts)
        return StepOutputs(hidden, slots, positions, logits, sampled)
