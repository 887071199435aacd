"""Small steps with prompts in them as CUDA graphs: their kernels take the host longer to launch than a GPU to run.

A graph is cut for so many decodes and so many tokens of prompts, which belong to a few requests: `inputs` says whose
they are. What is left of the tokens is a run of the row that pads batches. Attention reads on the device where runs
begin and end, so that any such step fits.

    inputs   [S] int64 each: indices of the tokens that are sampled from, positions of what is sampled, and rows
             [R] int32 each: rows, first positions, numbers of tokens, and indices of the first tokens of the requests
             [tiles] int32 each: request and first query of each tile of the runs
             if layers keep states: [tokens] int32, the run that each belongs to, and [chunks] int32 each: first token,
             among the runs', and length of each chunk of these
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from kvern.attention.base import AttentionBackend
from kvern.device.device_batch import DeviceBatch, DeviceRows
from kvern.device.input_batch import sampled_tokens
from kvern.device.rows import BatchRows
from kvern.device.state_runs import chunks_of
from kvern.device.transfer import send
from kvern.kernels import delta_net
from kvern.kernels.attention_latent import QUERIES
from kvern.kernels.attention_prefill import prefill_shape
from kvern.kernels.batch import read_tokens, write_sampled
from kvern.models.decoder import Decoder
from kvern.request.step import NewRequest, ScheduledTokens, SchedulerOutput
from kvern.runner.cuda_graph import DecodedStep, capture
from kvern.runner.device_sampling import sample_plain
from kvern.runner.device_states import DeviceStateMemory
from kvern.spec.mixers import RecurrentSpec
from kvern.spec.model import ModelSpec

DECODES = (16, 64, 128, 256)
TOKENS = (64, 128, 256, 384, 512)
"""With more tokens of prompts a step takes a GPU longer than its launches take a host."""
RUNS = 8
"""Prompts of one step."""
MOST_KEYS = 8192
"""Behind more of them, if all layers attend, a run is left to kernels that the host chooses for it."""


class PromptStep(NamedTuple):
    """What a graph is cut for, or a step needs room for: tokens of decodes, and of prompts."""

    decodes: int
    tokens: int

    @property
    def requests(self) -> int:
        """Decodes, runs of prompts, the run that pads the tokens, and an empty one, which pads tiles."""
        return self.decodes + RUNS + 2

    @property
    def samples(self) -> int:
        return self.decodes + RUNS

    @property
    def is_plain(self) -> bool:
        """Whether it is decodes alone, which other graphs are for."""
        return self.tokens == 0

    def fits_into(self, other: "PromptStep") -> bool:
        return self.decodes <= other.decodes and self.tokens <= other.tokens


def prompt_steps(requests: int, most: int, longest: int) -> list[PromptStep]:
    """All graphs of an engine that runs so many requests at once, the likeliest first.

    `most`: tokens of a step; `longest`: of a sequence.
    """
    largest = next((size for size in DECODES if size >= requests), DECODES[-1])
    steps = [PromptStep(decodes, tokens) for decodes in DECODES if decodes <= largest for tokens in reversed(TOKENS)]
    return [step for step in steps if sum(step) <= most and step.tokens <= longest]


def reading_steps(most: int, longest: int) -> list[PromptStep]:
    """The same of who reads prompts alone."""
    return [PromptStep(0, tokens) for tokens in reversed(TOKENS) if tokens <= min(most, longest)]


def most_keys(spec: ModelSpec) -> int:
    """Of a run in a graph: there a layer that attends is slow, and outside all are launched slowly."""
    attending = sum(any(not isinstance(mixer, RecurrentSpec) for mixer in layer.mixers) for layer in spec.layers)
    return MOST_KEYS * len(spec.layers) // max(1, attending)


@dataclass
class PromptGraph:
    """A captured step: reads `inputs` int32, writes `outputs`; None: prompts are read, and nothing is sampled."""

    replay: Callable[[], None]
    inputs: torch.Tensor
    outputs: DecodedStep | None
    slots: torch.Tensor
    """[S] int64, in `inputs`: the rows that are sampled for."""


class PromptGraphs:
    """Captures and replays."""

    def __init__(
        self,
        decoder: Decoder,
        attention: AttentionBackend[DeviceBatch],
        rows: DeviceRows,
        block_size: int,
        most: int,
        pool: Any,
        stream: torch.cuda.Stream,
        states: DeviceStateMemory | None = None,
        *,
        samples: bool = True,
    ) -> None:
        """`most`: tokens of a step; `pool` and `stream`: of graphs.

        Without `samples` prompts are read, whose keys alone are wanted: steps have no decodes, and nothing is sampled.
        """
        self._decoder, self._attention, self._rows, self._block_size = decoder, attention, rows, block_size
        self._states, self._samples = states, samples
        self._pool, self._stream = pool, stream
        size = attention.caches[0].element_size()
        sizes = {
            prefill_shape(attention.head_dim, False, size).queries if attention.value_dim is None else QUERIES
            for attention in decoder.spec.attentions
        }
        self._most_keys = most_keys(decoder.spec)
        self._tile = sizes.pop() if len(sizes) == 1 else 0
        longest = rows.tokens.shape[1] - 1
        steps = prompt_steps(rows.scratch, most, longest) if samples else reading_steps(most, longest)
        self.missing = deque(steps if self._tile else [])
        self._graphs: dict[PromptStep, PromptGraph] = {}

    def capture_next(self) -> None:
        """Capture the next of those that are `missing`."""
        step = self.missing.popleft()
        self._graphs[step] = self._capture(step)

    def room(self, scheduled: Sequence[ScheduledTokens]) -> PromptStep | None:
        """What a graph for a step, decodes first, has to have room for, one token of a prompt at least.

        None: there can be no graph for it.
        """
        runs = scheduled[self._decodes(scheduled) :]
        tokens = sum(item.count for item in runs)
        room = PromptStep(len(scheduled) - len(runs), max(tokens, 1))
        if len(runs) > RUNS or not room.fits_into(PromptStep(DECODES[-1], TOKENS[-1])):
            return None
        if any(item.sampled > 1 or item.start + item.count > self._most_keys for item in runs):
            return None
        return room

    def run(self, scheduled: Sequence[ScheduledTokens], room: PromptStep | None) -> tuple[PromptGraph, int] | None:
        """Start a step by a graph with this room; the graph, and how many tokens it samples. None: there is none."""
        fitting = [step for step in self._graphs if room is not None and room.fits_into(step)]
        if not fitting:
            return None
        step = min(fitting, key=sum)
        graph = self._graphs[step]
        packed, samples = self._packed(step, scheduled, self._decodes(scheduled))
        graph.inputs.copy_(send(packed, self._rows.device))
        graph.replay()
        return graph, samples

    def _decodes(self, scheduled: Sequence[ScheduledTokens]) -> int:
        """How many single tokens come first."""
        if not self._samples:
            return 0
        return next((place for place, item in enumerate(scheduled) if item.count > 1), len(scheduled))

    def _packed(
        self, step: PromptStep, scheduled: Sequence[ScheduledTokens], decodes: int
    ) -> "tuple[np.ndarray[tuple[int], np.dtype[np.int32]], int]":
        """What `inputs` are for this step, and how many tokens are sampled."""
        scratch, missing = self._rows.scratch, step.decodes - decodes
        runs = scheduled[decodes:]
        padding = step.tokens - sum(item.count for item in runs)
        empty = RUNS + 1 - len(runs)
        slots = [item.slot for item in scheduled[:decodes]] + [scratch] * missing
        slots += [item.slot for item in runs] + [scratch] * (1 + empty)
        starts = [item.start for item in scheduled[:decodes]] + [0] * missing
        starts += [item.start for item in runs] + [0] * (1 + empty)
        run_counts = [item.count for item in runs] + [padding] + [0] * empty
        counts = [1] * step.decodes + run_counts
        firsts = list(accumulate(counts[:-1], initial=0))
        size = self._tile
        tiles = [
            (start + first, run, first)
            for run, (start, count) in enumerate(zip(starts[step.decodes :], run_counts, strict=True))
            for first in range(0, count, size)
        ]
        tiles.sort(reverse=True)
        tiles += [(0, RUNS + 1, 0)] * (self._tiles(step) - len(tiles))
        sampled = sampled_tokens(scheduled)
        indices = [index if index < decodes else index + missing for index in sampled.indices]
        unused = step.samples - len(sampled.slots)  # they attend to the padding row's first key
        sampling = np.array(
            indices + [0] * unused + sampled.positions + [1] * unused + sampled.slots + [scratch] * unused,
            dtype=np.int64,
        )
        numbers = slots + starts + counts + firsts + [run for _, run, _ in tiles] + [first for _, _, first in tiles]
        if self._states is not None:
            numbers += [run for run, count in enumerate(run_counts) for _ in range(count)]
            chunks = chunks_of(run_counts)
            numbers += np.pad(chunks, ((0, 0), (0, self._chunks(step) - chunks.shape[1]))).flatten().tolist()
        return np.concatenate((sampling.view(np.int32), np.array(numbers, dtype=np.int32))), len(sampled.slots)

    def _tiles(self, step: PromptStep) -> int:
        """Tiles that the runs of a step are cut into, at most."""
        return -(-step.tokens // self._tile) + RUNS + 1

    @staticmethod
    def _chunks(step: PromptStep) -> int:
        """Chunks that the runs of a step are cut into, at most."""
        return -(-step.tokens // delta_net.CHUNK) + RUNS + 1

    def _capture(self, step: PromptStep) -> PromptGraph:
        packed, _ = self._packed(step, [], 0)
        inputs = torch.from_numpy(packed).to(self._rows.device)
        replay, outputs = self._record(lambda: self._step(step, inputs))
        sampling = inputs[: 6 * step.samples].view(torch.int64).view(3, -1)
        return PromptGraph(replay, inputs, outputs, sampling[2])

    def _record(self, step: Callable[[], DecodedStep | None]) -> tuple[Callable[[], None], DecodedStep | None]:
        """Whatever repeats the step, and where it then leaves what."""
        graph, outputs = capture(step, self._pool, self._stream)
        return graph.replay, outputs

    def _step(self, step: PromptStep, inputs: torch.Tensor) -> DecodedStep | None:
        rows, requests, samples, tokens = self._rows, step.requests, step.samples, step.decodes + step.tokens
        indices, positions_sampled, sample_slots = inputs[: 6 * samples].view(torch.int64).view(3, -1)
        numbers = inputs[6 * samples :]
        slots, starts, counts, firsts = numbers[: 4 * requests].view(4, -1)
        numbers = numbers[4 * requests :]
        tile_request, tile_first = numbers[: 2 * self._tiles(step)].view(2, -1)
        token_ids, positions, slot_mapping = read_tokens(
            rows.tokens, rows.block_table, slots, starts, firsts, counts, tokens, step.tokens, self._block_size
        )
        batch = DeviceBatch(
            slots=[rows.scratch] * requests,
            starts=[0] * requests,
            counts=[1] * requests,
            positions=positions,
            token_ids=token_ids,
            slot_mapping=slot_mapping,
            block_table=rows.block_table,
            sample_slots=[rows.scratch] * samples,
            logits_indices=indices,
            sample_positions=positions_sampled,
            decodes=step.decodes,
            device_slots=slots,
            device_starts=starts,
            device_counts=counts,
            query_start_loc=firsts,
            device_sample_slots=sample_slots,
            tiles=lambda size: (tile_request, tile_first),
            uncertain=True,
            windows=rows.windows(slots, starts, firsts, counts, tokens, step.tokens, self._block_size),
        )
        states = None
        if self._states is not None:
            cut = numbers[2 * self._tiles(step) :]
            of_tokens, chunks = torch.split(cut, [step.tokens, 2 * self._chunks(step)])
            states = self._states.plan(batch, (of_tokens, chunks.view(2, -1)))
        hidden = self._decoder(token_ids, positions, self._attention.plan(batch), indices, states=states)
        if not self._samples:
            return None
        logits, sampled = sample_plain(self._decoder, hidden, sample_slots, positions_sampled, rows)
        write_sampled(rows.tokens, sample_slots, positions_sampled, sampled)
        return DecodedStep(hidden, logits, positions_sampled, sampled)


def room_of(
    graphs: PromptGraphs | None, scheduled: Sequence[ScheduledTokens], request: Callable[[int], NewRequest]
) -> PromptStep | None:
    """What a captured step that computes this needs room for; None: there is none, with these `graphs` for prompts.

    `request`: the one in a row.
    """
    if all(item.count == item.sampled == 1 for item in scheduled):
        return PromptStep(len(scheduled), 0)
    if graphs is None:
        return None
    for item in scheduled:
        asked = request(item.slot)
        if asked.params.prompt_logprobs is not None and item.start + 1 < asked.spec.prompt_length:
            return None
    return graphs.room(scheduled)


def room_of_step(
    graphs: PromptGraphs | None, output: SchedulerOutput, rows: BatchRows, *, adapts: bool | None
) -> tuple[int, int, bool] | None:
    """As `room_of`, of a step before its rows have joined; and whether it has to be one of decodes alone.

    Those are captured for rows that begin where the device knows alone, too, and with `adapts` for adapters; None:
    there are none.
    """
    coming = {fork.slot: rows.request(fork.source) for fork in output.forked}  # rows fork, then others join
    coming |= {request.slot: request for request in output.joined}

    def request(slot: int) -> NewRequest:
        return coming.get(slot) or rows.request(slot)

    room = room_of(graphs, output.scheduled, request)
    is_adapted = adapts is not None and any(request(item.slot).adapter_index >= 0 for item in output.scheduled)
    if room is None or (is_adapted and not adapts):
        return None
    return *room, is_adapted or any(item.uncertain for item in output.scheduled)
