"""Causal convolutions of each channel by itself, over the last tokens of requests, activated or gated.

A step's tokens are runs, one for each request, that go on with the request's state: its last inputs. Runs of a single
token are one launch (`convolve_tokens`), others two (`convolve_runs`); of drafts the second comes when it is known
which are accepted (`accept_inputs`).

Activated: what is convolved goes through a SiLU. Gated (Liquid AI 2025, LFM2): a token's row has three parts, a gate
before, a gate behind and what they multiply, x; the first times x is convolved, and the second multiplies the result.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvern.kernels.launch import Launcher, cdiv, next_power_of_2, wait_for_previous

CHANNELS = 256
"""The channels of a program that convolves."""
TOKENS = 16
"""The tokens of a program that convolves runs."""
PLACES = ["states", "firsts", "counts", "requests", "chunks"]
"""Parts of what describes a step: which of them are aligned differs from step to step."""


class Runs(NamedTuple):
    """Longer runs, one behind the other, all int32 (made by `kvern.runner.device_states`).

    states, firsts, counts [R]   the state of each, its first token among the T, and how many it has
    requests [T]                 the run that a token belongs to
    chunks [2, chunks]           first tokens of chunks, and how many they have
    """

    states: torch.Tensor
    firsts: torch.Tensor
    counts: torch.Tensor
    requests: torch.Tensor
    chunks: torch.Tensor


class Drafts(NamedTuple):
    """Runs that change no state before it is known how many of their tokens are accepted; parts as those of `Runs`."""

    states: torch.Tensor
    firsts: torch.Tensor
    counts: torch.Tensor
    requests: torch.Tensor


class Taps(NamedTuple):
    """A layer's own: weights [kernel, channels] and what is added [channels], if anything, float32."""

    weights: torch.Tensor
    bias: torch.Tensor | None = None


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _input_of(row, channels, inside, GATED: tl.constexpr):
    """Returns the convolved inputs of a row, as a state stores them: `row` points to its channels, gate and x
    follow."""
    given = tl.load(row, mask=inside, other=0.0)
    if GATED:
        x = tl.load(row + 2 * channels, mask=inside, other=0.0)
        given = (given.to(tl.float32) * x.to(tl.float32)).to(given.dtype)
    return given


@triton.jit
def _output_of(total, row, channels, inside, GATED: tl.constexpr):
    """Returns the output for the sums of a row."""
    if GATED:
        return total * tl.load(row + channels, mask=inside, other=0.0).to(tl.float32)
    else:
        return silu(total)


@Launcher
@triton.jit(do_not_specialize_on_alignment=PLACES)
def _convolve_tokens_kernel(
    mixed: tl.tensor,
    taps: tl.tensor,
    bias: tl.tensor | None,
    memory: tl.tensor,
    states: tl.tensor,
    out: tl.tensor,
    mixed_stride: tl.int64,
    channels: tl.constexpr,
    KERNEL: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A token of each request; what the convolution was given last moves by one."""
    wait_for_previous(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    at = memory + tl.load(states + token).to(tl.int64) * (KERNEL - 1) * channels + channel
    total = tl.zeros([BLOCK], tl.float32)
    if bias is not None:
        total += tl.load(bias + channel, mask=inside, other=0.0)
    for place in tl.static_range(KERNEL - 1):
        given = tl.load(at + place * channels, mask=inside, other=0.0)
        if place > 0:
            tl.store(at + (place - 1) * channels, given, mask=inside)
        total += given.to(tl.float32) * tl.load(taps + place * channels + channel, mask=inside, other=0.0)
    row = mixed + token * mixed_stride + channel
    given = _input_of(row, channels, inside, GATED)
    if KERNEL > 1:
        tl.store(at + (KERNEL - 2) * channels, given, mask=inside)
    total += given.to(tl.float32) * tl.load(taps + (KERNEL - 1) * channels + channel, mask=inside, other=0.0)
    target = out + token * channels + channel
    tl.store(target, _output_of(total, row, channels, inside, GATED).to(out.dtype.element_ty), mask=inside)


def convolve_tokens(
    mixed: torch.Tensor, taps: Taps, memory: torch.Tensor, states: torch.Tensor, *, gated: bool = False
) -> torch.Tensor:
    """The convolution of one token of each of B requests, activated or gated: [B, channels], in the dtype of `mixed`.

    mixed [B, channels], or [B, 3 * channels] if `gated`, rows may have gaps; memory [all states, kernel - 1, channels]:
    the last inputs of each, which change; states [B] int32, all different but those that nobody reads.
    """
    (weights, bias), count = taps, len(mixed)
    kernel, channels = weights.shape
    out = torch.empty(count, channels, dtype=mixed.dtype, device=mixed.device)
    block = min(CHANNELS, next_power_of_2(channels))
    _convolve_tokens_kernel[(count, cdiv(channels, block))](
        mixed, weights, bias, memory, states, out, mixed.stride(0), channels, kernel, gated, block,
        num_warps=2,
    )  # fmt: skip
    return out


@Launcher
@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=PLACES)
def _convolve_runs_kernel(
    mixed: tl.tensor,
    taps: tl.tensor,
    bias: tl.tensor | None,
    memory: tl.tensor,
    states: tl.tensor,
    firsts: tl.tensor,
    requests: tl.tensor,
    out: tl.tensor,
    noted: tl.tensor | None,
    mixed_stride: tl.int64,
    tokens,
    channels: tl.constexpr,
    KERNEL: tl.constexpr,
    GATED: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Before its run a token finds the state's inputs, which `_remember_kernel` changes afterwards.

    To `noted [tokens, channels]` go the tokens' own, if anywhere.
    """
    wait_for_previous(OVERLAP)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = token < tokens
    inside = known[:, None] & (channel < channels)[None, :]
    request = tl.load(requests + token, mask=known, other=0)
    first = tl.load(firsts + request)
    state = tl.load(states + request).to(tl.int64)
    total = tl.zeros([TOKENS, BLOCK], tl.float32)
    for place in tl.static_range(KERNEL):
        source = token - (KERNEL - 1 - place)
        before = source < first
        behind = mixed + source.to(tl.int64)[:, None] * mixed_stride + channel[None, :]
        kept = memory + (state * (KERNEL - 1) + (KERNEL - 1) + source - first)[:, None] * channels + channel[None, :]
        own = _input_of(behind, channels, inside & ~before[:, None], GATED)
        if place == KERNEL - 1 and noted is not None:
            tl.store(noted + token.to(tl.int64)[:, None] * channels + channel[None, :], own, mask=inside)
        given = own.to(tl.float32) + tl.load(kept, mask=inside & before[:, None], other=0.0).to(tl.float32)
        tap = tl.load(taps + place * channels + channel, mask=channel < channels, other=0.0)
        total += given * tap[None, :]
    if bias is not None:
        total += tl.load(bias + channel, mask=channel < channels, other=0.0)[None, :]
    row = mixed + token.to(tl.int64)[:, None] * mixed_stride + channel[None, :]
    found = _output_of(total, row, channels, inside, GATED).to(out.dtype.element_ty)
    tl.store(out + token.to(tl.int64)[:, None] * channels + channel[None, :], found, mask=inside)


@Launcher
@triton.jit(do_not_specialize=["tokens", "places"], do_not_specialize_on_alignment=PLACES)
def _remember_kernel(
    mixed: tl.tensor,
    memory: tl.tensor,
    states: tl.tensor,
    firsts: tl.tensor,
    counts: tl.tensor,
    mixed_stride: tl.int64,
    tokens,
    places,
    channels: tl.constexpr,
    KERNEL: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The last inputs of a run, or of what was there before where it is shorter.

    Layers have so many tokens and states each. Where one begins is a multiple of a row, whose alignment is known: that
    of how far they are apart would change with a step's tokens.
    """
    wait_for_previous(OVERLAP)
    request, layer = tl.program_id(0), tl.program_id(2).to(tl.int64)
    mixed += layer * tokens * mixed_stride
    memory += layer * places * ((KERNEL - 1) * channels)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    first, count = tl.load(firsts + request).to(tl.int64), tl.load(counts + request)
    at = memory + tl.load(states + request).to(tl.int64) * (KERNEL - 1) * channels + channel
    for place in tl.static_range(KERNEL - 1):  # reads places behind the one that it writes
        source = count - (KERNEL - 1) + place
        there = inside & (source >= 0)
        new = _input_of(mixed + (first + source) * mixed_stride + channel, channels, there, GATED)
        old = tl.load(at + (place + count) * channels, mask=inside & (source < 0), other=0.0)
        tl.store(at + place * channels, tl.where(source < 0, old, new), mask=inside)


def _convolve(
    mixed: torch.Tensor, taps: Taps, memory: torch.Tensor, runs: Runs | Drafts, noted: torch.Tensor | None, gated: bool
) -> torch.Tensor:
    (weights, bias), tokens = taps, len(mixed)
    kernel, channels = weights.shape
    out = torch.empty(tokens, channels, dtype=mixed.dtype, device=mixed.device)
    block = min(CHANNELS, next_power_of_2(channels))
    _convolve_runs_kernel[(cdiv(tokens, TOKENS), cdiv(channels, block))](
        mixed, weights, bias, memory, runs.states, runs.firsts, runs.requests, out, noted, mixed.stride(0), tokens,
        channels, kernel, gated, TOKENS, block, num_warps=4,
    )  # fmt: skip
    return out


def _remember(
    mixed: torch.Tensor, memory: torch.Tensor, runs: Runs | Drafts, counts: torch.Tensor, gated: bool
) -> None:
    """mixed [layers, T, ...], memory [layers, all states, kernel - 1, channels]; each layer's lie behind another's."""
    layers, places, remembered, channels = memory.shape
    if not remembered:
        return
    block = min(CHANNELS, next_power_of_2(channels))
    _remember_kernel[(len(runs.states), cdiv(channels, block), layers)](
        mixed, memory, runs.states, runs.firsts, counts, mixed.stride(1), mixed.shape[1], places,
        channels, remembered + 1, gated, block, num_warps=2,
    )  # fmt: skip


def convolve_runs(
    mixed: torch.Tensor, taps: Taps, memory: torch.Tensor, runs: Runs, *, gated: bool = False
) -> torch.Tensor:
    """Convolves runs, like `convolve_tokens`: [T, channels]."""
    out = _convolve(mixed, taps, memory, runs, None, gated)
    _remember(mixed[None], memory[None], runs, runs.counts, gated)
    return out


def convolve_drafts(
    mixed: torch.Tensor, taps: Taps, memory: torch.Tensor, drafts: Drafts, noted: torch.Tensor, *, gated: bool = False
) -> torch.Tensor:
    """Convolves runs that change no state; `noted [T, channels]`, like `memory`, gets their inputs."""
    return _convolve(mixed, taps, memory, drafts, noted, gated)


def accept_inputs(memory: torch.Tensor, noted: torch.Tensor, drafts: Drafts, kept: torch.Tensor) -> None:
    """Let the states of `drafts` go on behind as many of their tokens as `kept [R]` int32 says.

    memory [layers, all states, kernel - 1, channels], which changes; noted [layers, T, channels].
    """
    _remember(noted, memory, drafts, kept, False)
