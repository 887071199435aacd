"""Numbers of kernels beside PyTorch's, once on a card whose kernels no test has run: AMD's.

    one layer of each kind, random weights --PyTorch alone-------> logits of prompts that are computed in parts
                                           --kernels that compile--> logits

Where these differ by more than rounding, groups of kernels are added one by one, and those that make a difference are
left to PyTorch. What was found is kept for the card and the versions of kvern, PyTorch and Triton.
"""

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvern.attention.base import AttentionBackend
from kvern.attention.memory import CacheOptions
from kvern.attention.paged import PagedAttention, Phases
from kvern.attention.selection import Shapes, own_attention
from kvern.attention.torch_sdpa import TorchAttention
from kvern.cache.messages import StateMessage
from kvern.config import EngineConfig
from kvern.device.device_batch import DeviceRows, build_device_batch
from kvern.device.input_batch import InputBatch, build_input_batch
from kvern.device.measurements import Measurements
from kvern.device.rows import BatchRows
from kvern.errors import in_a_line
from kvern.kernels.sampling import sample
from kvern.layers.build import Build
from kvern.layers.step_context import NO_ADAPTERS, Attend
from kvern.layers.tuned_linear import TunedMethod
from kvern.layers.tuning import timed_layers
from kvern.layers.unquantized import Unquantized
from kvern.models.decoder import Decoder
from kvern.models.fallback.spec import TransformersSpec
from kvern.models.loader import fill_random
from kvern.ranks.ranks import ALONE
from kvern.request.step import ScheduledTokens, SchedulerOutput
from kvern.runner.device_states import DeviceStateMemory
from kvern.runner.dummy_steps import META
from kvern.runner.fallback_check import bound
from kvern.runner.loaded_model import Stored
from kvern.runner.plan import LARGEST_HEAD, REQUIRED_KERNELS, largest_head
from kvern.runner.state_memory import StateMemory
from kvern.spec.mixers import AttentionSpec
from kvern.spec.model import ModelSpec

logger = logging.getLogger("kvern")

LENGTH = 200
"""Tokens of each prompt."""
FIRST = (120, 50, 17, 3, 1)
"""Tokens of each prompt in the first step; the second has the rest but for two, which are computed like decodes."""
TOKENS = 512
"""Tokens that differ, where attention alone is computed."""
CODED = 0.1
"""The share of their spread by which logits may differ where weights are codes: some products round rows to codes."""
PRODUCTS = frozenset({"few_rows", "linear"})
"""Groups that are used, or left to PyTorch, together."""
SECTION = "numbers"
PLAIN = Unquantized()


class Model(NamedTuple):
    """A model whose kernels are compared, on a device, with the options that decide which these are."""

    config: EngineConfig
    dtype: torch.dtype
    stored: Stored
    device: torch.device


def wrong_groups(model: Model, working: frozenset[str]) -> frozenset[str]:
    """The groups of `working` whose kernels give other numbers than PyTorch, each with a line in the log.

    Encoders, heads that draft, adapters and caches in 8 bits are not compared; of a model that transformers computes
    only attention and what reads and samples rows: its start compares the other parts with transformers.
    """
    spec = model.stored.spec
    if spec.encoder is not None or not working >= least_kernels(spec):
        return frozenset()
    config, dtype, stored, device = model
    measurements = Measurements(config.cache_folder, device)
    few = few_layers(spec)
    formats = sorted(timed_layers(Decoder(few, Build(dtype, META, 1, linear=stored.methods)))) if few.layers else []
    options = config.block_size, config.deterministic, config.linear_backend
    key = f"{few} {dtype} {formats} {options} {sorted(working)}"
    known = measurements.section(SECTION).get(key)
    if known is None:
        try:
            with torch.inference_mode():
                known = Comparison(model._replace(stored=stored._replace(spec=few, ranks=ALONE))).faults(working)
        except Exception as error:  # of PyTorch: no memory, or something that it cannot compute on this card
            logger.warning("numbers of kernels are not compared with PyTorch's at this start: %s", in_a_line(error))
            return frozenset()
        measurements.remember(SECTION, {key: known})
        measurements.save()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    for names, fault in known.items():
        logger.warning("the kernels for %s give other numbers than PyTorch here (%s): it does their work", names, fault)
    found = frozenset(name for names in known for name in names.split(", "))
    return working if found & REQUIRED_KERNELS else found


def few_layers(spec: ModelSpec) -> ModelSpec:
    """The model with one layer of each kind, and one of those whose keys and values others attend to."""
    if isinstance(spec, TransformersSpec):
        return replace(spec, calls=tuple(dict.fromkeys(spec.calls)))
    kinds = list(dict.fromkeys(spec.layers))
    for place, layer in enumerate(kinds):
        mixer = layer.mixer
        if isinstance(mixer, AttentionSpec) and mixer.cache_of is not None:
            owner = kinds.index(spec.layers[mixer.cache_of])
            kinds[place] = replace(layer, mixer=replace(mixer, cache_of=owner))
    return replace(spec, layers=tuple(dict.fromkeys(kinds)))


def least_kernels(spec: ModelSpec) -> frozenset[str]:
    """The groups without which no kernel runs a step of a model."""
    return REQUIRED_KERNELS | (frozenset({"states"}) if spec.recurrent else frozenset())


class Attentions:
    """The attentions alone of a model that transformers computes, to numbers that depend on tokens, as a `Decoder`."""

    def __init__(self, model: Model) -> None:
        spec = model.stored.spec
        self._calls, self._vocabulary = spec.attentions, spec.vocab_size
        widest = max(call.heads * call.head_dim + 2 * call.width for call in self._calls)
        generator = torch.Generator().manual_seed(0)
        self._numbers = torch.randn(TOKENS, widest, generator=generator).to(model.device, model.dtype)
        with_sinks = ((index, call.heads) for index, call in enumerate(self._calls) if call.sinks)
        self.sinks = {index: torch.randn(heads, generator=generator).to(model.device) for index, heads in with_sinks}

    def __call__(self, ids: Tensor, positions: Tensor, attend: Attend, wanted: Tensor, *_: object) -> Tensor:
        """`Decoder.forward`."""
        numbers = self._numbers[ids.long() % TOKENS]
        found = []
        for index, call in enumerate(self._calls):
            heads = call.heads + 2 * call.kv_heads
            parts = numbers[:, : heads * call.head_dim].view(-1, heads, call.head_dim)
            query, key, value = torch.split(parts, [call.heads, call.kv_heads, call.kv_heads], 1)
            found.append(attend(index, query, key, value[..., : call.value_dim]).flatten(1))
        return torch.cat(found, 1)[wanted]

    def own_logits(self, hidden: Tensor) -> Tensor:
        """The results of the attentions, repeated: no fewer numbers than the vocabulary has tokens."""
        return hidden.repeat(1, -(-self._vocabulary // hidden.shape[1]))


class Comparison:
    """The logits of a few layers by PyTorch, with which those by kernels are compared."""

    def __init__(self, model: Model) -> None:
        self._model = model
        methods = model.stored.methods
        is_plain = all(
            isinstance(item, Unquantized) for item in (methods.default, *(item for _, item in methods.rules))
        )
        self._is_exact = is_plain and model.dtype == torch.float32
        self._most = bound(model.dtype, len(model.stored.spec.layers) or 1) if is_plain else CODED
        self._expected = dict(self._logits(frozenset()))

    def faults(self, working: frozenset[str]) -> dict[str, str]:
        """The faults of kernels, by the names of their groups, separated by ", "; empty: they agree."""
        if self._fault(working) is None:
            return {}
        known = least_kernels(self._model.stored.spec)
        if (fault := self._fault(known)) is not None:
            return {", ".join(sorted(known)): fault}
        found = {}
        alone = [frozenset({name}) for name in sorted(working - known - PRODUCTS)]
        for part in (*alone, PRODUCTS & working):
            if (fault := self._fault(known | part)) is None:
                known |= part
            else:
                found[", ".join(sorted(part))] = fault
        return found

    def _fault(self, groups: frozenset[str]) -> str | None:
        """The fault of the numbers of kernels of these groups; None: they agree."""
        try:
            off = {name: self._difference(name, own) for name, own in self._logits(groups)}
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of a compiler, its launcher or the device: there is no common type
            return in_a_line(error)
        name = max(off, key=off.__getitem__)
        return None if off[name] <= self._most else f"logits of {name} are off by {off[name]:.2g} of their spread"

    def _difference(self, name: str, found: Tensor) -> float:
        """The share of their spread by which logits are off: of the worst row if they are exact, else the median."""
        expected = self._expected[name]
        off = (found - expected).square().mean(-1).sqrt() / expected.std(-1)
        off = off.nan_to_num(torch.inf)
        return float(off.max() if self._is_exact else off.median())

    def _logits(self, groups: frozenset[str]) -> Iterator[tuple[str, Tensor]]:
        """Yields each step's name and logits `[R, vocabulary]` float32; without groups PyTorch computes all."""
        model = self._model
        decoder = self._decoder(groups) if model.stored.spec.layers else Attentions(model)
        size, device = model.config.block_size, model.device
        table = -(-(LENGTH + 1) // size)
        attention = self._attention(decoder, groups, len(FIRST) * table + 1)
        rows = (
            DeviceRows(len(FIRST), LENGTH, table, device, len(FIRST) * table)
            if groups
            else BatchRows(len(FIRST), LENGTH, table, device)
        )
        ids = torch.randint(
            model.stored.spec.vocab_size, (len(FIRST), LENGTH), generator=torch.Generator().manual_seed(0)
        )
        rows.tokens[: len(FIRST), :LENGTH] = ids.to(rows.tokens)
        blocks = torch.arange(len(FIRST) * table).view(table, -1).T  # one's blocks lie between the others'
        rows.block_table[: len(FIRST)] = blocks.to(rows.block_table)
        states = self._states(on_device=bool(groups))
        for name, scheduled in _steps():
            batch: InputBatch
            planned: Any = None
            if isinstance(rows, DeviceRows):
                batch = on_device = build_device_batch(rows, scheduled, size)
                planned = states.plan(on_device) if isinstance(states, DeviceStateMemory) else None
            else:
                batch = build_input_batch(rows, scheduled, size)
                planned = states.plan(scheduled) if isinstance(states, StateMemory) else None
            given = batch.token_ids, batch.positions, attention.plan(batch), batch.logits_indices
            logits = decoder.own_logits(decoder(*given, NO_ADAPTERS, planned))
            if isinstance(rows, DeviceRows) and logits.isfinite().all():
                slots = torch.tensor(batch.sample_slots, device=device)
                chosen = sample(logits.contiguous(), None, slots, batch.sample_positions, rows)
                chosen = chosen.clamp(0, logits.shape[1] - 1)
                if not torch.equal(logits.gather(1, chosen[:, None])[:, 0], logits.amax(1)):
                    raise ValueError(f"tokens of {name} are not the most likely ones")
            yield name, logits.float()

    def _decoder(self, groups: frozenset[str]) -> Decoder:
        model, linear = self._model, self._model.stored.methods
        multiplies = groups >= PRODUCTS
        if not multiplies and isinstance(linear.default, Unquantized):
            rules = tuple((names, PLAIN if item is linear.default else item) for names, item in linear.rules)
            linear = replace(linear, default=PLAIN, rules=rules)
        build = Build(model.dtype, model.device, LENGTH + 1, groups, model.config.deterministic, linear=linear)
        decoder = Decoder(model.stored.spec, build)
        fill_random(decoder)
        decoder.finish()
        for method in (item for item in decoder.modules() if isinstance(item, TunedMethod)):
            for most, ways in method.candidates().items():
                if multiplies or None in ways:
                    method.choose(most, next(way for way in reversed(ways) if (way is not None) is multiplies))
        return decoder

    def _attention(self, decoder: Decoder | Attentions, groups: frozenset[str], blocks: int) -> AttentionBackend[Any]:
        config, dtype, stored, device = self._model
        layers, size = list(stored.spec.attentions), config.block_size
        cache = CacheOptions(layers, blocks, size, dtype, device, sinks=decoder.sinks)
        if "attention" not in groups or largest_head(stored.spec) > LARGEST_HEAD:
            return TorchAttention(cache)
        own = own_attention(Shapes(layers, size, dtype, dtype, device, len(FIRST) + 1, LENGTH), config)
        return PagedAttention(cache, Phases.all(own), own, config.deterministic)

    def _states(self, on_device: bool) -> StateMemory | DeviceStateMemory | None:
        """The states of each row, if layers have some."""
        model, rows = self._model, len(FIRST)
        if not model.stored.spec.recurrent:
            return None
        make = DeviceStateMemory if on_device else StateMemory
        states = make(model.stored.spec, rows, rows + on_device, model.dtype, model.device)
        given = StateMessage([], [(row, row) for row in range(rows)])
        states.prepare(SchedulerOutput(0, extensions={StateMessage.extension: given}))
        return states


def _steps() -> Iterator[tuple[str, list[ScheduledTokens]]]:
    """Yields the name of each step, and what it computes; each request has the logits of its last token."""
    last = LENGTH - 2
    yield "prompts", [ScheduledTokens(row, 0, count, 1) for row, count in enumerate(FIRST)]
    yield "later parts of prompts", [ScheduledTokens(row, count, last - count, 1) for row, count in enumerate(FIRST)]
    yield "decodes", [ScheduledTokens(row, last, 1, 1) for row in range(len(FIRST))]
    yield "a decode alone", [ScheduledTokens(0, last + 1, 1, 1)]
