"""Updates of recurrent layers' matrices by accepted drafts.

S <- decay S + key value^T      for each accepted token, of all layers in one launch
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvern.kernels.convolution import PLACES, Drafts
from kvern.kernels.launch import Launcher, cdiv, has_ptx, next_power_of_2, wait_for_previous

COLUMNS = 32
"""The columns of a matrix that one program updates."""
TOKENS = 16
"""The tokens of a run that read a state together."""
NOTED = ["keys", "values", "decays"]
"""Tensors of a layer that begin anywhere in the tensors of all layers."""


class Written(NamedTuple):
    """Keys and values that T tokens write to matrices [groups, rows, columns] shared by a group's heads; all float32.

    keys    [T, key groups, rows]   which neighbouring groups share
    values  [T, groups, columns]
    decays  [T, heads]              what is left of a head's columns

    Of all layers [layers, T, ...].
    """

    keys: torch.Tensor
    values: torch.Tensor
    decays: torch.Tensor


@triton.jit
def exact_product(inputs, factor):
    """Multiplies a tile of inputs with float32, which is split into three numbers of bfloat16, or two of TF32."""
    if inputs.dtype == tl.bfloat16:
        high = factor.to(tl.bfloat16)
        factor -= high.to(tl.float32)
        middle = factor.to(tl.bfloat16)
        low = (factor - middle.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(inputs, high, tl.dot(inputs, middle, tl.dot(inputs, low)))
    else:
        return tl.dot(inputs.to(tl.float32), factor, input_precision="tf32x3" if has_ptx() else "ieee")


@Launcher
@triton.jit(do_not_specialize=["tokens", "places"], do_not_specialize_on_alignment=[*PLACES, *NOTED])
def _accept_writes_kernel(
    memory: tl.tensor,
    states: tl.tensor,
    firsts: tl.tensor,
    counts: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    decays: tl.tensor,
    tokens,
    places,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    KEY_GROUPS: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program has some columns of one group's matrix, of one layer and request."""
    wait_for_previous(OVERLAP)
    run = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64) // GROUPS
    group = tl.program_id(1) % GROUPS
    row, column = tl.arange(0, ROWS), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    known, inside = row < DIM, column < WIDTH
    both = known[:, None] & inside[None, :]
    head = group * (HEADS // GROUPS) + column // (WIDTH // (HEADS // GROUPS))
    of_keys = group // (GROUPS // KEY_GROUPS)
    place = memory + ((layer * places + tl.load(states + run)) * GROUPS + group) * DIM * WIDTH
    place = place + row[:, None] * WIDTH + column[None, :]
    state = tl.load(place, mask=both, other=0.0)
    first = layer * tokens + tl.load(firsts + run)
    for token in range(first, first + tl.load(counts + run)):
        key = tl.load(keys + (token * KEY_GROUPS + of_keys) * DIM + row, mask=known, other=0.0)
        value = tl.load(values + (token * GROUPS + group) * WIDTH + column, mask=inside, other=0.0)
        kept = tl.load(decays + token * HEADS + head, mask=inside, other=0.0)
        state = state * kept[None, :] + key[:, None] * value[None, :]
    tl.store(place, state, mask=both)


def accept_writes(memory: torch.Tensor, written: Written, drafts: Drafts, kept: torch.Tensor) -> None:
    """Let the states of `drafts` go on behind as many of their tokens as `kept [R]` int32 says.

    memory [layers, all states, groups, rows, columns] float32, which changes; `written` by the tokens of all layers.
    Moves the states of all layers in and out.
    """
    layers, places, groups, dim, width = memory.shape
    key_groups = written.keys.shape[2]
    heads = written.decays.shape[2]
    rows, columns = next_power_of_2(dim), min(COLUMNS, next_power_of_2(width))
    _accept_writes_kernel[(len(drafts.states), layers * groups, cdiv(width, columns))](
        memory, drafts.states, drafts.firsts, kept, *written, written.keys.shape[1], places,
        groups, dim, width, key_groups, heads, rows, columns,
        num_warps=max(1, rows // 32),
    )  # fmt: skip
