"""Common parts of products on Hopper GPUs (compute capability 9.0): tiles that TMA moves, and activations."""

import functools

import torch
import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kvern.kernels.activation import activate, activate_gated
from kvern.kernels.launch import processors as processors

DTYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.int8: gl.int8,
    torch.int32: gl.int32,
}
"""Dtypes that the matrix units multiply."""
KINDS = (None, "silu", "gelu", "gelu_tanh", "relu", "clamped_swiglu")
"""Kinds of activations; the last is of experts only."""
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
"""For the threads of a block, as Triton 3.6 calls it, and since 3.7."""


def hopper_multiplies(dtype: torch.dtype, inputs: int, outputs: int) -> bool:
    """True if Hopper's kernels support such a matrix: TMA takes rows of a multiple of 16 bytes."""
    return dtype.itemsize <= 2 and inputs * dtype.itemsize % 16 == 0 and outputs % 8 == 0


def tiles_of(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Returns a descriptor for TMA of a matrix's tiles; numbers outside are zero and are not written."""
    return TensorDescriptor.from_tensor(matrix, [rows, columns], _layout(rows, columns, matrix.dtype))


@functools.cache
def _layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], DTYPES[dtype])


@gluon.jit
def barriers(STAGES: gl.constexpr, FILLED: gl.constexpr, EMPTIED: gl.constexpr):
    """For the stages of a ring: those on which what multiplies waits, and those on which what fetches does.

    A stage is full, or empty, after so many arrivals.
    """
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=FILLED)
        mbarrier.init(empty.index(stage), count=EMPTIED)
    return ready, empty


@gluon.jit
def place_of(row_tiles):
    """The tile of outputs of a program, and that of rows, of which so many stand side by side; None: one."""
    if row_tiles is None:
        return gl.program_id(0), 0
    else:
        return gl.program_id(0) // row_tiles, gl.program_id(0) % row_tiles


@gluon.jit
def fetch_weights(weight_tiles, ready, weights, expert, column, begin, wanted, outputs, GATED: gl.constexpr):
    """Begin to copy a tile, from the input `begin` on; of a gated one, gate's half and up's.

    `outputs` are those of the result: a matrix, or each expert's, has twice as many rows if gated.
    """
    WIDE: gl.constexpr = weights.shape[0]
    HALF: gl.constexpr = WIDE // 2
    if GATED:
        gate = expert * (2 * outputs) + column * HALF
        tma.async_copy_global_to_shared(weight_tiles, [gate, begin], ready, weights.slice(0, HALF), pred=wanted)
        up = weights.slice(HALF, HALF)
        tma.async_copy_global_to_shared(weight_tiles, [gate + outputs, begin], ready, up, pred=wanted)
    else:
        first = expert * outputs + column * WIDE
        tma.async_copy_global_to_shared(weight_tiles, [first, begin], ready, weights, pred=wanted)


@gluon.jit
def activate_by(x, KIND: gl.constexpr):
    """Activates by the number in `KINDS`, as texts cannot be passed to groups of warps."""
    if KIND == 1:
        return activate(x, "silu")
    if KIND == 2:
        return activate(x, "gelu")
    if KIND == 3:
        return activate(x, "gelu_tanh")
    return activate(x, "relu")


@gluon.jit
def activate_gated_by(gate, up, KIND: gl.constexpr):
    """Activates like `activate_gated`, by the number in `KINDS`."""
    if KIND == 5:
        return activate_gated(gate, up, "clamped_swiglu")
    return activate_by(gate, KIND) * up
