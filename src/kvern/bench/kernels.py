"""What each kernel achieves on this GPU for a model's shapes, beside what the card does at most."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from kvern.device.timing import time_calls
from kvern.kernels.activation import ACTIVATIONS, gated_activation
from kvern.kernels.attention import decode_attention, decode_shape, prefill_attention, prefill_shape
from kvern.kernels.linear import matvec
from kvern.kernels.norm import add_rms_norm
from kvern.kernels.rotary import rotate_and_store
from kvern.kernels.sampling import sample
from kvern.layers.few_rows import matvec_shape
from kvern.model_spec import MlpSpec, ModelSpec, MoeSpec

ROTATED_BYTES = 256 << 20
"""Inputs are taken in turns from this much memory, so that none is still in the L2 cache."""
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Case:
    """One launch: bytes that it must move and operations that it must do; `make` gives one call on fresh inputs."""

    kernel: str
    shape: str
    bytes: float
    operations: float
    make: Callable[[], Callable[[], object]]


@dataclass(frozen=True)
class Measured:
    case: Case
    seconds: float

    @property
    def terabytes_per_second(self) -> float:
        return self.case.bytes / self.seconds / 1e12

    @property
    def teraflops(self) -> float:
        return self.case.operations / self.seconds / 1e12


def measure(case: Case) -> Measured:
    """Time a case over inputs that rotate through memory."""
    copies = max(1, min(16, int(ROTATED_BYTES // max(case.bytes, 1))))
    calls = [case.make() for _ in range(copies)]
    while len(calls) < 8:
        calls += calls
    return Measured(case, time_calls(calls))


def ceilings(device: torch.device) -> tuple[float, float]:
    """What the card reads at most, in TB/s, and multiplies in bfloat16, in TFLOP/s; both measured."""
    size = 8192
    numbers = torch.empty(1 << 30, dtype=torch.float32, device=device).normal_()
    read = time_calls([lambda: numbers.sum()] * 4)
    a, b = (torch.empty(size, size, dtype=torch.bfloat16, device=device).normal_() for _ in range(2))
    multiply = time_calls([lambda: a @ b] * 4)
    return numbers.numel() * 4 / read / 1e12, 2 * size**3 / multiply / 1e12


Make = Callable[..., torch.Tensor]


def cases(spec: ModelSpec, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Iterator[Case]:
    """The kernels of a decode step and of a prefill step, on the shapes of the model's first layer."""
    make = partial(torch.randn, dtype=dtype, device=device)
    for rows in (1, 64, 8192):
        yield from _row_cases(spec, rows, make, device, dtype.itemsize)
    yield from _product_cases(spec, make, dtype.itemsize)
    yield from _attention_cases(spec, make, device, dtype.itemsize)
    yield from _expert_cases(spec, make, dtype.itemsize)


def _row_cases(spec: ModelSpec, rows: int, make: Make, device: torch.device, size: int) -> Iterator[Case]:
    """What works on each row alone; `size` is that of a number in bytes."""
    hidden, layer = spec.hidden_size, spec.layers[0]
    attention, mlp = layer.attention, layer.mlp
    heads = (attention.heads + 2 * attention.kv_heads) * attention.head_dim
    moved = 4 * rows * hidden * size
    yield Case(
        "add + RMSNorm",
        f"{rows} x {hidden}",
        moved,
        0,
        partial(_add_norm, rows, hidden, make),
    )
    yield Case(
        "rotate and store",
        f"{rows} x {heads}",
        2 * rows * heads * size,
        0,
        partial(_rotate, spec, rows, make, device),
    )
    if isinstance(mlp, MlpSpec) and mlp.gated and mlp.activation in ACTIVATIONS:
        yield Case(
            "gated activation",
            f"{rows} x {mlp.width}",
            3 * rows * mlp.width * size,
            0,
            partial(_activate, rows, mlp, make),
        )
    if rows < 8192:
        yield Case(
            "sampling",
            f"{rows} x {spec.vocab_size}",
            rows * spec.vocab_size * size,
            0,
            partial(_sample, spec, rows, make, device),
        )


def _product_cases(spec: ModelSpec, make: Make, size: int) -> Iterator[Case]:
    hidden, layer = spec.hidden_size, spec.layers[0]
    attention, mlp = layer.attention, layer.mlp
    heads = (attention.heads + 2 * attention.kv_heads) * attention.head_dim
    products = [(heads, hidden), (hidden, attention.heads * attention.head_dim)]
    if isinstance(mlp, MlpSpec):
        products += [(2 * mlp.width, hidden), (hidden, mlp.width)]
    for outputs, inputs in products:
        yield Case(
            "matrix-vector product",
            f"{outputs} x {inputs}",
            outputs * inputs * size,
            2 * outputs * inputs,
            partial(_matvec, outputs, inputs, make),
        )


def _attention_cases(spec: ModelSpec, make: Make, device: torch.device, size: int) -> Iterator[Case]:
    attention = spec.layers[0].attention
    token_bytes = 2 * attention.kv_heads * attention.head_dim * size
    for requests, keys in ((1, 1024), (32, 1024), (256, 1024)):
        yield Case(
            "decode attention",
            f"{requests} x {keys} keys",
            requests * keys * token_bytes,
            0,
            partial(_decode, spec, requests, keys, make, device),
        )
    for requests, queries in ((2, 4096), (16, 512)):
        pairs = requests * queries * (queries + 1) / 2
        yield Case(
            "prefill attention",
            f"{requests} x {queries}",
            2 * requests * queries * attention.heads * attention.head_dim * size,
            4 * attention.heads * attention.head_dim * pairs,
            partial(_prefill, spec, requests, queries, make, device),
        )


def _expert_cases(spec: ModelSpec, make: Make, size: int) -> Iterator[Case]:
    hidden, mlp = spec.hidden_size, spec.layers[0].mlp
    if isinstance(mlp, MoeSpec):
        for tokens in (1, 32, 8192):
            touched = mlp.experts * (1 - (1 - mlp.top_k / mlp.experts) ** tokens)
            weights = 3 * mlp.width * hidden
            yield Case(
                "experts",
                f"{tokens} tokens",
                touched * weights * size,
                2 * tokens * mlp.top_k * weights,
                partial(_experts, spec, mlp, tokens, make),
            )


def _add_norm(rows: int, hidden: int, make: Make) -> Callable[[], object]:
    return partial(add_rms_norm, make(rows, hidden), make(rows, hidden), make(hidden), 1e-5)


def _activate(rows: int, mlp: MlpSpec, make: Make) -> Callable[[], object]:
    return partial(gated_activation, make(rows, 2 * mlp.width), mlp.activation)


def _matvec(outputs: int, inputs: int, make: Make) -> Callable[[], object]:
    return partial(matvec, make(1, inputs), make(outputs, inputs), None, matvec_shape(outputs, inputs))


def _rotate(spec: ModelSpec, rows: int, make: Make, device: torch.device) -> Callable[[], object]:
    layer = spec.layers[0]
    attention = layer.attention
    width = (attention.heads + 2 * attention.kv_heads) * attention.head_dim
    return partial(
        rotate_and_store,
        make(rows, width),
        torch.arange(rows, device=device),
        torch.arange(rows, device=device),
        None if layer.rope is None else make(rows, 2, 1, layer.rope.dim),
        make(2, -(-rows // BLOCK_SIZE), BLOCK_SIZE, attention.kv_heads, attention.head_dim),
        query_heads=attention.heads,
    )


def _sample(spec: ModelSpec, rows: int, make: Make, device: torch.device) -> Callable[[], object]:
    slots = torch.arange(rows, device=device)
    ones = torch.ones(rows, device=device)
    return partial(sample, make(rows, spec.vocab_size), slots, slots, ones, slots, ones, ones, slots, filtered=False)


def _paged(
    spec: ModelSpec, requests: int, keys: int, make: Make, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A cache, the block table of requests with `keys` keys each, scattered, and the rows' indices."""
    attention = spec.layers[0].attention
    blocks = -(-keys // BLOCK_SIZE)
    cache = make(2, requests * blocks, BLOCK_SIZE, attention.kv_heads, attention.head_dim)
    table = torch.randperm(requests * blocks, device=device).view(requests, blocks).int()
    return cache, table, torch.arange(requests, device=device, dtype=torch.int32)


def _decode(spec: ModelSpec, requests: int, keys: int, make: Make, device: torch.device) -> Callable[[], object]:
    attention = spec.layers[0].attention
    cache, table, slots = _paged(spec, requests, keys, make, device)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return partial(
        decode_attention,
        make(requests, attention.heads, attention.head_dim),
        cache,
        table,
        slots,
        torch.full_like(slots, keys - 1),
        torch.zeros(requests * attention.kv_heads, dtype=torch.int32, device=device),
        torch.empty(requests, attention.heads, attention.head_dim, dtype=torch.bfloat16, device=device),
        decode_shape(requests, attention.kv_heads, attention.head_dim, processors),
        scale=attention.scale,
    )


def _prefill(spec: ModelSpec, requests: int, queries: int, make: Make, device: torch.device) -> Callable[[], object]:
    attention = spec.layers[0].attention
    cache, table, slots = _paged(spec, requests, queries, make, device)
    shape = prefill_shape(attention.head_dim, queries >= 1024)
    firsts = range(0, queries, shape.queries)
    tiles = sorted(((first, request) for request in range(requests) for first in firsts), reverse=True)
    query = make(requests * queries, attention.heads, attention.head_dim)
    return partial(
        prefill_attention,
        query,
        cache,
        table,
        slots,
        torch.zeros_like(slots),
        slots * queries,
        torch.full_like(slots, queries),
        torch.tensor([request for _, request in tiles], dtype=torch.int32, device=device),
        torch.tensor([first for first, _ in tiles], dtype=torch.int32, device=device),
        torch.empty_like(query),
        shape,
        scale=attention.scale,
    )


def _experts(spec: ModelSpec, moe: MoeSpec, tokens: int, make: Make) -> Callable[[], object]:
    from kvern.kernels.moe import fused_experts, route

    gate_up = make(moe.experts, 2 * moe.width, spec.hidden_size)
    down = make(moe.experts, spec.hidden_size, moe.width)
    weights, chosen = route(make(tokens, moe.experts), moe.top_k, moe.renormalize, moe.routed_scale)
    return partial(fused_experts, make(tokens, spec.hidden_size), gate_up, down, weights, chosen, moe.activation)
