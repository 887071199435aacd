"""Steps of a few layers of a model whose weights mean nothing: what they launch is recorded, or timed."""

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch

from kvern.attention.eight_bit import LARGEST_CODE, EightBit
from kvern.attention.memory import CacheOptions
from kvern.attention.paged import PagedAttention, Phases
from kvern.attention.selection import Shapes, own_attention
from kvern.config import EngineConfig
from kvern.device.device_batch import DeviceRows, build_device_batch
from kvern.kernels.groups import ENCODER_GROUPS, MODEL_GROUPS, NVIDIA_GROUPS
from kvern.kernels.launch import architecture
from kvern.layers.build import Build
from kvern.layers.step_context import NO_ADAPTERS, PagedAttend, StepAdapters
from kvern.models.decoder import Decoder
from kvern.models.loader import fill_random
from kvern.request.step import ScheduledTokens
from kvern.runner.device_states import DeviceStateMemory
from kvern.runner.loaded_model import Stored
from kvern.spec.model import ModelSpec

META = torch.device("meta")
LONGEST = 1 << 16
"""Tokens of a sequence: more than a step here has before its own."""
ROWS = 512
"""Rows of the batch."""
BLOCKS = 64
"""Blocks of a cache without memory; how many it has changes no kernel."""


def groups_of(spec: ModelSpec) -> frozenset[str]:
    """The groups of kernels that a model may launch on this device."""
    if spec.encoder is not None:
        return ENCODER_GROUPS
    card = architecture(META)
    missing = NVIDIA_GROUPS if isinstance(card, str) else frozenset[str]()
    return frozenset(group for group in MODEL_GROUPS - missing if card == 90 or not group.startswith("hopper"))


class DummySteps:
    """Runs steps of all layers of `model`, which generates text, on a `device`: "meta" computes nothing.

    `blocks` are those of the cache, which all rows may share.
    """

    def __init__(
        self,
        config: EngineConfig,
        dtype: torch.dtype,
        model: Stored,
        device: torch.device = META,
        blocks: int = BLOCKS,
    ) -> None:
        self._config = config
        self.dtype = dtype
        self._model = model
        self._device = device
        self._blocks = blocks
        self.groups = groups_of(model.spec)
        self.rows = DeviceRows(ROWS, LONGEST, LONGEST // config.block_size, device, 0)
        states = 0 if device == META else ROWS
        spec = model.spec
        self.states = DeviceStateMemory(spec, states, ROWS + 1, dtype, device) if spec.recurrent else None

    @cached_property
    def decoder(self) -> Decoder:
        """The model, with random weights where there is memory for them."""
        methods, ranks = self._model.methods, self._model.ranks
        deterministic = self._config.deterministic
        build = Build(self.dtype, self._device, LONGEST, self.groups, deterministic, ranks=ranks, linear=methods)
        decoder = Decoder(self._model.spec, build)
        if self._device != META:
            fill_random(decoder)
        decoder.finish()
        return decoder

    @cached_property
    def attention(self) -> PagedAttention:
        """Attention by the project's own kernels."""
        layers = list(self._model.spec.attentions)
        config, dtype = self._config, self._cache_dtype
        shapes = Shapes(
            layers, config.block_size, self.dtype, dtype, self._device, ROWS, LONGEST, "hopper" in self.groups
        )
        own, eight_bit = own_attention(shapes, config), None
        if dtype in LARGEST_CODE:
            scales = [torch.ones(2, layer.kv_heads, device=self._device) for layer in layers]
            eight_bit = EightBit(scales, self.dtype)
        sinks: Mapping[int, torch.Tensor]
        if self._model.spec.layers:
            sinks = self.decoder.sinks
        else:
            with_sinks = ((index, layer.heads) for index, layer in enumerate(layers) if layer.sinks)
            sinks = {index: torch.empty(heads, device=self._device) for index, heads in with_sinks}
        cache = CacheOptions(layers, self._blocks, config.block_size, dtype, self._device, None, eight_bit, sinks)
        return PagedAttention(cache, Phases.all(own), own, config.deterministic)

    @property
    def _cache_dtype(self) -> torch.dtype:
        codes = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
        return codes.get(self._config.kv_cache_dtype, self.dtype)

    def planned(self, scheduled: Sequence[ScheduledTokens]) -> PagedAttend:
        """The attention of a step."""
        return self.attention.plan(build_device_batch(self.rows, scheduled, self._config.block_size))

    def run(self, scheduled: Sequence[ScheduledTokens], adapters: StepAdapters = NO_ADAPTERS) -> torch.Tensor:
        """Run a step and return the logits of its sampled tokens, [S, vocabulary of this rank]."""
        step = build_device_batch(self.rows, scheduled, self._config.block_size)
        attend = self.attention.plan(step)
        states = None if self.states is None else self.states.plan(step)
        given = step.token_ids, step.positions, attend
        hidden = self.decoder(*given, step.logits_indices, adapters, states)
        logits = self.decoder.own_logits(hidden)
        if self.states is not None:
            self.states.accept(torch.empty(len(scheduled), dtype=torch.int32, device=self._device))
        return logits
