"""Makes an engine whose batch lives on a GPU: weights, kernels, then all memory that is left becomes KV cache."""

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

import torch

from kvern.attention.base import AttentionBackend
from kvern.attention.paged import PagedAttention
from kvern.attention.selection import Shapes, choose
from kvern.config import EngineConfig
from kvern.device.device_batch import DeviceBatch, DeviceRows
from kvern.device.measurements import Measurements, cache_folder, keep_builds
from kvern.device.timing import time_calls
from kvern.engine.core import EngineCore
from kvern.engine.device import GIGABYTE, LARGEST_HEAD, check_dtype, check_head_dim, check_weights_fit
from kvern.engine.factory import (
    GPU_BATCH_TOKENS,
    CachePlan,
    batch_requests,
    batch_tokens,
    make_adapters,
    make_scheduler,
    plan_cache,
    resolve_max_model_len,
    text_decoder,
)
from kvern.engine.kernel_check import REQUIRED, working_kernels
from kvern.engine.startup import Startup
from kvern.kernels.masks import restrict
from kvern.layers.linear_format import linear_methods
from kvern.layers.tuned_linear import TunedLinear
from kvern.layers.tuning import tune
from kvern.layers.unquantized import Unquantized
from kvern.model_spec import ModelSpec
from kvern.models.decoder import Decoder
from kvern.models.loader import choose_dtype, load_model, read_config
from kvern.models.registry import spec_from_config
from kvern.request import PromptInput, RequestSpec
from kvern.sample.processors import ProcessorModel, load_processors
from kvern.sampling_params import ResolvedParams
from kvern.step import NewRequest, ScheduledTokens, SchedulerOutput
from kvern.structured.grammar import grammars_of
from kvern.structured.masks import GrammarRows
from kvern.worker.device_runner import DeviceRunner
from kvern.worker.executor import InProcessExecutor
from kvern.worker.processor_rows import ProcessorRows

logger = logging.getLogger("kvern")

MODEL_KERNELS = frozenset({"norm", "rotary", "activation", "few_rows", "moe"})
"""What the parts of a model may be made of."""
ALL_KERNELS = MODEL_KERNELS | REQUIRED | {"adapters", "attention", "linear"}
OTHERS_BYTES = 2 << 30
"""Memory beside ours that is worth a word: the CUDA context itself takes half a gigabyte."""
MARGIN_BYTES = 512 << 20
MARGIN_SHARE = 0.02
"""Of the card's memory: kept free beside weights, activations and KV cache, for CUDA graphs and fragments."""


def build_device_core(
    config: EngineConfig, folder: Path, device: torch.device, startup: Startup
) -> tuple[EngineCore, ModelSpec, CachePlan] | None:
    """Load the model in `folder` and wire the engine around it; None if this device cannot run the kernels it needs.

    Raises KvernError subclasses.
    """
    described = read_config(folder)
    spec = spec_from_config(described)
    longest = resolve_max_model_len(config, spec)
    dtype = choose_dtype(config.dtype, spec, None if config.load_format == "dummy" else folder)
    check_dtype(dtype, device)
    check_head_dim(config, spec)
    check_weights_fit(spec, dtype, device, linear_methods(described, Unquantized()))
    keep_builds(cache_folder(config))
    measurements = Measurements(cache_folder(config), device)
    kernels = ALL_KERNELS
    if device.type == "cuda":
        with startup.stage("kernels"):
            rank = config.max_adapter_rank if config.adapter_slots else 0
            kernels = working_kernels(spec, dtype, config.block_size, device, rank)
    if not kernels >= REQUIRED:
        return None
    config = without_broken(config, spec, kernels)
    linear = TunedLinear(device, config.linear_backend)
    with startup.stage("weights"):
        decoder = load_model(
            folder,
            dtype=config.dtype,
            device=device,
            max_model_len=longest,
            load_format=config.load_format,
            kernels=kernels & MODEL_KERNELS,
            unquantized=linear,
            deterministic=config.deterministic,
        )
    if device.type == "cuda":
        with startup.stage("tuning"), torch.inference_mode():
            timed = tune(decoder, time_calls, measurements.section("linear"))
            measurements.remember("linear", timed)
    adapters, store = make_adapters(config, decoder, "adapters" in kernels)
    slots = batch_requests(config, device)
    tokens = batch_tokens(config, longest, slots, GPU_BATCH_TOKENS)
    with startup.stage("attention"), torch.inference_mode():
        make_attention = attention_maker(config, spec, dtype, device, longest, measurements, startup)
    measurements.save()
    compiled = grammars_of(folder, spec.vocab_size, spec.eos_token_ids, config.grammar_backend)
    grammars = GrammarRows(compiled, spec.vocab_size, device, restrict)
    model = ProcessorModel(folder, spec.vocab_size, slots, longest, device)
    processors = ProcessorRows(load_processors(config.logits_processors), model)
    with startup.stage("memory"):
        reserve = activation_bytes(
            config, decoder, grammars, processors, make_attention, slots, min(tokens, longest * slots), longest
        )
        plan = plan_cache(config, spec, longest, dtype, device, reserve + margin_bytes(device))
        report_others(device, decoder)
    with startup.stage("cache"):
        if config.kv_cache == "contiguous":
            slots = min(slots, plan.blocks)
        attention = make_attention(plan.blocks + 1, plan.block_size, plan.dtype)
        rows = DeviceRows(
            slots, plan.max_model_len, -(-plan.max_model_len // plan.block_size), device, scratch_block=plan.blocks
        )
    runner = DeviceRunner(
        decoder,
        attention,
        rows,
        plan.block_size,
        grammars,
        processors,
        config.cuda_graphs,
        config.shared_prefix_attention,
        adapters,
    )
    tokens = batch_tokens(config, plan.max_model_len, slots, GPU_BATCH_TOKENS)
    scheduler = make_scheduler(config, folder, plan, tokens, slots)
    depth = 2 if config.overlap else 1
    return (
        EngineCore(scheduler, InProcessExecutor(runner), depth, text_decoder(folder), store, grammars.prepare),
        spec,
        plan,
    )


def without_broken(config: EngineConfig, spec: ModelSpec, kernels: frozenset[str]) -> EngineConfig:
    """The configuration with PyTorch or cuBLAS in the place of kernels that do not work here or know the model not."""
    if "linear" not in kernels:
        config = dataclasses.replace(config, linear_backend="cublas")
    largest = max(layer.attention.head_dim for layer in spec.layers)
    if config.attention_backend == "auto" and ("attention" not in kernels or largest > LARGEST_HEAD):
        config = dataclasses.replace(config, attention_backend="torch_sdpa")
    return config


def report_others(device: torch.device, decoder: Decoder) -> None:
    """Say so if somebody else holds much of the card's memory: the KV cache is smaller for it."""
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    if others > OTHERS_BYTES:
        logger.warning(
            "others hold %.1f of the card's %.1f GB: the KV cache takes what is left of %.1f GB",
            others / GIGABYTE,
            total / GIGABYTE,
            free / GIGABYTE,
        )


MakeAttention = Callable[[int, int, torch.dtype], AttentionBackend[DeviceBatch]]
"""Makes the attention backend with a KV cache: blocks, block size, dtype."""


def attention_maker(
    config: EngineConfig,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    longest: int,
    measurements: Measurements,
    startup: Startup,
) -> MakeAttention:
    """Choose who attends. Raises ConfigError if the configured library cannot be used."""
    layers = [layer.attention for layer in spec.layers]
    if config.attention_backend == "torch_sdpa":
        from kvern.attention.torch_sdpa import TorchAttention

        return lambda blocks, block_size, dtype: TorchAttention(layers, blocks, block_size, dtype, device)
    cache_dtype = dtype if config.kv_cache_dtype == "auto" else getattr(torch, config.kv_cache_dtype)
    block_size = config.block_size if config.kv_cache == "paged" else longest
    shapes = Shapes(layers, block_size, dtype, cache_dtype, device, batch_requests(config, device) + 1, longest)
    phases, triton, table = choose(config, shapes, measurements)
    startup.report(table)
    return lambda blocks, block_size, dtype: PagedAttention(
        layers, blocks, block_size, dtype, device, phases, triton, config.deterministic
    )


def margin_bytes(device: torch.device) -> int:
    """Memory that stays free."""
    if device.type != "cuda":
        return MARGIN_BYTES
    return MARGIN_BYTES + int(MARGIN_SHARE * torch.cuda.get_device_properties(device).total_memory)


def activation_bytes(
    config: EngineConfig,
    decoder: Decoder,
    grammars: GrammarRows,
    processors: ProcessorRows,
    make_attention: MakeAttention,
    slots: int,
    tokens: int,
    longest: int,
) -> int:
    """What the largest steps take beside weights and cache: measured by running them, over a cache of one block.

    It also compiles and loads the kernels that serving needs.
    """
    device = decoder.build.device
    if device.type != "cuda":
        return 0
    length = min(longest - 1, tokens)
    requests = min(slots, -(-tokens // length))
    blocks = -(-longest // config.block_size)
    rows = DeviceRows(slots, longest, blocks, device, scratch_block=0)
    attention = make_attention(1, config.block_size, decoder.build.dtype)
    runner = DeviceRunner(decoder, attention, rows, config.block_size, grammars, processors, cuda_graphs=False)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    spec = RequestSpec("", PromptInput([0]), ResolvedParams(temperature=1.0, top_p=0.9), 1)
    joined = [NewRequest(slot, spec, spec.params, 0, [0], []) for slot in range(slots)]
    prompts = [ScheduledTokens(slot, 0, min(length, tokens - slot * length), 1) for slot in range(requests)]
    decodes = [ScheduledTokens(slot, 0, 1, 1) for slot in range(slots)]
    for step, scheduled in enumerate((prompts, decodes)):
        runner.execute(SchedulerOutput(step, joined=joined if step == 0 else [], scheduled=scheduled)).result()
    peak = torch.cuda.max_memory_allocated(device) - before
    del runner, attention, rows
    torch.cuda.empty_cache()
    return peak
