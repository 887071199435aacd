"""The experts of a mixture, each token through its own few.

    x [T, hidden] -> activation(gate) * up [T * top_k, width] -> down, times its weight -> sum [T, hidden]

Without a gate it is activation(up).

For one or a few tokens whose experts hardly meet, a program takes the outputs of one token and reads the expert from
`topk_ids` (direct). Otherwise pairs of token and expert are sorted into blocks of rows of one expert, and each block's
product runs on the matrix units (grouped), reading an expert's weights once for each of its blocks.
"""

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from kvern.kernels.activation import activate, activate_gated
from kvern.kernels.launch import Launcher, stages, wait_for_previous
from kvern.kernels.moe_direct import direct_down, direct_gate_up, inputs_of_step, load_tile, runs_direct
from kvern.kernels.moe_routing import Alignment, Product, Routed, align, route, through_blocks

if TYPE_CHECKING:
    from kvern.kernels.product_hopper import RowScales

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
def _grouped_kernel(
    x, weight, bias, pair_weights, blocks: Alignment, out, pairs, x_stride: tl.int64, inputs: tl.constexpr,
    outputs: tl.constexpr, top_k: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, GROUP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The product with gate and up, or up alone, of a token of x for each pair; without a KIND that with down."""
    wait_for_previous(OVERLAP)
    EVEN: tl.constexpr = inputs % INPUTS == 0
    block = tl.program_id(1) * GROUP + tl.program_id(0) % GROUP
    expert = tl.load(blocks.experts + block).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(blocks.pairs + block * ROWS + tl.arange(0, ROWS))
    live = pair < pairs
    output = tl.program_id(0) // GROUP * OUTPUTS + tl.arange(0, OUTPUTS)
    known = output < outputs
    column = tl.arange(0, INPUTS)
    if KIND != "":
        x_tile = x + (pair // top_k).to(tl.int64)[:, None] * x_stride + column[None, :]
    else:
        x_tile = x + pair.to(tl.int64)[:, None] * inputs + column[None, :]
    tile = weight + expert * ((2 if GATED else 1) * outputs * inputs) + (output[None, :] * inputs + column[:, None])
    up_tile = tile + outputs * inputs
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    up = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in tl.range(0, inputs, INPUTS):
        inside = start + column < inputs
        values = load_tile(x_tile + start, live[:, None], inside[None, :], EVEN)
        weights = load_tile(tile + start, known[None, :], inside[:, None], EVEN)
        if GATED:
            up_weights = load_tile(up_tile + start, known[None, :], inside[:, None], EVEN)
        total = tl.dot(values, weights, total, input_precision="ieee")
        if GATED:
            up = tl.dot(values, up_weights, up, input_precision="ieee")
    if bias is not None:
        place = bias + expert * ((1 if KIND == "" else 2) * outputs) + output
        total += tl.load(place, mask=known, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(place + outputs, mask=known, other=0.0).to(tl.float32)[None, :]
    if GATED:
        total = activate_gated(total, up, KIND)
    elif KIND != "":
        total = activate(total, KIND)
    else:
        total *= tl.load(pair_weights + pair, mask=live, other=0.0)[:, None]
    target = out + pair.to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=live[:, None] & known[None, :])


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
    routed = Routed.over(x, weights, topk_ids, add, of)
    (tokens, top_k), (experts, hidden, width) = topk_ids.shape, down.shape
    gate_up_bias, down_bias = biases or (None, None)
    expert_bytes = (gate_up[0].numel() + down[0].numel()) * x.element_size()
    if not deterministic and runs_direct(tokens, top_k, of or experts, expert_bytes):
        gated = torch.empty(tokens * top_k, width, dtype=x.dtype, device=x.device)
        direct_gate_up(x, gate_up, routed.topk_ids, gated, activation, gate_up_bias)
        return direct_down(gated, down, routed.weights, routed.topk_ids, add, down_bias)
    rows = DETERMINISTIC_ROWS if deterministic else rows_of_block(tokens * top_k, of or experts)
    cut = TILES[rows][tiles]
    if x.element_size() == 4:
        rows, cut = 16, FLOAT32_TILES
    first: Product
    second: Product
    if hopper:
        padded = rows == HOPPER_ROWS
        first = partial(hopper_product, gate_up.view(-1, hidden), activation=activation, top_k=top_k)
        second = partial(hopper_product, down.view(-1, width), weights=routed.weights)
        blocks = align(routed.topk_ids, experts, rows, HOPPER_GROUP if padded else 1)
        return through_blocks(routed, blocks, width, first, second, padded=padded)
    first = partial(_grouped, gate_up, gate_up_bias, cut.gate_up, activation=activation, top_k=top_k)
    second = partial(_grouped, down, down_bias, cut.down, weights=routed.weights)
    return through_blocks(routed, align(routed.topk_ids, experts, rows, cut.gate_up.group), width, first, second)


def hopper_product(
    weight: torch.Tensor,
    x: torch.Tensor,
    blocks: Alignment,
    out: torch.Tensor,
    *,
    activation: str | None = None,
    top_k: int = 0,
    weights: torch.Tensor | None = None,
    scales: "RowScales | None" = None,
    early: bool | None = None,
) -> None:
    """A `Product` by the kernels for Hopper GPUs: blocks of `HOPPER_ROWS` are padded, and not multiplied by `weights`.

    weight  [experts * outputs, inputs], with an activation gate and up; codes with `scales`
    top_k   rows of x are those of tokens, with so many pairs each; 0: one for each row of `out`
    early   see `stream_experts`; None: if x is what another product made
    """
    x = x.contiguous()  # so that rows begin where copies of 16 bytes may
    if blocks.rows == HOPPER_ROWS:
        from kvern.kernels.product_hopper import experts_product

        pairs = blocks.places.shape[0]
        experts_product(x, weight, out, blocks, pairs, HOPPER_GROUP, activation, top_k, scales)
    else:
        from kvern.kernels.stream_experts_hopper import stream_experts

        early = not top_k if early is None else early
        stream_experts(x, weight, out, blocks, max(1, top_k), activation, weights, scales, early)


def _grouped(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tile: Tile,
    x: torch.Tensor,
    blocks: Alignment,
    out: torch.Tensor,
    *,
    activation: str | None = None,
    top_k: int = 1,
    weights: torch.Tensor | None = None,
) -> None:
    """A `Product`: with an activation that with gate and up, or up alone; else with down, times the pairs' weights."""
    (pairs, outputs), rows = out.shape, blocks.rows
    inputs = weight.shape[2]
    wide = min(tile.outputs // (1 if activation is None else 2), max(16, triton.next_power_of_2(outputs)))
    _grouped_kernel[(tile.group * triton.cdiv(outputs, wide), blocks.experts.shape[0] // tile.group)](
        x,
        weight,
        bias,
        weights,
        blocks,
        out,
        pairs,
        x.stride(0),
        inputs,
        outputs,
        top_k,
        weight.shape[1] > outputs,
        activation or "",
        rows,
        wide,
        inputs_of_step(inputs, tile.inputs),
        tile.group,
        num_warps=tile.warps,
        num_stages=stages(x.device, tile.stages, (rows + tile.outputs) * tile.inputs * x.element_size()),
    )
