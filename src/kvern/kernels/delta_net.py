"""Gated delta nets (Yang et al. 2024): their states, token by token or in chunks, and their norm.

`advance_tokens` takes a token of each request. Of longer runs `advance_runs` solves the triangular systems of all
chunks side by side, and then lets states go from chunk to chunk.

    S <- e^decay S;  delta = beta (value - S^T key);  S <- S + key delta^T;  out = S^T query
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvern.kernels.convolution import Runs, silu
from kvern.kernels.launch import Launcher, capability, cdiv, eleven_bits, is_amd, next_power_of_2, wait_for_previous

CHUNK = 64
"""Tokens whose deltas are one triangular system."""
VALUES = 32
"""Columns of a state that are a program's which has a token."""
NORMED = 2048
"""Numbers that are a program's which normalises."""
LENGTH_FLOOR: tl.constexpr = tl.constexpr(1e-6)
"""Added to the squared lengths of queries and keys, which they are divided by."""


class Heads(NamedTuple):
    """The heads of a delta net: key heads, which neighbouring value heads share, and the widths of both."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def channels(self) -> int:
        """Numbers of a token that are convolved: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


class Gates(NamedTuple):
    """The inputs of state changes: step and beta [T, value_heads], of one stride, and the layer's own, float32.

    beta is sigmoid(beta), decay is rate * softplus(step + bias), with rate and bias [value_heads].
    """

    beta: torch.Tensor
    step: torch.Tensor
    rate: torch.Tensor
    bias: torch.Tensor


@triton.jit
def decay_of(step, rate):
    """softplus as PyTorch has it, without overflow."""
    return rate * (tl.maximum(step, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(step))))


@triton.jit
def _advance_state(
    state,
    inputs,
    gates,
    own_rate,
    own_bias,
    token,
    head,
    row,
    column,
    gate_stride,
    HEADS: tl.constexpr,
):
    """Some columns of a head's state behind a token, and what it reads of them."""
    keys: tl.constexpr = HEADS.key_heads * HEADS.key_dim
    at = inputs + token * (2 * keys + HEADS.value_heads * HEADS.value_dim)
    of_key = (head // (HEADS.value_heads // HEADS.key_heads)) * HEADS.key_dim + row
    query = tl.load(at + of_key, mask=row < HEADS.key_dim, other=0.0).to(tl.float32)
    key = tl.load(at + keys + of_key, mask=row < HEADS.key_dim, other=0.0).to(tl.float32)
    value = tl.load(at + 2 * keys + head * HEADS.value_dim + column, mask=column < HEADS.value_dim, other=0.0).to(
        tl.float32
    )
    query *= tl.rsqrt(tl.sum(query * query, 0) + LENGTH_FLOOR) * HEADS.key_dim**-0.5
    key *= tl.rsqrt(tl.sum(key * key, 0) + LENGTH_FLOOR)
    written = 1.0 / (1.0 + tl.exp(-tl.load(gates.beta + token * gate_stride + head).to(tl.float32)))
    kept = tl.exp(decay_of(tl.load(gates.step + token * gate_stride + head).to(tl.float32) + own_bias, own_rate))
    state = state * kept
    delta = (value - tl.sum(state * key[:, None], 0)) * written
    state += key[:, None] * delta[None, :]
    return state, tl.sum(state * query[:, None], 0)


@Launcher
@triton.jit(do_not_specialize=["gate_stride"], do_not_specialize_on_alignment=["gates", "states"])
def _advance_tokens_kernel(
    inputs,
    gates: Gates,
    memory,
    states,
    out,
    gate_stride: tl.int64,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A token of each request; a program has some columns of one head's state."""
    wait_for_previous(OVERLAP)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, column = tl.arange(0, KEYS), tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    known, inside = row < HEADS.key_dim, column < HEADS.value_dim
    place = memory + (tl.load(states + token).to(tl.int64) * HEADS.value_heads + head) * HEADS.key_dim * HEADS.value_dim
    place = place + row[:, None] * HEADS.value_dim + column[None, :]
    both = known[:, None] & inside[None, :]
    own_rate, own_bias = tl.load(gates.rate + head), tl.load(gates.bias + head)
    state, found = _advance_state(
        tl.load(place, mask=both, other=0.0), inputs, gates, own_rate, own_bias, token, head, row, column,
        gate_stride, HEADS,
    )  # fmt: skip
    tl.store(place, state, mask=both)
    tl.store(
        out + (token * HEADS.value_heads + head) * HEADS.value_dim + column, found.to(out.dtype.element_ty), mask=inside
    )


def advance_tokens(
    inputs: torch.Tensor, gates: Gates, memory: torch.Tensor, states: torch.Tensor, heads: Heads
) -> torch.Tensor:
    """Returns the outputs of one token of each of B requests, and updates their states: [B, value_heads, value_dim]
    float32.

    inputs [B, channels]: queries, keys and values; memory [all states, value_heads, key_dim, value_dim] float32; states
    [B] int32. Moves the states of all heads in and out.
    """
    count = len(inputs)
    out = torch.empty(count, heads.value_heads, heads.value_dim, dtype=torch.float32, device=inputs.device)
    keys = next_power_of_2(heads.key_dim)
    values = min(VALUES, next_power_of_2(heads.value_dim))
    _advance_tokens_kernel[(count, heads.value_heads, cdiv(heads.value_dim, values))](
        inputs, gates, memory, states, out, gates.beta.stride(0), heads, keys, values,
        num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def rows_of(at, token, inside, stride, column, width):
    return tl.load(
        at + token[:, None] * stride + column[None, :], mask=inside[:, None] & (column < width)[None, :], other=0.0
    )


@triton.jit
def unit_of(rows):
    """Returns the factor that gives each row length 1."""
    rows = rows.to(tl.float32)
    return tl.rsqrt(tl.sum(rows * rows, 1) + LENGTH_FLOOR)


@Launcher
@triton.jit(do_not_specialize=["gate_stride", "count", "tokens"], do_not_specialize_on_alignment=["gates", "chunks"])
def _solve_chunks_kernel(
    inputs,
    gates: Gates,
    chunks,
    solved,
    scores,
    factors,
    gate_stride: tl.int64,
    count,
    tokens,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Computes the part of a chunk that does not depend on the state before it: see `advance_runs`. 2^LEVELS = CHUNK.

    Raw keys and queries are multiplied, which are exact, and their lengths afterwards.
    """
    wait_for_previous(OVERLAP)
    chunk, head = tl.program_id(0), tl.program_id(1)
    place, row = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    token = tl.load(chunks + chunk).to(tl.int64) + place
    inside = place < tl.load(chunks + count + chunk)
    keys: tl.constexpr = HEADS.key_heads * HEADS.key_dim
    stride: tl.constexpr = 2 * keys + HEADS.value_heads * HEADS.value_dim
    exact: tl.constexpr = tl.float32 if PRECISION == "ieee" else tl.float16  # no number of a system is above 1
    of_head = inputs + (head // (HEADS.value_heads // HEADS.key_heads)) * HEADS.key_dim
    written = tl.load(gates.beta + token * gate_stride + head, mask=inside, other=0.0).to(tl.float32)
    written = tl.where(inside, 1.0 / (1.0 + tl.exp(-written)), 0.0)
    decay = tl.load(gates.step + token * gate_stride + head, mask=inside, other=0.0).to(tl.float32)
    decay = decay_of(decay + tl.load(gates.bias + head), tl.load(gates.rate + head))
    since = tl.cumsum(tl.where(inside, decay, 0.0), 0)
    whole = tl.min(since, 0)  # decays add up downwards
    key = rows_of(of_head + keys, token, inside, stride, row, HEADS.key_dim)
    query = rows_of(of_head, token, inside, stride, row, HEADS.key_dim)
    of_key, of_query = unit_of(key), unit_of(query) * HEADS.key_dim**-0.5
    before = tl.program_id(1).to(tl.int64) * tokens
    at, part = factors + before + token, tl.num_programs(1).to(tl.int64) * tokens
    tl.store(at, tl.exp(since) * of_key, mask=inside)
    tl.store(at + part, tl.exp(since) * of_query, mask=inside)
    tl.store(at + 2 * part, tl.exp(whole - since) * of_key, mask=inside)
    tl.store(at + 3 * part, tl.exp(whole + tl.zeros_like(since)), mask=inside)

    at = (before + token)[:, None] * CHUNK + place[None, :]
    below, same = place[:, None] > place[None, :], place[:, None] == place[None, :]
    between = tl.exp(tl.where(below, since[:, None] - since[None, :], 0.0))
    found = tl.dot(query, tl.trans(key), input_precision=PRECISION) * of_query[:, None] * of_key[None, :]
    found = tl.where(below | same, found * between, 0.0)
    tl.store(scores + at, found.to(scores.dtype.element_ty), mask=inside[:, None])

    alike = tl.dot(key, tl.trans(key), input_precision=PRECISION) * (of_key * written)[:, None] * of_key[None, :]
    system = tl.where(below, alike * between, 0.0).to(exact)
    pairs = (place[:, None] >> 1) == (place[None, :] >> 1)
    inverse = tl.where(same, 1.0, tl.where(pairs, -system.to(tl.float32), 0.0))
    for level in tl.range(1, LEVELS, num_stages=1):
        # Blocks that are inverted join in pairs: [[a, 0], [c, b]] has -b^-1 c a^-1 in the place of c.
        above, left = place[:, None] >> level, place[None, :] >> level
        joining = tl.where(((above & 1) == 1) & (left == above - 1), system, 0.0)
        known = inverse.to(exact)
        joined = tl.dot(joining, known, input_precision=PRECISION).to(exact)
        inverse -= tl.dot(known, joined, input_precision=PRECISION)
    tl.store(solved + at, (inverse * written[None, :]).to(solved.dtype.element_ty), mask=inside[:, None])


@Launcher
@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["runs"])
def _advance_runs_kernel(
    inputs,
    solved,
    scores,
    factors,
    memory,
    runs: Runs,
    out,
    tokens,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A run, chunk after chunk; a thread block has some columns of one head's state.

    Matrices are transposed, so that each result is the first factor of the next product, which may be in registers.
    """
    wait_for_previous(OVERLAP)
    request, head = tl.program_id(0), tl.program_id(1)
    place, row = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    column = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    known, within = row < HEADS.key_dim, column < HEADS.value_dim
    keys: tl.constexpr = HEADS.key_heads * HEADS.key_dim
    stride: tl.constexpr = 2 * keys + HEADS.value_heads * HEADS.value_dim
    # Numbers of float16 would overflow: what is written is divided by the lengths of keys.
    operand: tl.constexpr = tl.bfloat16 if inputs.dtype.element_ty == tl.bfloat16 else tl.float32
    of_query = inputs + (head // (HEADS.value_heads // HEADS.key_heads)) * HEADS.key_dim
    of_value = inputs + 2 * keys + head * HEADS.value_dim + column
    first, count = tl.load(runs.firsts + request).to(tl.int64), tl.load(runs.counts + request)
    of_head = (
        memory
        + (tl.load(runs.states + request).to(tl.int64) * HEADS.value_heads + head) * HEADS.key_dim * HEADS.value_dim
    )
    of_head = of_head + row[None, :] * HEADS.value_dim + column[:, None]
    state = tl.load(of_head, mask=known[None, :] & within[:, None], other=0.0)
    before, part = tl.program_id(1).to(tl.int64) * tokens, tl.num_programs(1).to(tl.int64) * tokens
    for begin in tl.range(0, count, CHUNK, num_stages=STAGES):
        token, inside = first + begin + place, place < count - begin
        both = inside[None, :] & within[:, None]
        key = rows_of(of_query + keys, token, inside, stride, row, HEADS.key_dim).to(operand)
        value = tl.load(of_value[:, None] + token[None, :] * stride, mask=both, other=0.0).to(tl.float32)
        system = rows_of(solved + before * CHUNK, token, inside, CHUNK, place, CHUNK).to(operand)
        at = factors + before + token
        of_state, of_found = tl.load(at, mask=inside, other=0.0), tl.load(at + part, mask=inside, other=0.0)
        remains = tl.load(at + 2 * part, mask=inside, other=0.0)
        kept = tl.load(factors + before + 3 * part + first + begin)
        held = state.to(operand)
        delta = value - tl.dot(held, tl.trans(key), input_precision=PRECISION) * of_state[None, :]
        delta = tl.dot(delta.to(operand), tl.trans(system), input_precision=PRECISION)
        query = rows_of(of_query, token, inside, stride, row, HEADS.key_dim).to(operand)
        found = tl.dot(held, tl.trans(query), input_precision=PRECISION) * of_found[None, :]
        score = rows_of(scores + before * CHUNK, token, inside, CHUNK, place, CHUNK).to(operand)
        found = tl.dot(delta.to(operand), tl.trans(score), found, input_precision=PRECISION)
        state = tl.dot((delta * remains[None, :]).to(operand), key, state * kept, input_precision=PRECISION)
        at = (token[None, :] * HEADS.value_heads + head) * HEADS.value_dim + column[:, None]
        tl.store(out + at, found, mask=both)
    tl.store(of_head, state, mask=known[None, :] & within[:, None])


class RunShape(NamedTuple):
    """Columns of a state that are a program's, chunks in its shared memory, and warps of one that solves a chunk."""

    values: int
    stages: int
    solvers: int


def run_shape(dtype: torch.dtype, device: torch.device) -> RunShape:
    """The largest that registers hold: products of Hopper read one factor out of shared memory, others both, and on
    cards of AMD's what is loaded ahead goes through registers."""
    if dtype != torch.bfloat16 or is_amd(device):
        return RunShape(16, 1, 8)
    return RunShape(64, 2, 4) if capability(device) == 90 else RunShape(32, 2, 8)


def advance_runs(inputs: torch.Tensor, gates: Gates, memory: torch.Tensor, runs: Runs, heads: Heads) -> torch.Tensor:
    """Advances runs, like `advance_tokens`: [T, value_heads, value_dim] float32.

    With S the state before a chunk, K, Q and V its rows, d_i what decays leave until row i, d_ij what they leave of
    row j:

        solved = (1 + [beta_i d_ij k_i k_j, j < i])^-1 beta     scores = [d_ij q_i k_j, j <= i]
        delta = solved (V - d K S)      out = d Q S + scores delta      S <- d_end S + (d_end,i K)^T delta

    Sums are float32. Factors of a float32 model are too; of a bfloat16 model they are rounded to it, and of a float16
    model to 11 bits, as are those of which `solved` is made.
    """
    tokens = len(inputs)
    device = inputs.device
    dtype = inputs.dtype
    solved, scores = torch.empty(2, heads.value_heads, tokens, CHUNK, dtype=dtype, device=device)
    factors = torch.empty(4, heads.value_heads, tokens, dtype=torch.float32, device=device)
    out = torch.empty(tokens, heads.value_heads, heads.value_dim, dtype=torch.float32, device=device)
    precision = {torch.float32: "ieee", torch.float16: eleven_bits(device)}.get(dtype)
    keys, count = max(16, next_power_of_2(heads.key_dim)), runs.chunks.shape[1]
    shape = run_shape(dtype, device)
    _solve_chunks_kernel[(count, heads.value_heads)](
        inputs, gates, runs.chunks, solved, scores, factors, gates.beta.stride(0), count, tokens,
        heads, keys, CHUNK, CHUNK.bit_length() - 1, precision, num_warps=shape.solvers,
    )  # fmt: skip
    values = min(shape.values, max(16, next_power_of_2(heads.value_dim)))
    _advance_runs_kernel[(len(runs.states), heads.value_heads, cdiv(heads.value_dim, values))](
        inputs, solved, scores, factors, memory, runs, out, tokens,
        heads, keys, values, CHUNK, shape.stages, precision, num_warps=4,
    )  # fmt: skip
    return out


@Launcher
@triton.jit
def _gated_norm_kernel(
    read: tl.tensor,
    gate: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    gate_stride: tl.int64,
    epsilon: tl.float32,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous(OVERLAP)
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = (head < HEADS)[:, None] & (column < WIDTH)[None, :]
    at = head[:, None] * WIDTH + column[None, :]
    x = tl.load(read + token * HEADS * WIDTH + at, mask=inside, other=0.0)
    gain = tl.load(weight + column, mask=column < WIDTH, other=0.0)
    x *= tl.rsqrt(tl.sum(x * x, 1) / WIDTH + epsilon)[:, None] * gain[None, :]
    opened = tl.load(gate + token * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * HEADS * WIDTH + at, (x * silu(opened)).to(out.dtype.element_ty), mask=inside)


def gated_norm(read: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """`rms_norm(read) * silu(gate)`, each head for itself: [T, heads * width] in the dtype of `gate`.

    read [T, heads, width] float32; gate [T, heads * width], rows may have gaps; weight [width] float32.
    """
    tokens, heads, width = read.shape
    out = torch.empty(tokens, heads * width, dtype=gate.dtype, device=gate.device)
    block = next_power_of_2(width)
    rows = min(next_power_of_2(heads), max(1, NORMED // block))
    _gated_norm_kernel[(tokens, cdiv(heads, rows))](
        read, gate, weight, out, gate.stride(0), epsilon, heads, width, rows, block,
        num_warps=4,
    )  # fmt: skip
    return out
