"""Gated delta nets: states, of single tokens, of runs and of drafts, and norms."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from kvern.kernels import delta_net
from kvern.kernels.accepted_drafts import Written, accept_writes
from kvern.kernels.convolution import Drafts
from kvern.kernels.delta_net import Gates, Heads
from kvern.kernels.delta_net_drafts import read_drafts
from kvern.layers.recurrent_kernels import heads_of
from kvern.spec.mixers import DeltaNetSpec
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


def gates(inputs: Inputs, tokens: int, heads: int) -> Gates:
    """Of a product's outputs, which lie beside others."""
    both = inputs.numbers(tokens, 2 * heads + 8)
    small = (inputs.numbers(heads, dtype=torch.float32) for _ in range(2))
    return Gates(both[:, :heads], both[:, heads : 2 * heads], -next(small).abs(), next(small))


def advanced(
    mixed: torch.Tensor, gates: Gates, memory: torch.Tensor, counts: Sequence[int], states: Sequence[int], heads: Heads
) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64, token by token: what runs read of their states, and the states behind them."""
    keys, group = heads.key_heads * heads.key_dim, heads.value_heads // heads.key_heads
    query, key, value = torch.split(mixed.double(), [keys, keys, heads.value_heads * heads.value_dim], 1)
    query, key = (torch.unflatten(part, 1, (heads.key_heads, -1)) for part in (query, key))
    query, key = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (query, key))
    query, key = (part.repeat_interleave(group, 1) for part in (query * heads.key_dim**-0.5, key))
    value = torch.unflatten(value, 1, (heads.value_heads, -1))
    beta = gates.beta.double().sigmoid()
    decay = gates.rate.double() * F.softplus(gates.step.double() + gates.bias.double())
    memory = memory.double()
    found = []
    token = 0
    for count, state in zip(counts, states, strict=True):
        for _ in range(count):
            kept = memory[state] * decay[token].exp()[:, None, None]
            delta = beta[token][:, None] * (value[token] - torch.einsum("hkv,hk->hv", kept, key[token]))
            memory[state] = kept + key[token][:, :, None] * delta[:, None]
            found.append(torch.einsum("hkv,hk->hv", memory[state], query[token]))
            token += 1
    return torch.stack(found), memory


def _advance(spec: ModelSpec, inputs: Inputs, net: DeltaNetSpec, counts: Sequence[int], single: bool) -> Call:
    requests = len(counts)
    tokens = sum(counts)
    heads = heads_of(net)
    mixed, opened = inputs.numbers(tokens, net.channels), gates(inputs, tokens, net.value_heads)
    shape = (requests, net.value_heads, net.key_dim, net.value_dim)
    memory, described = inputs.numbers(*shape, dtype=torch.float32), runs(inputs, counts)
    states = list(reversed(range(requests)))

    def launch() -> tuple[torch.Tensor, torch.Tensor]:
        if single:
            return delta_net.advance_tokens(mixed, opened, memory, described.states, heads), memory
        return delta_net.advance_runs(mixed, opened, memory, described, heads), memory

    read = tokens * net.value_heads * net.value_dim
    moved = 8 * memory.numel() + mixed.numel() * mixed.element_size() + 4 * read
    operations = 6.0 * tokens * net.value_heads * net.key_dim * net.value_dim
    sizes = f"{requests} x {max(counts)} x {net.value_heads} heads"
    return Call(sizes, launch, lambda: advanced(mixed, opened, memory, counts, states, heads), moved, operations)


def verify(
    mixed: torch.Tensor, gates: Gates, memory: torch.Tensor, drafts: Drafts, heads: Heads, kept: torch.Tensor
) -> torch.Tensor:
    """What drafts read of states, which go on behind those that are kept."""
    tokens = len(mixed)
    key_heads = heads.key_heads
    key_dim = heads.key_dim
    shapes = (key_heads, key_dim), (heads.value_heads, heads.value_dim), (heads.value_heads,)
    written = Written(*(torch.empty(1, tokens, *shape, device=mixed.device) for shape in shapes))
    read = torch.empty_like(written.values[0])
    read_drafts(mixed, gates, memory, drafts, heads, Written(*(part[0] for part in written)), read)
    accept_writes(memory[None], written, drafts, kept)
    return read


def _verify(spec: ModelSpec, inputs: Inputs, net: DeltaNetSpec, counts: Sequence[int], accepted: Sequence[int]) -> Call:
    requests = len(counts)
    tokens = sum(counts)
    heads = heads_of(net)
    mixed, opened = inputs.numbers(tokens, net.channels), gates(inputs, tokens, net.value_heads)
    memory = inputs.numbers(requests, *net.states[1].shape, dtype=torch.float32)
    unsure = drafts(inputs, counts)
    kept = inputs.integers(accepted)
    states = list(reversed(range(requests)))

    def reference() -> tuple[torch.Tensor, torch.Tensor]:
        first = accepted_tokens(counts, accepted)
        known = opened._replace(beta=opened.beta[first], step=opened.step[first])
        behind = advanced(mixed[first], known, memory, accepted, states, heads)[1]
        return advanced(mixed, opened, memory, counts, states, heads)[0], behind

    moved = 12 * memory.numel() + mixed.numel() * mixed.element_size() + 4 * tokens * net.value_heads * net.value_dim
    return Call(
        f"{requests} x {max(counts)} x {net.value_heads} heads",
        lambda: (verify(mixed, opened, memory, unsure, heads, kept), memory),
        reference,
        moved,
    )


def _norm(spec: ModelSpec, inputs: Inputs, net: DeltaNetSpec, tokens: int, apart: bool = True) -> Call:
    """Of gates that lie in a projection's rows, or that were taken out of them."""
    heads, width = net.value_heads, net.value_dim
    read = inputs.numbers(tokens, heads, width, dtype=torch.float32)
    gate = projected(inputs, net, tokens)[1] if apart else inputs.numbers(tokens, heads * width)
    weight = inputs.numbers(width, dtype=torch.float32)

    def reference() -> torch.Tensor:
        rows = read.double()
        normal = rows / (rows.square().mean(-1, keepdim=True) + net.epsilon).sqrt() * weight.double()
        return normal.flatten(1) * F.silu(gate.double())

    moved, launch = read.numel() * (4 + 2 * gate.element_size()), partial(delta_net.gated_norm, read, gate, weight)
    return Call(f"{tokens} x {heads} heads", lambda: launch(net.epsilon), reference, moved)


def _nets(spec: ModelSpec) -> list[DeltaNetSpec]:
    return list(dict.fromkeys(mixer for mixer in spec.recurrent if isinstance(mixer, DeltaNetSpec)))


def _single_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    yield from ((net, SINGLE, True) for net in _nets(spec))


def _runs_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    yield from ((net, COUNTS, False) for net in _nets(spec))


def _norm_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    yield from ((net, 3, apart) for net in _nets(spec) for apart in ((False,) if net.grouped else (True, False)))


def _single_timed(spec: ModelSpec, inputs: Inputs) -> Sizes:
    yield from ((net, (1,) * tokens, True) for net in _nets(spec) for tokens in TIMED_TOKENS)


def _runs_timed(spec: ModelSpec, inputs: Inputs) -> Sizes:
    yield from ((net, counts, False) for net in _nets(spec) for counts in TIMED_COUNTS)


def _drafts_launched(spec: ModelSpec, inputs: Inputs) -> Sizes:
    if inputs.drafts:
        yield from ((net, DRAFTED, ACCEPTED) for net in _nets(spec))


def _drafts_timed(spec: ModelSpec, inputs: Inputs) -> Sizes:
    yield from ((net, counts, counts) for net in _nets(spec) for counts in TIMED_DRAFTS)


def _norm_timed(spec: ModelSpec, inputs: Inputs) -> Sizes:
    yield from ((net, tokens) for net in _nets(spec) for tokens in (*TIMED_TOKENS, 8192))


_entry = partial(Kernel, group="states")
KERNELS = (
    _entry(name="advance_tokens", make=_advance, launched=_single_launched, timed=_single_timed),
    _entry(name="advance_runs", make=_advance, launched=_runs_launched, timed=_runs_timed),
    _entry(name="delta_net_drafts", make=_verify, launched=_drafts_launched, timed=_drafts_timed),
    _entry(name="gated_norm", make=_norm, launched=_norm_launched, timed=_norm_timed),
)
