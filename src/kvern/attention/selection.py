"""The choice of attention libraries on this GPU: each is checked and timed on the model's shapes, and remembered.

An optional library that is not installed, does not build, or answers wrongly is passed over with the reason. PyTorch's
own attention is timed, too, on all cards but that on which the tiles of kvern's kernels were chosen. Without memory to
time anything kvern's kernels attend.
"""

import importlib.metadata
import importlib.util
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING

import torch

from kvern.attention.base import AttentionKernels, OwnKernels, PlannedAttention
from kvern.attention.eight_bit import LARGEST_CODE
from kvern.attention.expanded import ExpandedAttention
from kvern.attention.gathered import GatheredKernels
from kvern.attention.latent import LatentKernels
from kvern.attention.paged import Phases
from kvern.attention.triton import TritonKernels, cached_layer
from kvern.config import EngineConfig
from kvern.device.device_batch import Queries
from kvern.device.measurements import Measurements
from kvern.device.timing import time_launches
from kvern.errors import ConfigError
from kvern.kernels.launch import architecture
from kvern.spec.mixers import AttentionSpec

if TYPE_CHECKING:
    from kvern.attention.hopper import HopperPrefill

logger = logging.getLogger("kvern")

TOLERANCE = 0.02
"""The error of 16-bit numbers in one attention, as a share of the largest entry."""
PACKAGES = {"flashinfer": "flashinfer-python", "flash_attn": "flash-attn-4"}
MODULES = {"flashinfer": "flashinfer", "flash_attn": "flash_attn.cute"}
GATHERED = "torch"
TILED = 90
"""The `architecture` on which tiles of kvern's kernels were chosen."""
PHASES: Mapping[str, tuple[str, list[tuple[int, int]]]] = {
    "decode, short": ("decode", [(511, 1)] * 64),
    "decode, long": ("decode", [(8191, 1)] * 64),
    "prefill, short": ("short_prefill", [(0, 512)] * 16),
    "prefill, long": ("long_prefill", [(0, 4096)] * 2),
    "prefill, mixed, new": ("mixed", [(0, 2048)] * 2),
    "prefill, mixed": ("mixed", [(2048, 2048)] * 2),
}
"""The timed steps: the phase, and first position and number of tokens of each request."""
SHARE = 4
"""A timed step has as many of its requests as fit in this part of the free memory, one at least."""


@dataclass(frozen=True)
class Shapes:
    """The layers and options that attention is needed for."""

    layers: Sequence[AttentionSpec]
    block_size: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    device: torch.device
    max_requests: int
    longest: int
    hopper: bool = False
    """The kernels for Hopper work here."""


@dataclass(frozen=True)
class AttentionChoice:
    """The name of the library of each phase, of `libraries`, which all work here; and lines of the measurements."""

    phases: dict[str, str]
    libraries: Mapping[str, AttentionKernels]
    triton: OwnKernels
    table: Sequence[str] = ()


def choose(
    asked: str, config: EngineConfig, shapes: Shapes, measurements: Measurements, free_bytes: int
) -> AttentionChoice:
    """The choice: the library `asked` for, or for "auto" the fastest. Raises ConfigError if it cannot be used.

    `free_bytes` of the device's memory are left for what is timed.
    """
    hopper = None if config.deterministic else _hopper(shapes)
    triton = _own(shapes, config.deterministic, hopper)
    if asked in PACKAGES:
        return AttentionChoice(
            dict.fromkeys(_phases(), asked), {asked: _load(asked, shapes, triton), "triton": triton}, triton
        )
    only = AttentionChoice(dict.fromkeys(_phases(), "triton"), {"triton": triton}, triton)
    card = architecture(shapes.device)
    if asked == "triton" or config.deterministic or card == 0 or shapes.cache_dtype in LARGEST_CODE:
        return only
    if any(layer.value_dim is not None for layer in shapes.layers):
        return only
    installed = {name: _version(name) for name in PACKAGES if _installed(name)}
    if card != TILED and _unknown(GATHERED, shapes) is None:
        installed[GATHERED] = torch.__version__
    if not installed:
        return only
    key = f"{shapes.layers[0]} {shapes.dtype} {shapes.block_size} {config.cuda_graphs} {hopper is not None} {installed}"
    known = measurements.section("attention").get(key)
    candidates: dict[str, AttentionKernels] = {"triton": triton}
    for name in installed:
        if known is None or name in known.values():
            try:
                candidates[name] = _load(name, shapes, triton)
            except ConfigError as error:
                logger.warning("%s", error)
    if known is not None and set(known.values()) <= set(candidates):
        return AttentionChoice(known, candidates, triton)
    able = _able(candidates, config.cuda_graphs)
    seconds = _seconds(candidates, able, shapes, free_bytes)
    if seconds is None:
        torch.cuda.empty_cache()
        logger.warning(
            "%.1f GB of free GPU memory are too little to time who attends: kvern's kernels do until a start has more",
            free_bytes / 1e9,
        )
        return only
    chosen = _fastest(seconds, able)
    if set(candidates) == {"triton", *installed}:
        measurements.remember("attention", {key: chosen})
    return AttentionChoice(chosen, candidates, triton, _table(seconds, chosen))


def own_attention(shapes: Shapes, config: EngineConfig) -> OwnKernels:
    """kvern's own kernels for these shapes."""
    return _own(shapes, config.deterministic, None if config.deterministic else _hopper(shapes))


def _own(shapes: Shapes, deterministic: bool, hopper: "HopperPrefill | None") -> OwnKernels:
    """The kernels for a model all or none of whose layers attend to latents."""
    layers, device = shapes.layers, shapes.device
    if any(layer.value_dim is not None for layer in layers):
        return LatentKernels(layers, device, shapes.max_requests, _expanding(shapes))
    return TritonKernels(layers, device, shapes.max_requests, deterministic, shapes.cache_dtype, hopper)


def _expanding(shapes: Shapes) -> ExpandedAttention | None:
    """The kernels that expand latents, if those of all layers are alike and kernels know such heads."""
    kinds = {layer.expanded for layer in shapes.layers}
    kind = kinds.pop()
    if kinds or kind is None:
        return None
    is_hopper = False
    if shapes.hopper:
        from kvern.attention.hopper import hopper_fits

        is_hopper = hopper_fits(kind.head_dim, shapes.block_size, shapes.dtype)
    return ExpandedAttention(kind, shapes.device, shapes.dtype, shapes.block_size, shapes.longest, is_hopper)


def _hopper(shapes: Shapes) -> "HopperPrefill | None":
    """The kernel for Hopper, if it works here and knows some of the layers."""
    if not shapes.hopper:
        return None
    if shapes.cache_dtype != shapes.dtype and shapes.cache_dtype not in LARGEST_CODE:
        return None
    from kvern.attention.hopper import HopperPrefill, hopper_fits

    heads = [layer.head_dim for layer in shapes.layers]
    fits = {index for index, size in enumerate(heads) if hopper_fits(size, shapes.block_size, shapes.dtype)}
    if not fits:
        return None
    return HopperPrefill(shapes.layers, shapes.device, shapes.block_size, fits, shapes.cache_dtype)


def _phases() -> list[str]:
    return [item.name for item in fields(Phases)]


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(MODULES[name]) is not None
    except ImportError:
        return False


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(PACKAGES[name])
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _load(name: str, shapes: Shapes, own: OwnKernels) -> AttentionKernels:
    """Import a library, build its kernels and check their answers. Raises ConfigError with the reason."""
    if name != GATHERED and not _installed(name):
        raise ConfigError(
            f"attention_backend {name} is not installed: pip install {PACKAGES[name]}, or leave attention_backend auto"
        )
    problem = _unknown(name, shapes)
    if problem is None:
        try:
            kernels = _make(name, shapes, own)
            problem = next(
                filter(None, (_check(kernels, shapes, layer) for layer in _kinds(shapes.layers).values())), None
            )
        except Exception as error:  # whatever an optional library raises: kvern runs without it
            reason = str(error).strip().splitlines() or [""]
            problem = f"{type(error).__name__}: {reason[-1] if 'nvcc' in reason[-1] else reason[0]}"
        if problem is None:
            return kernels
    raise ConfigError(f"attention_backend {name} cannot be used here: {problem}")


def _make(name: str, shapes: Shapes, own: OwnKernels) -> AttentionKernels:
    if name == GATHERED:
        return GatheredKernels(shapes.layers, own)
    if name == "flashinfer":
        from kvern.attention.flashinfer import FlashInferKernels

        return FlashInferKernels(shapes.layers, shapes.block_size, shapes.dtype, shapes.device)
    from kvern.attention.flash_attn import FlashAttnKernels

    return FlashAttnKernels(shapes.layers)


def _unknown(name: str, shapes: Shapes) -> str | None:
    """The reason why a library cannot do what is needed; None: it can."""
    if any(layer.sinks for layer in shapes.layers):
        return f"kvern has no attention sinks through {name}, and the model has them"
    if any(layer.value_dim is not None for layer in shapes.layers):
        return f"kvern has no latent attention through {name}, and the model has it"
    if name == GATHERED and any(layer.softcap is not None for layer in shapes.layers):
        return "PyTorch's attention has no softcap, and the model has one"
    if name == GATHERED and any(layer.window is not None for layer in shapes.layers):
        return "PyTorch's attention needs a mask for a window, and the model has one"
    if name != GATHERED and shapes.dtype not in (torch.bfloat16, torch.float16):
        return f"{name} computes in 16 bits only, and dtype is {shapes.dtype}"
    if shapes.cache_dtype != shapes.dtype:
        return f"{name} reads a cache of the model's dtype only, and kv_cache_dtype is {shapes.cache_dtype}"
    return None


def _kinds(layers: Sequence[AttentionSpec]) -> dict[AttentionSpec, int]:
    """Each kind of attention, with the first layer that has it."""
    return {layer: index for index, layer in reversed(list(enumerate(layers)))}


def make_queries(
    requests: Sequence[tuple[int, int]], shapes: Shapes, layer: AttentionSpec
) -> tuple[Queries, torch.Tensor, torch.Tensor]:
    """Requests with these first positions and numbers of tokens, their queries, and a cache with scattered blocks.

    Behind a context its last block holds NaN: whoever had the block before left what is there.
    """
    blocks = [-(-(start + count) // shapes.block_size) for start, count in requests]
    generator = torch.Generator().manual_seed(len(requests))
    order = torch.randperm(sum(blocks), generator=generator)
    table = torch.zeros(len(requests), max(blocks), dtype=torch.int32)
    for row, (first, count) in enumerate(zip(itertools.accumulate(blocks, initial=0), blocks, strict=False)):
        table[row, :count] = order[first : first + count]
    counts = [count for _, count in requests]
    firsts = list(itertools.accumulate(counts, initial=0))
    rows = [range(len(requests)), [start for start, _ in requests], firsts[:-1], counts]
    slots, starts, first_tokens, lengths = (
        torch.tensor(list(row), dtype=torch.int32, device=shapes.device) for row in rows
    )
    queries = Queries(
        slots=list(range(len(requests))),
        starts=[start for start, _ in requests],
        counts=counts,
        block_table=table.to(shapes.device),
        device_slots=slots,
        device_starts=starts,
        query_start_loc=first_tokens,
        device_counts=lengths,
    )

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=shapes.dtype, device=shapes.device)

    cache = random(2, sum(blocks), shapes.block_size, layer.kv_heads, layer.head_dim)
    for row, (start, count), used in zip(table, requests, blocks, strict=True):
        cache[:, row[used - 1], start + count - (used - 1) * shapes.block_size :] = float("nan")
    return queries, random(firsts[-1], layer.heads, layer.head_dim), cache


def _check(kernels: AttentionKernels, shapes: Shapes, index: int) -> str | None:
    """The error of the answers for the layer of this index; None: they are right."""
    layer = shapes.layers[index]
    for plan, requests in (
        (kernels.decode, [(0, 1), (77, 1), (290, 1)]),
        (kernels.prefill, [(0, 70), (131, 33)]),
        (kernels.prefill, [(0, 70), (0, 33)]),
    ):
        queries, query, cache = make_queries(requests, shapes, layer)
        out = torch.full_like(query, float("nan"))
        plan(queries)(index, query, cached_layer(layer, cache), out)
        expected = reference_attention(queries, query, cache, layer)
        error = ((out.float() - expected).abs().max() / expected.abs().max()).item()
        if not error < TOLERANCE:
            return f"its answers for {layer} are off by {error:.2g} of the largest entry, more than {TOLERANCE}"
    return None


def reference_attention(
    queries: Queries, query: torch.Tensor, cache: torch.Tensor, layer: AttentionSpec
) -> torch.Tensor:
    """The expected answers, computed in float32 and in the simplest way."""
    parts = []
    for slot, start, tokens in zip(
        queries.slots, queries.starts, torch.split(query, list(queries.counts)), strict=True
    ):
        end = start + len(tokens)
        keys = cache[:, queries.block_table[slot].long()].float().flatten(1, 2)[:, :end]
        key, value = keys.repeat_interleave(layer.heads // layer.kv_heads, 2)
        scores = torch.einsum("qhd,khd->hqk", tokens.float(), key) * layer.scale
        if layer.softcap is not None:
            scores = layer.softcap * (scores / layer.softcap).tanh()
        position = torch.arange(start, end, device=query.device)[:, None]
        other = torch.arange(end, device=query.device)[None]
        hidden = other > position
        if layer.window is not None:
            hidden |= other <= position - layer.window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        parts.append(torch.einsum("hqk,khd->qhd", weights, value))
    return torch.cat(parts)


def _able(candidates: Mapping[str, AttentionKernels], cuda_graphs: bool) -> dict[str, list[str]]:
    """The candidates of each phase: for decodes those that can be captured if there are graphs, and not PyTorch."""
    able = {phase: list(candidates) for phase in _phases()}
    able["decode"] = [
        name for name, item in candidates.items() if name != GATHERED and (item.captures or not cuda_graphs)
    ]
    return able


def _seconds(
    candidates: Mapping[str, AttentionKernels], able: Mapping[str, Sequence[str]], shapes: Shapes, free_bytes: int
) -> dict[str, dict[str, float]] | None:
    """Seconds of one layer's attention, by who attends and what is timed: where there is a choice. None: no memory."""
    seconds: dict[str, dict[str, float]] = {name: {} for name in candidates}
    try:
        for case, (phase, requests) in PHASES.items():
            for name in able[phase] if len(able[phase]) > 1 else ():
                kernels = candidates[name]
                plan = kernels.decode if phase == "decode" else kernels.prefill
                seconds[name][case] = _time(plan, requests, shapes, free_bytes)
    except torch.OutOfMemoryError:
        return None
    return seconds


def _time(
    plan: Callable[[Queries], PlannedAttention],
    requests: Sequence[tuple[int, int]],
    shapes: Shapes,
    free_bytes: int,
) -> float:
    layer = shapes.layers[0]
    queries, query, cache = make_queries(_fitting(requests, shapes, layer, free_bytes // SHARE), shapes, layer)
    out = torch.empty_like(query)
    return time_launches(partial(plan(queries), 0, query, cached_layer(layer, cache), out))


def _fitting(
    requests: Sequence[tuple[int, int]], shapes: Shapes, layer: AttentionSpec, room: int
) -> list[tuple[int, int]]:
    """Returns the requests, cut to the longest sequence, whose tensors fit into `room` bytes; one at least."""
    fitting: list[tuple[int, int]] = []
    for start, count in requests[: shapes.max_requests]:
        first = min(start, shapes.longest - 1)
        tokens = min(count, shapes.longest - first)
        cached = -(-(first + tokens) // shapes.block_size) * shapes.block_size
        numbers = 2 * cached * layer.kv_heads + 2 * tokens * layer.heads  # keys and values, queries and answers
        room -= numbers * layer.head_dim * shapes.dtype.itemsize
        if room < 0 and fitting:
            break
        fitting.append((first, tokens))
    return fitting


def _fastest(seconds: Mapping[str, Mapping[str, float]], able: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The best for each phase of those that are able to."""
    chosen = {}
    for phase, names in able.items():
        cases = [case for case, (of, _) in PHASES.items() if of == phase and case in seconds[names[0]]]
        chosen[phase] = min(names, key=lambda name: sum(seconds[name][case] for case in cases))
    return chosen


def _table(seconds: Mapping[str, Mapping[str, float]], chosen: Mapping[str, str]) -> list[str]:
    """Lines of the measurements; none if nobody had another beside it."""
    lines = ["attention, us a layer  " + "".join(f"{name:>12}" for name in seconds) + "   chosen"]
    for case, (phase, _) in PHASES.items():
        times = [f"{1e6 * of[case]:12.1f}" if case in of else f"{'-':>12}" for of in seconds.values()]
        if any(case in of for of in seconds.values()):
            lines.append(f"  {case:<21}{''.join(times)}   {chosen[phase]}")
    return lines if lines[1:] else []
