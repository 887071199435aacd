"""Routing, and the experts that were chosen."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import triton

from kvern.kernels.moe import ACTIVATIONS, TILES, fused_experts, rows_of_block
from kvern.kernels.moe_direct import runs_direct
from kvern.kernels.moe_routing import CHUNK, route
from kvern.layers.expert_share import TURNS
from kvern.spec.model import SWIGLU_LIMIT, SWIGLU_SLOPE, ModelSpec, MoeSpec
from tests.support.kernel_list.dense import ACTIVATION
from tests.support.kernel_list.entry import Call, Inputs, Kernel

Sizes = Iterator[tuple[Any, ...]]
OTHER_TILES = range(1, len(TILES[16]))
"""Beside the first, where tokens are sorted."""


def moes(spec: ModelSpec) -> list[MoeSpec]:
    """The kinds of experts that a model has."""
    return list(dict.fromkeys(layer.mixture for layer in spec.layers if layer.mixture is not None))


def width_of_rows(spec: ModelSpec, moe: MoeSpec) -> int:
    """Of what the experts of a model read and give."""
    return moe.latent or spec.hidden_size


def bytes_of_expert(spec: ModelSpec, inputs: Inputs, moe: MoeSpec) -> int:
    """Of an expert's plain weights."""
    return (moe.first_width + moe.width) * width_of_rows(spec, moe) * inputs.dtype.itemsize


def as_chosen(moe: MoeSpec, topk_ids: torch.Tensor) -> torch.Tensor:
    """Of PyTorch int64, which chooses by sigmoids and within groups; of the router's kernel int32."""
    return topk_ids if moe.scoring == "sigmoid" or moe.groups > 1 else topk_ids.int()


def activated(moe: MoeSpec, gate_up: torch.Tensor) -> torch.Tensor:
    """What goes on to the product with down, of `[rows, first_width]`."""
    if not moe.gated:
        return ACTIVATION[moe.activation](gate_up)
    gate, up = gate_up.chunk(2, -1)
    if moe.activation == "clamped_swiglu":
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        return gate * (SWIGLU_SLOPE * gate).sigmoid() * (up + 1)
    return ACTIVATION[moe.activation](gate) * up


def make_biases(moe: MoeSpec, hidden: int, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Of gate and up, and of down, where experts have them."""
    return (inputs.numbers(moe.slots, 2 * moe.width), inputs.numbers(moe.slots, hidden)) if moe.bias else None


def _route(spec: ModelSpec, inputs: Inputs, moe: MoeSpec, tokens: int) -> Call:
    logits, counts = inputs.numbers(tokens, moe.experts), inputs.zeros(moe.experts, dtype=torch.int64)
    slots, turns = None, TURNS if moe.redundant else 1
    if moe.placed_over > 1:
        numbers = torch.arange(turns * moe.experts, dtype=torch.int32, device=inputs.device)
        slots = numbers.view(turns, -1) - moe.experts // 2

    def reference() -> tuple[torch.Tensor, torch.Tensor]:
        weights, chosen = logits.double().softmax(-1).sort(dim=-1, descending=True, stable=True)
        weights, chosen = weights[:, : moe.top_k], chosen[:, : moe.top_k]
        chosen = chosen if slots is None else slots[torch.arange(tokens, device=chosen.device)[:, None] % turns, chosen]
        return (weights / weights.sum(-1, keepdim=True) if moe.renormalize else weights) * moe.routed_scale, chosen

    launch = partial(route, logits, moe.top_k, moe.renormalize, moe.routed_scale, counts, slots)
    return Call(f"{tokens} x {moe.experts}", launch, reference, logits.numel() * logits.element_size())


def make_experts(
    spec: ModelSpec, inputs: Inputs, moe: MoeSpec, tokens: int, hopper: bool = False, tiles: int = 0
) -> Call:
    """What each token makes of its experts, of those that are here."""
    hidden = width_of_rows(spec, moe)
    width = moe.width
    slots = moe.slots
    x = inputs.numbers(tokens, hidden)
    gate_up = inputs.numbers(slots, moe.first_width, hidden, deviation=hidden**-0.5)
    down = inputs.numbers(slots, hidden, width, deviation=width**-0.5)
    weights, chosen = inputs.numbers(tokens, moe.experts, dtype=torch.float32).topk(moe.top_k)
    chosen = as_chosen(moe, chosen.where(chosen < slots, -1))
    added = moe.shared_width and not moe.latent
    add, biases = inputs.numbers(tokens, hidden) if added else None, make_biases(moe, hidden, inputs)

    def reference() -> torch.Tensor:
        out = torch.zeros(x.shape, dtype=torch.float64, device=x.device) if add is None else add.double()
        for expert in range(slots):
            token, place = (chosen == expert).nonzero(as_tuple=True)
            first, second = (0, 0) if biases is None else (bias[expert].double() for bias in biases)
            made = activated(moe, x[token].double() @ gate_up[expert].double().T + first)
            made = made @ down[expert].double().T + second
            out.index_add_(0, token, made * weights[token, place].double()[:, None])
        return out

    touched = slots * (1 - (1 - moe.top_k / moe.experts) ** tokens)
    launch = partial(
        fused_experts,
        x,
        gate_up,
        down,
        weights,
        chosen,
        moe.activation,
        biases=biases,
        add=add,
        hopper=hopper,
        tiles=tiles,
        of=moe.experts if moe.placed_over > 1 else None,
    )
    each = bytes_of_expert(spec, inputs, moe)
    operations = 2 * tokens * moe.top_k * each / inputs.dtype.itemsize
    return Call(f"{tokens} tokens", launch, reference, touched * each, operations)


def _launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    for moe in moes(spec):
        yield from ((moe, count) for count in forms(moe, inputs.batch_tokens, bytes_of_expert(spec, inputs, moe)))


def forms(
    moe: MoeSpec, most: int, expert_bytes: int, rows_of_block: Callable[[int, int], int] = rows_of_block
) -> list[int]:
    """Numbers of tokens up to `most`, one for each way in which their pairs with experts are cut."""
    found: dict[tuple[int, ...], int] = {}
    for tokens in range(1, most + 1):
        pairs = tokens * moe.top_k
        chunk = min(CHUNK, triton.next_power_of_2(pairs))
        direct = runs_direct(tokens, moe.top_k, moe.experts, expert_bytes)
        chunks = triton.next_power_of_2(triton.cdiv(pairs, chunk))
        found.setdefault((direct, rows_of_block(pairs, moe.experts), chunk, chunks), tokens)
    return list(found.values())


def blocks(moe: MoeSpec, most: int, expert_bytes: int) -> list[int]:
    """Numbers of tokens up to `most`, one for each size of blocks in which their pairs are sorted."""
    grouped = (tokens for tokens in range(1, most + 1) if not runs_direct(tokens, moe.top_k, moe.experts, expert_bytes))
    return list({rows_of_block(tokens * moe.top_k, moe.experts): tokens for tokens in grouped}.values())


def plain_experts(spec: ModelSpec, inputs: Inputs) -> list[MoeSpec]:
    """The kinds of experts with kernels that the model does not store quantized, in any layer."""
    packed = {(kind.outputs, kind.inputs) for kind in inputs.packed if kind.part == "experts.gate_up_proj"}
    return [
        moe
        for moe in moes(spec)
        if moe.activation in ACTIVATIONS and (moe.slots * moe.first_width, width_of_rows(spec, moe)) not in packed
    ]


def _experts_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    for moe in plain_experts(spec, inputs):
        expert_bytes = bytes_of_expert(spec, inputs, moe)
        yield from ((moe, tokens) for tokens in forms(moe, inputs.batch_tokens, expert_bytes))
        if inputs.dtype.itemsize == 2:
            for tokens, tiles in itertools.product(blocks(moe, inputs.batch_tokens, expert_bytes), OTHER_TILES):
                yield moe, tokens, False, tiles


def _experts_timed(spec: ModelSpec, inputs: Inputs) -> Sizes:
    for moe in moes(spec)[:1]:
        if moe.activation in ACTIVATIONS:
            yield from ((moe, tokens) for tokens in (1, 32, 8192))


KERNELS = (
    Kernel("route", "moe", _route, _launched),
    Kernel("experts", "moe", make_experts, _experts_launched, _experts_timed),
)
