"""Speed of the kernels of a model's layers on this GPU, compared with the card's limits."""

import logging
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from kvern.attention.texts import PackedTexts
from kvern.bench.offline import shown_config
from kvern.bench.record import Case, Record, figure, make_record
from kvern.config import EngineConfig
from kvern.device.device_batch import DeviceRows, build_device_batch
from kvern.device.text_batch import build_text_batch
from kvern.device.timing import time_calls
from kvern.errors import KvernError
from kvern.formats.choice import ROUTERS
from kvern.formats.gguf.header import BY_NAME
from kvern.formats.gguf.method import GgufFormat
from kvern.kernels import constraints, logprobs, sampling
from kvern.kernels.block_codes import BLOCKS
from kvern.layers.build import Build
from kvern.layers.linear_format import LinearFormat, LinearMethods, linear_methods
from kvern.layers.tuning import TIMED_LAYERS, bytes_of, timed_layers
from kvern.models.decoder import Decoder
from kvern.models.encoder import Encoder
from kvern.models.loader import fill_random
from kvern.request.request import PromptInput, RequestSpec
from kvern.request.sampling_params import ResolvedParams
from kvern.request.step import NewRequest, ScheduledTokens
from kvern.runner.dummy_steps import LONGEST, META, DummySteps, groups_of
from kvern.runner.loaded_model import Stored
from kvern.spec.mixers import AttentionSpec
from kvern.spec.model import ModelSpec

logger = logging.getLogger("kvern")

ROTATED_BYTES = 2 << 30
"""Like layers are timed in turn, up to so many bytes of weights, so that none is still in the L2 cache."""
STORED: Mapping[str, Mapping[str, Any]] = {
    "fp8_blocks": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "int4_zero": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "e2m1": {"quant_method": "mxfp4"},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
}
"""Formats of weights by their `quantization_config`."""
ONLINE = ("fp8", "int8", "int4")
"""Formats that plain weights become while they are loaded."""
CODES = (*ONLINE, *STORED, *BLOCKS)
"""The formats of weights that can be timed, whatever a model stores."""
STEPS: Mapping[str, tuple[tuple[int, int], ...]] = {
    **{f"{requests} x 1024 keys": ((1023, 1),) * requests for requests in (1, 32, 256)},
    "2 x 4096": ((0, 4096),) * 2,
    "16 x 512": ((0, 512),) * 16,
    "64 x 4 after 1000": ((1000, 4),) * 64,
    "19 after 26000": ((26000, 19),),
}
"""Steps by name: keys before, and tokens, of each request."""
TEXTS, TEXT_LENGTH = 8, 512
"""The texts of a step of an encoder."""
SAMPLED, LENGTH = 64, 64
"""Rows of a batch that sample, and the tokens before."""
ASKED = {
    "greedy": ResolvedParams(temperature=0.0),
    "filtered": ResolvedParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, logprobs=5),
    "typical": ResolvedParams(temperature=0.8, typical_p=0.7, top_p=0.95),
    "constrained": ResolvedParams(temperature=0.8, presence_penalty=0.5, repetition_penalty=1.2, logit_bias={1: 2.0}),
}
REPEATS = 5
"""Steps that are profiled."""


@dataclass(frozen=True)
class Measured:
    """A kernel and its shape, the seconds of a call, and the bytes and operations that it takes at least.

    Bytes and operations are 0 where they are not known.
    """

    kernel: str
    shape: str
    seconds: float
    bytes: float = 0
    operations: float = 0


def kernel_record(config: EngineConfig, timed: Sequence[Measured], ceilings: tuple[float, float]) -> Record:
    """Returns the record of times; a kernel that ran on a shape more than once has as many runs."""
    alike: dict[tuple[str, str], list[Measured]] = defaultdict(list)
    for found in timed:
        alike[found.kernel, found.shape].append(found)
    cases = [
        Case(
            f"{kernel}, {shape}",
            {"microseconds": figure([1e6 * item.seconds for item in items], "us", main=True)},
            {"bytes": items[0].bytes, "operations": items[0].operations},
        )
        for (kernel, shape), items in alike.items()
    ]
    bandwidth, rate = ceilings
    reached = {"bytes_per_second": bandwidth, "operations_per_second": rate}
    return make_record("kernels", config.model, cases, options=shown_config(config), conditions={"ceilings": reached})


def ceilings(device: torch.device) -> tuple[float, float]:
    """Measures the card's memory bandwidth in bytes/s and its bfloat16 matrix products in FLOP/s."""
    size = 8192
    numbers = torch.empty(1 << 30, dtype=torch.float32, device=device).normal_()
    read = time_calls([lambda: numbers.sum()] * 4)
    a, b = (torch.empty(size, size, dtype=torch.bfloat16, device=device).normal_() for _ in range(2))
    multiply = time_calls([lambda: a @ b] * 4)
    return numbers.numel() * 4 / read, 2 * size**3 / multiply


def methods_of(code: str, plain: LinearFormat) -> LinearMethods:
    """Weights in one of `CODES`; routers stay `plain`."""
    if code in ONLINE:
        return linear_methods({}, plain, code)
    if code in STORED:
        return linear_methods({"quantization_config": STORED[code]}, plain)
    layers = re.compile(r"^model\.layers\..*_proj$")
    return LinearMethods(plain, ((ROUTERS, plain), (layers, GgufFormat(BY_NAME[code]))))


def measured_kernels(
    config: EngineConfig, dtype: torch.dtype, model: Stored, codes: Sequence[str], device: torch.device
) -> Iterator[Measured]:
    """Times every way to multiply by a model's weights, and in each of `codes`, its attention, and its other kernels.

    The model has one layer of each kind, some times over. A format that does not hold weights of its shapes is left
    out.
    """
    kinds = tuple(dict.fromkeys(model.spec.layers))
    spec = replace(model.spec, layers=kinds)
    plain = model.methods.default
    if spec.encoder is not None:
        yield from _encoder_kernels(spec, dtype, device)
        return
    outline = Decoder(spec, Build(dtype, META, 1, linear=model.methods))
    copies = max(1, min(TIMED_LAYERS, ROTATED_BYTES // sum(bytes_of(layer) for layer in outline.layers)))
    stored = model._replace(spec=replace(spec, layers=kinds * copies))
    size = config.block_size
    most = max(sum(-(-(before + count) // size) for before, count in runs) for runs in STEPS.values())
    steps = DummySteps(config, dtype, stored, device, most)
    yield from _products(steps.decoder)
    for code in codes:
        coded = stored._replace(methods=methods_of(code, plain))
        try:
            decoder = DummySteps(config, dtype, coded, device).decoder
        except (KvernError, ValueError, RuntimeError):
            continue
        yield from _products(decoder, code)
    yield from _attention(steps, spec.attentions, config.block_size)
    yield from _sampling(spec.vocab_size, dtype, device)
    yield from _other_kernels({name: partial(steps.run, _scheduled(steps, name, size)) for name in STEPS})


def _products(model: nn.Module, code: str = "") -> Iterator[Measured]:
    """Every way of a model's linear layers and experts, for the numbers of rows that it may be chosen for."""
    for kind, alike in timed_layers(model).items():
        first, *_ = layers = alike[:TIMED_LAYERS]
        ways = [layer.candidates() for layer in layers]
        for rows, offered in ways[0].items():
            inputs = first.inputs(rows)
            for way in offered:
                try:
                    seconds = time_calls([found[rows][way](*inputs) for found in ways])
                except Exception as error:  # of a compiler, its launcher or the device: there is no common type
                    logger.warning("%s, %s rows: %s does not run here: %s", first.name, rows, way, error)
                    continue
                name = f"{code}, {way}" if code else str(way)
                yield Measured(name, f"{rows} rows, {kind}", seconds, *first.work(rows))


def _scheduled(steps: DummySteps, name: str, block_size: int) -> list[ScheduledTokens]:
    """One of `STEPS`, each of whose requests samples a token, over blocks that lie scattered."""
    runs = STEPS[name]
    counts = [-(-(before + count) // block_size) for before, count in runs]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    first = 0
    for slot, count in enumerate(counts):
        steps.rows.block_table[slot, :count].copy_(order[first : first + count])
        first += count
    return [ScheduledTokens(slot, before, count, 1) for slot, (before, count) in enumerate(runs)]


def _attention(steps: DummySteps, layers: Sequence[AttentionSpec], block_size: int) -> Iterator[Measured]:
    """Attention of each kind of layer that stores keys and values of heads."""
    for kind in dict.fromkeys(layer for layer in layers if layer.value_dim is None):
        alike = [index for index, layer in enumerate(layers) if layer == kind]
        for name, runs in STEPS.items():
            attend = steps.attention.plan(
                build_device_batch(steps.rows, _scheduled(steps, name, block_size), block_size)
            )
            cache = attend.cache(alike[0])
            tokens = sum(count for _, count in runs)
            query = torch.randn(tokens, kind.heads, kind.head_dim, device=cache.device).to(steps.dtype)
            seen = kind.window or LONGEST
            keys = sum(min(before + count, seen + count) for before, count in runs)
            pairs = sum(count * min(before + (count + 1) / 2, seen) for before, count in runs)
            moved = 2 * keys * kind.kv_heads * kind.head_dim * cache.element_size() + 2 * query.nbytes
            seconds = time_calls([partial(attend.over_cache, index, query) for index in alike])
            shape = f"{name}, {kind.heads} heads of {kind.head_dim}"
            yield Measured("attention", shape, seconds, moved, 4 * pairs * kind.heads * kind.head_dim)


def _sampling(vocab_size: int, dtype: torch.dtype, device: torch.device) -> Iterator[Measured]:
    """The choice of tokens by each of `ASKED`, constraints on it, and log-probabilities."""
    for count in (1, SAMPLED):
        slots = torch.arange(count, dtype=torch.int32, device=device)
        positions = torch.full((count,), LENGTH, dtype=torch.int64, device=device)
        logits = torch.randn(count, vocab_size, device=device).to(dtype)
        rows = {name: _rows_asking(params, count, device) for name, params in ASKED.items()}
        given = logits, slots, positions
        calls: dict[str, Callable[[], object]] = {
            f"sampling, {name}": partial(sampling.sample, logits, None, slots, positions, asking)
            for name, asking in rows.items()
        }
        calls["constraints"] = partial(constraints.change, *given, rows["constrained"], everything=False)
        reported = logprobs.empty(count, device)
        counts = rows["filtered"].logprobs
        calls["log-probabilities"] = partial(logprobs.logprobs, logits, slots, counts, positions, reported)
        for name, call in calls.items():
            yield Measured(name, f"{count} x {vocab_size}", time_calls([call] * 8), logits.nbytes)


def _rows_asking(params: ResolvedParams, count: int, device: torch.device) -> DeviceRows:
    """Rows with LENGTH tokens each, which all ask for the same."""
    rows = DeviceRows(count, LENGTH, 1, device, scratch_block=0)
    spec = RequestSpec("", PromptInput([0]), params, LENGTH // 2)
    rows.join([NewRequest(row, spec, params, row, list(range(LENGTH)), []) for row in range(count)])
    return rows


def _encoder_kernels(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Iterator[Measured]:
    """The kernels of a step of an encoder, whose weights PyTorch multiplies by."""
    assert spec.encoder is not None
    encoder = Encoder(spec, Build(dtype, device, LONGEST, groups_of(spec)))
    fill_random(encoder)
    encoder.finish()
    positions = spec.encoder.positions - spec.encoder.first_position if spec.encoder.positions else LONGEST
    prompts = [PromptInput([0] * min(TEXT_LENGTH, positions))] * TEXTS
    texts = build_text_batch(prompts, spec.encoder, device)

    def step() -> None:
        encoder.read(texts, PackedTexts(spec.attentions, dtype, texts))

    yield from _other_kernels({f"{TEXTS} texts of {len(prompts[0].token_ids)} tokens": step})


def _other_kernels(steps: Mapping[str, Callable[[], object]]) -> Iterator[Measured]:
    """The kernels of steps by their names, as PyTorch's profiler sees them."""
    for name, step in steps.items():
        step()  # compiles
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
            for _ in range(REPEATS):
                step()
            torch.cuda.synchronize()
        spent: dict[str, list[float]] = defaultdict(list)
        for event in profiler.events() or ():
            if event.device_type == DeviceType.CUDA:
                spent[event.name].append(event.device_time / 1e6)
        for kernel, seconds in spent.items():
            yield Measured(kernel, name, statistics.mean(seconds))
