"""The feed-forward half of a block. `rows` are the adapters of its rows, if any has one."""

from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor, nn

from kvern.layers.activation import activation_of, gated_activation_of
from kvern.layers.build import Build
from kvern.layers.module import Module
from kvern.spec.model import MlpSpec


class GatedMLP(Module):
    """`down(activation(gate(x)) * up(x))`, gate and up in one product."""

    def __init__(self, hidden_size: int, spec: MlpSpec, build: Build) -> None:
        super().__init__()
        parts = {"gate_proj": spec.width, "up_proj": spec.width}
        self.gate_up_proj = build.column(hidden_size, parts, bias=spec.bias, fused="gate_up_proj")
        self.down_proj = build.row(spec.width, "down_proj", hidden_size, bias=spec.bias)
        self.activation = gated_activation_of(spec.activation, build)
        self.gated = self.gate_up_proj.method.gated(spec.activation)
        self.bias = self.gate_up_proj.bias

    def forward(self, x: Tensor, rows: Any = None) -> Tensor:
        if self.gated is not None and rows is None:  # adapters add to what is activated
            activated = self.gated(x, self.bias)
        else:
            activated = self.activation(self.gate_up_proj(x, rows))
        out: Tensor = self.down_proj(activated, rows)
        return out


class ScaledMLP(GatedMLP):
    """`out_scale * down(activation(gate_scale * gate(x)) * up(x))`."""

    def __init__(self, hidden_size: int, spec: MlpSpec, build: Build) -> None:
        super().__init__(hidden_size, spec, build)
        self.spec = spec

    def forward(self, x: Tensor, rows: Any = None) -> Tensor:
        gate_up = self.gate_up_proj(x, rows)
        gate_up[:, : self.spec.width].mul_(self.spec.gate_scale)
        out: Tensor = self.down_proj(self.activation(gate_up), rows)
        return out.mul_(self.spec.out_scale)


class SparseMLP(GatedMLP):
    """Of a row of gates what exceeds a cutoff is activated, all others are 0.

    The cutoff lies so many standard deviations above the row's mean that a share `sparsity` of normally spread numbers
    is below it.
    """

    def __init__(self, hidden_size: int, spec: MlpSpec, build: Build) -> None:
        super().__init__(hidden_size, spec, build)
        self.width, self.deviations, self._ranks = spec.width, NormalDist().inv_cdf(spec.sparsity), build.ranks

    def forward(self, x: Tensor, rows: Any = None) -> Tensor:
        gate_up = self.gate_up_proj(x, rows)
        gate = gate_up[:, : self.width].float()
        spread, mean = self._spread_and_mean(gate)
        gate_up[:, : self.width] = gate.sub_(mean + spread * self.deviations).relu_()
        out: Tensor = self.down_proj(self.activation(gate_up), rows)
        return out

    def _spread_and_mean(self, gate: Tensor) -> tuple[Tensor, Tensor]:
        """Each `[T, 1]`, of rows of which ranks have parts of one size."""
        variance, mean = torch.var_mean(gate, -1, correction=0, keepdim=True)
        if self._ranks.size == 1:
            return variance.sqrt(), mean
        found = self._ranks.beside(torch.cat((variance, mean), 1))
        variances, means = found[:, ::2], found[:, 1::2]
        among, mean = torch.var_mean(means, -1, correction=0, keepdim=True)
        return (variances.mean(-1, keepdim=True) + among).sqrt(), mean


class PlainMLP(Module):
    """`down(activation(up(x)))`."""

    def __init__(self, hidden_size: int, spec: MlpSpec, build: Build) -> None:
        super().__init__()
        self.up_proj = build.column(hidden_size, {"up_proj": spec.width}, bias=spec.bias)
        self.down_proj = build.row(spec.width, "down_proj", hidden_size, bias=spec.bias)
        self.activation = activation_of(spec.activation, build)

    def forward(self, x: Tensor, rows: Any = None) -> Tensor:
        out: Tensor = self.down_proj(self.activation(self.up_proj(x, rows)), rows)
        return out


def make_mlp(hidden_size: int, spec: MlpSpec, build: Build) -> nn.Module:
    """The MLP of a specification."""
    if spec.sparsity:
        return SparseMLP(hidden_size, spec, build)
    if spec.gated and (spec.gate_scale, spec.out_scale) != (1.0, 1.0):
        return ScaledMLP(hidden_size, spec, build)
    if spec.gated and "activation" in build.kernels and spec.activation != "relu2":
        from kvern.layers.fused import FusedGatedMLP

        return FusedGatedMLP(hidden_size, spec, build)
    return (GatedMLP if spec.gated else PlainMLP)(hidden_size, spec, build)
