"""Mamba-2: what stands in the place of attention in layers that keep a state space for each request."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kvern.layers.attention import NO_ADAPTERS, StepAdapters, rows_of
from kvern.layers.build import Build, Section
from kvern.layers.convolution import Convolution
from kvern.layers.decays import Decays
from kvern.layers.loadable import Loadable, copy_shares
from kvern.layers.module import Module
from kvern.layers.rope import Rotation
from kvern.layers.state_space import advance, advance_run
from kvern.layers.states import StepStates, advance_states
from kvern.spec.mixers import Mamba2Spec


class Vector(Loadable):
    """`weight [size]` float32, which the checkpoint calls `name`."""

    def __init__(self, size: int, name: str, build: Build) -> None:
        super().__init__(build.path)
        self.name = name
        self.weight = build.empty(size, dtype=torch.float32)
        self._share = build.ranks.share(size)

    def parts(self) -> dict[str, tuple[int, ...]]:
        return {self.name: (self._share.whole,)}

    def load(self, part: str, tensor: Tensor, first_row: int = 0) -> None:
        copy_shares(self.weight, tensor, first_row, [self._share])


class GatedNorm(Vector):
    """What is read, times its gate, both `[T, inner]` float32 -> `[T, inner]`, each group of neighbours normalised."""

    def __init__(self, spec: Mamba2Spec, build: Build) -> None:
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
    """The same with the gate behind the norm."""

    def forward(self, read: Tensor, gate: Tensor) -> Tensor:
        return self.normal(read) * F.silu(gate)


class Gate(Module):
    """The same without a norm."""

    def forward(self, read: Tensor, gate: Tensor) -> Tensor:
        return read * F.silu(gate)


def make_gate(spec: Mamba2Spec, build: Build) -> Module:
    """What is done with what is read, by the specification's `gating`."""
    if spec.gating == "without_norm":
        return Gate()
    return (GatedNorm if spec.gating == "before_norm" else NormThenGate)(spec, build)


class Mamba2(Module):
    """`hidden [T, hidden] -> [T, hidden]`. `index`: the layer's place among those that have states."""

    def __init__(self, index: int, hidden_size: int, spec: Mamba2Spec, build: Build) -> None:
        super().__init__()
        self.index, self.spec = index, spec
        parts = [Section(spec.inner), *convolved(spec), Section(spec.heads)]
        self.in_proj = build.column(hidden_size, {"in_proj": parts}, bias=spec.bias)
        self.conv1d = make_convolution(spec, build)
        self.decays = Decays(spec.heads, build)
        self.skip = Vector(spec.heads, "D", build)
        self.norm = make_gate(spec, build)
        self.out_proj = build.row(spec.inner, "out_proj", hidden_size, bias=spec.bias)

    def forward(
        self,
        hidden: Tensor,
        rotation: Rotation,
        memory: StepStates,
        wanted: Tensor | None = None,
        adapters: StepAdapters = NO_ADAPTERS,
    ) -> Tensor:
        """Positions mean nothing to a state: `rotation` is not used."""
        spec, (last, state) = self.spec, memory.layers[self.index]
        gate, mixed, step = torch.split(self.in_proj(hidden, adapters.rows), [spec.inner, spec.channels, spec.heads], 1)
        shared = spec.groups * spec.state_dim
        x, key, query = torch.split(F.silu(self.conv1d(mixed, memory, last)), [spec.inner, shared, shared], 1)
        x = x.reshape(-1, spec.heads, spec.head_dim)
        steps, decay = self.decays(step.float() * spec.scales.step)
        shape = (-1, spec.groups, spec.state_dim)
        inputs = query.reshape(shape), key.reshape(shape), x * steps[..., None], decay
        read = advance_states(memory, state, inputs, advance, advance_run)
        read = torch.addcmul(rows_of(read, wanted), rows_of(x, wanted), self.skip.weight[:, None])
        normal = self.norm(read.flatten(1), rows_of(gate, wanted).float() * spec.scales.gate)
        out: Tensor = self.out_proj(normal.to(hidden.dtype), adapters.wanted)
        return out.mul_(spec.scales.out)


def convolved(spec: Mamba2Spec) -> list[Section]:
    """Values, keys and queries."""
    shared = Section(spec.groups * spec.state_dim, spec.copies)
    return [Section(spec.inner), shared, shared]


def make_convolution(spec: Mamba2Spec, build: Build) -> Convolution:
    """That of values, keys and queries, with their scales."""
    sections, scales = convolved(spec), (spec.scales.value, spec.scales.key, spec.scales.query)
    each = [torch.full((part.size,), scale, device=build.device) for part, scale in zip(sections, scales, strict=True)]
    return Convolution(spec.kernel, sections, "conv1d", build, bias=spec.conv_bias, scales=torch.cat(each))


def make_mamba2(index: int, hidden_size: int, spec: Mamba2Spec, build: Build) -> Mamba2:
    """Mamba-2, out of kernels where there are some."""
    if "states" in build.kernels:
        from kvern.layers.fused_mamba2 import FusedMamba2

        return FusedMamba2(index, hidden_size, spec, build)
    return Mamba2(index, hidden_size, spec, build)
