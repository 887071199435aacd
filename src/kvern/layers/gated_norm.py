"""Norms whose results are gated, and learned vectors, of layers with states."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kvern.layers.build_options import BuildOptions
from kvern.layers.loadable import Loadable, copy_shares
from kvern.layers.module import Module
from kvern.spec.mixers import Mamba2Spec


class Vector(Loadable):
    """`weight [size]` float32, which the checkpoint calls `name`."""

    def __init__(self, size: int, name: str, build: BuildOptions) -> None:
        super().__init__(build.path)
        self.name = name
        self.weight = build.empty(size, dtype=torch.float32)
        self._share = build.ranks.share(size)

    def parts(self) -> dict[str, tuple[int, ...]]:
        return {self.name: (self._share.whole,)}

    def load(self, part: str, tensor: Tensor, first_row: int = 0) -> None:
        copy_shares(self.weight, tensor, first_row, [self._share])


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
