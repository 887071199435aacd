"""Makes an engine from a configuration: model, KV cache size, scheduler, runner."""

import functools
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kvern.adapters.bank import AdapterBank
from kvern.adapters.store import AdapterStore
from kvern.attention.torch_sdpa import TorchAttention
from kvern.cache.keys import model_identity
from kvern.cache.manager import KVCacheManager
from kvern.config import EngineConfig
from kvern.device.rows import BatchRows
from kvern.engine.beams import Decode
from kvern.engine.core import EngineCore
from kvern.engine.device import resolve_device
from kvern.engine.policy import POLICIES
from kvern.engine.scheduler import Scheduler, SchedulerLimits
from kvern.engine.startup import Startup
from kvern.errors import ConfigError
from kvern.model_spec import ModelSpec
from kvern.models.decoder import Decoder
from kvern.models.loader import load_model, read_config
from kvern.models.registry import spec_from_config
from kvern.sample.processors import ProcessorModel, load_processors
from kvern.structured.grammar import grammars_of
from kvern.structured.masks import GrammarRows
from kvern.tokenizer import Tokenizer
from kvern.worker.adapters import Adapters
from kvern.worker.executor import InProcessExecutor
from kvern.worker.processor_rows import ProcessorRows
from kvern.worker.runner import ModelRunner

logger = logging.getLogger("kvern")

CPU_MEMORY_SHARE = 0.25
"""Of the memory that is available when the engine starts, for keys and values."""
CPU_CACHE_BYTES = 1 << 30
CPU_CACHE_TOKENS = 32768
"""A CPU's cache is no larger than the larger of these two: beyond, it seldom helps."""
GPU_MEMORY_SHARE = 0.85
CPU_BATCH_REQUESTS = 256
GPU_BATCH_REQUESTS = 512
CPU_BATCH_TOKENS = 1024
GPU_BATCH_TOKENS = 8192


@dataclass(frozen=True)
class CachePlan:
    """How the KV cache is laid out: `blocks` of `block_size` tokens, `token_bytes` each over all layers."""

    max_model_len: int
    blocks: int
    block_size: int
    token_bytes: int
    dtype: torch.dtype


def build_core(
    config: EngineConfig, folder: Path, startup: Startup | None = None
) -> tuple[EngineCore, ModelSpec, CachePlan]:
    """Load the model in `folder` and wire the engine around it. Raises KvernError subclasses."""
    startup = startup or Startup()
    device = resolve_device(config)
    if device.type == "cuda" and config.triton_kernels:
        from kvern.engine.device_factory import build_device_core

        built = build_device_core(config, folder, device, startup)
        if built is not None:
            return built
    if device.type == "cpu":
        torch.set_num_threads(config.threads or available_cores())
    spec = spec_from_config(read_config(folder))
    longest = resolve_max_model_len(config, spec)
    with startup.stage("weights"):
        decoder = load_model(
            folder, dtype=config.dtype, device=device, max_model_len=longest, load_format=config.load_format
        )
    adapters, store = make_adapters(config, decoder, kernels=False)
    plan = plan_cache(config, spec, longest, decoder.build.dtype, device)
    slots = batch_requests(config, device)
    if config.kv_cache == "contiguous":
        slots = min(slots, plan.blocks)
    attention = TorchAttention(
        [layer.attention for layer in spec.layers], plan.blocks, plan.block_size, plan.dtype, device
    )
    rows = BatchRows(slots, plan.max_model_len, -(-plan.max_model_len // plan.block_size), device)
    default = CPU_BATCH_TOKENS if device.type == "cpu" else GPU_BATCH_TOKENS
    scheduler = make_scheduler(config, folder, plan, batch_tokens(config, plan.max_model_len, slots, default), slots)
    compiled = grammars_of(folder, spec.vocab_size, spec.eos_token_ids, config.grammar_backend)
    grammars = GrammarRows(compiled, spec.vocab_size, device)
    model = ProcessorModel(folder, spec.vocab_size, slots, plan.max_model_len, device)
    processors = ProcessorRows(load_processors(config.logits_processors), model)
    runner = ModelRunner(decoder, attention, rows, plan.block_size, grammars, processors, adapters)
    return (
        EngineCore(
            scheduler, InProcessExecutor(runner), decode=text_decoder(folder), store=store, prepare=grammars.prepare
        ),
        spec,
        plan,
    )


def make_adapters(
    config: EngineConfig, decoder: Decoder, kernels: bool
) -> tuple[Adapters, AdapterStore] | tuple[None, None]:
    """Places for adapters in the decoder, and where their weights wait for one; None if there can be none."""
    if not config.adapter_slots:
        return None, None
    bank = AdapterBank(decoder, config.adapter_slots, config.max_adapter_rank, kernels)
    pinned = decoder.build.device.type == "cuda"
    store = AdapterStore(decoder.spec, bank.targets, config.max_adapter_rank, decoder.build.dtype, pinned)
    return Adapters(bank, store), store


def text_decoder(folder: Path) -> Decode:
    """Makes texts of a model's tokens; the tokenizer is loaded at first use."""

    @functools.cache
    def tokenizer() -> Tokenizer:
        return Tokenizer(folder)

    def decode(token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        known = tokenizer()
        return known.decode(token_ids, skip_special_tokens) if known.available else ""

    return decode


def batch_requests(config: EngineConfig, device: torch.device) -> int:
    """Requests that may run at the same time: as many as one step may have tokens, if only tokens are limited."""
    default = CPU_BATCH_REQUESTS if device.type == "cpu" else GPU_BATCH_REQUESTS
    return config.max_batch_requests or min(default, config.max_batch_tokens or default)


def batch_tokens(config: EngineConfig, max_model_len: int, slots: int, default: int) -> int:
    """Tokens of one step at most: a token of each request must fit, and a whole prompt if it cannot be split."""
    tokens = max(config.max_batch_tokens or default, slots)
    return tokens if config.chunked_prefill else max(tokens, max_model_len)


def make_scheduler(config: EngineConfig, folder: Path, plan: CachePlan, tokens: int, slots: int) -> Scheduler:
    """The scheduler over a KV cache of this plan, for the model in `folder`."""
    limits = SchedulerLimits(tokens, slots, config.aging_steps, config.chunked_prefill, config.batching == "continuous")
    layout = (config.load_format, config.dtype, str(plan.dtype), plan.block_size)
    cache = KVCacheManager(plan.blocks, plan.block_size, config.prefix_cache, model_identity(folder, *layout))
    return Scheduler(limits, cache, POLICIES[config.policy], config.adapter_slots)


def resolve_max_model_len(config: EngineConfig, spec: ModelSpec) -> int:
    """The longest sequence: the option, which the model's own context bounds."""
    if config.max_model_len is not None and config.max_model_len > spec.max_position_embeddings:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, above the model's {spec.max_position_embeddings}: lower it"
        )
    return config.max_model_len or spec.max_position_embeddings


def plan_cache(
    config: EngineConfig,
    spec: ModelSpec,
    longest: int,
    model_dtype: torch.dtype,
    device: torch.device,
    reserve: int = 0,
) -> CachePlan:
    """Size the KV cache: what the batch can use, as far as the free memory, less `reserve` bytes, goes.

    Raises ConfigError when the memory, or `kv_cache_tokens`, cannot hold one sequence of `max_model_len`.
    """
    dtype = torch.float32 if device.type == "cpu" and model_dtype == torch.float16 else model_dtype
    if config.kv_cache_dtype != "auto":
        dtype = getattr(torch, config.kv_cache_dtype)
    token_bytes = sum(2 * layer.attention.kv_heads * layer.attention.head_dim for layer in spec.layers) * dtype.itemsize
    tokens = config.kv_cache_tokens
    if tokens is None:
        tokens = min(longest * batch_requests(config, device), free_cache_tokens(device, token_bytes, reserve))
    if 0 < tokens < longest and config.max_model_len is None:
        logger.warning("max_model_len is %d, not the model's %d: the KV cache has no room for more", tokens, longest)
        longest = tokens
    block_size = config.block_size if config.kv_cache == "paged" else longest
    blocks = -(-tokens // block_size) if config.kv_cache == "paged" else tokens // max(block_size, 1)
    if tokens < longest or not blocks:
        raise ConfigError(
            f"the KV cache has room for {tokens} tokens ({tokens * token_bytes / 2**20:.0f} MiB), below max_model_len "
            f"{longest}: raise kv_cache_tokens, free memory, or lower max_model_len"
        )
    return CachePlan(longest, blocks, block_size, token_bytes, dtype)


def free_cache_tokens(device: torch.device, token_bytes: int, reserve: int = 0) -> int:
    """Tokens that the KV cache may hold in the memory that is free, `reserve` bytes of which a GPU keeps."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return max(0, free - (reserve or int(free * (1 - GPU_MEMORY_SHARE)))) // token_bytes
    return min(
        int(available_memory() * CPU_MEMORY_SHARE) // token_bytes, max(CPU_CACHE_BYTES // token_bytes, CPU_CACHE_TOKENS)
    )


def available_cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory() -> int:
    """Bytes of host memory that can be had without swapping; half of all where the system does not tell."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
