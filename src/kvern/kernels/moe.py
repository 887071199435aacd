"""The experts of a mixture, each token through its own few.

    x [T, hidden] -> activation(gate) * up [T * top_k, width] -> down, times its weight -> sum [T, hidden]

Without a gate it is activation(up).

For one or a few tokens whose experts hardly meet, a program takes the outputs of one token and reads the expert from
`topk_ids` (direct). Otherwise pairs of token and expert are sorted into blocks of rows of one expert, and each block's
product runs on the matrix units (grouped), reading an expert's weights once for each of its blocks.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvern.kernels.activation import activate, activate_gated
from kvern.kernels.launch import Launcher, overlaps, stages, wait_for_previous
from kvern.kernels.moe_direct import direct_down, direct_gate_up, inputs_of_step, load_tile, runs_direct
from kvern.kernels.moe_routing import Alignment, align, route

__all__ = ["ACTIVATIONS", "fused_experts", "route"]

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2", "clamped_swiglu")
"""Activations of `fused_experts`; experts with another activation run in PyTorch."""

DETERMINISTIC_ROWS = 64
HOPPER_ROWS, HOPPER_GROUP = 128, 2
"""The rows of a block, and blocks side by side, in the kernel for Hopper GPUs."""


class Tile(NamedTuple):
    """The shape of a grouped product: outputs and inputs of one tile; `group` blocks of rows run side by side.

    A product with gate and up computes half the outputs of each.
    """

    outputs: int
    inputs: int
    group: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """The tiles of the products with gate and up, and with down; both have one `group`."""

    gate_up: Tile
    down: Tile


TILES = {
    16: (Tiles(*[Tile(64, 128, 1, 4, 4)] * 2), Tiles(*[Tile(128, 64, 1, 4, 5)] * 2)),
    32: (Tiles(*[Tile(64, 128, 1, 4, 4)] * 2), Tiles(*[Tile(128, 64, 1, 4, 5)] * 2)),
    64: (Tiles(*[Tile(128, 64, 4, 4, 4)] * 2), Tiles(*[Tile(128, 64, 1, 4, 4)] * 2)),
    128: (Tiles(*[Tile(256, 64, 8, 8, 4)] * 2), Tiles(*[Tile(128, 64, 8, 4, 4)] * 2)),
}
"""Tiles by the rows of a block: the ones to time; the first is used until then."""
FLOAT32_TILES = Tiles(*[Tile(32, 32, 1, 4, 2)] * 2)
"""Float32 runs on the ordinary cores, in blocks of 16 rows."""


def hopper_experts(dtype: torch.dtype, hidden: int, width: int) -> bool:
    """True if the kernels for Hopper GPUs support such experts: rows are copied in runs whose end Triton knows."""
    return dtype.itemsize == 2 and hidden % 16 == 0 and width % 16 == 0


def rows_of_block(pairs: int, experts: int) -> int:
    """Twice what an expert gets on average, so that most experts' weights are read by one block."""
    wanted: int = triton.next_power_of_2(2 * pairs // experts)
    return min(128, max(16, wanted))


@Launcher
@triton.jit(do_not_specialize=["pairs"])
def _grouped_gate_up_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor | None,
    sorted_pairs: tl.tensor,
    block_experts: tl.tensor,
    out: tl.tensor,
    pairs,
    x_stride: tl.int64,
    hidden: tl.constexpr,
    width: tl.constexpr,
    top_k: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        wait_for_previous()
    EVEN: tl.constexpr = hidden % INPUTS == 0
    block = tl.program_id(1) * GROUP + tl.program_id(0) % GROUP
    expert = tl.load(block_experts + block).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(sorted_pairs + block * ROWS + tl.arange(0, ROWS))
    live = pair < pairs
    output = tl.program_id(0) // GROUP * OUTPUTS + tl.arange(0, OUTPUTS)
    known = output < width
    column = tl.arange(0, INPUTS)
    x_tile = x + (pair // top_k).to(tl.int64)[:, None] * x_stride + column[None, :]
    gate_tile = weight + expert * ((2 if GATED else 1) * width * hidden) + (output[None, :] * hidden + column[:, None])
    up_tile = gate_tile + width * hidden
    gate = tl.zeros([ROWS, OUTPUTS], tl.float32)
    up = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in tl.range(0, hidden, INPUTS):
        inside = start + column < hidden
        values = load_tile(x_tile + start, live[:, None], inside[None, :], EVEN)
        gate_weights = load_tile(gate_tile + start, known[None, :], inside[:, None], EVEN)
        if GATED:
            up_weights = load_tile(up_tile + start, known[None, :], inside[:, None], EVEN)
        gate = tl.dot(values, gate_weights, gate, input_precision="ieee")
        if GATED:
            up = tl.dot(values, up_weights, up, input_precision="ieee")
    if bias is not None:
        place = bias + expert * (2 * width) + output
        gate += tl.load(place, mask=known, other=0.0).to(tl.float32)[None, :]
        up += tl.load(place + width, mask=known, other=0.0).to(tl.float32)[None, :]
    target = out + pair.to(tl.int64)[:, None] * width + output[None, :]
    result = (activate_gated(gate, up, KIND) if GATED else activate(gate, KIND)).to(out.dtype.element_ty)
    tl.store(target, result, mask=live[:, None] & known[None, :])


@Launcher
@triton.jit(do_not_specialize=["pairs"])
def _grouped_down_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor | None,
    weights: tl.tensor,
    sorted_pairs: tl.tensor,
    block_experts: tl.tensor,
    out: tl.tensor,
    pairs,
    hidden: tl.constexpr,
    width: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        wait_for_previous()
    EVEN: tl.constexpr = width % INPUTS == 0
    block = tl.program_id(1) * GROUP + tl.program_id(0) % GROUP
    expert = tl.load(block_experts + block).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(sorted_pairs + block * ROWS + tl.arange(0, ROWS))
    live = pair < pairs
    output = tl.program_id(0) // GROUP * OUTPUTS + tl.arange(0, OUTPUTS)
    known = output < hidden
    column = tl.arange(0, INPUTS)
    x_tile = x + pair.to(tl.int64)[:, None] * width + column[None, :]
    tile = weight + expert * (hidden * width) + (output[None, :] * width + column[:, None])
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in tl.range(0, width, INPUTS):
        inside = start + column < width
        values = load_tile(x_tile + start, live[:, None], inside[None, :], EVEN)
        down = load_tile(tile + start, known[None, :], inside[:, None], EVEN)
        total = tl.dot(values, down, total, input_precision="ieee")
    if bias is not None:
        total += tl.load(bias + expert * hidden + output, mask=known, other=0.0).to(tl.float32)[None, :]
    total *= tl.load(weights + pair, mask=live, other=0.0)[:, None]
    target = out + pair.to(tl.int64)[:, None] * hidden + output[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=live[:, None] & known[None, :])


@Launcher
@triton.jit
def _sum_kernel(
    parts: tl.tensor,
    add: tl.tensor,
    out: tl.tensor,
    places: tl.tensor,
    weights: tl.tensor,
    topk_ids: tl.tensor | None,
    add_stride: tl.int64,
    hidden: tl.constexpr,
    top_k: tl.constexpr,
    ADD: tl.constexpr,
    SORTED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        wait_for_previous()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(top_k):
        pair = token * top_k + choice
        known = inside
        if topk_ids is not None:
            known = inside & (tl.load(topk_ids + pair) >= 0)
        if SORTED:
            place = tl.load(places + pair).to(tl.int64)
            part = tl.load(parts + place * hidden + column, mask=known, other=0.0).to(tl.float32)
            total += part * tl.load(weights + pair)
        else:
            total += tl.load(parts + pair * hidden + column, mask=known, other=0.0).to(tl.float32)
    if ADD:
        total += tl.load(add + token * add_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * hidden + column, total.to(out.dtype.element_ty), mask=inside)


def fused_experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str,
    *,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    add: torch.Tensor | None = None,
    deterministic: bool = False,
    hopper: bool = False,
    tiles: int = 0,
    of: int | None = None,
) -> torch.Tensor:
    """Sum x through the experts chosen, times their weights.

    x              [T, hidden], rows may have gaps
    gate_up        [experts, 2 * width, hidden] in the dtype of x: rows of the gate, then rows of up; or of up alone
    down           [experts, hidden, width]
    weights        [T, top_k] float32
    topk_ids       [T, top_k] int32 or int64
    biases         [experts, 2 * width] of gate and up, and [experts, hidden] of down, or None; not with `hopper`
    add            [T, hidden] that is added to the sum, or None; rows may have gaps
    deterministic  a token's result depends on no other token, and on no number of tokens
    hopper         the kernels for Hopper GPUs take what is grouped
    tiles          which of `TILES` do else
    of             experts of the mixture, if others have some of them: these are -1 among the `topk_ids`, and left out
    returns        [T, hidden] in the dtype of x; sums in float32

    Moves the weights of each expert that is chosen once, 6 * width * hidden bytes in 16 bits with a gate, if it gets no
    more rows than a block has.
    """
    tokens, top_k = topk_ids.shape
    experts, _, width = down.shape
    topk_ids, weights = topk_ids.contiguous(), weights.contiguous()
    some = None if of is None else topk_ids
    gate_up_bias, down_bias = biases or (None, None)
    expert_bytes = (gate_up[0].numel() + down[0].numel()) * x.element_size()
    if not deterministic and runs_direct(tokens, top_k, of or experts, expert_bytes):
        gated = torch.empty(tokens * top_k, width, dtype=x.dtype, device=x.device)
        direct_gate_up(x, gate_up, topk_ids, gated, activation, gate_up_bias)
        return direct_down(gated, down, weights, topk_ids, add, down_bias)
    rows = DETERMINISTIC_ROWS if deterministic else rows_of_block(tokens * top_k, of or experts)
    cut = TILES[rows][tiles]
    if x.element_size() == 4:
        rows, cut = 16, FLOAT32_TILES
    if hopper and rows == HOPPER_ROWS:
        from kvern.kernels.product_hopper import experts_products

        blocks = align(topk_ids, experts, rows, HOPPER_GROUP)
        parts = experts_products(x, gate_up, down, blocks, topk_ids.numel(), top_k, activation, HOPPER_GROUP)
        return sum_parts(parts, top_k, add, blocks.places, weights, some=some)
    blocks = align(topk_ids, experts, rows, 1 if hopper else cut.gate_up.group)
    gated = torch.empty(tokens * top_k, width, dtype=x.dtype, device=x.device)
    if hopper:
        from kvern.kernels.stream_experts_hopper import stream_experts

        parts = torch.empty(tokens * top_k, x.shape[1], dtype=x.dtype, device=x.device)
        stream_experts(x.contiguous(), gate_up.view(-1, x.shape[1]), gated, blocks, rows, top_k, activation)
        stream_experts(gated, down.view(-1, width), parts, blocks, rows, weights=weights, early=True)
    else:
        _grouped_gate_up(x, gate_up, gate_up_bias, blocks, gated, top_k, activation, rows, cut.gate_up)
        parts = _grouped_down(gated, down, down_bias, weights, blocks, rows, cut.down)
    return parts if top_k == 1 and add is None and some is None else sum_parts(parts, top_k, add, some=some)


def _stages(x: torch.Tensor, rows: int, tile: Tile) -> int:
    return stages(x.device, tile.stages, (rows + tile.outputs) * tile.inputs * x.element_size())


def _grouped_gate_up(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    bias: torch.Tensor | None,
    blocks: Alignment,
    out: torch.Tensor,
    top_k: int,
    activation: str,
    rows: int,
    tile: Tile,
) -> None:
    (pairs, width), hidden = out.shape, x.shape[1]
    overlap = overlaps(x.device)
    outputs = min(tile.outputs // 2, max(16, triton.next_power_of_2(width)))
    _grouped_gate_up_kernel[(tile.group * triton.cdiv(width, outputs), blocks.experts.shape[0] // tile.group)](
        x,
        gate_up,
        bias,
        blocks.pairs,
        blocks.experts,
        out,
        pairs,
        x.stride(0),
        hidden,
        width,
        top_k,
        gate_up.shape[1] > width,
        activation,
        rows,
        outputs,
        inputs_of_step(hidden, tile.inputs),
        tile.group,
        overlap,
        num_warps=tile.warps,
        num_stages=_stages(x, rows, tile),
        launch_pdl=overlap,
    )


def _grouped_down(
    gated: torch.Tensor,
    down: torch.Tensor,
    bias: torch.Tensor | None,
    weights: torch.Tensor,
    blocks: Alignment,
    rows: int,
    tile: Tile,
) -> torch.Tensor:
    pairs, (_, hidden, width) = gated.shape[0], down.shape
    overlap = overlaps(gated.device)
    out = torch.empty(pairs, hidden, dtype=gated.dtype, device=gated.device)
    outputs = min(tile.outputs, max(16, triton.next_power_of_2(hidden)))
    _grouped_down_kernel[(tile.group * triton.cdiv(hidden, outputs), blocks.experts.shape[0] // tile.group)](
        gated,
        down,
        bias,
        weights,
        blocks.pairs,
        blocks.experts,
        out,
        pairs,
        hidden,
        width,
        rows,
        outputs,
        inputs_of_step(width, tile.inputs),
        tile.group,
        overlap,
        num_warps=tile.warps,
        num_stages=_stages(gated, rows, tile),
        launch_pdl=overlap,
    )
    return out


def sum_parts(
    parts: torch.Tensor,
    top_k: int,
    add: torch.Tensor | None,
    places: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    some: torch.Tensor | None = None,
) -> torch.Tensor:
    """`places` of the pairs among the parts, which are then still to be multiplied by `weights`.

    `some`: the `topk_ids`, if those of -1 have no part.
    """
    hidden = parts.shape[1]
    pairs = parts.shape[0] if places is None else places.shape[0]
    out = torch.empty(pairs // top_k, hidden, dtype=parts.dtype, device=parts.device)
    block = min(1024, triton.next_power_of_2(hidden))
    overlap = overlaps(parts.device)
    _sum_kernel[(pairs // top_k, triton.cdiv(hidden, block))](
        parts,
        out if add is None else add,
        out,
        parts if places is None else places,
        parts if weights is None else weights,
        some,
        0 if add is None else add.stride(0),
        hidden,
        top_k,
        add is not None,
        places is not None,
        block,
        overlap,
        num_warps=4,
        launch_pdl=overlap,
    )
    return out
