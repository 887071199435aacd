"""Gated delta nets (Yang et al. 2024): what stands in the place of attention in layers that keep a state of fixed size.

The gated delta rule changes a state S [key_dim, value_dim] by each token,

    S <- e^decay S;  delta = beta (value - S^T key);  S <- S + key delta^T;  out = S^T query

one token at a time, or in chunks, within which the deltas of all tokens are the solution of a triangular system (Yang
et al. 2024, Parallelizing Linear Transformers with the Delta Rule). All in float32; states are changed in place.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kvern.layers.build import Build
from kvern.layers.build_options import Section
from kvern.layers.convolution import CHUNK, Convolution, Decays, within_chunk
from kvern.layers.linear import column, row
from kvern.layers.module import Module
from kvern.layers.norm import Norm
from kvern.layers.states import StepStates, advance_states
from kvern.layers.step_context import StepContext, rows_of
from kvern.spec.mixers import DeltaNetSpec
from kvern.spec.model import NormSpec


def advance(state: Tensor, query: Tensor, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
    """One token of each of B sequences: `state [B, heads, key_dim, value_dim]` -> `[B, heads, value_dim]`.

    `query` and `key [B, heads, key_dim]`, `value [B, heads, value_dim]`, `beta` and `decay [B, heads]`.
    """
    kept = decay.exp()[..., None]
    read = torch.stack((query, key), 2) @ state
    delta = (value - kept * read[:, :, 1]) * beta[..., None]
    state.mul_(kept[..., None]).addcmul_(key[..., None], delta[:, :, None])
    return kept * read[:, :, 0] + (query * key).sum(-1, keepdim=True) * delta


def advance_run(state: Tensor, query: Tensor, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
    """T tokens of one sequence: `state [heads, key_dim, value_dim]` -> `[T, heads, value_dim]`.

    `query` and `key [T, heads, key_dim]`, `value [T, heads, value_dim]`, `beta` and `decay [T, heads]`.
    """
    parts = (torch.split(item.transpose(0, 1), CHUNK, 1) for item in (query, key, value, beta, decay))
    found = [_advance_chunk(state, *chunk) for chunk in zip(*parts, strict=True)]
    return torch.cat(found, 1).transpose(0, 1)


def _advance_chunk(state: Tensor, query: Tensor, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
    """`query` and `key [heads, L, key_dim]`, `value [heads, L, value_dim]`, others `[heads, L]` -> as `value`."""
    between, kept, left = within_chunk(decay)
    weighted = key * beta[..., None]
    system = (weighted @ key.mT).mul_(between)
    right = torch.cat((value * beta[..., None], weighted * kept), -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    own, of_state = torch.split(solved, [value.shape[-1], key.shape[-1]], -1)
    delta = own - of_state @ state
    out: Tensor = (query * kept) @ state + (query @ key.mT).mul_(between) @ delta
    state.mul_(kept[:, -1:]).baddbmm_((key * left).mT, delta)
    return out


LENGTH_FLOOR = 1e-6
"""Added to the squared lengths of queries and keys, which they are divided by."""


class DeltaNet(Module):
    """`hidden [T, hidden] -> [T, hidden]`. `index`: the layer's place among those that have states."""

    def __init__(self, index: int, hidden_size: int, spec: DeltaNetSpec, build: Build) -> None:
        super().__init__()
        self.index, self.spec = index, spec
        gates, heads = spec.value_heads * spec.value_dim, spec.value_heads
        keys = Section(spec.key_heads * spec.key_dim)
        convolved = [keys, keys, Section(gates)]
        parts: dict[str, int | Sequence[Section]] = {"in_proj_qkvz": spec.channels + gates, "in_proj_ba": 2 * heads}
        if not spec.grouped:
            parts = {"in_proj_qkv": convolved, "in_proj_z": gates, "in_proj_b": heads, "in_proj_a": heads}
        self.in_proj = column(build, hidden_size, parts)
        self.conv1d = Convolution(spec.kernel, convolved, "conv1d", build)
        self.decays = Decays(heads, build)
        self.norm = Norm(NormSpec(epsilon=spec.epsilon), spec.value_dim, "norm", build, dtype=torch.float32)
        self.out_proj = row(build, gates, "out_proj", hidden_size)
        self._kernels = None
        if "states" in build.kernels:
            from kvern.layers.recurrent_kernels import DeltaNetKernels

            self._kernels = DeltaNetKernels(index, spec)

    def forward(self, hidden: Tensor, step: StepContext) -> Tensor:
        mixed, gate, beta, length = self._split(self.in_proj(hidden, step.adapters.rows))
        if self._kernels is not None:
            if self.spec.grouped:  # views of every other number where a key head has one value head
                beta, length = beta.contiguous(), length.contiguous()
            learned = self.decays.rate, self.decays.step
            read = self._kernels.advance(step.states, (mixed, beta, length), self.conv1d, learned)
            normal = self._kernels.norm(rows_of(read, step.wanted), rows_of(gate, step.wanted), self.norm.weight)
        else:
            read = self._advanced(step.states, mixed, beta, length)
            gate = torch.unflatten(rows_of(gate, step.wanted), 1, (self.spec.value_heads, -1))
            normal = self.norm(rows_of(read, step.wanted))
            normal = (normal * F.silu(gate.float())).to(hidden.dtype).flatten(1)
        out: Tensor = self.out_proj(normal, step.adapters.wanted)
        return out

    def _advanced(self, states: StepStates, mixed: Tensor, beta: Tensor, length: Tensor) -> Tensor:
        """The results of the tokens' queries, `[T, value_heads, value_dim]` float32; states are changed in place."""
        convolved, matrices = states.layers[self.index]
        heads = self._heads(F.silu(self.conv1d(mixed, states, convolved)))
        inputs = (*heads, beta.float().sigmoid(), self.decays(length)[1])
        return advance_states(states, matrices, inputs, advance, advance_run)

    def _split(self, projected: Tensor) -> Sequence[Tensor]:
        """The convolution's inputs, gates, betas and lengths of decay's steps, in this order; each `[T, ...]`."""
        spec = self.spec
        gates = spec.value_heads * spec.value_dim
        if not spec.grouped:
            return torch.split(projected, [spec.channels, gates, spec.value_heads, spec.value_heads], 1)
        each, group = gates // spec.key_heads, spec.value_heads // spec.key_heads
        first, second = torch.split(projected, [spec.channels + gates, 2 * spec.value_heads], 1)
        grouped = torch.unflatten(first, 1, (spec.key_heads, -1)), torch.unflatten(second, 1, (spec.key_heads, -1))
        query, key, value, gate = torch.split(grouped[0], [spec.key_dim, spec.key_dim, each, each], 2)
        beta, step = torch.split(grouped[1], group, 2)
        mixed = torch.cat((query.flatten(1), key.flatten(1), value.flatten(1)), 1)
        return mixed, gate.flatten(1), beta.flatten(1), step.flatten(1)

    def _heads(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of `inputs [T, channels]` float32, each `[T, value_heads, ...]`."""
        spec = self.spec
        keys, group = spec.key_heads * spec.key_dim, spec.value_heads // spec.key_heads
        heads = torch.unflatten(inputs[:, : 2 * keys], 1, (2, spec.key_heads, spec.key_dim))
        heads = heads * (heads.square().sum(-1, keepdim=True) + LENGTH_FLOOR).rsqrt_()
        query, key = heads.repeat_interleave(group, 2).unbind(1)
        value = torch.unflatten(inputs[:, 2 * keys :], 1, (spec.value_heads, spec.value_dim))
        return query * spec.key_dim**-0.5, key, value
