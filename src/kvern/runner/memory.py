"""The memory that a device has for keys and values, and the block tables of layers with a window."""

import gc
import logging
import math
from collections.abc import Iterable, Sequence

import torch

from kvern.attention.groups import LayerGroups, group_layers
from kvern.config import EngineConfig
from kvern.cpu.cores import available_memory
from kvern.device.chunked_memory import ChunkedMemory, blocks_of_a_piece
from kvern.device.mapped_memory import granularity
from kvern.runner.plan import ChangingCache, Layout, Plan
from kvern.spec.model import ModelSpec

logger = logging.getLogger("kvern")

GIGABYTE = 1e9

CPU_MEMORY_SHARE = 0.25
"""The share for keys and values of the memory that is available when the engine starts."""
CPU_CACHE_BYTES = 1 << 30
CPU_CACHE_TOKENS = 32768
"""A CPU's cache is no larger than the larger of these two: beyond, it seldom helps."""
CPU_STATES = 32
"""But for the states of so many requests, where a model has them."""
GPU_MEMORY_SHARE = 0.85
"""The share of free memory for keys and values, where nobody measured what steps take."""
OTHERS_BYTES = 2 << 30
"""Memory beside ours that is worth a word: the CUDA context itself takes half a gigabyte."""
MARGIN_BYTES = 512 << 20
MARGIN_SHARE = 0.02
"""The share of the card's memory that stays free for fragments, beside weights, activations, graphs and KV cache."""
GRAPH_BYTES = 1 << 20
"""The bytes that a driver takes for a captured graph, beside the activations that all graphs share."""
RING_BYTES = 2 << 30
"""The most memory in which pages for a tier are packed, on a GPU: what two steps compute of an 8B model."""
STAGE_BYTES, STAGES = 32 << 20, 2
"""Memory of a GPU to which threads of stores copy pages before these are unpacked, or one page if that is larger."""
STEPS_STAGE_BYTES = 128 << 20
"""Such memory for the thread that runs the steps: each fill costs it a launch and a call of the driver."""
CONTEXT_BYTES = 600 << 20
"""The bytes that a process takes of a card beside PyTorch: the CUDA context, kernels, workspaces of libraries."""


class DeviceMemory:
    """The memory of an engine's device, of which it may take what is free, or, of a GPU, a share of the whole.

    `processes`: so many take theirs of a CPU's memory.
    """

    def __init__(self, device: torch.device, share: float | None = None, processes: int = 1) -> None:
        self.device = device
        self.share = share
        self.processes = processes
        self.mapped = 0
        """Bytes that PyTorch does not count: what other GPUs write to, and what goes while the engine is asleep."""
        self.chunked: ChunkedMemory | None = None
        """The memory of KV caches that change while the engine runs, once there is a layout for them."""
        if device.type == "cuda" and torch.cuda.memory_reserved(device):
            gc.collect()  # engines of this process that ended hold theirs until then, and PyTorch what they gave back
            torch.cuda.empty_cache()
        self._held_before = torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
        if share is not None and device.type != "cuda":
            logger.warning("gpu_memory_share is %s and has no effect: the model runs on a CPU", share)

    def free_and_total(self) -> tuple[int, int]:
        """Bytes of the GPU that this engine may still take, and that there are in all."""
        free, total = torch.cuda.mem_get_info(self.device)
        return left_of_share(free, total, self.held, self.share), total

    @property
    def held(self) -> int:
        """Bytes of the GPU that this engine always has, beside its context."""
        own = torch.cuda.memory_reserved(self.device) - self._held_before + self.mapped
        return own + (0 if self.chunked is None else self.chunked.least_bytes)

    def divide(self, layout: Layout) -> None:
        """Have memory for KV caches in chunks from now on, if the layout says so."""
        if layout.unit:
            sizes = layout.blocks, layout.chunk, layout.least_blocks, layout.unit
            self.chunked = ChunkedMemory(self.device, *sizes)


def left_of_share(free: int, total: int, held: int, share: float | None) -> int:
    """Bytes that an engine may still take of a card with `free` of `total` bytes free, when it holds `held`."""
    return free if share is None else max(0, min(free, int(share * total) - held - CONTEXT_BYTES))


def bytes_of_token(spec: ModelSpec, dtype: torch.dtype, groups: LayerGroups | None = None) -> int:
    """Bytes of a token's keys and values over all layers, and of places in blocks that no layer has."""
    groups = groups or LayerGroups.one_table(spec.attentions)
    owners = (spec.attentions[owner] for owner in groups.owners)
    return sum(owner.stored * owner.width for owner in owners) * groups.blocks_of_column * dtype.itemsize


def bytes_of_draft(spec: ModelSpec, plan: Plan, groups: LayerGroups) -> int:
    """Bytes of a token's keys and values in a draft model's layers, which have all blocks of all block tables."""
    return bytes_of_token(spec, getattr(torch, plan.plain_cache_dtype)) * (1 + groups.window_tables)


def bytes_of_drafting(spec: ModelSpec, itemsize: int, rows: int, steps: int, drawn: int) -> int:
    """Bytes that a draft model takes on a GPU beside the model's steps, with activations of `itemsize` bytes.

    Either graphs of so many `steps`, each as large as one of the model's, and the scores of their `rows`, also as
    float32. Or, of `drawn` drafts, what each was drawn from and three times as much while they are verified, all of it
    float32.
    """
    if drawn:
        return 4 * 4 * drawn * spec.vocab_size
    return steps * GRAPH_BYTES + rows * spec.vocab_size * (itemsize + 4)


def bytes_of_reading(spec: ModelSpec, itemsize: int, graphs: Sequence[int]) -> int:
    """Bytes that a draft model takes for graphs that read so many tokens each, with activations of `itemsize` bytes.

    Of each token of the largest a layer has some states, and gates, ups and products of an MLP four times as wide.
    """
    return len(graphs) * GRAPH_BYTES + 16 * spec.hidden_size * itemsize * max(graphs, default=0)


def bytes_of_packed(plan: Plan, token_bytes: int, state_bytes: int) -> int:
    """Bytes of the ring in which a GPU packs pages for a tier: those of the tokens of two steps, and of two states.

    The pages of a step are packed before those of the one before have reached the host.
    """
    return max(state_bytes, min(RING_BYTES, 2 * (plan.max_batch_tokens * token_bytes + state_bytes)))


def bytes_of_state(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of a request's states over all layers, of a model in this dtype; 0 where there are none."""
    tensors = (tensor for mixer in spec.recurrent for tensor in mixer.states)
    return sum(math.prod(tensor.shape) * (4 if tensor.exact else dtype.itemsize) for tensor in tensors)


def bytes_noted(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes that all layers with states note of a draft before it is accepted, of a model in this dtype."""
    written = sum(math.prod(shape) for mixer in spec.recurrent for shape in mixer.written)
    return 4 * written + dtype.itemsize * sum(mixer.channels for mixer in spec.recurrent)


def cache_bytes(memory: DeviceMemory, token_bytes: int, reserved: int | None = None, state_bytes: int = 0) -> int:
    """Bytes that keys and values, and states, may take of the memory that is left.

    `reserved`: bytes that a GPU's steps will take besides; None: nobody measured what they take.
    """
    if memory.device.type == "cuda":
        free, total = memory.free_and_total()
        if reserved is None:
            return int(free * GPU_MEMORY_SHARE)
        return max(0, free - reserved - margin(memory.share, total))
    return host_cache_bytes(available_memory() // memory.processes, token_bytes, state_bytes)


def margin(share: float | None, total: int) -> int:
    """Bytes of a card of `total` bytes that an engine leaves free of its share."""
    return MARGIN_BYTES + int(MARGIN_SHARE * (share or 1) * total)


def changing_cache(
    memory: DeviceMemory, reserved: int, kinds: Iterable[tuple[ModelSpec, torch.dtype]], block_size: int
) -> ChangingCache | None:
    """The bounds of a GPU's cache that changes, of models with keys and values of these dtypes; None on a CPU.

    `reserved`: bytes that steps will take. What others have of the card now, they may give back.
    """
    if memory.device.type != "cuda":
        return None
    total = torch.cuda.mem_get_info(memory.device)[1]
    fixed = memory.held + CONTEXT_BYTES + reserved + margin(memory.share, total)
    sizes = {
        block_size * layer.kv_heads * layer.head_dim * dtype.itemsize
        for spec, dtype in kinds
        for layer in spec.attentions
    }
    unit = blocks_of_a_piece(granularity(memory.device), sizes)
    own = total if memory.share is None else int(memory.share * total)
    return ChangingCache(unit, fixed, max(0, own - fixed), max(0, total - fixed))


def host_cache_bytes(available: int, token_bytes: int, state_bytes: int = 0) -> int:
    """Bytes for keys and values, and states of requests, of a CPU with so much memory left."""
    most = max(CPU_CACHE_BYTES, CPU_CACHE_TOKENS * token_bytes) + CPU_STATES * state_bytes
    return min(int(available * CPU_MEMORY_SHARE), most)


def report_others(memory: DeviceMemory) -> None:
    """Say so if the KV cache is smaller because somebody else holds much of the card's memory."""
    if memory.device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(memory.device)
    others = total - free - torch.cuda.memory_reserved(memory.device) - memory.mapped
    if others > OTHERS_BYTES and memory.free_and_total()[0] == free:
        logger.warning(
            "others hold %.1f of the card's %.1f GB: the KV cache takes what is left of %.1f GB",
            others / GIGABYTE,
            total / GIGABYTE,
            free / GIGABYTE,
        )


def choose_groups(config: EngineConfig, spec: ModelSpec, plan: Plan, libraries: Iterable[str] = ()) -> LayerGroups:
    """Block tables of a model's layers, where `libraries` attend."""
    groups = group_layers(spec.attentions)
    if groups.window is None:
        return groups
    obstacles = {
        "windowed_kv_cache is off": config.windowed_kv_cache == "off",
        "the contiguous cache has one block for each sequence": config.kv_cache != "paged",
        "stages would divide the layers of a table": config.pipeline_parallel_size > 1,
        "states of recurrent layers are kept at other places": bool(spec.recurrent),
        "a draft model keeps all tokens": config.draft_model is not None and not groups.whole,
        "flashinfer plans for one block table": "flashinfer" in libraries,
        "its kernel does not work": plan.on_device and "windows" not in plan.kernels,
        f"no sequence is longer than the window of {groups.window}": plan.max_model_len <= groups.window,
    }
    reason = next((reason for reason, stands in obstacles.items() if stands), None)
    return groups if reason is None else LayerGroups.one_table(spec.attentions, reason)


def report_groups(groups: LayerGroups) -> list[str]:
    """Lines for the report of a start."""
    if groups.reason:
        return [f"layers with a window keep all tokens: {groups.reason}"]
    return [] if groups.window is None else [f"layers with a window of {groups.window} keep no more tokens than that"]
