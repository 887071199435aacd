"""Mamba-2 (Dao and Gu 2024, Transformers are SSMs): what stands in the place of attention in layers with a state space.

The state of each head forgets as a whole:

    S <- e^decay S + key value^T;  out = S^T query

Heads come in groups that share keys and queries (B and C in the paper). The states of a group's heads lie side by side,
as one matrix [state_dim, heads of a group * head_dim]. One token at a time, or in chunks, within which tokens attend to
each other. All in float32; states are changed in place.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kvern.layers.build import Build
from kvern.layers.build_options import BuildOptions, Section
from kvern.layers.convolution import CHUNK, Convolution, Decays, within_chunk
from kvern.layers.linear import column, row
from kvern.layers.loadable import Vector
from kvern.layers.module import Module
from kvern.layers.states import StepStates, advance_states
from kvern.layers.step_context import StepContext, rows_of
from kvern.spec.mixers import Mamba2Spec


class GatedNorm(Vector):
    """The norm of each group of `read * silu(gate)`: both `[T, inner]` float32 -> `[T, inner]`."""

    def __init__(self, spec: Mamba2Spec, build: BuildOptions) -> None:
        super().__init__(spec.inner, "norm.weight", build)
        self.groups, self.epsilon = spec.groups, spec.epsilon
        self._copies, self._ranks = spec.copies, build.ranks

    def forward(self, read: Tensor, gate: Tensor) -> Tensor:
        return self.normal(read * F.silu(gate))

    def normal(self, x: Tensor) -> Tensor:
        grouped = torch.unflatten(x, 1, (self.groups, -1))
        if self._copies == 1:
            return F.rms_norm(grouped, grouped.shape[2:], None, self.epsilon).flatten(1) * self.weight
        means = self._ranks.beside(x.square().mean(1, keepdim=True))
        first = self._ranks.rank // self._copies * self._copies
        mean = means[:, first : first + self._copies].mean(1, keepdim=True)
        return x * (mean + self.epsilon).rsqrt() * self.weight


class NormThenGate(GatedNorm):
    """The norm of each group of `read`, times `silu(gate)`."""

    def forward(self, read: Tensor, gate: Tensor) -> Tensor:
        return self.normal(read) * F.silu(gate)


class Gate(Module):
    """`read * silu(gate)`, without a norm."""

    def forward(self, read: Tensor, gate: Tensor) -> Tensor:
        return read * F.silu(gate)


def make_gate(spec: Mamba2Spec, build: BuildOptions) -> Module:
    """The module that gates the results of a state, by the specification's `gating`."""
    if spec.gating == "without_norm":
        return Gate()
    return (GatedNorm if spec.gating == "before_norm" else NormThenGate)(spec, build)


def advance(state: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor) -> Tensor:
    """One token of each of B sequences: `state [B, groups, state_dim, width]` -> `[B, heads, head_dim]`.

    `query` and `key [B, groups, state_dim]`, `value [B, heads, head_dim]`, `decay [B, heads]`.
    """
    beside = (len(value), query.shape[1], 1, -1)
    kept = decay.exp()[..., None].expand_as(value).reshape(beside)
    state.mul_(kept).addcmul_(key[..., None], value.reshape(beside))
    return (query[:, :, None] @ state).view(value.shape)


def advance_run(state: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor) -> Tensor:
    """T tokens of one sequence: `state [groups, state_dim, width]` -> `[T, heads, head_dim]`.

    `query` and `key [T, groups, state_dim]`, `value [T, heads, head_dim]`, `decay [T, heads]`.
    """
    parts = (torch.split(item, CHUNK) for item in (query, key, value, decay))
    return torch.cat([_advance_chunk(state, *chunk) for chunk in zip(*parts, strict=True)])


def _advance_chunk(state: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor) -> Tensor:
    length, groups = query.shape[:2]
    between, kept, left = within_chunk(decay.T)
    query, key = query.transpose(0, 1), key.transpose(0, 1)
    weights = torch.unflatten(between, 0, (groups, -1)).mul_((query @ key.mT)[:, None]).flatten(0, 1)
    own = (weights @ value.transpose(0, 1)).transpose(0, 1)
    of_state = (query @ state).transpose(0, 1).reshape(value.shape)
    added = (value * left.transpose(0, 1)).view(length, groups, -1).transpose(0, 1)
    state.mul_(kept[:, -1].expand(-1, value.shape[2]).reshape(groups, 1, -1)).baddbmm_(key.mT, added)
    return torch.addcmul(own, of_state, kept.transpose(0, 1))


class Mamba2(Module):
    """`hidden [T, hidden] -> [T, hidden]`. `index`: the layer's place among those that have states."""

    def __init__(self, index: int, hidden_size: int, spec: Mamba2Spec, build: Build) -> None:
        super().__init__()
        self.index, self.spec = index, spec
        parts = [Section(spec.inner), *convolved(spec), Section(spec.heads)]
        self.in_proj = column(build, hidden_size, {"in_proj": parts}, bias=spec.bias)
        self.conv1d = make_convolution(spec, build)
        self.decays = Decays(spec.heads, build)
        self.skip = Vector(spec.heads, "D", build)
        self.norm = make_gate(spec, build)
        self.out_proj = row(build, spec.inner, "out_proj", hidden_size, bias=spec.bias)
        self._kernels = None
        if "states" in build.kernels:
            from kvern.layers.recurrent_kernels import Mamba2Kernels

            self._kernels = Mamba2Kernels(index, spec)

    def forward(self, hidden: Tensor, step: StepContext) -> Tensor:
        spec, wanted = self.spec, step.wanted
        projected = self.in_proj(hidden, step.adapters.rows)
        gate, mixed, length = torch.split(projected, [spec.inner, spec.channels, spec.heads], 1)
        if self._kernels is not None:
            learned = self.decays.rate, self.decays.step, self.skip.weight
            read = self._kernels.advance(step.states, (mixed, length), self.conv1d, learned)
            read, gate = rows_of(read, wanted), rows_of(gate, wanted)
            if isinstance(self.norm, GatedNorm) and spec.copies > 1:  # a group's heads are on several ranks
                normal = self.norm(read, gate.float() * spec.scales.gate).to(hidden.dtype)
            else:
                weight = self.norm.weight if isinstance(self.norm, GatedNorm) else None
                normal = self._kernels.norm(read, gate, weight)
        else:
            read, x = self._advanced(step.states, mixed, length)
            read = torch.addcmul(rows_of(read, wanted), rows_of(x, wanted), self.skip.weight[:, None])
            normal = self.norm(read.flatten(1), rows_of(gate, wanted).float() * spec.scales.gate).to(hidden.dtype)
        out: Tensor = self.out_proj(normal, step.adapters.wanted)
        return out if spec.scales.out == 1.0 else out.mul_(spec.scales.out)

    def _advanced(self, states: StepStates, mixed: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        """Advances the states in place.

        Returns what the tokens read of them, and the convolved inputs, `[T, heads, head_dim]` float32 each.
        """
        spec, (last, state) = self.spec, states.layers[self.index]
        shared = spec.groups * spec.state_dim
        x, key, query = torch.split(F.silu(self.conv1d(mixed, states, last)), [spec.inner, shared, shared], 1)
        x = x.reshape(-1, spec.heads, spec.head_dim)
        steps, decay = self.decays(length.float() * spec.scales.step)
        shape = (-1, spec.groups, spec.state_dim)
        inputs = query.reshape(shape), key.reshape(shape), x * steps[..., None], decay
        return advance_states(states, state, inputs, advance, advance_run), x


def convolved(spec: Mamba2Spec) -> list[Section]:
    """Values, keys and queries."""
    shared = Section(spec.groups * spec.state_dim, spec.copies)
    return [Section(spec.inner), shared, shared]


def make_convolution(spec: Mamba2Spec, build: Build) -> Convolution:
    """The convolution of values, keys and queries, with their scales."""
    sections, scales = convolved(spec), (spec.scales.value, spec.scales.key, spec.scales.query)
    each = [torch.full((part.size,), scale, device=build.device) for part, scale in zip(sections, scales, strict=True)]
    return Convolution(spec.kernel, sections, "conv1d", build, bias=spec.conv_bias, scales=torch.cat(each))
