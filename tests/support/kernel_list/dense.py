"""Norms, rotation, activations, products of few rows, and what adapters add."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from kvern.attention.eight_bit import codes_of
from kvern.kernels import adapters
from kvern.kernels.activation import ACTIVATIONS, gated_activation
from kvern.kernels.adapted_product import adapted_product
from kvern.kernels.linear import MatmulShape, MatvecShape, matvec, small_matmul
from kvern.kernels.norm import add_rms_norm, rms_norm
from kvern.kernels.rotary import rotate_and_store, rotate_queries
from kvern.layers.fused_adapters import SHAPES, adapted_shape, joins
from kvern.layers.linear_method import LinearShape
from kvern.layers.tuned_linear import Shape, candidates_of, matvec_shape
from kvern.spec.mixers import LatentAttentionSpec
from kvern.spec.model import LayerSpec, MlpSpec, ModelSpec, MoeSpec
from tests.support.kernel_list.entry import (
    ALONE_PRODUCT,
    Call,
    Inputs,
    Joined,
    Kernel,
    linear_shapes,
    multiplied,
    scored,
)

ROWS = 64
FEW_OUTPUTS = 256
"""Of a product that stands for others: how many there are changes nothing but whether rows of them are aligned."""
TIMED_ROWS = (1, 64, 8192)
Sizes = Iterator[tuple[Any, ...]]
ACTIVATION: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}
"""What kernels call by these names."""


def gated_mlps(spec: ModelSpec) -> list[MlpSpec]:
    """Those that a kernel can activate."""
    mlps = dict.fromkeys(layer.mlp for layer in spec.layers if isinstance(layer.mlp, MlpSpec))
    return [mlp for mlp in mlps if mlp.gated and mlp.activation in ACTIVATIONS]


def _gain(spec: ModelSpec, inputs: Inputs) -> torch.Tensor:
    return inputs.numbers(spec.hidden_size, dtype=torch.float32 if spec.norm.offset else None)


def normed(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight.double()


def _norm(spec: ModelSpec, inputs: Inputs, rows: int, width: int) -> Call:
    x, weight = inputs.numbers(rows, width), inputs.numbers(width, dtype=torch.float32 if spec.norm.offset else None)
    launch = partial(rms_norm, x, weight, 1e-6)
    return Call(f"{rows} x {width}", launch, lambda: normed(x, weight, 1e-6), 2 * x.numel() * x.element_size())


def _add_norm(spec: ModelSpec, inputs: Inputs, rows: int) -> Call:
    x, update = (inputs.numbers(rows, spec.hidden_size) for _ in range(2))
    weight = _gain(spec, inputs)

    def reference() -> tuple[torch.Tensor, torch.Tensor]:
        total = x.double() + update.double()
        return normed(total, weight, 1e-6), total

    moved = 4 * rows * spec.hidden_size * x.element_size()
    return Call(f"{rows} x {spec.hidden_size}", lambda: (add_rms_norm(x, update, weight, 1e-6), x), reference, moved)


def _norm_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    if spec.norm.kind == "rms":
        yield ROWS, spec.hidden_size
        if spec.additions.per_layer is not None:
            yield ROWS, spec.additions.per_layer.width
        mixers = (layer.mixer for layer in spec.layers)
        asked = (mixer.q_lora_rank for mixer in mixers if isinstance(mixer, LatentAttentionSpec))
        yield from ((ROWS, width) for width in dict.fromkeys(asked) if width is not None)


def _add_norm_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    if spec.norm.kind == "rms":
        yield (ROWS,)


def _add_norm_timed(spec: ModelSpec, inputs: Inputs) -> Sizes:
    if spec.norm.kind == "rms":
        yield from ((rows,) for rows in TIMED_ROWS)


def rotation_table(inputs: Inputs, tokens: int, dim: int, interleaved: bool) -> torch.Tensor:
    """Cosines and signed sines [tokens, 2, 1, dim] of some angles."""
    angles = inputs.numbers(tokens, dim // 2, dtype=torch.float32)
    cosine, sine = angles.cos(), angles.sin()
    if interleaved:
        both = cosine.repeat_interleave(2, -1), torch.stack((-sine, sine), -1).flatten(-2)
    else:
        both = torch.cat((cosine, cosine), -1), torch.cat((-sine, sine), -1)
    return torch.stack(both, 1).unsqueeze(2).to(inputs.dtype)


def turned(x: torch.Tensor, table: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """`x [T, heads, head_dim]` with the first entries of each head turned by `table [T, 2, 1, dim]`."""
    dim = table.shape[-1]
    cosine, sine = table.double().unbind(1)
    pairs = x[..., :dim].reshape(*x.shape[:-1], *((-1, 2) if interleaved else (2, -1)))
    swapped = pairs.flip(-1 if interleaved else -2).flatten(-2)
    return torch.cat((x[..., :dim] * cosine + swapped * sine, x[..., dim:]), -1)


def _rotate(spec: ModelSpec, inputs: Inputs, layer: LayerSpec, tokens: int) -> Call:
    attention, rope = layer.attention, layer.rope
    heads = attention.heads
    kv_heads = attention.kv_heads
    head_dim = attention.head_dim
    width = (heads + (1 if attention.keys_are_values else 2) * kv_heads) * head_dim
    qkv = inputs.numbers(tokens, width)
    blocks = -(-tokens // inputs.block_size)
    cache, scales = inputs.cache(inputs.stored_dtype, 2, blocks, inputs.block_size, kv_heads, head_dim)
    positions = inputs.integers(range(tokens), torch.int64)
    places = inputs.permutation(tokens, torch.int64)
    interleaved = rope is not None and rope.interleaved
    table = None if rope is None else rotation_table(inputs, tokens, rope.dim, interleaved)
    weight, norm_values = None, False
    if spec.query_key_norm is not None:
        weight = inputs.numbers(heads + kv_heads, head_dim, dtype=torch.float32)
        norm_values = spec.query_key_norm.values

    def launch() -> tuple[torch.Tensor, torch.Tensor]:
        query = rotate_and_store(
            qkv,
            positions,
            places,
            table,
            cache,
            query_heads=heads,
            interleaved=interleaved,
            norm_weight=weight,
            epsilon=1e-6,
            norm_values=norm_values,
            keys_are_values=attention.keys_are_values,
            scales=scales,
        )
        return query, cache

    def reference() -> tuple[torch.Tensor, torch.Tensor]:
        parts = qkv.double().view(tokens, -1, head_dim)
        known, value = parts[:, : heads + kv_heads], parts[:, -kv_heads:]
        value = normed(value, torch.ones(()), 1e-6) if norm_values else value
        known = known if weight is None else normed(known, weight, 1e-6)
        known = known if table is None else turned(known, table, interleaved)
        expected = cache.double()
        stored = [known[:, heads:], value]
        if scales is not None:
            stored = [codes_of(*kind, cache.dtype).double() for kind in zip(stored, scales, strict=True)]
        expected.flatten(1, 2)[:, places] = torch.stack(stored)
        return known[:, :heads], expected

    return Call(f"{tokens} x {width}", launch, reference, 2 * qkv.numel() * qkv.element_size())


def _rotate_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    storing = (layer for layer in dict.fromkeys(spec.attending) if layer.attention.cache_of is None)
    yield from ((layer, tokens) for layer in storing for tokens in (1, ROWS))


def _rotate_queries(spec: ModelSpec, inputs: Inputs, layer: LayerSpec, tokens: int) -> Call:
    heads = layer.attention.heads
    head_dim = layer.attention.head_dim
    rope = layer.rope
    queries = inputs.numbers(tokens, heads * head_dim)
    interleaved = rope is not None and rope.interleaved
    table = None if rope is None else rotation_table(inputs, tokens, rope.dim, interleaved)
    weight = None if spec.query_key_norm is None else inputs.numbers(heads, head_dim, dtype=torch.float32)
    positions = inputs.integers(range(tokens), torch.int64)

    def launch() -> torch.Tensor:
        return rotate_queries(
            queries, positions, table, heads=heads, interleaved=interleaved, norm_weight=weight, epsilon=1e-6
        )

    def reference() -> torch.Tensor:
        known = queries.double().view(tokens, heads, head_dim)
        known = known if weight is None else normed(known, weight, 1e-6)
        return known if table is None else turned(known, table, interleaved)

    return Call(f"{tokens} x {heads * head_dim}", launch, reference, 2 * queries.numel() * queries.element_size())


def _rotate_queries_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    borrowing = (layer for layer in spec.attending if layer.attention.cache_of is not None)
    kinds = dict.fromkeys(replace(layer, mlp=None, experts=None) for layer in borrowing)
    yield from ((layer, tokens) for layer in kinds for tokens in (1, ROWS))


def _rotate_timed(spec: ModelSpec, inputs: Inputs) -> Sizes:
    yield from ((layer, tokens) for layer in spec.attending[:1] for tokens in TIMED_ROWS)


def _activate(spec: ModelSpec, inputs: Inputs, mlp: MlpSpec, rows: int) -> Call:
    x = inputs.numbers(rows, 2 * mlp.width)

    def reference() -> torch.Tensor:
        gate, up = x.double().chunk(2, -1)
        return ACTIVATION[mlp.activation](gate) * up

    moved = 3 * rows * mlp.width * x.element_size()
    return Call(f"{rows} x {mlp.width}", partial(gated_activation, x, mlp.activation), reference, moved)


def _activate_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    yield from ((mlp, ROWS) for mlp in activated_mlps(spec))


def activated_mlps(spec: ModelSpec) -> list[MlpSpec]:
    """Those that a kernel can activate, beside experts too."""
    moes = dict.fromkeys(layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoeSpec))
    mlps = [MlpSpec(moe.shared_width, moe.activation) for moe in moes if moe.shared_width and moe.gated]
    return gated_mlps(spec) + [mlp for mlp in mlps if mlp.activation in ACTIVATIONS]


def _activate_timed(spec: ModelSpec, inputs: Inputs) -> Sizes:
    yield from ((mlp, rows) for mlp in gated_mlps(spec)[:1] for rows in TIMED_ROWS)


def _matvec(
    spec: ModelSpec,
    inputs: Inputs,
    outputs: int,
    width: int,
    joined: Joined = ALONE_PRODUCT,
    biased: bool = False,
    shape: MatvecShape | None = None,
) -> Call:
    bias = inputs.numbers(outputs) if biased else None
    x, weight = inputs.numbers(1, width), inputs.numbers(outputs, width, deviation=width**-0.5)
    around, activation = inputs.around(spec, joined, width, outputs), joined.activation

    def reference() -> torch.Tensor:
        out = (x.double() if around.gain is None else normed(x, around.gain, 1e-6)) @ weight.double().T
        out = out if bias is None else out + bias.double()
        if activation is not None:
            gate, up = out.chunk(2, -1)
            out = ACTIVATION[activation](gate) * up
        return out if around.residual is None else out + around.residual.double()

    cut = shape or matvec_shape(outputs, width, activation is not None)
    moved = weight.numel() * weight.element_size()
    launch = partial(matvec, x, weight, bias, cut, around)
    return Call(f"{outputs} x {width}", launch, reference, moved, 2 * weight.numel())


def _matvec_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    hidden = spec.hidden_size
    normed_before = Joined(norm=True)
    added = Joined(residual=True)
    launched: list[tuple[Any, ...]] = [(scored(spec, inputs), hidden, ALONE_PRODUCT, spec.biases.head)]
    for layer in dict.fromkeys(spec.attending):
        attention, mlp = layer.attention, layer.mlp
        values = 0 if attention.keys_are_values else attention.own_kv_heads
        qkv = (attention.heads + attention.own_kv_heads + values) * attention.head_dim
        launched.append((qkv, hidden, normed_before, spec.biases.qkv))
        launched.append((hidden, attention.heads * attention.head_dim, added, spec.biases.output))
        if isinstance(mlp, MoeSpec):  # the layer behind it has its norm before the product
            launched += [(qkv, hidden, ALONE_PRODUCT, spec.biases.qkv), (mlp.experts, hidden)]
            if mlp.shared_width:
                launched += [(2 * mlp.shared_width, hidden), (hidden, mlp.shared_width)]
            if mlp.shared_gate:
                launched.append((1, hidden))
        elif mlp in gated_mlps(spec):
            launched.append((2 * mlp.width, hidden, Joined(norm=True, activation=mlp.activation), mlp.bias))
            launched.append((hidden, mlp.width, added, mlp.bias))
    shared = inputs.ranks[1] > 1  # norms that sum over ranks have their launches before products, and behind them
    if shared:
        launched += [(2 * mlp.width, hidden, Joined(activation=mlp.activation), mlp.bias) for mlp in gated_mlps(spec)]
    if spec.attends_to_latents or inputs.has_head or shared:
        launched += [(outputs, width, ALONE_PRODUCT, biased) for width, outputs, biased in multiplied(spec, inputs)]
    yield from dict.fromkeys(launched)


def _matvec_timed(spec: ModelSpec, inputs: Inputs) -> Sizes:
    hidden = spec.hidden_size
    for layer in spec.attending[:1]:
        attention, mlp = layer.attention, layer.mlp
        yield (attention.heads + 2 * attention.kv_heads) * attention.head_dim, hidden
        yield hidden, attention.heads * attention.head_dim
        if isinstance(mlp, MlpSpec):
            yield 2 * mlp.width, hidden
            yield hidden, mlp.width


def _product(
    spec: ModelSpec, inputs: Inputs, rows: int, shape: Shape, outputs: int, width: int, biased: bool = False
) -> Call:
    if isinstance(shape, MatvecShape):
        return _matvec(spec, inputs, outputs, width, biased=biased, shape=shape)
    assert isinstance(shape, MatmulShape)
    x, weight = inputs.numbers(rows, width), inputs.numbers(outputs, width, deviation=width**-0.5)
    bias = inputs.numbers(outputs) if biased else None
    launch = partial(small_matmul, x, weight, bias, shape, inputs.zeros(outputs))

    def reference() -> torch.Tensor:
        out = x.double() @ weight.double().T
        return out if bias is None else out + bias.double()

    return Call(f"{rows} x {outputs} x {width}", launch, reference)


def _product_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    launched = set()
    for width, outputs, biased in multiplied(spec, inputs):
        for rows, cut in _cuts(inputs, outputs, width):
            form = cut, rows, width % 16, width % cut.inputs == 0, outputs % 16 == 0, biased
            if form not in launched:
                launched.add(form)
                yield rows, cut, FEW_OUTPUTS + outputs % 16, width, biased


def _cuts(inputs: Inputs, outputs: int, width: int) -> Iterator[tuple[int, MatvecShape | MatmulShape]]:
    """What the tuner may choose for a matrix, and for how many rows."""
    offered: Mapping[int, tuple[Shape, ...]] = {}
    if inputs.hopper:
        from kvern.layers.tuned_linear import hopper_candidates

        offered = hopper_candidates(LinearShape(outputs, width, inputs.dtype, inputs.device))
    for rows, cuts in (offered or candidates_of(inputs.dtype)).items():
        yield from ((rows, cut) for cut in cuts if isinstance(cut, MatvecShape | MatmulShape))


def _adapt(
    spec: ModelSpec,
    inputs: Inputs,
    hidden: int,
    parts: tuple[int, ...],
    rows: int,
    index_type: torch.dtype = torch.int32,
    shape: MatmulShape | None = None,
) -> Call:
    """Of a layer with so many inputs; `shape`: with its own product, of few outputs."""
    if shape is not None:
        parts = (128,) * len(parts)
    places, outputs = inputs.adapter_places, sum(parts)
    rank = -(-inputs.adapter_rank // adapters.CHUNK.value) * adapters.CHUNK.value
    x, out = inputs.numbers(rows, hidden), inputs.numbers(rows, outputs)
    down = inputs.numbers(places, len(parts), rank, hidden, deviation=hidden**-0.5)
    up = inputs.numbers(places, rank, outputs)
    using = inputs.integers((row % (places + 1) - 1 for row in range(rows)), index_type)
    ranks = inputs.integers(max(1, rank - 3 * place) for place in range(places))
    ends = tuple(itertools.accumulate(parts))
    weight = inputs.numbers(outputs if shape is not None else 0, hidden, deviation=hidden**-0.5)

    def launch() -> torch.Tensor:
        if shape is not None:
            counters = inputs.zeros(-(-outputs // shape.outputs))
            return adapted_product(x, weight, None, using, down, up, ranks, ends, shape, counters)
        adapters.add_adapters(out, x, using, down, up, ranks, ends, False)
        return out

    def reference() -> torch.Tensor:
        expected = out.double() if shape is None else x.double() @ weight.double().T
        for adapter_index, most in enumerate(ranks.tolist()):
            low = torch.einsum("th,prh->tpr", x.double(), down[adapter_index, :, :most].double())
            low = low.repeat_interleave(torch.tensor(parts, device=x.device), 1, output_size=outputs)
            added = torch.einsum("tor,ro->to", low, up[adapter_index, :most].double())
            expected = torch.where((using == adapter_index)[:, None], expected + added, expected)
        return expected

    return Call(f"{rows} x {outputs} x {hidden}, rank {rank}", launch, reference)


def _adapt_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    if not inputs.adapter_rank:
        return
    kinds = linear_shapes(spec, inputs.dtype)
    shapes = dict.fromkeys((kind.inputs, kind.outputs) for kind in kinds if len(kind.outputs) <= adapters.MOST_PARTS)
    for (hidden, parts), index_type in itertools.product(shapes, (torch.int32, torch.int64)):
        ends = tuple(itertools.accumulate(parts))
        joined = joins(ends, inputs.dtype)
        few = () if joined and not inputs.packed else (1, 32, 64)
        for rows in (*few, 128, adapters.SPLIT_ROWS):
            yield hidden, parts, rows, index_type
        if joined:
            cuts = ((rows, adapted_shape(rows, ends[-1], hidden)) for rows in SHAPES)
            yield from ((hidden, parts, rows, index_type, cut) for rows, cut in cuts)


KERNELS = (
    Kernel("RMSNorm", "norm", _norm, _norm_launched),
    Kernel("add + RMSNorm", "norm", _add_norm, _add_norm_launched, _add_norm_timed),
    Kernel("rotate and store", "rotary", _rotate, _rotate_launched, _rotate_timed),
    Kernel("rotate queries", "rotary", _rotate_queries, _rotate_queries_launched),
    Kernel("gated activation", "activation", _activate, _activate_launched, _activate_timed),
    Kernel("matrix-vector product", "few_rows", _matvec, _matvec_launched, _matvec_timed),
    Kernel("product of few rows", "linear", _product, _product_launched),
    Kernel("adapters", "adapters", _adapt, _adapt_launched),
)
