"""Mamba-2: states, of single tokens, of runs and of drafts, and norms."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from kvern.kernels import mamba2
from kvern.kernels.accepted_drafts import Written, accept_writes
from kvern.kernels.convolution import Drafts
from kvern.kernels.mamba2 import StateSizes, Steps
from kvern.layers.recurrent_kernels import sizes_of
from kvern.spec.mixers import Mamba2Spec
from kvern.spec.model import ModelSpec
from tests.support.kernel_list.convolution import (
    ACCEPTED,
    COUNTS,
    DRAFTED,
    SINGLE,
    TIMED_COUNTS,
    TIMED_DRAFTS,
    TIMED_TOKENS,
    accepted_tokens,
    drafts,
    projected,
    runs,
)
from tests.support.kernel_list.entry import Call, Inputs, Kernel

Sizes = Iterator[tuple[Any, ...]]


def make_steps(inputs: Inputs, tokens: int, heads: int, scale: float) -> Steps:
    """Of a product's outputs, which lie behind others."""
    step = inputs.numbers(tokens, heads + 8)[:, 8:]
    rate, bias, skip = (inputs.numbers(heads, dtype=torch.float32) for _ in range(3))
    return Steps(step, -rate.abs(), bias, skip, scale)


def advanced(
    mixed: torch.Tensor,
    steps: Steps,
    memory: torch.Tensor,
    counts: Sequence[int],
    states: Sequence[int],
    sizes: StateSizes,
) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64, token by token: what runs read of their states, and the states behind them."""
    heads, head_dim, groups, state_dim = sizes
    value, key, query = torch.split(mixed.double(), [heads * head_dim, groups * state_dim, groups * state_dim], 1)
    value = torch.unflatten(value, 1, (heads, head_dim))
    key, query = (torch.unflatten(part, 1, (groups, state_dim)) for part in (key, query))
    length = F.softplus(steps.step.double() * steps.scale + steps.bias.double())
    kept = (steps.rate.double() * length).exp()[..., None].expand_as(value)
    memory = memory.double()
    found = []
    token = 0
    beside = (groups, 1, -1)
    for count, state in zip(counts, states, strict=True):
        for _ in range(count):
            written = (value[token] * length[token][:, None]).reshape(beside)
            memory[state] = memory[state] * kept[token].reshape(beside) + key[token][..., None] * written
            found.append((query[token][:, None] @ memory[state]).view(heads, head_dim))
            token += 1
    return (torch.stack(found) + value * steps.skip.double()[:, None]).flatten(1), memory


def _advance(spec: ModelSpec, inputs: Inputs, mixer: Mamba2Spec, counts: Sequence[int], single: bool) -> Call:
    requests = len(counts)
    tokens = sum(counts)
    sizes = sizes_of(mixer)
    mixed = inputs.numbers(tokens, mixer.channels)
    steps = make_steps(inputs, tokens, mixer.heads, mixer.scales.step)
    memory = inputs.numbers(requests, *mixer.states[1].shape, dtype=torch.float32)
    described, states = runs(inputs, counts), list(reversed(range(requests)))

    def launch() -> tuple[torch.Tensor, torch.Tensor]:
        if single:
            return mamba2.advance_tokens(mixed, steps, memory, described.states, sizes), memory
        return mamba2.advance_runs(mixed, steps, memory, described, sizes), memory

    moved = 8 * memory.numel() + mixed.numel() * mixed.element_size() + 4 * tokens * mixer.inner
    operations = 4.0 * tokens * mixer.inner * mixer.state_dim
    shown = f"{requests} x {max(counts)} x {mixer.heads} heads"
    return Call(shown, launch, lambda: advanced(mixed, steps, memory, counts, states, sizes), moved, operations)


def verify(
    mixed: torch.Tensor, steps: Steps, memory: torch.Tensor, drafts: Drafts, sizes: StateSizes, kept: torch.Tensor
) -> torch.Tensor:
    """What drafts read of states, which go on behind those that are kept."""
    heads, head_dim, groups, state_dim = sizes
    shapes = (groups, state_dim), (groups, heads // groups * head_dim), (heads,)
    written = Written(*(torch.empty(1, len(mixed), *shape, device=mixed.device) for shape in shapes))
    read = torch.empty_like(written.values[0])
    mamba2.read_drafts(mixed, steps, memory, drafts, sizes, Written(*(part[0] for part in written)), read)
    accept_writes(memory[None], written, drafts, kept)
    return read.flatten(1)


def _verify(spec: ModelSpec, inputs: Inputs, mixer: Mamba2Spec, counts: Sequence[int], accepted: Sequence[int]) -> Call:
    requests = len(counts)
    tokens = sum(counts)
    sizes = sizes_of(mixer)
    mixed = inputs.numbers(tokens, mixer.channels)
    steps = make_steps(inputs, tokens, mixer.heads, mixer.scales.step)
    memory = inputs.numbers(requests, *mixer.states[1].shape, dtype=torch.float32)
    unsure = drafts(inputs, counts)
    kept = inputs.integers(accepted)
    states = list(reversed(range(requests)))

    def reference() -> tuple[torch.Tensor, torch.Tensor]:
        first = accepted_tokens(counts, accepted)
        behind = advanced(mixed[first], steps._replace(step=steps.step[first]), memory, accepted, states, sizes)[1]
        return advanced(mixed, steps, memory, counts, states, sizes)[0], behind

    moved = 12 * memory.numel() + mixed.numel() * mixed.element_size() + 4 * tokens * mixer.inner
    return Call(
        f"{requests} x {max(counts)} x {mixer.heads} heads",
        lambda: (verify(mixed, steps, memory, unsure, sizes, kept), memory),
        reference,
        moved,
    )


def _norm(spec: ModelSpec, inputs: Inputs, mixer: Mamba2Spec, tokens: int, apart: bool = True) -> Call:
    """Of gates that lie in a projection's rows, or that were taken out of them."""
    read, inner = inputs.numbers(tokens, mixer.inner, dtype=torch.float32), mixer.inner
    gate = projected(inputs, mixer, tokens)[1] if apart else inputs.numbers(tokens, inner)
    weight = None if mixer.gating == "without_norm" else inputs.numbers(inner, dtype=torch.float32)

    def normal(rows: torch.Tensor) -> torch.Tensor:
        if weight is None:
            return rows
        grouped = torch.unflatten(rows, 1, (mixer.groups, -1))
        lengths = (grouped.square().mean(-1, keepdim=True) + mixer.epsilon).sqrt()
        return (grouped / lengths).flatten(1) * weight.double()

    def reference() -> torch.Tensor:
        opened = F.silu(gate.double() * mixer.scales.gate)
        rows = read.double()
        return normal(rows) * opened if mixer.gating == "after_norm" else normal(rows * opened)

    launch = partial(
        mamba2.gated_norm,
        read,
        gate,
        weight,
        mixer.epsilon,
        groups=mixer.groups,
        gating=mixer.gating,
        scale=mixer.scales.gate,
    )
    return Call(f"{tokens} x {inner}", launch, reference, read.numel() * (4 + 2 * gate.element_size()))


def _mixers(spec: ModelSpec) -> list[Mamba2Spec]:
    return list(dict.fromkeys(mixer for mixer in spec.recurrent if isinstance(mixer, Mamba2Spec)))


def _single_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    yield from ((mixer, SINGLE, True) for mixer in _mixers(spec))


def _runs_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    yield from ((mixer, COUNTS, False) for mixer in _mixers(spec))


def _norm_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    yield from ((mixer, 3, apart) for mixer in _mixers(spec) for apart in (True, False))


def _single_timed(spec: ModelSpec, inputs: Inputs) -> Sizes:
    yield from ((mixer, (1,) * tokens, True) for mixer in _mixers(spec) for tokens in TIMED_TOKENS)


def _runs_timed(spec: ModelSpec, inputs: Inputs) -> Sizes:
    yield from ((mixer, counts, False) for mixer in _mixers(spec) for counts in TIMED_COUNTS)


def _drafts_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    if inputs.drafts:
        yield from ((mixer, DRAFTED, ACCEPTED) for mixer in _mixers(spec))


def _drafts_timed(spec: ModelSpec, inputs: Inputs) -> Sizes:
    yield from ((mixer, counts, counts) for mixer in _mixers(spec) for counts in TIMED_DRAFTS)


def _norm_timed(spec: ModelSpec, inputs: Inputs) -> Sizes:
    yield from ((mixer, tokens) for mixer in _mixers(spec) for tokens in (*TIMED_TOKENS, 8192))


_entry = partial(Kernel, group="states")
KERNELS = (
    _entry(name="mamba2_tokens", make=_advance, launched=_single_launched, timed=_single_timed),
    _entry(name="mamba2_runs", make=_advance, launched=_runs_launched, timed=_runs_timed),
    _entry(name="mamba2_drafts", make=_verify, launched=_drafts_launched, timed=_drafts_timed),
    _entry(name="mamba2_norm", make=_norm, launched=_norm_launched, timed=_norm_timed),
)
