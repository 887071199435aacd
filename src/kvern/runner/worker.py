"""One device of an engine, and all that lives on it: weights, KV cache, rows, adapters, grammars, processors."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from kvern.attention.eight_bit import LARGEST_CODE, EightBit
from kvern.config import EngineConfig
from kvern.cpu.cores import cpu_threads, processes_here
from kvern.drafting.models.choice import is_medusa, read_draft, reads_embeddings
from kvern.errors import ConfigError, InvalidAdapter
from kvern.layers.linear_format import LinearFormat, LinearMethods
from kvern.layers.unquantized import Unquantized
from kvern.models.checkpoint import read_headers
from kvern.models.decoder import Decoder, LanguageModel
from kvern.models.fallback.spec import TransformersSpec
from kvern.models.image_models import usable_vision
from kvern.models.loader import (
    LoadOptions,
    choose_dtype,
    load_model,
    outline_of,
    read_config,
    share_of_ranks,
    stored_methods,
)
from kvern.ranks.ranks import ALONE, Ranks
from kvern.runner.asleep import MemoryAsleep, memory_asleep
from kvern.runner.device import (
    check_indexers,
    check_kernels,
    check_latents,
    check_state_kernels,
    check_states,
)
from kvern.runner.kernel_choice import settle_threads, usable_kernels
from kvern.runner.layer_times import step_clock
from kvern.runner.loaded_model import VISION_KERNELS, Draft, LoadedModel, Runner, StepBackend, Stored
from kvern.runner.memory import DeviceMemory, report_groups
from kvern.runner.plan import (
    CPU_KERNELS,
    EIGHT_BIT,
    FreeMemory,
    Layout,
    Plan,
    ProbedDevice,
    resolve_max_model_len,
    whole_prompt,
)
from kvern.runner.startup import Startup
from kvern.spec.model import ModelSpec

if TYPE_CHECKING:
    from kvern.adapters.bank import AdapterBank, AdapterStore
    from kvern.adapters.peft import Target
    from kvern.models.checkpoint import StoredTensor
    from kvern.models.vision import VisionTower
    from kvern.models.weighted import WeightedModel
    from kvern.ranks.expert_placement import Placement
    from kvern.request.weights import WeightSource
    from kvern.runner.cached_model import EmbeddingSource
    from kvern.runner.new_weights import NewWeights
    from kvern.runner.processor_rows import ProcessorRows
    from kvern.runner.ranks.experts import ExpertBalance, ExpertCounts, LayerCounts
    from kvern.runner.tier import Tier
    from kvern.runner.tier_start import CachedDraft
    from kvern.spec.vision import VisionSpec
    from kvern.structured.masks import GrammarRows

MODEL_KERNELS = frozenset({"norm", "rotary", "activation", "few_rows", "moe", "hopper_linear", "quantized", "states"})
"""The kernels that the parts of a model may use, besides kernels of a CPU."""


class Worker:
    """Made in three calls, between which ranks agree (`runner/plan.py`): probe, load, build. `runner` runs steps."""

    runner: Runner

    def __init__(
        self,
        config: EngineConfig,
        folder: Path,
        spec: ModelSpec,
        device: torch.device,
        startup: Startup,
        draft: Path | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """`spec`: of the whole model, of which one of several `ranks` has a share. Before `load` these must have met.

        `draft`: where a model is that guesses what this one goes on with, which the last stage asks.
        """
        self._draft, self._ranks = draft if ranks.stage.is_last else None, ranks
        self._config = config
        self._folder = folder
        self.device = device
        self._whole = spec
        self._whole_experts = None
        if config.enable_expert_parallel:
            from kvern.models.share import WholeExperts

            self._whole_experts = WholeExperts(config.redundant_experts)
        self._spec = self._shared = share_of_ranks(spec, ranks, self._whole_experts)
        if ranks.stage.layers is not None:
            from kvern.models.stages import part_of_stage

            self._spec = part_of_stage(self._shared, ranks.stage)
        self._startup = startup
        processes = processes_here(ranks.processes * config.data_parallel_size)
        self.memory = DeviceMemory(device, config.gpu_memory_share, processes)
        self._store: AdapterStore | None = None
        self._stored_scales: list[torch.Tensor | None] = [None] * len(spec.attentions)

    def probe(self) -> ProbedDevice:
        """Look at what the device is and can do. Raises ConfigError for what it cannot."""
        config, device = self._config, self.device
        resolve_max_model_len(config, self._spec)  # what is wrong with the options shows before kernels are compiled
        check_states(config, self._spec)
        check_latents(config, self._spec, device)
        check_indexers(config, self._spec)
        check_kernels(self._spec, device)
        dtype = choose_dtype(config.dtype, self._spec, None if config.load_format == "dummy" else self._folder)
        if isinstance(self._spec, TransformersSpec):
            from kvern.runner.fallback_check import check_fallback_options

            check_fallback_options(config, self._spec, dtype, self.memory)
        if config.kv_cache_dtype in EIGHT_BIT and config.load_format != "dummy" and self._spec.layers:
            from kvern.models.cache_scales import stored_scales

            largest = LARGEST_CODE[getattr(torch, EIGHT_BIT[config.kv_cache_dtype])]
            sizes = self._whole, largest, self._ranks
            self._stored_scales = stored_scales(self._folder, read_config(self._folder), *sizes)
        gpu, methods = None, LinearMethods(Unquantized())
        if device.type == "cuda":
            from kvern.runner.gpu_checks import check_dtype, check_weights_fit

            torch.cuda.set_device(device)
            gpu = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            check_dtype(dtype, device)
            if not isinstance(self._spec, TransformersSpec):
                stored = [] if config.load_format == "dummy" else read_headers(self._folder)
                given = self._spec, stored, self._unquantized(), config.quantization, config.has_int8_head("cuda")
                methods = stored_methods(read_config(self._folder), *given)
                check_weights_fit(self._spec, dtype, self.memory, methods, self._ranks)
        else:
            sharing = self._ranks.processes if config.executor == "processes" else 1  # Ray gives each rank its own
            torch.set_num_threads(max(1, (config.threads or cpu_threads()) // sharing))
        has_head = self._draft is not None and (reads_embeddings(config, self._draft) or is_medusa(self._draft))
        vision = self._vision if device.type == "cuda" and self._ranks.stage.is_first else None
        model = Stored(self._spec, methods, self._ranks, has_head, vision)
        draft = None if self._draft is None or device.type != "cuda" else self._stored_draft(self._draft)
        kernels, of_draft = usable_kernels(config, dtype, device, self._startup, model, draft, config.has_drafts)
        check_state_kernels(self._spec, kernels, device)
        name = str(dtype).removeprefix("torch.")
        return ProbedDevice(device.type, name, kernels, gpu, None if self._draft is None else of_draft)

    def _stored_draft(self, folder: Path) -> Stored | None:
        """The stored layers of a draft model or head; None: Medusa heads, which have none. Raises KvernError."""
        dummy, quantization = self._config.load_format == "dummy", self._config.draft_format
        is_head = reads_embeddings(self._config, folder)
        if is_head:
            from kvern.drafting.models.formats import read_draft_head

            head, tensors = read_draft_head(folder, self._spec, self._ranks, dummy=dummy)
            quantization = self._config.quantization if folder == self._folder else quantization
            spec, stored = head.model, tensors or []
        elif is_medusa(folder):
            return None
        else:
            spec = self._spec_of_draft(folder, resolve_max_model_len(self._config, self._spec))
            stored = [] if dummy else read_headers(folder)
        methods = stored_methods(read_config(folder), spec, stored, self._unquantized(), quantization)
        return Stored(spec, methods, self._ranks.of_own_stage(), is_head)

    def _unquantized(self) -> LinearFormat:
        """Returns how plain weights are multiplied on a GPU, without memory."""
        from kvern.layers.tuned_linear import TunedLinear

        return TunedLinear(torch.device("meta"), self._config.linear_backend)

    def _spec_of_draft(self, folder: Path, longest: int) -> ModelSpec:
        return share_of_ranks(read_draft(folder, self._folder, self._spec, longest), self._ranks.of_own_stage())

    def load(self, plan: Plan) -> FreeMemory:
        """Load the weights and whatever a batch of the plan's size needs beside its cache. Raises KvernError."""
        config = self._config
        self._plan = plan
        spec = self._spec
        self._choose_sums(plan)
        self.times = step_clock(config, self._ranks, on_device=plan.on_device)
        self._backend = backend = self._make_backend(plan, spec)
        adapters, model = None, self._load_fallback(plan)
        if model is None:
            decoder = model = self._load_decoder(self._folder, plan, backend, config.quantization, self._ranks)
            backend.prepare(decoder)
            adapters = self._make_adapters(decoder, "adapters" in plan.kernels)
        self._tower, images = self._load_images(plan)
        if isinstance(model, Decoder) and self.device.type == "cpu" and not plan.on_device:
            settle_threads(config, plan, model, *(() if self._tower is None else (self._tower,)))
        processors = self._make_processors(plan) if config.logits_processors else None
        draft = None if self._draft is None else self._load_draft(self._draft, plan, model)
        given = model, lambda: self.grammars, processors, adapters, self._store
        self._loaded = LoadedModel(*given, draft=draft, ranks=self._ranks, images=images, times=self.times)
        if config.rebalance_seconds:
            self._ranks.of_experts.hand_once(self.device)
        if config.kv_cache_dtype not in EIGHT_BIT:
            return self._room()
        from kvern.runner.cache_scales import digest

        with self._startup.stage("cache scales"):
            eight_bit = self._eight_bit(plan)
        self._loaded = replace(self._loaded, eight_bit=eight_bit)
        return msgspec.structs.replace(self._room(), scales=digest(eight_bit.scales))

    @cached_property
    def grammars(self) -> "GrammarRows":
        """The matchers of rows; what follows grammars is imported when a request first has one."""
        from kvern.structured.masks import GrammarRows
        from kvern.structured.matchers import library_of

        size = self._spec.vocab_size
        return GrammarRows(library_of(self._folder, size), size, self.device, self._backend.restrict)

    def _room(self) -> FreeMemory:
        room = self._backend.room(self._loaded)
        self._startup.report(report_groups(self._backend.groups))
        draft = self._loaded.draft
        if draft is None:
            return room
        return msgspec.structs.replace(room, most_drafts=draft.most, catches_up=isinstance(draft.decoder, Decoder))

    def _choose_sums(self, plan: Plan) -> None:
        """Have ranks on GPUs of one machine sum, or bring to each other, few rows by a kernel, if that is faster."""
        ranks, dtype = self._ranks, getattr(torch, plan.dtype)
        kernels = "peer_sum" if ranks.dp_attention is None else "peer_exchange"
        if self.device.type != "cuda" or kernels not in plan.kernels:
            return
        from kvern.device.measurements import Measurements
        from kvern.runner.ranks.rank_sums import choose_exchange, choose_sums, share_norms

        with self._startup.stage("sums"), torch.inference_mode():
            known = Measurements(self._config.cache_folder, self.device)
            given = self._spec.hidden_size, dtype, self.device, known
            if ranks.dp_attention is not None:
                ranks = ranks.dp_attention.ranks
                self._startup.report(choose_exchange(ranks, *given))
            elif ranks.size > 1:
                self._startup.report(choose_sums(ranks, *given))
                if "shared_norm" in plan.kernels and not self._config.deterministic:
                    self._startup.report(share_norms(ranks, self._spec, plan.max_batch_tokens, dtype, self.device))
        self.memory.mapped = ranks.mapped_bytes

    def _load_draft(self, folder: Path, plan: Plan, model: LanguageModel) -> Draft:
        if reads_embeddings(self._config, folder):
            return self._load_head(folder, plan, model)
        if is_medusa(folder):
            return self._load_medusa(folder, model)
        spec = self._spec_of_draft(folder, plan.max_model_len)
        plan = plan.of_draft(spec)
        backend = self._make_backend(plan, spec)
        ranks = self._ranks.of_own_stage()
        decoder = self._load_decoder(folder, plan, backend, self._config.draft_format, ranks)
        backend.prepare(decoder)
        return Draft(decoder, backend)

    def _load_medusa(self, folder: Path, model: LanguageModel) -> Draft:
        from kvern.drafting.models.medusa_heads import load_medusa

        with self._startup.stage("weights"):
            heads = load_medusa(
                folder,
                _with_states(model, folder),
                load_format=self._config.load_format,
                unquantized=self._backend.unquantized,
            )
        self._backend.tune(heads)
        return Draft(heads, self._backend, heads.count)

    def _load_head(self, folder: Path, plan: Plan, model: LanguageModel) -> Draft:
        from kvern.drafting.models.formats import load_draft_head, read_draft_head

        config, target = self._config, _with_states(model, folder)
        dummy = config.load_format == "dummy"
        described, _ = read_draft_head(folder, target.spec, self._ranks, dummy=dummy)
        plan = plan.of_draft(described.model)
        backend = self._make_backend(plan, described.model)
        with self._startup.stage("weights"):
            head = load_draft_head(
                folder,
                target,
                load_format=config.load_format,
                kernels=plan.kernels & (MODEL_KERNELS | CPU_KERNELS),
                unquantized=backend.unquantized,
                quantization=config.quantization if folder == self._folder else config.draft_format,
            )
        backend.prepare(head)
        return Draft(head, backend)

    def _load_decoder(
        self,
        folder: Path,
        plan: Plan,
        backend: StepBackend,
        quantization: str | None,
        ranks: Ranks,
        stored: "Sequence[StoredTensor] | None" = None,
    ) -> Decoder:
        with self._startup.stage("weights"):
            return load_model(
                folder,
                LoadOptions(
                    ranks=ranks,
                    dtype=plan.dtype,
                    device=self.device,
                    max_model_len=plan.max_model_len,
                    load_format=self._config.load_format,
                    kernels=plan.kernels & (MODEL_KERNELS | CPU_KERNELS),
                    unquantized=backend.unquantized,
                    deterministic=self._config.deterministic and bool(plan.kernels),
                    quantization=quantization,
                    int8_head=self._config.has_int8_head(self.device.type, draft=folder != self._folder),
                    whole_experts=self._whole_experts if ranks is self._ranks else None,
                    stored=stored,
                ),
            )

    @cached_property
    def _vision(self) -> "VisionSpec | None":
        """The encoder of images that is used."""
        dummy = self._config.load_format == "dummy"
        return usable_vision(self._folder, read_config(self._folder), dummy=dummy)

    def _load_images(self, plan: Plan) -> "tuple[VisionTower | None, Callable[[int], EmbeddingSource] | None]":
        """The encoder of images, and what makes rows of them; None: the model has no encoder."""
        config, vision = self._config, self._vision
        if vision is None:
            return None, None
        from kvern.images.settings import settings_of
        from kvern.images.spans import places_for
        from kvern.runner.image_rows import EncodedRows, ImageRows

        if len(self._spec.layers) < len(vision.taps) and self._ranks.stage.is_first:
            raise ConfigError(
                f"the first of {self._ranks.stage.count} pipeline stages has {len(self._spec.layers)} layers, and "
                f"what is seen is added after {len(vision.taps)}: lower pipeline_parallel_size"
            )
        settings, encoded = settings_of(self._folder, vision), None
        if self._ranks.stage.is_first:
            tower = self._load_tower(vision, plan)
            width = vision.projector.hidden * (1 + len(vision.taps))
            places = places_for(settings, whole_prompt(config, self._whole))
            encoded = EncodedRows(tower, torch.empty(places, width, dtype=tower.build.dtype, device=self.device))
        return None if encoded is None else encoded.tower, partial(ImageRows, vision, settings, encoded)

    def _load_tower(
        self, vision: "VisionSpec", plan: Plan, stored: "Sequence[StoredTensor] | None" = None
    ) -> "VisionTower":
        from kvern.models.vision import load_vision

        config = self._config
        options = LoadOptions(
            plan.dtype,
            self.device,
            load_format=config.load_format,
            kernels=CPU_KERNELS if plan.kernels >= CPU_KERNELS else plan.kernels & VISION_KERNELS,
            deterministic=config.deterministic,
            quantization=config.quantization if self.device.type == "cpu" else None,
            stored=stored,
        )
        with self._startup.stage("weights"):
            return load_vision(self._folder, vision, options)

    def read_weights(self, sources: "Sequence[WeightSource]") -> "NewWeights":
        """New weights, loaded beside those that steps use; any thread may call this.

        Raises InvalidWeights, or ConfigError if this engine cannot change its weights.
        """
        from kvern.runner.new_weights import check_changeable, check_memory, read_weights

        check_changeable(self._config, self._whole, self._loaded)
        engines = self._ranks.processes * self._config.data_parallel_size
        check = partial(check_memory, (self._loaded.decoder, self._tower), self.memory, engines)
        return read_weights(self._folder, self._whole, sources, self._load_beside, check)

    def _load_beside(self, stored: "Sequence[StoredTensor]") -> "Iterator[tuple[WeightedModel, WeightedModel]]":
        """Models of these tensors, each after the one that steps use. Raises KvernError."""
        decoder, plan = self._loaded.decoder, self._plan
        assert isinstance(decoder, Decoder)
        quantization = self._config.quantization
        yield decoder, self._load_decoder(self._folder, plan, self._backend, quantization, self._ranks, stored)
        if self._vision is not None and self._tower is not None:
            yield self._tower, self._load_tower(self._vision, plan, stored)

    def _load_fallback(self, plan: Plan) -> LanguageModel | None:
        """The model as transformers computes it, which is found right; None: kvern does."""
        if not isinstance(self._spec, TransformersSpec):
            return None
        from kvern.runner.fallback_check import load_checked

        options = LoadOptions(
            device=self.device,
            load_format=self._config.load_format,
            kernels=plan.kernels & (MODEL_KERNELS | CPU_KERNELS),
            unquantized=self._backend.unquantized,
            quantization=self._config.quantization,
            int8_head=self._config.has_int8_head(self.device.type),
        )
        model = load_checked(self._folder, self._spec, plan, options, self._startup)
        self._backend.prepare(model.model)
        self._startup.report([str(model)])
        return model

    def _eight_bit(self, plan: Plan) -> EightBit:
        """The scales of a cache in 8 bits: those of the checkpoint, and measured ones where it has none."""
        found = stored = self._stored_scales
        if (layers := self._ranks.stage.layers) is not None:
            places = zip(stored, self._whole.caching_layers, strict=True)
            found = [scale for scale, place in places if place in layers]
        if any(scale is None for scale in stored):  # also of other stages alone, which then wait for these layers
            from kvern.runner.cache_scales import measured_scales

            loaded, size = self._loaded, self._config.block_size
            make_runner = partial(self._backend.runner, loaded)
            measured = measured_scales(make_runner, self._spec, plan, size, getattr(torch, plan.cache_dtype))
            found = [other if scale is None else scale for scale, other in zip(found, measured, strict=True)]
        scales = [scale.to(self.device) for scale in found if scale is not None]
        return EightBit(scales, getattr(torch, plan.plain_cache_dtype))

    def build(self, layout: Layout) -> None:
        """Take the memory of the KV cache; then steps can run.

        Raises ConfigError for experts that cannot move, and for ranks in DP attention, which all replay the same
        graphs, if there is no memory for one.
        """
        self.memory.divide(layout)
        self.runner = self._backend.runner(self._loaded, layout)
        while self._ranks.dp_attention is not None and self.runner.idle():
            pass
        if self._config.enable_sleep and self.device.type == "cuda":
            self.memory.mapped += self.sleeping.size  # before graphs are captured, which keep addresses
        if self._config.rebalance_seconds:
            from kvern.runner.ranks.experts import check_moves, experts_of

            check_moves(experts_of(self._loaded.decoder), self._ranks.of_experts)

    @cached_property
    def sleeping(self) -> MemoryAsleep:
        """The memory that goes while the engine is asleep; caches are empty then."""
        runner = self.runner
        states = () if runner.states is None else (tensor for stack in runner.states.stacks for tensor in stack.tensors)
        emptied = [*runner.caches, *runner.draft_caches, *states]
        return memory_asleep((runner, self._loaded), self.memory, self._config.cache_folder, emptied)

    def make_tier(self, layout: Layout) -> "Tier | None":
        """The tier that keeps pages of the KV cache, once that is built; None: no option asks for one.

        Raises ConfigError.
        """
        if not self._config.kv_tier:
            return None
        from kvern.runner.tier_start import TieredCache, start_tier

        runner = self.runner
        cache = TieredCache(
            self._folder,
            self._whole,
            self._plan,
            layout,
            self._ranks,
            runner.caches,
            () if runner.states is None else runner.states.stacks,
            self._backend.groups,
            self._loaded.eight_bit,
            self._cached_draft(),
        )
        tier, lines = start_tier(self._config, cache)
        self._startup.report(lines)
        return tier

    def _cached_draft(self) -> "CachedDraft | None":
        """The draft model or head whose keys a tier keeps; None: there is none, or one without keys."""
        folder, config = self._draft, self._config
        if folder is None or not self.runner.draft_caches:
            return None
        from kvern.cache.keys import model_identity
        from kvern.drafting.models.formats import read_draft_head
        from kvern.runner.tier_start import CachedDraft

        is_head = reads_embeddings(config, folder)
        if is_head:
            spec = read_draft_head(folder, self._whole, ALONE, dummy=config.load_format == "dummy")[0].model
        else:
            spec = read_draft(folder, self._folder, self._whole, self._plan.max_model_len)
        stored = config.load_format, config.quantization, config.draft_format
        name = f" of {model_identity(folder, *stored, config.has_int8_head(self.device.type, draft=True)).hex()}"
        return CachedDraft(name, is_head, spec.attentions, self.runner.draft_caches)

    def expert_placements(self) -> "dict[int, Placement]":
        """The first placements of all layers of the model whose experts are placed whole."""
        from kvern.ranks.expert_placement import first_placement

        return {
            place: first_placement(moe.experts, moe.placed_over, moe.redundant)
            for place, moe in enumerate(layer.mixture for layer in self._shared.layers)
            if moe is not None and moe.placed_over > 1
        }

    def expert_balance(self) -> "ExpertBalance | None":
        """Has experts placed anew between steps; None: they stay where they are."""
        seconds = self._config.rebalance_seconds
        if not seconds:
            return None
        from kvern.runner.ranks.experts import ExpertBalance

        return ExpertBalance(self.expert_placements(), seconds)

    def place_experts(self, placements: "Mapping[int, Placement]") -> None:
        """Place the experts of these layers anew, between the same steps on all ranks."""
        from kvern.runner.ranks.experts import experts_of, move_experts

        move_experts(experts_of(self._loaded.decoder), placements, self._ranks.of_experts)

    @cached_property
    def _expert_counts(self) -> "ExpertCounts | None":
        """The counts of the tokens of the experts, once those of this stage are loaded; None: the model has none."""
        if all(layer.mixture is None for layer in self._whole.layers):
            return None
        from kvern.runner.ranks.experts import ExpertCounts

        return ExpertCounts(self._loaded.decoder, self._whole, self._ranks.stage, self.device)

    def begin_counting(self) -> None:
        """Forget the counts of experts and the times so far: those steps were no request's."""
        if self.times is not None:
            self.times.forget()
        if self._expert_counts is not None:
            self._expert_counts.reset()

    def count_experts(self) -> "Callable[[], LayerCounts]":
        """Begin to read how many tokens each expert has had; what is returned may wait for the steps so far."""
        return list if self._expert_counts is None else self._expert_counts.read()

    @property
    def adapters(self) -> "AdapterStore":
        """The adapters that steps may load; any thread may read one. Raises InvalidAdapter if there can be none."""
        if self._store is None:
            raise InvalidAdapter("this engine has no place for adapters: set max_adapters")
        return self._store

    def _make_processors(self, plan: Plan) -> "ProcessorRows":
        from kvern.runner.processor_rows import ProcessorRows
        from kvern.sample.processors import ProcessorModel, load_processors

        named = self._config.logits_processors if self._ranks.rank == 0 else ()  # the others take what it chooses
        sizes = self._spec.vocab_size, plan.max_batch_requests, plan.max_model_len
        return ProcessorRows(load_processors(named), ProcessorModel(self._folder, *sizes, self.device))

    def _make_backend(self, plan: Plan, spec: ModelSpec) -> StepBackend:
        if not plan.on_device:
            from kvern.runner.torch_backend import TorchBackend

            return TorchBackend(self._config, spec, plan, self.memory)
        from kvern.runner.kernel_backend import KernelBackend

        return KernelBackend(self._config, spec, plan, self.memory, self._startup)

    def _make_adapters(self, decoder: Decoder, kernels: bool) -> "AdapterBank | None":
        """Places for adapters in the decoder, and where their weights wait for one; None if there can be none."""
        places, rank = self._config.adapter_places, self._config.max_adapter_rank
        if not places:
            return None
        from kvern.adapters.bank import AdapterBank, AdapterStore

        bank = AdapterBank(decoder, places, rank, kernels)
        pinned = self.device.type == "cuda"
        readable = None
        if self._ranks.processes > 1:  # in DP attention all that an adapter may change is here
            readable = bank.targets if self._ranks.dp_attention is not None else self._readable_targets(decoder)
        self._store = AdapterStore(decoder.spec, bank.targets, rank, decoder.build.dtype, pinned, readable)
        return bank

    def _readable_targets(self, decoder: Decoder) -> "Mapping[str, tuple[Target, ...]]":
        """The targets that an adapter of the whole model may change, also in layers of other stages."""
        from kvern.adapters.peft import targets_of

        ranks = Ranks(self._ranks.rank, self._ranks.size)
        spec = share_of_ranks(self._whole, ranks, self._whole_experts)
        return targets_of(outline_of(spec, replace(decoder.build, ranks=ranks)))


def _with_states(model: LanguageModel, head: Path) -> Decoder:
    """A model whose states a head can read. Raises ConfigError."""
    if not isinstance(model, Decoder):
        raise ConfigError(f"draft_model {str(head)!r} is a head: it reads states of models that kvern computes")
    return model
