"""Makes an engine from a configuration: the executor with the model, and the scheduler over what it has room for."""

import contextlib
import dataclasses
import errno
import logging
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvern.cache.manager import KVCacheManager, MakeExtension
from kvern.config import OPTIONAL, EngineConfig
from kvern.cpu.cores import available_memory
from kvern.drafting.drafting import Drafting
from kvern.drafting.models.choice import draft_folder
from kvern.drafting.proposer import PROPOSERS
from kvern.engine.core import EngineCore
from kvern.engine.core_timing import CoreTiming
from kvern.engine.image_pool import image_pool, vision_here
from kvern.engine.layer_seconds import LayerSeconds
from kvern.engine.loop import EngineLoop
from kvern.engine.pace import Pace
from kvern.engine.queues import POLICIES
from kvern.engine.recorder import Recorder
from kvern.engine.scheduler import Scheduler, SchedulerLimits
from kvern.engine.slow_machine import SlowMachine
from kvern.engine.step_baseline import step_times
from kvern.engine.step_drift import StepDrift
from kvern.engine.step_watch import StepWatch
from kvern.errors import ConfigError, KvernError
from kvern.models.fallback.spec import TransformersSpec
from kvern.models.implementation import describe_model
from kvern.models.loader import read_config
from kvern.runner.device import resolve_device
from kvern.runner.executor import Executor, start
from kvern.runner.plan import Layout
from kvern.runner.startup import Startup
from kvern.spec.facts import ModelFacts
from kvern.spec.model import ModelSpec
from kvern.tiers.arena import HOST, sized

if TYPE_CHECKING:
    from kvern.cache.messages import TierIndex
    from kvern.planning.estimate import StepFactors

STATES_APART = 512
"""Tokens of a prompt that a GPU computes in about the time of one more small step."""
GRAPH_SECONDS = 0.55
"""So long an engine captures the likeliest graphs before it is ready, if it can capture the others when it is idle."""
logger = logging.getLogger("kvern")
DECODE_STEPS = 3
"""The target of the time between tokens, in plain decode steps, if none is given."""


@contextlib.contextmanager
def refused_memory() -> Iterator[None]:
    """Has the system's refusals of host memory raise ConfigError, with what to do."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        is_torch = isinstance(error, RuntimeError) and "can't allocate memory" in str(
            error
        )  # which has no class for it
        if not (is_torch or isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM):
            raise
        raise ConfigError(
            "the system gives this process too little memory for the model and its KV cache: close other programs, "
            "raise the limit (ulimit -v), take a smaller model or fewer bits, or lower --kv-cache-tokens"
        ) from error


@refused_memory()
def build_core(
    config: EngineConfig,
    folder: Path,
    startup: Startup,
    *,
    prepares: bool = False,
    watch: StepWatch | None = None,
    streams: bool = False,
    lost: Callable[[int], None] | None = None,
) -> tuple[EngineLoop, ModelSpec, Layout]:
    """Load the model in `folder` and wire the engine around it; `prepares` and `watch` are the core's.

    With `prepares` what makes steps faster may be made later, in idle moments.

    `streams`: somebody waits for single tokens, so that steps on a GPU have a target if the configuration says nothing.

    `lost` as in `RankProcesses`.

    Raises KvernError subclasses.
    """
    spec = describe_model(folder, read_config(folder), config.model_implementation)
    config = usable_tiers(config, spec)
    if HOST in config.kv_tier and spec.encoder is None:  # all ranks have the same size
        options = sized(config.kv_tier, available_memory() // config.data_parallel_size)
        config = dataclasses.replace(config, kv_tier=options)
    if config.ranks > 1:
        from kvern.runner.ranks.rank_limits import check_ranks

        check_ranks(config, folder, spec)
    check_layer_times(config, spec)
    if spec.encoder is not None:
        from kvern.engine.encoder_core import EncoderCore
        from kvern.engine.picture_queue import PictureQueue
        from kvern.runner.decoders import Decoders
        from kvern.runner.encoder_runner import start_encoder

        vision = vision_here(config, folder)
        runner, layout = start_encoder(config, folder, spec, startup, vision)
        sizes = layout.max_batch_tokens, layout.max_batch_requests, layout.depth
        pictures = None if vision is None else PictureQueue(Decoders(folder))
        return EncoderCore(runner, config, *sizes, watch, pictures), spec, layout
    draft = draft_folder(config, folder, resolve_device(config).type)
    if config.ranks > 1:
        from kvern.runner.ranks.rank_executors import start_ranks

        executor, layout = start_ranks(config, folder, spec, startup, draft, lost)
    else:
        executor, layout = start(config, folder, spec, startup, draft)
    drafting = make_drafting(config, spec, layout, draft)
    if config.enable_dp_attention:
        executor.begin_counting()
        return make_dp_attention_core(config, folder, layout, executor, drafting, watch), spec, layout
    scheduler = make_scheduler(config, folder, layout, executor.tier)
    with startup.stage("graphs"):
        use_idle_time(executor, GRAPH_SECONDS if prepares else math.inf)
    with startup.stage("pace"):
        pace = make_pace(config, folder, executor, layout, streams)
    executor.begin_counting()
    timing = make_timing(config, folder, spec, layout)._replace(pace=pace, watch=watch)
    return EngineCore(scheduler, executor, layout.depth, folder, prepares, drafting, timing), spec, layout


def make_timing(config: EngineConfig, folder: Path, spec: ModelSpec, layout: Layout) -> CoreTiming:
    """Returns what notes the time of steps and requests."""
    layers = None if config.trace_layers is None else LayerSeconds(config.trace_layers, spec)
    factors = factors_of_steps(config, folder, layout)
    return CoreTiming(factors=factors, recorder=make_recorder(config), layers=layers)


def factors_of_steps(config: EngineConfig, folder: Path, layout: Layout) -> "Callable[[], StepFactors | None]":
    """Returns the estimate of the times of parts of steps, as `kvern plan` has it; None where there is none."""

    def found() -> "StepFactors | None":
        from kvern.planning.choice import model_of
        from kvern.planning.estimate import Split, step_factors
        from kvern.planning.hardware import engine_card

        split = Split(config.tensor_parallel_size, 1, config.pipeline_parallel_size, config.enable_expert_parallel)
        try:
            model = model_of(config, folder)
            card = engine_card(config, model.dtype, layout)
            return None if card is None else step_factors(model, card, split, layout.token_bytes)
        except KvernError as error:  # a model that cannot be described, such as one with code of its own
            logger.info("the seconds of steps are not divided: %s", error)
            return None

    return found


def check_layer_times(config: EngineConfig, spec: ModelSpec) -> None:
    """Raises ConfigError if the layers of a model cannot be measured."""
    if config.trace_layers is None:
        return
    reason = ""
    if spec.encoder is not None:
        reason = f"{spec.model_type} is an encoder, which computes texts whole"
    elif isinstance(spec, TransformersSpec):
        reason = f"transformers computes {spec.model_type}, and tells nothing of its layers"
    elif config.enable_dp_attention:
        reason = "with enable_dp_attention each rank computes other steps"
    if reason:
        raise ConfigError(f"trace_layers is {config.trace_layers}, and {reason}: leave it out")


def usable_tiers(config: EngineConfig, spec: ModelSpec) -> EngineConfig:
    """The configuration without tiers that are optional and cannot be; those that can be are no longer optional.

    Raises ConfigError.
    """
    if spec.encoder is not None:
        if config.kv_events_config:
            raise ConfigError(f"kv_events_config: {spec.model_type} is an encoder and has no KV cache; leave it out")
        reason = f"{spec.model_type} is an encoder and has no KV cache"
    elif not config.prefix_cache:
        reason = "the prefix cache is off"
    else:
        return dataclasses.replace(config, kv_tier=tuple(option.removesuffix(OPTIONAL) for option in config.kv_tier))
    needed = config.needed_tiers
    if needed == config.kv_tier:
        return config
    logger.warning("kv_tier %s has no effect: %s", config.shown_kv_tier, reason)
    age, by_heads = (config.kv_tier_max_age, config.kv_tier_heads) if needed else (None, False)
    return dataclasses.replace(config, kv_tier=needed, kv_tier_max_age=age, kv_tier_heads=by_heads)


def facts_of(config: EngineConfig, spec: ModelSpec, layout: Layout, folder: Path) -> ModelFacts:
    """The facts of the model of an engine."""
    return ModelFacts.of(spec, vision_here(config, folder) is not None, layout.max_batch_tokens)


def make_dp_attention_core(
    config: EngineConfig,
    folder: Path,
    layout: Layout,
    executor: Executor,
    drafting: Drafting | None,
    watch: StepWatch | None,
) -> EngineLoop:
    """The cores of all ranks, of which this process's is the first."""
    from kvern.runner.ranks.rank_executors import DPAttentionExecutor
    from kvern.serving.dp_attention import DPAttentionCore, RankRequests

    assert isinstance(executor, DPAttentionExecutor) and executor.others is not None
    cached = layout.cached_tokens if config.prefix_cache else 0
    ranks = [RankRequests(layout.max_batch_requests, cached) for _ in range(config.dp_attention_size)]
    core = make_rank_core(config, folder, layout, executor, drafting)
    return DPAttentionCore(core, executor, executor.others, ranks, config.rank_timeout, watch)


def make_rank_core(
    config: EngineConfig, folder: Path, layout: Layout, executor: Executor, drafting: Drafting | None
) -> EngineCore:
    """The core of one rank with requests of its own."""
    scheduler = make_scheduler(config, folder, layout, executor.tier)
    timing = CoreTiming(recorder=make_recorder(config))
    return EngineCore(scheduler, executor, layout.depth, folder, True, drafting, timing)


def make_recorder(config: EngineConfig) -> Recorder | None:
    """Returns the maker of requests' records, if they are wanted."""
    return Recorder() if config.request_records else None


def make_drafting(config: EngineConfig, spec: ModelSpec, layout: Layout, draft: Path | None) -> Drafting | None:
    """Returns the drafting by a proposer, by the model in the folder `draft`, and from predicted outputs."""
    if config.speculation == "off":
        return None
    proposer = None if config.proposer is None else PROPOSERS.find(config.proposer)(config, spec)
    device = layout.device if proposer is None and draft is not None else None
    return Drafting(proposer, spec.vocab_size, device=device, most=layout.most_drafts, catches_up=layout.catches_up)


def use_idle_time(executor: Executor, seconds: float) -> None:
    """Make what steps run faster with, for so long; what is begun is brought to its end."""
    until = time.monotonic() + seconds
    while executor.idle() and time.monotonic() < until:
        pass


def make_scheduler(config: EngineConfig, folder: Path, layout: Layout, tier: "TierIndex | None") -> Scheduler:
    """The scheduler over a KV cache of this layout, for the model in `folder`, whose blocks a tier may keep."""
    limits = SchedulerLimits(
        layout.max_batch_tokens,
        layout.max_batch_requests,
        config.aging_steps,
        config.chunked_prefill,
        config.batching == "continuous",
        config.pipeline_parallel_size,
    )
    extensions = make_extensions(config, layout, tier)
    if (images := image_pool(config, folder)) is not None:
        extensions.append(images)
    sizes = layout.blocks, layout.block_size
    positions = layout.positions if layout.window_tables else 0
    identity = b"" if tier is None else tier.identity
    cache = KVCacheManager(*sizes, config.prefix_cache, identity, extensions, positions, layout.chunk)
    if layout.chunk:
        cache.begin_with(layout.least_chunks)
    return Scheduler(limits, cache, POLICIES[config.policy], config.adapter_places)


def make_pace(config: EngineConfig, folder: Path, executor: Executor, layout: Layout, streams: bool) -> Pace:
    """The target that the time between tokens has, with what steps cost here if there is a target or a tier.

    A tier loads what would take longer to compute. Steps are watched in any case, whether they become slower.
    """
    drift = StepDrift(step_times(config, layout, read_config(folder)), SlowMachine(layout.gpus))
    target, stages = config.target_itl_seconds, config.pipeline_parallel_size
    has_none = target == 0 or (target is None and not (streams and layout.device == "cuda" and stages == 1))
    if has_none and executor.tier is None:
        return Pace(stages=stages, drift=drift)
    from kvern.engine.step_timing import time_steps

    timed = time_steps(executor, layout)
    if timed is None:
        return Pace(stages=stages, drift=drift)
    plain, costs = timed
    if executor.tier is not None:
        executor.tier.computing = partial(costs.prompt_seconds, layout.max_batch_tokens)
    if has_none:
        return Pace(costs, stages=stages, drift=drift)
    return Pace(costs, target or DECODE_STEPS * plain, yields=target is None, stages=stages, drift=drift)


def windows(config: EngineConfig, layout: Layout) -> MakeExtension | None:
    """The block tables of layers with a window, if they have some of their own."""
    if not layout.window_tables:
        return None
    from kvern.cache.messages import WindowLimits
    from kvern.cache.windows import WindowedBlocks

    sizes = layout.window, layout.window_tables, layout.max_batch_tokens, layout.positions
    return partial(WindowedBlocks, WindowLimits(*sizes))


def states(config: EngineConfig, layout: Layout) -> MakeExtension | None:
    """The states of recurrent layers, if the model has some."""
    if not layout.states:
        return None
    from kvern.cache.messages import blocks_of_page
    from kvern.cache.states import StatePool

    page_blocks = blocks_of_page(layout.block_size) if config.kv_tier else 1
    apart = STATES_APART if layout.device == "cuda" else 1
    return partial(StatePool, layout.states, apart, page_blocks=page_blocks)


def kv_events(config: EngineConfig) -> MakeExtension | None:
    """The events of the prefix cache, if they are published. Raises ConfigError."""
    if not config.kv_events_config:
        return None
    from kvern.engine.kv_events import KVEvents, KVEventsConfig

    options = KVEventsConfig.of(config.kv_events_config)
    if options is not None and (config.enable_dp_attention or not config.prefix_cache):
        raise ConfigError(
            "kv_events_config needs one prefix cache in an engine: leave it out, or enable_dp_attention, and turn "
            "prefix_cache on"
        )
    return None if options is None else partial(KVEvents, options)


EXTENSIONS: list[Callable[[EngineConfig, Layout], MakeExtension | None]] = [windows, states]
"""Each says how its extension is made for an engine, or None if the engine does not need it."""


def make_extensions(config: EngineConfig, layout: Layout, tier: "TierIndex | None") -> list[MakeExtension]:
    """All extensions of an engine, a tier's last."""
    found = [made for make in EXTENSIONS if (made := make(config, layout)) is not None]
    if (events := kv_events(config)) is not None:
        found.append(events)
    if tier is None:
        return found
    from kvern.cache.messages import blocks_of_page
    from kvern.cache.tier import TierTraffic

    return [*found, partial(TierTraffic, tier, blocks_of_page(layout.block_size))]
