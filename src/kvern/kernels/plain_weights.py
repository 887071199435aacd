"""Products of many rows with quantized weights: runs of the matrix's rows are made plain, then multiplied by cuBLAS.

Making them plain is bound by the bytes that are written. A run is small, so that the product finds it in the cache.
"""

import torch
import triton
import triton.language as tl

from kvern.kernels.codes import chunk_of, interleaved, places, planes_of, scales_rows, table_of, weights
from kvern.kernels.launch import Launcher, cdiv, overlaps, wait_for_previous
from kvern.kernels.packed import Packed

OUTPUTS, INPUTS = 16, 256
"""The outputs and inputs of a program: a multiple of every code's block."""
WARPS = 4
RUN_ROWS = 128
"""A run has a multiple of so many rows: the products' tiles."""


@Launcher
@triton.jit(do_not_specialize=["first", "rows"])
def _plain_weights_kernel(
    out: tl.tensor,
    codes: tl.tensor,
    scale: tl.tensor,
    zero: tl.tensor,
    table: tl.tensor,
    factor: tl.tensor,
    first,
    rows,
    inputs,
    CODE: tl.constexpr,
    GROUP: tl.constexpr,
    PER: tl.constexpr,
    ZERO: tl.constexpr,
    SCALES_ROWS: tl.constexpr,
    FACTOR: tl.constexpr,
    EVEN: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    line = tl.minimum(row, rows - 1) + first
    start = tl.program_id(0) * INPUTS
    tiles = weights(
        codes, scale, zero, table, line, start, inputs, CODE, GROUP, PER, ZERO, SCALES_ROWS, INPUTS, CHUNK, EVEN
    )
    by = tl.full([OUTPUTS], 1.0, tl.float32)
    if SCALES_ROWS:
        by = tl.load(scale + line // PER).to(tl.float32)
    if FACTOR:
        by *= tl.load(factor + line)
    if OVERLAP:
        wait_for_previous()  # which may read what is written here
    plain = out + row[:, None] * inputs
    known = (row < rows)[:, None]
    if interleaved(CODE):
        column = start + tl.arange(0, INPUTS)
        mask = known if EVEN else known & (column < inputs)[None, :]
        tile = tl.reshape(tl.join(tiles[0], tiles[1]), [OUTPUTS, INPUTS])
        if FACTOR:
            tile *= by[:, None]
        tl.store(plain + column[None, :], tile.to(out.dtype.element_ty), mask=mask)
    else:
        for plane in tl.static_range(planes_of(CODE)):
            place = places(start, CODE, INPUTS, plane)
            mask = known if EVEN else known & (place < inputs)[None, :]
            tile = tiles[plane]
            if SCALES_ROWS or FACTOR:
                tile *= by[:, None]
            tl.store(plain + place[None, :], tile.to(out.dtype.element_ty), mask=mask)


def plain_weights(weight: Packed, first: int, out: torch.Tensor) -> torch.Tensor:
    """`out [N, inputs]`, contiguous: the numbers of N rows from the row `first` on, of inputs in the matrix's order.

    Moves the rows' codes and scales once, and `out`.
    """
    rows, inputs = out.shape
    overlap = overlaps(out.device)
    _plain_weights_kernel[(cdiv(inputs, INPUTS), cdiv(rows, OUTPUTS))](
        out,
        weight.codes,
        out if weight.scale is None else weight.scale,
        out if weight.zero is None else weight.zero,
        table_of(out.device),
        out if weight.factor is None else weight.factor,
        first,
        rows,
        inputs,
        weight.code,
        weight.group,
        weight.outputs_per_scale,
        weight.zero is not None,
        scales_rows(weight.code, weight.group, inputs, weight.zero),
        weight.factor is not None,
        inputs % INPUTS == 0,
        OUTPUTS,
        INPUTS,
        chunk_of(weight.code, weight.group, INPUTS // planes_of(weight.code)),
        overlap,
        num_warps=WARPS,
        launch_pdl=overlap,
    )
    return out


def plain_product(x: torch.Tensor, weight: Packed, bias: torch.Tensor | None, numbers: int) -> torch.Tensor:
    """`x @ weight.T + bias`: [T, inputs] in the matrix's order -> [T, outputs], by runs of about so many numbers."""
    inputs, outputs = x.shape[1], weight.codes.shape[0]
    step = cdiv(cdiv(outputs, cdiv(outputs * inputs, numbers)), RUN_ROWS) * RUN_ROWS
    plain = torch.empty(min(step, outputs), inputs, dtype=x.dtype, device=x.device)
    out = torch.empty(x.shape[0], outputs, dtype=x.dtype, device=x.device)
    for first in range(0, outputs, step):
        run = plain_weights(weight, first, plain[: outputs - first])
        torch.mm(x, run.T, out=out[:, first : first + step])
    return out if bias is None else out.add_(bias)
