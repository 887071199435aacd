"""Gated delta nets over drafts: tokens that read states and may be rejected (`kernels/accepted_drafts.py`).

A state is read once for several tokens. With S the state before them, k_i, q_i and v_i their rows, d_i what decays
leave of S until row i, and d_ij what they leave of row j:

    delta_i = beta_i (v_i - d_i S^T k_i - sum of d_ij (k_i k_j) delta_j, j < i)
    out_i = d_i S^T q_i + sum of d_ij (q_i k_j) delta_j, j <= i

Keys and queries are the rows of one tile, of which both sums are taken away token by token.
"""

import torch
import triton
import triton.language as tl

from kvern.kernels.accepted_drafts import NOTED, TOKENS, Written, exact_product
from kvern.kernels.convolution import Drafts
from kvern.kernels.delta_net import LENGTH_FLOOR, Gates, Heads, decay_of, rows_of, unit_of
from kvern.kernels.launch import Launcher, cdiv, has_ptx, next_power_of_2, wait_for_previous

COLUMNS = 64
"""The columns of a state in one program; with more than a tile's rows its warps are side by side."""
WARPS = 4


@triton.jit
def _read_written(rows, remains, key, delta, row, column, HEADS: tl.constexpr):
    """Returns what rows read of an earlier token's update."""
    key = tl.load(key + row, mask=row < HEADS.key_dim, other=0.0).to(tl.float32)
    delta = tl.load(delta + column, mask=column < HEADS.value_dim, other=0.0)
    remains *= tl.rsqrt(tl.sum(key * key, 0) + LENGTH_FLOOR)
    return (tl.sum(rows.to(tl.float32) * key[None, :], 1) * remains)[:, None] * delta[None, :]


@Launcher
@triton.jit(do_not_specialize=["gate_stride"], do_not_specialize_on_alignment=["gates", "drafts", *NOTED])
def _read_drafts_kernel(
    inputs,
    gates: Gates,
    memory,
    drafts: Drafts,
    keys,
    values,
    decays,
    out,
    gate_stride: tl.int64,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A run, some tokens at a time, by a copy of its state; a program has some columns of one head's."""
    wait_for_previous(OVERLAP)
    run, head = tl.program_id(0), tl.program_id(1)
    row, column = tl.arange(0, KEYS), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    place, of_pair = tl.arange(0, TOKENS), tl.arange(0, 2 * TOKENS)
    asks, of_both = of_pair >= TOKENS, of_pair % TOKENS  # keys come first, then queries
    known, within = row < HEADS.key_dim, column < HEADS.value_dim
    first, count = tl.load(drafts.firsts + run).to(tl.int64), tl.load(drafts.counts + run)
    of_head = (
        memory
        + (tl.load(drafts.states + run).to(tl.int64) * HEADS.value_heads + head) * HEADS.key_dim * HEADS.value_dim
    )
    of_head = of_head + row[:, None] * HEADS.value_dim + column[None, :]
    state = tl.load(of_head, mask=known[:, None] & within[None, :] & (count > 0), other=0.0)
    own_rate, own_bias = tl.load(gates.rate + head), tl.load(gates.bias + head)
    width: tl.constexpr = HEADS.key_heads * HEADS.key_dim
    stride: tl.constexpr = 2 * width + HEADS.value_heads * HEADS.value_dim
    of_key = head // (HEADS.value_heads // HEADS.key_heads)
    notes_decay = tl.program_id(2) == 0
    notes_key = notes_decay & (head % (HEADS.value_heads // HEADS.key_heads) == 0)
    before = 0.0
    for begin in tl.range(0, count, TOKENS, num_stages=1):
        token, inside = first + begin + place, place < count - begin
        either, valid = first + begin + of_both, of_both < count - begin
        at = either * stride + tl.where(asks, 0, width) + of_key * HEADS.key_dim
        pair = tl.load(inputs + at[:, None] + row[None, :], mask=valid[:, None] & known[None, :], other=0.0)
        key = rows_of(inputs + width + of_key * HEADS.key_dim, token, inside, stride, row, HEADS.key_dim)
        at = either * stride + 2 * width + head * HEADS.value_dim
        writes = (valid & (asks == 0))[:, None] & within[None, :]
        value = tl.load(inputs + at[:, None] + column[None, :], mask=writes, other=0.0).to(tl.float32)
        written = tl.load(gates.beta + either * gate_stride + head, mask=valid, other=0.0).to(tl.float32)
        written = tl.where(asks, -1.0, 1.0 / (1.0 + tl.exp(-written)))
        decay = tl.load(gates.step + token * gate_stride + head, mask=inside, other=0.0).to(tl.float32)
        decay = tl.where(inside, decay_of(decay + own_bias, own_rate), 0.0)
        since = tl.cumsum(decay, 0)
        since_pair = tl.sum(tl.where(of_both[:, None] == place[None, :], since[None, :], 0.0), 1)
        length, length_pair = unit_of(key), unit_of(pair) * tl.where(asks, HEADS.key_dim**-0.5, 1.0)

        found = exact_product(pair, state) * (tl.exp(before + since_pair) * length_pair)[:, None]
        between = 0.0
        for back in range(1, begin + 1):
            earlier = first + begin - back
            found += _read_written(
                pair, tl.exp(between + since_pair) * length_pair,
                inputs + earlier * stride + width + of_key * HEADS.key_dim,
                values + (earlier * HEADS.value_heads + head) * HEADS.value_dim, row, column, HEADS,
            )  # fmt: skip
            between += decay_of(tl.load(gates.step + earlier * gate_stride + head).to(tl.float32) + own_bias, own_rate)
        before += tl.sum(decay, 0)
        found = tl.where(asks[:, None], found, (value - found) * written[:, None])

        sees = place[:, None] < tl.where(asks, of_both + 1, of_both)[None, :]
        alike = tl.dot(key, tl.trans(pair), input_precision="tf32x3" if has_ptx() else "ieee")
        alike = alike * length[:, None] * (length_pair * written)[None, :]
        alike = tl.where(sees, alike * tl.exp(tl.where(sees, since_pair[None, :] - since[:, None], 0.0)), 0.0)
        for turn in range(tl.minimum(count - begin, TOKENS)):
            delta = tl.sum(tl.where((of_pair == turn)[:, None], found, 0.0), 0)
            found -= tl.sum(tl.where((place == turn)[:, None], alike, 0.0), 0)[:, None] * delta[None, :]

        at = ((either * HEADS.value_heads + head) * HEADS.value_dim)[:, None] + column[None, :]
        tl.store(values + at, found, mask=writes)
        tl.store(out + at, found, mask=(valid & asks)[:, None] & within[None, :])
        tl.store(decays + token * HEADS.value_heads + head, tl.exp(decay), mask=inside & notes_decay)
        at = ((token * HEADS.key_heads + of_key) * HEADS.key_dim)[:, None] + row[None, :]
        noted = inside[:, None] & known[None, :] & notes_key
        tl.store(keys + at, key.to(tl.float32) * length[:, None], mask=noted)
        tl.debug_barrier()  # what follows reads deltas


def read_drafts(
    inputs: torch.Tensor,
    gates: Gates,
    memory: torch.Tensor,
    drafts: Drafts,
    heads: Heads,
    written: Written,
    read: torch.Tensor,
) -> None:
    """Advances runs without changing states, like `advance_tokens`, into `read [T, value_heads, value_dim]` float32.

    `written` is to hold what they would write, keys [T, key_heads, key_dim] of length 1 and deltas [T, value_heads,
    value_dim]. Moves the states of all heads in.
    """
    keys = max(16, next_power_of_2(heads.key_dim))
    columns = max(16, min(COLUMNS, next_power_of_2(heads.value_dim)))
    _read_drafts_kernel[(len(drafts.states), heads.value_heads, cdiv(heads.value_dim, columns))](
        inputs, gates, memory, drafts, *written, read, gates.beta.stride(0),
        heads, keys, columns, TOKENS, num_warps=WARPS,
    )  # fmt: skip
