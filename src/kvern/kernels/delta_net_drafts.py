"""Gated delta nets over drafts: tokens that read states and may be rejected (`kernels/accepted_drafts.py`)."""

import torch
import triton
import triton.language as tl

from kvern.kernels.accepted_drafts import NOTED, Written
from kvern.kernels.convolution import PLACES, Drafts
from kvern.kernels.delta_net import OPENED, VALUES, Gates, Heads, advance_state
from kvern.kernels.launch import Launcher, cdiv, next_power_of_2, overlaps, wait_for_previous


@Launcher
@triton.jit(do_not_specialize=["gate_stride"], do_not_specialize_on_alignment=[*PLACES, *OPENED, *NOTED])
def _read_drafts_kernel(
    inputs: tl.tensor,
    beta: tl.tensor,
    step: tl.tensor,
    rate: tl.tensor,
    bias: tl.tensor,
    memory: tl.tensor,
    states: tl.tensor,
    firsts: tl.tensor,
    counts: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    decays: tl.tensor,
    out: tl.tensor,
    gate_stride: tl.int64,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A run, token after token, by a copy of its state; a program has some columns of one head's."""
    if OVERLAP:
        wait_for_previous()
    run, head = tl.program_id(0), tl.program_id(1)
    row, column = tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    known, inside = row < KEY_DIM, column < VALUE_DIM
    place = memory + (tl.load(states + run).to(tl.int64) * VALUE_HEADS + head) * KEY_DIM * VALUE_DIM
    place = place + row[:, None] * VALUE_DIM + column[None, :]
    state = tl.load(place, mask=known[:, None] & inside[None, :], other=0.0)
    own_rate, own_bias = tl.load(rate + head), tl.load(bias + head)
    of_key = head // (VALUE_HEADS // KEY_HEADS)
    notes_decay = tl.program_id(2) == 0
    notes_key = notes_decay & (head % (VALUE_HEADS // KEY_HEADS) == 0)
    first, count = tl.load(firsts + run).to(tl.int64), tl.load(counts + run)
    for token in range(first, first + count):
        state, found, key, delta, kept = advance_state(
            state, inputs, beta, step, own_rate, own_bias, token, head, row, column,
            gate_stride, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM,
        )  # fmt: skip
        at = token * VALUE_HEADS + head
        tl.store(out + at * VALUE_DIM + column, found, mask=inside)
        tl.store(values + at * VALUE_DIM + column, delta, mask=inside)
        tl.store(decays + at, kept, mask=notes_decay)
        tl.store(keys + (token * KEY_HEADS + of_key) * KEY_DIM + row, key, mask=known & notes_key)


def read_drafts(
    inputs: torch.Tensor,
    gates: Gates,
    memory: torch.Tensor,
    drafts: Drafts,
    heads: Heads,
    written: Written,
    read: torch.Tensor,
) -> None:
    """As `advance_tokens`, of runs that change no state, to `read [T, value_heads, value_dim]` float32.

    `written` is to hold what they would write, keys [T, key_heads, key_dim] of length 1 and deltas [T, value_heads,
    value_dim]. Moves the states of all heads in.
    """
    keys, overlap = next_power_of_2(heads.key_dim), overlaps(inputs.device)
    values = min(VALUES, next_power_of_2(heads.value_dim))
    _read_drafts_kernel[(len(drafts.states), heads.value_heads, cdiv(heads.value_dim, values))](
        inputs, *gates, memory, drafts.states, drafts.firsts, drafts.counts, *written, read, gates.beta.stride(0),
        *heads, keys, values, overlap, num_warps=4, launch_pdl=overlap,
    )  # fmt: skip
