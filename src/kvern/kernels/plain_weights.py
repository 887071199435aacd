"""Products of many rows with quantized weights: runs of the matrix's rows are made plain, then multiplied by cuBLAS.

Making them plain is bound by the bytes that are written. A run is small, so that the product finds it in the cache.
"""

import torch
import triton
import triton.language as tl

from kvern.kernels.codes import Matrix, form_of, interleaved, matrix_of, places, planes_of, times_rows, weights
from kvern.kernels.launch import Launcher, cdiv, wait_for_previous
from kvern.kernels.packed import Packed

OUTPUTS, INPUTS = 16, 256
"""The outputs and inputs of a program: a multiple of every code's block."""
WARPS = 4
RUN_ROWS = 128
"""A run has a multiple of so many rows: the products' tiles."""


@Launcher
@triton.jit(do_not_specialize=["first", "rows"])
def _plain_weights_kernel(
    out, matrix: Matrix, first, rows, inputs, FORM: tl.constexpr, OUTPUTS: tl.constexpr, OVERLAP: tl.constexpr
):
    CODE: tl.constexpr = FORM.code
    INPUTS: tl.constexpr = FORM.inputs
    row = tl.program_id(1).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    line = tl.minimum(row, rows - 1) + first
    start = tl.program_id(0) * INPUTS
    tiles = weights(matrix, line, start, inputs, FORM)
    by = times_rows(tl.full([OUTPUTS], 1.0, tl.float32), matrix, line, FORM)
    wait_for_previous(OVERLAP)  # which may read what is written here
    plain = out + row[:, None] * inputs
    known = (row < rows)[:, None]
    if interleaved(CODE):
        column = start + tl.arange(0, INPUTS)
        mask = known if FORM.even else known & (column < inputs)[None, :]
        tile = tl.reshape(tl.join(tiles[0], tiles[1]), [OUTPUTS, INPUTS])
        if matrix.factor is not None:
            tile *= by[:, None]
        tl.store(plain + column[None, :], tile.to(out.dtype.element_ty), mask=mask)
    else:
        for plane in tl.static_range(planes_of(CODE)):
            place = places(start, plane, FORM)
            mask = known if FORM.even else known & (place < inputs)[None, :]
            tile = tiles[plane]
            if FORM.scales_rows or matrix.factor is not None:
                tile *= by[:, None]
            tl.store(plain + place[None, :], tile.to(out.dtype.element_ty), mask=mask)


def plain_weights(weight: Packed, first: int, out: torch.Tensor) -> torch.Tensor:
    """`out [N, inputs]`, contiguous: the numbers of N rows from the row `first` on, of inputs in the matrix's order.

    Moves the rows' codes and scales once, and `out`.
    """
    rows, inputs = out.shape
    _plain_weights_kernel[(cdiv(inputs, INPUTS), cdiv(rows, OUTPUTS))](
        out,
        matrix_of(weight),
        first,
        rows,
        inputs,
        form_of(weight, inputs, INPUTS),
        OUTPUTS,
        num_warps=WARPS,
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
