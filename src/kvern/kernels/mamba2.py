"""Mamba-2 (Dao and Gu 2024, Transformers are SSMs): its states, token by token or in chunks, and its gated norm.

    length = softplus(step + bias);  S <- e^(rate length) S + key (length value)^T;  out = S^T query + skip value

`advance_tokens` takes a token of each request. In longer runs `advance_runs` goes from chunk to chunk: within one,
tokens attend to each other, and together they change the state. `read_drafts` takes short runs that may be rejected.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvern.kernels.accepted_drafts import NOTED, Written
from kvern.kernels.convolution import Drafts, Runs, silu
from kvern.kernels.launch import Launcher, cdiv, eleven_bits, is_amd, next_power_of_2, wait_for_previous
from kvern.spec.mixers import Gating

CHUNK = 64
"""Tokens that attend to each other."""
COLUMNS = 32
"""The columns of a head's state in one program; in runs fewer for many rows, which registers would not hold."""
PRECISIONS = {torch.float32: "ieee", torch.float16: "tensor cores", torch.bfloat16: "split"}
"""The precision of products in runs by the model's dtype: float16 cannot hold a state's numbers."""
RUN_NUMBERS = 4096
"""The numbers of a state in one program, in runs."""


class StateSizes(NamedTuple):
    """Heads of states [state_dim, head_dim], in groups of neighbours that share keys and queries."""

    heads: int
    head_dim: int
    groups: int
    state_dim: int

    @property
    def channels(self) -> int:
        """Numbers of a token: its values, keys and queries."""
        return self.heads * self.head_dim + 2 * self.groups * self.state_dim


class Steps(NamedTuple):
    """The inputs of state changes: `step [T, heads]`, rows may have gaps, times `scale`; and the layer's own.

    `rate` (below 0), `bias` and `skip` are [heads], float32.
    """

    step: torch.Tensor
    rate: torch.Tensor
    bias: torch.Tensor
    skip: torch.Tensor
    scale: float = 1.0


@triton.jit
def _step_length(step, bias):
    """Softplus without overflow."""
    x = step + bias
    return tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _state_of(memory, state, head, SIZES: tl.constexpr):
    """Returns the start of a head's state; its rows are next to those of the other heads of its group."""
    each: tl.constexpr = SIZES.heads // SIZES.groups
    start = head % each * SIZES.head_dim
    return memory + (state * SIZES.groups + head // each) * (SIZES.state_dim * each * SIZES.head_dim) + start


@triton.jit
def _own(steps, head):
    """Returns a head's rate, bias and skip."""
    return tl.load(steps.rate + head), tl.load(steps.bias + head), tl.load(steps.skip + head)


@triton.jit
def _advance(state, inputs, steps, own, token, head, row, column, step_stride, SIZES: tl.constexpr):
    """Some columns of a head's state behind a token, what it reads of them, its key, what it writes, what it leaves."""
    own_rate, own_bias, own_skip = own
    known, inside = row < SIZES.state_dim, column < SIZES.head_dim
    inner: tl.constexpr = SIZES.heads * SIZES.head_dim
    at = inputs + token * (inner + 2 * SIZES.groups * SIZES.state_dim)
    shared = at + inner + head // (SIZES.heads // SIZES.groups) * SIZES.state_dim + row
    key = tl.load(shared, mask=known, other=0.0).to(tl.float32)
    query = tl.load(shared + SIZES.groups * SIZES.state_dim, mask=known, other=0.0).to(tl.float32)
    value = tl.load(at + head * SIZES.head_dim + column, mask=inside, other=0.0).to(tl.float32)
    length = _step_length(tl.load(steps.step + token * step_stride + head).to(tl.float32) * steps.scale, own_bias)
    kept, written = tl.exp(own_rate * length), value * length
    state = state * kept + key[:, None] * written[None, :]
    return state, tl.sum(state * query[:, None], 0) + value * own_skip, key, written, kept


@Launcher
@triton.jit(do_not_specialize=["step_stride"], do_not_specialize_on_alignment=["steps", "states"])
def _advance_tokens_kernel(
    inputs,
    steps: Steps,
    memory,
    states,
    out,
    step_stride: tl.int64,
    SIZES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A token of each request; a program has some columns of one head's state."""
    wait_for_previous(OVERLAP)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, column = tl.arange(0, ROWS), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    known, inside = row < SIZES.state_dim, column < SIZES.head_dim
    both = known[:, None] & inside[None, :]
    inner: tl.constexpr = SIZES.heads * SIZES.head_dim
    width: tl.constexpr = inner // SIZES.groups
    place = _state_of(memory, tl.load(states + token).to(tl.int64), head, SIZES)
    place = place + row[:, None] * width + column[None, :]
    own = _own(steps, head)
    state = tl.load(place, mask=both, other=0.0)
    state, found, _, _, _ = _advance(state, inputs, steps, own, token, head, row, column, step_stride, SIZES)
    tl.store(place, state, mask=both)
    tl.store(out + token * inner + head * SIZES.head_dim + column, found, mask=inside)


def advance_tokens(
    inputs: torch.Tensor, steps: Steps, memory: torch.Tensor, states: torch.Tensor, sizes: StateSizes
) -> torch.Tensor:
    """Returns the outputs of one token of each of B requests, and updates their states: [B, heads * head_dim] float32.

    inputs [B, channels]: values, keys and queries; memory [all states, groups, state_dim, heads of a group * head_dim]
    float32; states [B] int32. Moves the states of all heads in and out.
    """
    count = len(inputs)
    out = torch.empty(count, sizes.heads * sizes.head_dim, dtype=torch.float32, device=inputs.device)
    rows = next_power_of_2(sizes.state_dim)
    columns = min(COLUMNS, next_power_of_2(sizes.head_dim))
    _advance_tokens_kernel[(count, sizes.heads, cdiv(sizes.head_dim, columns))](
        inputs, steps, memory, states, out, steps.step.stride(0), sizes, rows, columns,
        num_warps=max(1, rows // 32),
    )  # fmt: skip
    return out


@Launcher
@triton.jit(do_not_specialize=["step_stride"], do_not_specialize_on_alignment=["steps", "drafts", *NOTED])
def _read_drafts_kernel(
    inputs,
    steps: Steps,
    memory,
    drafts: Drafts,
    keys,
    values,
    decays,
    out,
    step_stride: tl.int64,
    SIZES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A run, token after token, by a copy of its state; a program has some columns of one head's."""
    wait_for_previous(OVERLAP)
    run, head = tl.program_id(0), tl.program_id(1)
    row, column = tl.arange(0, ROWS), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    known, inside = row < SIZES.state_dim, column < SIZES.head_dim
    inner: tl.constexpr = SIZES.heads * SIZES.head_dim
    width: tl.constexpr = inner // SIZES.groups
    place = _state_of(memory, tl.load(drafts.states + run).to(tl.int64), head, SIZES)
    place = place + row[:, None] * width + column[None, :]
    state = tl.load(place, mask=known[:, None] & inside[None, :], other=0.0)
    own = _own(steps, head)
    group = head // (SIZES.heads // SIZES.groups)
    notes_decay = tl.program_id(2) == 0
    notes_key = notes_decay & (head % (SIZES.heads // SIZES.groups) == 0)
    first, count = tl.load(drafts.firsts + run).to(tl.int64), tl.load(drafts.counts + run)
    for token in range(first, first + count):
        state, found, key, written, kept = _advance(
            state, inputs, steps, own, token, head, row, column, step_stride, SIZES
        )
        at = token * inner + head * SIZES.head_dim + column
        tl.store(out + at, found, mask=inside)
        tl.store(values + at, written, mask=inside)
        tl.store(decays + token * SIZES.heads + head, kept, mask=notes_decay)
        tl.store(keys + (token * SIZES.groups + group) * SIZES.state_dim + row, key, mask=known & notes_key)


def read_drafts(
    inputs: torch.Tensor,
    steps: Steps,
    memory: torch.Tensor,
    drafts: Drafts,
    sizes: StateSizes,
    written: Written,
    read: torch.Tensor,
) -> None:
    """Advances runs without changing states, like `advance_tokens`, into `read [T, groups, heads of a group *
    head_dim]` float32.

    `written` is to hold what they would write, keys [T, groups, state_dim] and values times steps [T, groups, heads of
    a group * head_dim]. Moves the states of all heads in.
    """
    rows = next_power_of_2(sizes.state_dim)
    columns = min(COLUMNS, next_power_of_2(sizes.head_dim))
    _read_drafts_kernel[(len(drafts.states), sizes.heads, cdiv(sizes.head_dim, columns))](
        inputs, steps, memory, drafts, *written, read, steps.step.stride(0), sizes, rows, columns,
        num_warps=max(1, rows // 32),
    )  # fmt: skip


@triton.jit
def _product(inputs, factor, PRECISION: tl.constexpr):
    """Multiplies a tile of inputs with float32, which may be split into a sum of two of their dtype."""
    if PRECISION == "split":
        high = factor.to(inputs.dtype)
        low = (factor - high.to(tl.float32)).to(inputs.dtype)
        return tl.dot(inputs, low, tl.dot(inputs, high))
    else:
        return tl.dot(inputs.to(tl.float32), factor, input_precision=PRECISION)


@Launcher
@triton.jit(do_not_specialize=["step_stride"], do_not_specialize_on_alignment=["steps", "runs"])
def _advance_runs_kernel(
    inputs,
    steps: Steps,
    memory,
    runs: Runs,
    out,
    step_stride: tl.int64,
    SIZES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    WITHIN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A run, chunk after chunk; a program has some columns of one head's state."""
    wait_for_previous(OVERLAP)
    request, head = tl.program_id(0), tl.program_id(1)
    row, column = tl.arange(0, ROWS), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    known, within = row < SIZES.state_dim, column < SIZES.head_dim
    inner: tl.constexpr = SIZES.heads * SIZES.head_dim
    width: tl.constexpr = inner // SIZES.groups
    stride: tl.constexpr = inner + 2 * SIZES.groups * SIZES.state_dim
    first, count = tl.load(runs.firsts + request).to(tl.int64), tl.load(runs.counts + request)
    of_head = _state_of(memory, tl.load(runs.states + request).to(tl.int64), head, SIZES)
    of_head = of_head + row[:, None] * width + column[None, :]
    state = tl.load(of_head, mask=known[:, None] & within[None, :], other=0.0)
    own_rate, own_bias, own_skip = _own(steps, head)
    place = tl.arange(0, CHUNK)
    for begin in range(0, count, CHUNK):
        token, inside = first + begin + place, place < count - begin
        at = inputs + token[:, None] * stride
        shared = at + (inner + head // (SIZES.heads // SIZES.groups) * SIZES.state_dim + row)[None, :]
        both = inside[:, None] & known[None, :]
        key = tl.load(shared, mask=both, other=0.0)
        query = tl.load(shared + SIZES.groups * SIZES.state_dim, mask=both, other=0.0)
        both = inside[:, None] & within[None, :]
        value = tl.load(at + (head * SIZES.head_dim + column)[None, :], mask=both, other=0.0).to(tl.float32)
        length = tl.load(steps.step + token * step_stride + head, mask=inside, other=0.0).to(tl.float32) * steps.scale
        length = tl.where(inside, _step_length(length, own_bias), 0.0)
        since = tl.cumsum(own_rate * length, 0)
        whole = tl.min(since, 0)  # rates are below 0: decays add up downwards
        earlier = place[:, None] >= place[None, :]
        between = tl.where(earlier, tl.exp(tl.where(earlier, since[:, None] - since[None, :], 0.0)), 0.0)
        scores = tl.dot(query, tl.trans(key), input_precision=WITHIN) * between
        written = value * length[:, None]
        found = _product(query, state, PRECISION) * tl.exp(since)[:, None]
        found += tl.dot(scores, written, input_precision=WITHIN) + value * own_skip
        tl.store(out + token[:, None] * inner + (head * SIZES.head_dim + column)[None, :], found, mask=both)
        written *= tl.exp(whole - since)[:, None]
        state = state * tl.exp(whole) + _product(tl.trans(key), written, PRECISION)
    tl.store(of_head, state, mask=known[:, None] & within[None, :])


def advance_runs(
    inputs: torch.Tensor, steps: Steps, memory: torch.Tensor, runs: Runs, sizes: StateSizes
) -> torch.Tensor:
    """Advances runs, like `advance_tokens`: [T, heads * head_dim] float32.

    Products of a float32 model are exact to float32; others take tensor cores, with 11 bits at least of each factor.
    """
    out = torch.empty(len(inputs), sizes.heads * sizes.head_dim, dtype=torch.float32, device=inputs.device)
    rows = max(16, next_power_of_2(sizes.state_dim))
    device = inputs.device
    most = COLUMNS // 2 if is_amd(device) else COLUMNS  # the registers of AMD's wavefronts hold no more
    columns = max(16, min(most, RUN_NUMBERS // rows, next_power_of_2(sizes.head_dim)))
    # Two tiles fit 99 KiB of shared memory.
    chunk = CHUNK // 2 if is_amd(device) or rows * inputs.element_size() >= 1024 else CHUNK
    precision = PRECISIONS[inputs.dtype]
    within = "ieee" if precision == "ieee" else eleven_bits(device)
    precision = precision if precision == "split" else within
    _advance_runs_kernel[(len(runs.states), sizes.heads, cdiv(sizes.head_dim, columns))](
        inputs, steps, memory, runs, out, steps.step.stride(0), sizes, rows, columns, chunk, precision, within,
        num_warps=8, num_stages=1,
    )  # fmt: skip
    return out


@Launcher
@triton.jit
def _gated_norm_kernel(
    read: tl.tensor,
    gate: tl.tensor,
    weight: tl.tensor | None,
    out: tl.tensor,
    gate_stride: tl.int64,
    epsilon: tl.float32,
    scale: tl.float32,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    GATING: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_previous(OVERLAP)
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = group * WIDTH + tl.arange(0, BLOCK)
    inside = tl.arange(0, BLOCK) < WIDTH
    x = tl.load(read + token * GROUPS * WIDTH + column, mask=inside, other=0.0)
    opened = silu(tl.load(gate + token * gate_stride + column, mask=inside, other=0.0).to(tl.float32) * scale)
    if GATING != "after_norm":
        x *= opened
    if GATING != "without_norm":
        x *= tl.rsqrt(tl.sum(x * x, 0) / WIDTH + epsilon) * tl.load(weight + column, mask=inside, other=0.0)
    if GATING == "after_norm":
        x *= opened
    tl.store(out + token * GROUPS * WIDTH + column, x.to(out.dtype.element_ty), mask=inside)


def gated_norm(
    read: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    *,
    groups: int,
    gating: Gating,
    scale: float = 1.0,
) -> torch.Tensor:
    """Returns outputs, normalized in groups of neighbours and gated: [T, inner] in the dtype of `gate`.

    read [T, inner] float32; gate [T, inner], rows may have gaps, whose SiLU multiplies, after `scale`, on the side of
    the norm that `gating` names; weight [inner] float32, or None without a norm.
    """
    tokens, inner = read.shape
    out = torch.empty(tokens, inner, dtype=gate.dtype, device=gate.device)
    width = inner // groups
    block = next_power_of_2(width)
    _gated_norm_kernel[(tokens, groups)](
        read, gate, weight, out, gate.stride(0), epsilon, scale, groups, width, gating, block,
        num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    return out
