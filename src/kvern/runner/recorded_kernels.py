"""A list of the kernels that a model launches, recorded while its layers run dummy steps on tensors without memory.

    layers, one of each kind --tune--> every way to multiply that may be chosen
                             --steps-> norms, rotation, attention, states, experts, adapters
    rows of the batch        --------> what reads and writes them, constraints, sampling, drafts
    ranks                    --------> sums between them

Each form of a kernel is recorded once. Nothing here depends on the numbers in tensors, so that no GPU is needed.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from kvern.adapters.bank import AdapterBank
from kvern.attention.bidirectional import TorchAttend
from kvern.attention.groups import group_layers
from kvern.attention.texts import PackedTexts
from kvern.config import EngineConfig
from kvern.device.device_batch import decodes_on_device
from kvern.device.text_batch import TextBatch, build_text_batch
from kvern.images.views import Grid
from kvern.kernels import batch, constraints, logprobs, masks, sampling
from kvern.kernels import drafts as drafting
from kvern.kernels.adapters import SPLIT_ROWS
from kvern.kernels.attention_prefix import SharedPrefix, tiles_for
from kvern.kernels.groups import ENCODER_GROUPS
from kvern.kernels.known_shapes import KnownShapes
from kvern.kernels.launch import processors
from kvern.kernels.peer_words import PeerMemory, memory_of, row_words_of, rows_kept
from kvern.kernels.recording import Launches, recording
from kvern.kernels.shared_norm import await_flags, shared_norm
from kvern.layers.block import adds_by_norms
from kvern.layers.build import Build
from kvern.layers.linear import Linear
from kvern.layers.moe import ExpertsBeside, MoE
from kvern.layers.step_context import StepAdapters, StepContext
from kvern.layers.tuning import timed_layers, tune
from kvern.models.encoder import Encoder
from kvern.models.loader import LoadOptions
from kvern.models.vision import VisionTower, vision_build
from kvern.ranks.peer_sums import TIMED_ROWS, PeerExchange, PeerSums, Way
from kvern.ranks.ranks import DPAttention, Ranks
from kvern.request.request import PromptInput
from kvern.request.step import ScheduledTokens
from kvern.runner.dummy_steps import LONGEST, META, ROWS, DummySteps
from kvern.runner.loaded_model import VISION_KERNELS, Stored
from kvern.spec.vision import VisionSpec

MOST_DECODES = 128
"""Tokens of a step of decodes alone; a step of more is a run."""
FEW_ROWS = 1, 2
"""Tokens of steps, beside the most for each choice of ways to multiply."""
EXPERT_ROWS = tuple(
    sorted({1, 2} | {(1 << power) * part // 4 + (part == 4) for power in range(14) for part in range(4, 9)})
)
"""Rows of mixtures of experts, which sort them in chunks, and cut products, by the rows of an expert on average."""
REQUESTS = tuple(sorted({*range(1, 16), *(round(16 * 1.1**power) for power in range(37)), ROWS}))
"""Decodes of steps in attention, which cuts launches by them: each but the first has at most 1.1 times the one before.
"""
ADAPTED_ROWS = 1, 16, 32, 64, 128, SPLIT_ROWS
"""Rows of steps with adapters, which are added by different kernels."""
SUMS: Sequence[Sequence[Way]] = [["whole"] * len(TIMED_ROWS), ["parts"] * len(TIMED_ROWS)]
"""The way in which rows of each number are summed over ranks."""
RUNS: Sequence[Sequence[tuple[int, int, int]]] = (
    ((0, 40, 1), (0, 3, 1)),
    ((0, 500, 1), (0, 500, 1)),
    ((2000, 500, 1), (2000, 500, 1)),
    ((3000, 1, 1), (3000, 300, 1), (3000, 300, 1)),
    ((2000, 40, 1),) * ROWS,
    *(((3000, count, 1),) for count in (2, 4, 8, 19)),
    *((*before, *((3000, 4, 4),) * requests) for before in ((), ((3000, 1, 1),)) for requests in (1, 8, 64)),
)
"""First positions, numbers of tokens and of sampled tokens of the requests of steps with runs, and with drafts."""


class UnconnectedRanks(Ranks):
    """A rank that has met no other: what they would send has the right shape and no memory."""

    @classmethod
    def like(cls, ranks: Ranks) -> "UnconnectedRanks":
        """Returns the same rank of as many."""
        sharing = ranks.dp_attention
        return cls(
            ranks.rank, ranks.size, dp_attention=None if sharing is None else DPAttention(cls.like(sharing.ranks))
        )

    def group_sum(self, x: Tensor) -> Tensor:
        return x

    def group_gather(self, x: Tensor) -> Tensor:
        return x.new_empty(self.size * len(x), x.shape[1])

    def group_sum_scattered(self, x: Tensor) -> Tensor:
        return x.new_empty(len(x) // self.size, x.shape[1])

    def first(self, x: Tensor) -> Tensor:
        return x

    def _parts(self, x: Tensor) -> list[Tensor]:
        return list(x.new_empty(self.size, *x.shape).unbind())


def record_launches(config: EngineConfig, dtype: torch.dtype, model: Stored, *, drafts: bool) -> Launches:
    """Every form of a kernel that a model of this dtype launches with these options.

    `drafts`: some are verified.
    """
    with torch.inference_mode(), KnownShapes(), recording() as launches:
        if model.spec.encoder is not None:
            _read_texts(config, dtype, model)
        elif not model.spec.layers:  # transformers computes it, but for attention: the start's check runs other parts
            recorder = StepRecorder(config, dtype, model)
            recorder.attend_runs()
            recorder.attend()
            recorder.use_rows(drafts)
        else:
            recorder = StepRecorder(config, dtype, model)
            recorder.run_layers()
            recorder.attend()
            recorder.use_rows(drafts)
            recorder.sum_over_ranks()
            if model.has_head:
                recorder.join_states()
            if config.adapter_places:
                recorder.adapt()
            if model.vision is not None:
                _encode_patches(dtype, model.vision)
    return launches


def _read_texts(config: EngineConfig, dtype: torch.dtype, model: Stored) -> None:
    """Run a step of an encoder."""
    build = Build(dtype, META, LONGEST, ENCODER_GROUPS, config.deterministic, linear=model.methods)
    encoder = Encoder(model.spec, build)
    encoder.finish()
    for lengths in ((1, 67, 5), (1,)):
        texts = build_text_batch([PromptInput([0] * length) for length in lengths], encoder.encoder, META)
        encoder.read(texts, PackedTexts(model.spec.attentions, dtype, texts))


def _encode_patches(dtype: torch.dtype, vision: VisionSpec) -> None:
    """Run a layer of each kind of an encoder of images, and what stands around layers, on few patches and on many."""
    tower = VisionTower(vision, vision_build(vision, dtype, LoadOptions(device=META, kernels=VISION_KERNELS)))
    nothing = torch.empty(1, dtype=torch.int32, device=META)
    for side in (1, 6, 32):  # few tokens, some and many, as the rotation's kernel tells them apart
        grid = Grid(side * vision.merge, side * vision.merge)
        count = grid.cells + vision.lead
        line = TextBatch([count], *(nothing,) * 6)
        step = StepContext(tower.rotation([grid], None), TorchAttend(vision.tower.attentions, line, dtype))
        for kind in dict.fromkeys(vision.tower.layers):
            hidden = torch.empty(count, vision.tower.hidden_size, dtype=dtype, device=META)
            layer = tower.layers[vision.tower.layers.index(kind)]
            layer(hidden, layer(hidden, None, step)[1], step)
        for norm in (tower.patch_norm, tower.ln_pre, tower.last_norm):
            norm(hidden)
        for projector in (tower.projector, *tower.deep):
            projector(hidden[: grid.cells], [grid])


def _first_call(calls: list[Callable[[], object]]) -> float:
    calls[0]()
    return 0.0


def _each_choice(part: nn.Module, rows: Sequence[int]) -> Iterator[int]:
    """These numbers of rows, and the fewest and most for each choice of ways to multiply, once with each such way."""
    layers = [layer for alike in timed_layers(part).values() for layer in alike]
    offers = [(layer, {most: list(ways) for most, ways in layer.candidates().items()}) for layer in layers]
    mosts = sorted({most for _, offered in offers for most in offered})
    for count in sorted({*rows, *mosts, *(most + 1 for most in mosts)}):
        most = next((most for most in mosts if count <= most), mosts[-1] if mosts else 0)
        chosen = [(layer, offered[most]) for layer, offered in offers if most in offered]
        for place in range(max((len(ways) for _, ways in chosen), default=1)):
            for layer, ways in chosen:
                layer.choose(most, ways[min(place, len(ways) - 1)])
            yield count


class StepRecorder:
    """Runs dummy steps of a model that generates text."""

    def __init__(self, config: EngineConfig, dtype: torch.dtype, model: Stored) -> None:
        if not isinstance(model.ranks, UnconnectedRanks):
            model = model._replace(ranks=UnconnectedRanks.like(model.ranks))
        self._config = config
        self._dtype = dtype
        self._model = model
        self._spec = model.spec
        if model.spec.layers:
            kinds, last = tuple(dict.fromkeys(model.spec.layers)), model.spec.last_storing_layer
            # The first layer has nothing to add yet, and from the last that stores something on rows may be left out.
            layers = *kinds, kinds[0], model.spec.layers[last], *dict.fromkeys(model.spec.layers[last + 1 :])
            self._spec = dataclasses.replace(model.spec, layers=layers)
        self._steps = DummySteps(config, dtype, model._replace(spec=self._spec))

    def run_layers(self) -> None:
        """Run steps of all layers, by each way to multiply."""
        tune(self._steps.decoder, _first_call, {})
        self.run_choices(LONGEST)
        for runs in RUNS:
            self._steps.run([ScheduledTokens(slot, *run) for slot, run in enumerate(runs)])
            if any(layer.spans for layer in self._spec.attentions):
                spans = [((start, start + count),) if count > 1 else () for start, count, _ in runs]
                self._steps.run([ScheduledTokens(slot, *run, spans=spans[slot]) for slot, run in enumerate(runs)])

        for mixture in self._steps.decoder.modules():
            if isinstance(mixture, MoE | ExpertsBeside):
                for rows in _each_choice(mixture, EXPERT_ROWS):
                    x = self._numbers(rows, self._spec.hidden_size)
                    mixture(x, x) if isinstance(mixture, ExpertsBeside) else mixture(x)

    def attend_runs(self) -> None:
        """Attend in steps of decodes and of runs, without the layers around."""
        kinds = {layer: index for index, layer in reversed(list(enumerate(self._spec.attentions)))}
        for runs in (*RUNS, ((0, 1, 1),), ((0, 1, 1),) * MOST_DECODES):
            attend = self._steps.planned([ScheduledTokens(slot, *run) for slot, run in enumerate(runs)])
            tokens = sum(count for _, count, _ in runs)
            for layer, index in kinds.items():
                query = self._numbers(tokens, layer.heads, layer.head_dim)
                key, value = (self._numbers(tokens, layer.kv_heads, layer.head_dim) for _ in range(2))
                attend(index, query, key, value)

    def run_choices(self, most: int) -> None:
        """Run steps of decodes, or of a run, of at most so many tokens by each way to multiply as many."""
        for rows in _each_choice(self._steps.decoder, FEW_ROWS):
            if rows <= most:
                runs = [(0, 1, 1)] * rows if rows <= MOST_DECODES else [(0, rows, 1)]
                self._steps.run([ScheduledTokens(slot, *run) for slot, run in enumerate(runs)])

    def attend(self) -> None:
        """Attend to keys of as many requests as a step may have, with and without a prefix that they share."""
        kinds = {layer: index for index, layer in reversed(list(enumerate(self._spec.attentions)))}
        members = self._steps.attention.prefix_members
        for count in REQUESTS:
            shared = None
            if members:
                tiles = tiles_for(count, members)
                shared = SharedPrefix(self._integers(tiles, members), self._integers(tiles), self._integers(count))
            for prefix in dict.fromkeys((None, shared)):
                indices = self._integers(count), self._integers(count), self._integers(count)
                given = self._integers(count), self._integers(count), indices, self._config.block_size
                step = decodes_on_device(self._steps.rows, *given)
                step.shared = prefix
                attend = self._steps.attention.plan(step)
                for layer, index in kinds.items():
                    attend.over_cache(index, self._numbers(count, layer.heads, layer.head_dim))

    def use_rows(self, drafts: bool) -> None:
        """Launch what reads and writes rows of the batch, and what chooses tokens."""
        config = self._config
        rows = self._steps.rows
        count = 3
        slots, starts, counts = (self._integers(count) for _ in range(3))
        positions, chosen = (self._integers(count, dtype=torch.int64) for _ in range(2))
        if group_layers(self._model.spec.attentions).window_tables:
            for longest in (1, 40):
                tables = self._integers(3 * ROWS, LONGEST // config.block_size)
                sizes = count * longest, longest, config.block_size
                batch.read_slots(tables, ROWS, batch.TokenRuns(slots, starts, slots, counts), *sizes)
        batch.write_runs(rows.tokens, self._integers(2, 4), self._integers(20))
        for pool in self._steps.attention.pools:
            batch.copy_pool_blocks(pool, positions, positions, positions)
        for of_slots in (slots, slots.long()):
            batch.write_sampled(rows.tokens, of_slots, positions, chosen)
            self._choose(of_slots, positions)
        batch.write_sampled(rows.tokens, slots, positions, chosen, starts)
        if drafts:
            runs = batch.TokenRuns(slots, starts, slots, counts)
            drafting.read_drafts(rows.tokens, rows.block_table, counts, rows.turns, runs, starts, 6, config.block_size)
            drafting.accept_drafts(rows.tokens, counts, runs, chosen, positions)
            drafting.begin_drafts(counts, self._integers(2, 4), self._integers(2, 8), self._integers(3, 4), ROWS)
            drafting.write_drafts(rows.tokens, self._integers(3, count), chosen)

    def _choose(self, slots: Tensor, positions: Tensor) -> None:
        """Constrain, sample and report, from logits of the model's dtype and of float32."""
        rows, count = self._steps.rows, len(slots)
        scaled = self._spec.scales.logit != 1.0 or self._spec.scales.softcap is not None
        exact = self._numbers(count, self._spec.vocab_size, dtype=torch.float32)
        own = exact if scaled else self._numbers(count, self._spec.vocab_size)
        for everything in (False, True):
            constraints.change(own, slots, positions, rows, everything=everything)
        for logits, scores in ((own, None), (own, exact), (exact, exact), (exact, None)):
            sampling.sample(logits, scores, slots, positions, rows)
        for logits in (own, exact):
            logprobs.logprobs(logits, slots, rows.logprobs, positions, logprobs.empty(count, META))
        for logits in (self._numbers(count, self._spec.vocab_size), exact):
            masks.restrict(logits, positions, self._integers(2, -(-self._spec.vocab_size // 32)))

    def adapt(self) -> None:
        """Run steps whose rows use adapters. Afterwards the linear layers are adapted ones."""
        config = self._config
        AdapterBank(self._steps.decoder, config.adapter_places, config.max_adapter_rank, kernels=True)
        for rows, index_type in itertools.product(ADAPTED_ROWS, (torch.int32, torch.int64)):
            using = self._integers(rows, dtype=index_type)
            runs = [(0, 1, 1)] * rows if rows <= MOST_DECODES else [(0, rows, rows)]
            scheduled = [ScheduledTokens(slot, *run) for slot, run in enumerate(runs)]
            self._steps.run(scheduled, StepAdapters(using, using))

    def join_states(self) -> None:
        """Multiply by the layers that a draft head has besides: they join a state and an embedding, or three states."""
        size = self._spec.hidden_size
        for states, biased in itertools.product((1, 2, 3), (False, True)):
            joined = Linear(states * size, {"joined": size}, self._steps.decoder.build, bias=biased)
            for rows in _each_choice(joined, FEW_ROWS):
                joined(self._numbers(rows, states * size))
        sampled = self._numbers(3, self._spec.vocab_size, dtype=torch.float32)
        positions = self._integers(3, dtype=torch.int64)
        for slots in (self._integers(3), positions):
            sampling.sample(sampled, None, slots, positions, self._steps.rows)

    def sum_over_ranks(self) -> None:
        """Run steps whose rows ranks add up, or bring to each other, through memory of each other."""
        ranks, width = self._model.ranks, self._spec.hidden_size
        if not row_words_of(width, self._dtype):
            return
        if ranks.size > 1:
            shared = UnconnectedRanks(ranks.rank, ranks.size)
            shared.peers = PeerSums(self._peer_memory(ranks), width, self._dtype)
            recorder = StepRecorder(self._config, self._dtype, self._model._replace(ranks=shared))
            for shared.peers.ways in SUMS[: 1 + (ranks.size > 2)]:
                shared.sum(self._numbers(1, width))
                recorder.run_choices(TIMED_ROWS[-1])
            if adds_by_norms(self._spec):
                self._share_norms(ranks)
        if ranks.dp_attention is not None:
            others = ranks.dp_attention.ranks
            exchange = PeerExchange(self._peer_memory(others), width, self._dtype)
            exchange.gather(self._numbers(4, width))
            exchange.sum_scattered(self._numbers(4 * others.size, width))

    def _peer_memory(self, ranks: Ranks) -> PeerMemory:
        row_words = row_words_of(self._spec.hidden_size, self._dtype)
        rows, programs = rows_kept(ranks.size, row_words), processors(META)
        own = self._integers(memory_of(ranks.size, rows, row_words), dtype=torch.int64)
        buffers = self._integers(ranks.size + 1, dtype=torch.int64)
        return PeerMemory(own, buffers, self._integers(rows), ranks.rank, ranks.size, rows, row_words, programs)

    def _share_norms(self, ranks: Ranks) -> None:
        width = self._spec.hidden_size
        rows = 4
        flags = self._integers(ranks.size)
        lost = self._integers(1)
        norm_dtype = torch.float32 if self._spec.norm.offset else self._dtype
        summand, hidden = (self._numbers(ranks.size * rows, width) for _ in range(2))
        sent, weight = self._numbers(ranks.size, rows, width), self._numbers(width, dtype=norm_dtype)
        own = range(ranks.rank * rows, (ranks.rank + 1) * rows)
        for given in ((), (weight, 1e-6)):
            shared_norm(summand, sent, hidden, hidden, own, flags, 2, lost, ranks.rank, *given)
        await_flags(flags, 2, lost, ranks.rank)

    def _numbers(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self._dtype, device=META)

    def _integers(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=META)
