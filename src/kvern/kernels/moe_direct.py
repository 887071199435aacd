"""The experts of one or a few tokens: a program computes outputs of one token, and reads the expert from `topk_ids`.

Nothing has to be sorted; an expert's weights are read once for each token that chose it.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvern.kernels.activation import activate, activate_gated
from kvern.kernels.launch import Launcher, wait_for_previous

SHARED_BYTES = 16 << 20
"""Weights read twice that cost no more than sorting the pairs would."""


class DirectTile(NamedTuple):
    """The shape of a direct product: numbers of one tile of weights, and the most inputs of one step."""

    size: int
    inputs: int
    warps: int


DIRECT_GATE_UP = DirectTile(2048, 512, 4)
DIRECT_DOWN = DirectTile(8192, 256, 4)


def runs_direct(tokens: int, top_k: int, experts: int, expert_bytes: int) -> bool:
    """True if so few tokens probably share an expert that sorting them gains nothing."""
    meetings = tokens * (tokens - 1) / 2 * top_k * top_k / experts
    return meetings * expert_bytes <= SHARED_BYTES


def inputs_of_step(inputs: int, most: int, least: int = 32) -> int:
    """A power of two that divides `inputs` if one of at least `least` does, so that no step is masked."""
    divisor = inputs & -inputs
    return min(most, divisor if divisor >= least else max(16, triton.next_power_of_2(inputs)))


@triton.jit
def load_tile(tile, rows, columns, EVEN: tl.constexpr):
    """A tile of which only the rows have to be masked if the columns are even."""
    if EVEN:
        return tl.load(tile, mask=rows, other=0.0)
    return tl.load(tile, mask=rows & columns, other=0.0)


@Launcher
@triton.jit
def _direct_gate_up_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor | None,
    topk_ids: tl.tensor,
    out: tl.tensor,
    x_stride: tl.int64,
    hidden: tl.constexpr,
    width: tl.constexpr,
    top_k: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous(OVERLAP)
    EVEN: tl.constexpr = hidden % INPUTS == 0
    pair = tl.program_id(1).to(tl.int64)
    expert = tl.load(topk_ids + pair).to(tl.int64)
    if expert < 0:
        return
    row = x + pair // top_k * x_stride
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    known = output < width
    column = tl.arange(0, INPUTS)
    tile = weight + expert * ((2 if GATED else 1) * width * hidden) + output[:, None] * hidden + column[None, :]
    gate = tl.zeros([OUTPUTS, INPUTS], tl.float32)
    up = tl.zeros([OUTPUTS, INPUTS], tl.float32)
    for start in tl.range(0, hidden, INPUTS):
        inside = start + column < hidden
        gate_weights = load_tile(tile + start, known[:, None], inside[None, :], EVEN).to(tl.float32)
        if GATED:
            up_weights = load_tile(tile + width * hidden + start, known[:, None], inside[None, :], EVEN).to(tl.float32)
        values = tl.load(row + start + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        gate += gate_weights * values
        if GATED:
            up += up_weights * values
    first = tl.sum(gate, axis=1)
    second = tl.sum(up, axis=1)
    if bias is not None:
        place = bias + expert * (2 * width) + output
        first += tl.load(place, mask=known, other=0.0).to(tl.float32)
        second += tl.load(place + width, mask=known, other=0.0).to(tl.float32)
    result = activate_gated(first, second, KIND) if GATED else activate(first, KIND)
    tl.store(out + pair * width + output, result.to(out.dtype.element_ty), mask=known)


@Launcher
@triton.jit
def _direct_down_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor | None,
    weights: tl.tensor,
    topk_ids: tl.tensor,
    add: tl.tensor | None,
    out: tl.tensor,
    add_stride: tl.int64,
    hidden: tl.constexpr,
    width: tl.constexpr,
    top_k: tl.constexpr,
    CHOICES: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous(OVERLAP)
    EVEN: tl.constexpr = width % INPUTS == 0
    token = tl.program_id(1).to(tl.int64)
    choice = tl.arange(0, CHOICES)
    pair = token * top_k + choice
    expert = tl.load(topk_ids + pair, mask=choice < top_k, other=-1).to(tl.int64)
    taken = expert >= 0
    scale = tl.load(weights + pair, mask=taken, other=0.0)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    known = output < hidden
    column = tl.arange(0, INPUTS)
    inner = (output[:, None] * width + column[None, :])[None, :, :]
    tile = weight + (expert * (hidden * width))[:, None, None] + inner
    rows = taken[:, None, None] & known[None, :, None]
    total = tl.zeros([CHOICES, OUTPUTS, INPUTS], tl.float32)
    for start in tl.range(0, width, INPUTS):
        inside = start + column < width
        values = load_tile(x + pair[:, None] * width + start + column[None, :], taken[:, None], inside[None, :], EVEN)
        down = load_tile(tile + start, rows, inside[None, None, :], EVEN).to(tl.float32)
        total += down * values.to(tl.float32)[:, None, :]
    sums = tl.sum(total, axis=2)
    if bias is not None:
        added = bias + (expert * hidden)[:, None] + output[None, :]
        sums += tl.load(added, mask=taken[:, None] & known[None, :], other=0.0).to(tl.float32)
    result = tl.sum(sums * scale[:, None], axis=0)
    if add is not None:
        result += tl.load(add + token * add_stride + output, mask=known, other=0.0).to(tl.float32)
    tl.store(out + token * hidden + output, result.to(out.dtype.element_ty), mask=known)


def direct_gate_up(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    topk_ids: torch.Tensor,
    out: torch.Tensor,
    activation: str,
    bias: torch.Tensor | None = None,
) -> None:
    """`activation(gate) * up` of every pair: x [T, hidden], gate_up [experts, 2 * width, hidden] -> out [pairs, width].

    Of pairs whose expert is -1 nothing is written. Without a gate `activation(up)`, with as many rows of up alone.
    `bias [experts, 2 * width]` is added to gate and up, if it is given. Moves the gate and up weights of every pair's
    expert: 4 * width * hidden bytes in 16 bits.
    """
    (pairs, width), hidden = out.shape, x.shape[1]
    inputs = inputs_of_step(hidden, DIRECT_GATE_UP.inputs)
    outputs = min(DIRECT_GATE_UP.size // inputs, triton.next_power_of_2(width))
    _direct_gate_up_kernel[(triton.cdiv(width, outputs), pairs)](
        x,
        gate_up,
        bias,
        topk_ids,
        out,
        x.stride(0),
        hidden,
        width,
        topk_ids.shape[1],
        gate_up.shape[1] > width,
        activation,
        outputs,
        inputs,
        num_warps=DIRECT_GATE_UP.warps,
    )


def direct_down(
    gated: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    topk_ids: torch.Tensor,
    add: torch.Tensor | None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """gated [T * top_k, width] times down [experts, hidden, width], summed with `weights [T, top_k]` -> [T, hidden].

    `bias [experts, hidden]` is added to each product, if it is given.
    Moves the down weights of every pair's expert: 2 * width * hidden bytes in 16 bits. The sum is never rounded.
    """
    (tokens, top_k), (_, hidden, width) = topk_ids.shape, down.shape
    out = torch.empty(tokens, hidden, dtype=gated.dtype, device=gated.device)
    choices = triton.next_power_of_2(top_k)
    inputs = inputs_of_step(width, DIRECT_DOWN.inputs)
    outputs = max(1, min(DIRECT_DOWN.size // (choices * inputs), triton.next_power_of_2(hidden)))
    _direct_down_kernel[(triton.cdiv(hidden, outputs), tokens)](
        gated,
        down,
        bias,
        weights,
        topk_ids,
        add,
        out,
        0 if add is None else add.stride(0),
        hidden,
        width,
        top_k,
        choices,
        outputs,
        inputs,
        num_warps=DIRECT_DOWN.warps,
    )
    return out
