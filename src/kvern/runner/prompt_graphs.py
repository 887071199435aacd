"""Small steps with prompts in them as CUDA graphs: their kernels take the host longer to launch than a GPU to run.

A graph has room for so many decodes and so many tokens of prompts, which belong to a few requests: `inputs` says to
which. What is left of the tokens is a run of the row that pads batches. Attention reads on the device where runs begin
and end, so that any such step fits.

    inputs   [S] int64 each: indices of the tokens that are sampled from, positions of what is sampled, and rows
             [R] int32 each: rows, first positions, numbers of tokens, and indices of the first tokens of the requests
             [tiles] int32 each: request and first query of each tile of the runs
             if layers keep states: [tokens] int32, the run that each belongs to, and [chunks] int32 each: first token,
             among those of the runs, and length of each chunk of these
             of a graph that takes rows of embeddings: [tokens] int32, the index of the row of each; -1: none
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvern.device.device_batch import DeviceSamples, captured_batch, runs_in
from kvern.device.input_batch import sampled_tokens
from kvern.device.rows import BatchRows
from kvern.kernels import delta_net
from kvern.kernels.attention_latent import QUERIES
from kvern.kernels.attention_prefill import prefill_shape
from kvern.kernels.batch import write_sampled
from kvern.layers.embedding import EmbeddedTokens
from kvern.request.step import NewRequest, ScheduledTokens, SchedulerOutput
from kvern.runner.device_sampling import sample_plain
from kvern.runner.device_states import chunks_of
from kvern.runner.step_graphs import (
    DeviceModel,
    GraphInputs,
    PlannedStep,
    Priority,
    StepGraph,
    StepKind,
    StepOutputs,
    StepSize,
)
from kvern.spec.mixers import RecurrentSpec
from kvern.spec.model import ModelSpec

DECODES = (16, 64, 128, 256)
TOKENS = (64, 128, 256, 384, 512)
"""The sizes in tokens of prompts: a step with more takes a GPU longer than its launches take a host."""
RUNS = 8
"""The most prompts of one step."""
SHARED_TOKENS = 256
"""The most tokens of prompts of a graph in which thread blocks share the keys of a run: few tokens are few tiles, and
after a cached prefix they see many keys."""
SHARED_PAIRS = 256 * 32768
"""The most pairs of a token and a key for which these are as fast as the kernels that the host chooses."""
MOST_KEYS = 8192
"""A run with more keys, if all layers attend and keys are not shared, is left to kernels that the host chooses."""


class PromptShape(NamedTuple):
    """The most tokens of decodes, and of prompts, that a graph has room for; `embeds`: some have rows of embeddings."""

    decodes: int
    prompts: int
    embeds: bool = False

    @property
    def tokens(self) -> int:
        """All tokens."""
        return self.decodes + self.prompts

    @property
    def requests(self) -> int:
        """The number of decodes, runs of prompts, and two that pad: one the tokens, an empty one the tiles."""
        return self.decodes + RUNS + 2

    @property
    def samples(self) -> int:
        """The most tokens that are sampled."""
        return self.decodes + RUNS


def prompt_shapes(requests: int, most: int, longest: int) -> list[PromptShape]:
    """All graphs of an engine that runs so many requests at once, as `StepKind.shapes`.

    `most`: tokens of a step; `longest`: tokens of a sequence.
    """
    largest = next((size for size in DECODES if size >= requests), DECODES[-1])
    shapes = [PromptShape(decodes, tokens) for decodes in DECODES if decodes <= largest for tokens in reversed(TOKENS)]
    return [shape for shape in shapes if shape.tokens <= most and shape.prompts <= longest]


def reading_shapes(most: int, longest: int) -> list[PromptShape]:
    """All graphs of a draft model, which reads prompts alone; as `prompt_shapes`."""
    return [PromptShape(0, tokens) for tokens in reversed(TOKENS) if tokens <= min(most, longest)]


def most_keys(spec: ModelSpec) -> int:
    """The most keys of a run in a graph, where a layer that attends is slow; outside of it all launches are slow."""
    attending = sum(any(not isinstance(mixer, RecurrentSpec) for mixer in layer.mixers) for layer in spec.layers)
    return MOST_KEYS * len(spec.layers) // max(1, attending) if spec.layers else MOST_KEYS


class PromptInputs(GraphInputs):
    """The numbers are as the module says; `rows` [tokens, hidden]: rows of embeddings, of a graph that takes such."""

    def __init__(self, numbers: Tensor, rows: Tensor | None) -> None:
        super().__init__(numbers)
        self.rows = rows


PromptGraph = StepGraph[PromptShape, PromptInputs]


class PromptKind(StepKind[PromptShape, PromptInputs]):
    """Steps of decodes and of a few tokens of prompts."""

    takes_embeddings = True

    def __init__(self, model: DeviceModel, most: int, *, samples: bool = True) -> None:
        """`most`: tokens of a step.

        Without `samples` prompts are read, whose keys alone are wanted: steps have no decodes, and nothing is sampled.
        """
        self._model = model
        self._rows = model.rows
        self._samples = samples
        spec, size = model.decoder.spec, model.attention.caches[0].element_size()
        ropes = [layer.rope for layer in spec.layers]
        sizes = {
            prefill_shape(attention.head_dim, False, size).queries if attention.value_dim is None else QUERIES
            for attention in spec.attentions
        }
        self._most_keys = most_keys(spec)
        self._tile = sizes.pop() if len(sizes) == 1 else 0
        shared = model.attention.tile_sizes
        is_plain = all(attention.value_dim is None for attention in spec.attentions)
        self._shared_tile = next(iter(shared)) if len(shared) == 1 and self._tile and is_plain else 0
        self._longest = model.rows.tokens.shape[1] - 1
        scratch = model.rows.scratch
        shapes = prompt_shapes(scratch, most, self._longest) if samples else reading_shapes(most, self._longest)
        if model.embeddings is not None and samples and not any(rope is not None and rope.axes for rope in ropes):
            shapes += [shape._replace(embeds=True) for shape in shapes]
        self.shapes = shapes if self._tile else []

    def priority(self, shape: PromptShape) -> Priority:
        return Priority.PROMPTS if self._samples else Priority.DRAFTS_MADE

    def largest_step(self) -> list[ScheduledTokens]:
        if not self.shapes:
            return []
        largest = max(self.shapes, key=lambda shape: shape.tokens)
        others = min(largest.decodes, self._rows.scratch - 1)
        decodes = [ScheduledTokens(slot, 0, 1, 1) for slot in range(others)]
        return [*decodes, ScheduledTokens(others, 0, min(largest.tokens - others, self._longest - 1), 1)]

    def size(self, scheduled: Sequence[ScheduledTokens]) -> StepSize | None:
        """The size of a step, decodes first, with one token of a prompt at least.

        None: there can be no graph for it.
        """
        runs = scheduled[self._decodes(scheduled) :]
        tokens = sum(item.count for item in runs)
        size = StepSize(len(scheduled) - len(runs), max(tokens, 1))
        if len(runs) > RUNS or not size.fits_into(StepSize(DECODES[-1], TOKENS[-1])):
            return None
        if any(item.sampled > 1 for item in runs) or self._most_keys_of(runs) > self._reach(size.prompts):
            return None
        return size

    @staticmethod
    def _most_keys_of(runs: Sequence[ScheduledTokens]) -> int:
        """The most keys that one of these runs sees."""
        return max((item.start + item.count for item in runs), default=0)

    def _shares(self, tokens: int) -> bool:
        """True if thread blocks share the keys of runs in a graph for so many tokens of prompts."""
        return self._shared_tile > 0 and tokens <= SHARED_TOKENS

    def _reach(self, tokens: int) -> int:
        """The most keys of a run in a graph for so many tokens of prompts."""
        return max(self._most_keys, SHARED_PAIRS // tokens if self._shares(tokens) else 0)

    def run(self, step: PlannedStep, captured: Mapping[PromptShape, PromptGraph]) -> StepOutputs | None:
        size = step.size
        if size is None or size.is_plain or step.adapted or step.uncertain or step.is_read:
            return None
        embeds = step.embeddings is not None
        if step.embeddings is not None and step.embeddings.positions is not None:
            return None
        decodes = self._decodes(step.scheduled)
        keys = self._most_keys_of(step.scheduled[decodes:])
        fitting = [
            shape
            for shape in captured
            if shape.embeds == embeds and size.fits_into(StepSize(*shape[:2])) and keys <= self._reach(shape.prompts)
        ]
        if not fitting:
            return None
        graph = captured[min(fitting, key=lambda shape: shape.tokens)]
        inputs = graph.inputs
        packed, count = self._packed(graph.shape, step.scheduled, decodes)
        source, rows = ((), None) if step.embeddings is None else step.embeddings[:2]
        if rows is not None and inputs.rows is not None:
            packed[-graph.shape.tokens :][:decodes] = source[:decodes]
            packed[len(packed) - graph.shape.prompts :][: len(source) - decodes] = source[decodes:]
            inputs.rows[: len(rows)].copy_(rows)
        inputs.send(packed)
        graph.replay()
        outputs = graph.outputs
        if not count or outputs.sampled is None:
            return StepOutputs()
        if not step.needs:
            return StepOutputs(sampled=outputs.sampled[:count])
        return outputs.unsampled(self._model.decoder, count)

    def _decodes(self, scheduled: Sequence[ScheduledTokens]) -> int:
        """Returns how many single tokens come first."""
        if not self._samples:
            return 0
        return next((place for place, item in enumerate(scheduled) if item.count > 1), len(scheduled))

    def _packed(
        self, shape: PromptShape, scheduled: Sequence[ScheduledTokens], decodes: int
    ) -> "tuple[np.ndarray[tuple[int], np.dtype[np.int32]], int]":
        """The inputs for this step, and how many tokens are sampled."""
        scratch, missing = self._rows.scratch, shape.decodes - decodes
        runs = scheduled[decodes:]
        padding = shape.prompts - sum(item.count for item in runs)
        empty = RUNS + 1 - len(runs)
        slots = [item.slot for item in scheduled[:decodes]] + [scratch] * missing
        slots += [item.slot for item in runs] + [scratch] * (1 + empty)
        starts = [item.start for item in scheduled[:decodes]] + [0] * missing
        starts += [item.start for item in runs] + [0] * (1 + empty)
        run_counts = [item.count for item in runs] + [padding] + [0] * empty
        counts = [1] * shape.decodes + run_counts
        firsts = list(accumulate(counts[:-1], initial=0))
        size = self._tile_of(shape)
        tiles = [
            (start + first, run, first)
            for run, (start, count) in enumerate(zip(starts[shape.decodes :], run_counts, strict=True))
            for first in range(0, count, size)
        ]
        tiles.sort(reverse=True)
        tiles += [(0, RUNS + 1, 0)] * (self._tiles(shape) - len(tiles))
        sampled = sampled_tokens(scheduled)
        indices = [index if index < decodes else index + missing for index in sampled.indices]
        unused = shape.samples - len(sampled.slots)  # they attend to the padding row's first key
        sampling = np.array(
            indices + [0] * unused + sampled.positions + [1] * unused + sampled.slots + [scratch] * unused,
            dtype=np.int64,
        )
        numbers = slots + starts + counts + firsts + [run for _, run, _ in tiles] + [first for _, _, first in tiles]
        if self._model.states is not None:
            numbers += [run for run, count in enumerate(run_counts) for _ in range(count)]
            chunks = chunks_of(run_counts)
            numbers += np.pad(chunks, ((0, 0), (0, self._chunks(shape) - chunks.shape[1]))).flatten().tolist()
        if shape.embeds:
            numbers += [-1] * shape.tokens
        return np.concatenate((sampling.view(np.int32), np.array(numbers, dtype=np.int32))), len(sampled.slots)

    def _tiles(self, shape: PromptShape) -> int:
        """The most tiles that the runs of a step are cut into."""
        return -(-shape.prompts // self._tile_of(shape)) + RUNS + 1

    def _tile_of(self, shape: PromptShape) -> int:
        """The most queries of a tile."""
        return self._shared_tile if self._shares(shape.prompts) else self._tile

    @staticmethod
    def _chunks(shape: PromptShape) -> int:
        """The most chunks that the runs of a step are cut into."""
        return -(-shape.prompts // delta_net.CHUNK) + RUNS + 1

    def inputs(self, shape: PromptShape) -> PromptInputs:
        packed, _ = self._packed(shape, [], 0)
        rows, build = None, self._model.decoder.build
        if shape.embeds:
            sizes = shape.tokens, self._model.decoder.spec.hidden_size
            rows = torch.zeros(sizes, dtype=build.dtype, device=self._rows.device)
        return PromptInputs(torch.from_numpy(packed).to(self._rows.device), rows)

    def compute(self, shape: PromptShape, inputs: PromptInputs) -> StepOutputs:
        model = self._model
        rows = self._rows
        decoder = self._model.decoder
        samples, prompts = shape.samples, shape.prompts
        cuts = [6 * samples, 4 * shape.requests, 2 * self._tiles(shape)]
        cuts += [] if model.states is None else [prompts, 2 * self._chunks(shape)]
        cuts += [shape.tokens] if shape.embeds else []
        sampling, described, tiled, *others = torch.split(inputs.numbers, cuts)
        sampled_from = DeviceSamples(*sampling.view(torch.int64).view(3, -1))
        runs = runs_in(described)
        total = shape.tokens
        size = model.block_size
        tile_request, tile_first = tiled.view(2, -1)
        batch = captured_batch(
            rows,
            runs,
            rows.read(runs, total, prompts, size),
            sampled_from,
            lambda _: (tile_request, tile_first),
            decodes=shape.decodes,
            windows=rows.windows(runs, total, prompts, size),
        )
        batch.sample_slots, batch.uncertain = [rows.scratch] * samples, True
        batch.few = self._shares(prompts)
        states = None
        if model.states is not None:
            of_tokens, chunks, *others = others
            states = model.states.plan(batch, (of_tokens, chunks.view(2, -1)))
        attend = model.attention.plan(batch)
        tokens: Tensor | EmbeddedTokens = batch.token_ids
        if inputs.rows is not None:
            tokens = EmbeddedTokens(batch.token_ids, others[0], inputs.rows)
        hidden = decoder(tokens, batch.positions, attend, sampled_from.logits_indices, states=states)
        if not self._samples:
            return StepOutputs()
        positions, slots = sampled_from.positions, sampled_from.slots
        logits, sampled = sample_plain(decoder, hidden, slots, positions, rows)
        write_sampled(rows.tokens, slots, positions, sampled)
        return StepOutputs(hidden, slots, positions, logits, sampled)


def size_of(
    kind: PromptKind | None, scheduled: Sequence[ScheduledTokens], request: Callable[[int], NewRequest]
) -> StepSize | None:
    """The size of a step of decodes and prompts; None: there can be no graph for it.

    `kind`: steps with prompts, if graphs of them are captured; `request`: the request in a row.
    """
    if all(item.count == item.sampled == 1 for item in scheduled):
        return StepSize(len(scheduled), 0)
    if kind is None:
        return None
    for item in scheduled:
        asked = request(item.slot)
        if asked.params.prompt_logprobs is not None and item.start + 1 < asked.spec.prompt_length:
            return None
    return kind.size(scheduled)


def size_of_next(
    kind: PromptKind | None, output: SchedulerOutput, rows: BatchRows, *, adapts: bool | None
) -> tuple[int, int, bool] | None:
    """The size of a step before its rows have joined, and whether its graph has to be one of decodes alone.

    Graphs of decodes alone also serve rows that begin where only the device knows and, with `adapts`, rows with
    adapters; None: the engine has no place for adapters.
    """
    coming = {fork.slot: rows.request(fork.source) for fork in output.forked}  # rows fork, then others join
    coming |= {request.slot: request for request in output.joined}

    def request(slot: int) -> NewRequest:
        return coming.get(slot) or rows.request(slot)

    size = size_of(kind, output.scheduled, request)
    is_adapted = adapts is not None and any(request(item.slot).adapter_index >= 0 for item in output.scheduled)
    if size is None or (is_adapted and not adapts):
        return None
    return *size, is_adapted or any(item.uncertain for item in output.scheduled)
