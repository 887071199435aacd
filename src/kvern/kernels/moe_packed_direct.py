"""The experts of one or a few tokens whose weights are quantized: as `kernels/moe_direct.py` has plain ones."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvern.kernels.activation import activate_gated
from kvern.kernels.codes import CODES, chunk_of, planes_of, scales_rows, table_of
from kvern.kernels.launch import Launcher, cdiv, next_power_of_2, overlaps, wait_for_previous
from kvern.kernels.moe_direct import inputs_of_step
from kvern.kernels.packed import Packed
from kvern.kernels.packed_product import MOST_CHUNK, add_row_step, ended_sums

DIRECT_OUTPUTS = 8
DIRECT_INPUTS = 512
DIRECT_WARPS = 4
"""The outputs of a program, and the inputs and warps of one step, of a direct product."""
FEWEST_INPUTS = 128
"""The fewest inputs of a step without masks: shorter ones would be too many."""
MOST_COPIES = 24
"""The most copies of a step in the code of a product by down: with more a compiler takes minutes."""


class Form(NamedTuple):
    """The compile-time side of a packed matrix, in steps of `inputs`."""

    code: str
    group: int
    per: int
    zero: bool
    scales_rows: bool
    factor: bool
    even: bool
    inputs: int
    chunk: int

    @classmethod
    def of(cls, matrix: Packed, inputs: int, step: int, most_chunk: int) -> "Form":
        """`inputs`: the matrix's; a step is of at most `step` of them, and of whole blocks."""
        step = max(inputs_of_step(inputs, step, FEWEST_INPUTS), CODES[matrix.code].block, 32)
        return cls(
            matrix.code,
            matrix.group,
            matrix.outputs_per_scale,
            matrix.zero is not None,
            scales_rows(matrix.code, matrix.group, inputs, matrix.zero),
            matrix.factor is not None,
            inputs % step == 0,
            step,
            min(most_chunk, chunk_of(matrix.code, matrix.group, step // planes_of(matrix.code))),
        )


def tensors_of(matrix: Packed) -> tuple[torch.Tensor, ...]:
    """Returns a matrix's tensors for kernels: codes, scale, zero, table and factor, with a stand-in for missing
    ones."""
    codes = matrix.codes
    scale = matrix.scale
    zero = matrix.zero
    factor = matrix.factor
    some = [codes if item is None else item for item in (scale, zero, factor)]
    return codes, some[0], some[1], table_of(codes.device), some[2]


@Launcher
@triton.jit
def _direct_gate_up_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scale: tl.tensor,
    zero: tl.tensor,
    table: tl.tensor,
    factor: tl.tensor,
    bias: tl.tensor | None,
    topk_ids: tl.tensor,
    out: tl.tensor,
    x_stride: tl.int64,
    hidden: tl.constexpr,
    width: tl.constexpr,
    top_k: tl.constexpr,
    KIND: tl.constexpr,
    OUTPUTS: tl.constexpr,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    PER: tl.constexpr,
    ZERO: tl.constexpr,
    SCALES_ROWS: tl.constexpr,
    FACTOR: tl.constexpr,
    EVEN: tl.constexpr,
    INPUTS: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        wait_for_previous()
    pair = tl.program_id(1).to(tl.int64)
    expert = tl.load(topk_ids + pair).to(tl.int64)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    known = output < width
    row = expert * (2 * width) + tl.minimum(output, width - 1)
    COLUMNS: tl.constexpr = INPUTS // planes_of(CODE)
    gate = tl.zeros([OUTPUTS, COLUMNS // CHUNK], tl.float32)
    up = tl.zeros([OUTPUTS, COLUMNS // CHUNK], tl.float32)
    squares = 0.0
    for start in tl.range(0, hidden, INPUTS):
        gate, up, squares = add_row_step(
            gate, up, squares, x + pair // top_k * x_stride, x, codes, scale, zero, table, row, row + width, start,
            hidden, CODE, GROUP, PER, ZERO, SCALES_ROWS, False, True, EVEN, INPUTS, CHUNK, False,
        )  # fmt: skip
    first = ended_sums(tl.sum(gate, axis=1), row, known, scale, factor, x, PER, SCALES_ROWS, FACTOR, False)
    second = ended_sums(tl.sum(up, axis=1), row + width, known, scale, factor, x, PER, SCALES_ROWS, FACTOR, False)
    if bias is not None:
        first += tl.load(bias + row).to(tl.float32)
        second += tl.load(bias + row + width).to(tl.float32)
    tl.store(out + pair * width + output, activate_gated(first, second, KIND).to(out.dtype.element_ty), mask=known)


@Launcher
@triton.jit
def _direct_down_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scale: tl.tensor,
    zero: tl.tensor,
    table: tl.tensor,
    factor: tl.tensor,
    bias: tl.tensor | None,
    weights: tl.tensor,
    topk_ids: tl.tensor,
    add: tl.tensor,
    out: tl.tensor,
    add_stride: tl.int64,
    hidden: tl.constexpr,
    width: tl.constexpr,
    top_k: tl.constexpr,
    ADD: tl.constexpr,
    UNROLL: tl.constexpr,
    OUTPUTS: tl.constexpr,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    PER: tl.constexpr,
    ZERO: tl.constexpr,
    SCALES_ROWS: tl.constexpr,
    FACTOR: tl.constexpr,
    EVEN: tl.constexpr,
    INPUTS: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        wait_for_previous()
    token = tl.program_id(1).to(tl.int64)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    known = output < hidden
    COLUMNS: tl.constexpr = INPUTS // planes_of(CODE)
    result = tl.zeros([OUTPUTS], tl.float32)
    for choice in tl.range(0, top_k, loop_unroll_factor=UNROLL):  # codes of some experts come together
        pair = token * top_k + choice
        row = tl.load(topk_ids + pair).to(tl.int64) * hidden + tl.minimum(output, hidden - 1)
        total = tl.zeros([OUTPUTS, COLUMNS // CHUNK], tl.float32)
        squares = 0.0
        for start in tl.static_range(0, width, INPUTS):
            total, _, squares = add_row_step(
                total, total, squares, x + pair * width, x, codes, scale, zero, table, row, row, start, width,
                CODE, GROUP, PER, ZERO, SCALES_ROWS, False, False, EVEN, INPUTS, CHUNK, False,
            )  # fmt: skip
        part = ended_sums(tl.sum(total, axis=1), row, known, scale, factor, x, PER, SCALES_ROWS, FACTOR, False)
        if bias is not None:
            part += tl.load(bias + row).to(tl.float32)
        result += part * tl.load(weights + pair)
    if ADD:
        result += tl.load(add + token * add_stride + output, mask=known, other=0.0).to(tl.float32)
    tl.store(out + token * hidden + output, result.to(out.dtype.element_ty), mask=known)


def direct_gate_up(
    x: torch.Tensor,
    gate_up: Packed,
    topk_ids: torch.Tensor,
    out: torch.Tensor,
    activation: str,
    bias: torch.Tensor | None = None,
) -> None:
    """`activation(gate) * up` of every pair: x [T, hidden] -> out [pairs, width].

    `bias [experts, 2 * width]` is added to gate and up, if it is given.
    Moves the codes and scales of gate and up of every pair's expert.
    """
    overlap = overlaps(x.device)
    (pairs, width), hidden = out.shape, x.shape[1]
    outputs = min(DIRECT_OUTPUTS, next_power_of_2(width))
    _direct_gate_up_kernel[(cdiv(width, outputs), pairs)](
        x,
        *tensors_of(gate_up),
        bias,
        topk_ids,
        out,
        x.stride(0),
        hidden,
        width,
        topk_ids.shape[1],
        activation,
        outputs,
        *Form.of(gate_up, hidden, DIRECT_INPUTS, MOST_CHUNK),
        overlap,
        num_warps=DIRECT_WARPS,
        launch_pdl=overlap,
    )


def steps_of_down(down: Packed, width: int) -> tuple[Form, int]:
    """The steps of a product by down, and of how many experts codes come together."""
    form = Form.of(down, width, DIRECT_INPUTS, MOST_CHUNK)
    together = 2 if down.scale is None else 4  # scales among the codes take many instructions
    return form, max(1, min(together, MOST_COPIES // cdiv(width, form.inputs)))


def direct_down(
    gated: torch.Tensor,
    down: Packed,
    weights: torch.Tensor,
    topk_ids: torch.Tensor,
    add: torch.Tensor | None,
    hidden: int,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """gated [T * top_k, width] through down, summed with `weights [T, top_k]` -> [T, hidden], which is never rounded.

    `bias [experts, hidden]` is added to each product, if it is given.
    Moves the codes and scales of down of every pair's expert.
    """
    overlap = overlaps(gated.device)
    (tokens, top_k), width = topk_ids.shape, gated.shape[1]
    out = torch.empty(tokens, hidden, dtype=gated.dtype, device=gated.device)
    outputs = min(DIRECT_OUTPUTS, next_power_of_2(hidden))
    form, together = steps_of_down(down, width)
    _direct_down_kernel[(cdiv(hidden, outputs), tokens)](
        gated,
        *tensors_of(down),
        bias,
        weights,
        topk_ids,
        out if add is None else add,
        out,
        0 if add is None else add.stride(0),
        hidden,
        width,
        top_k,
        add is not None,
        together,
        outputs,
        *form,
        overlap,
        num_warps=DIRECT_WARPS,
        launch_pdl=overlap,
    )
    return out
