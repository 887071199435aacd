"""The feed-forward half of a block. `rows` are the adapters of its rows, if any has one."""

from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvern.layers.build import Build
from kvern.layers.linear import column, row
from kvern.layers.module import Module
from kvern.spec.model import MlpSpec

if TYPE_CHECKING:
    from kvern.kernels.quantize_rows import RowCodes


class GatedMLP(Module):
    """`down(activation(gate(x)) * up(x))`, gate and up in one product.

    The activation is an operation of its own, or the end of the first product, if its method has such a product. Where
    the last product multiplies codes, the activation makes them.
    """

    computes_gate = False
    """A subclass computes something between the first product and its activation."""

    def __init__(self, hidden_size: int, spec: MlpSpec, build: Build) -> None:
        super().__init__()
        parts = {"gate_proj": spec.width, "up_proj": spec.width}
        self.gate_up_proj = column(build, hidden_size, parts, bias=spec.bias, fused="gate_up_proj")
        self.down_proj = row(build, spec.width, "down_proj", hidden_size, bias=spec.bias)
        self.kind = spec.activation
        fused = None if self.computes_gate else build.ops.fused_activation(spec.activation)
        self.is_fused = fused is not None
        self.activation = fused or build.ops.gated_activation(spec.activation)
        self.gated = self.gate_up_proj.method.gated(spec.activation)
        self.bias = self.gate_up_proj.bias
        self._coded = build.ops.coded_activation if self.is_fused else None
        self._methods = self.gate_up_proj.method, self.down_proj.method

    def forward(self, x: "Tensor | RowCodes", rows: Any = None) -> Tensor:
        out: Tensor = self.down_proj(self.activated(x, rows), rows)
        return out

    def activated(self, x: "Tensor | RowCodes", rows: Any = None) -> "Tensor | RowCodes":
        """The rows `[T, width]` that the last product multiplies, or codes of them."""
        if self.gated is not None and rows is None and isinstance(x, Tensor):  # adapters add to what is activated
            return self.gated(x, self.bias)
        gate_up = self.gate_up_proj(x, rows)
        if self._coded is not None and rows is None:
            coding = self._methods[1].coding(gate_up.shape[0])
            if coding is not None:
                codes: RowCodes = self._coded(gate_up, self.kind, coding)
                return codes
        return self.activation(gate_up)


class ScaledMLP(GatedMLP):
    """`out_scale * down(activation(gate_scale * gate(x)) * up(x))`."""

    computes_gate = True

    def __init__(self, hidden_size: int, spec: MlpSpec, build: Build) -> None:
        super().__init__(hidden_size, spec, build)
        self.spec = spec

    def forward(self, x: "Tensor | RowCodes", rows: Any = None) -> Tensor:
        gate_up = self.gate_up_proj(x, rows)
        gate_up[:, : self.spec.width].mul_(self.spec.gate_scale)
        out: Tensor = self.down_proj(self.activation(gate_up), rows)
        return out.mul_(self.spec.out_scale)


class SparseMLP(GatedMLP):
    """A gated MLP in which only the gates of a row that exceed a cutoff are activated; all others are 0.

    The cutoff lies so many standard deviations above the row's mean that a share `sparsity` of normally spread numbers
    is below it.
    """

    computes_gate = True

    def __init__(self, hidden_size: int, spec: MlpSpec, build: Build) -> None:
        super().__init__(hidden_size, spec, build)
        self.width = spec.width
        self.deviations = NormalDist().inv_cdf(spec.sparsity)
        self._ranks = build.ranks

    def forward(self, x: "Tensor | RowCodes", rows: Any = None) -> Tensor:
        gate_up = self.gate_up_proj(x, rows)
        gate = gate_up[:, : self.width].float()
        spread, mean = self._spread_and_mean(gate)
        gate_up[:, : self.width] = gate.sub_(mean + spread * self.deviations).relu_()
        out: Tensor = self.down_proj(self.activation(gate_up), rows)
        return out

    def _spread_and_mean(self, gate: Tensor) -> tuple[Tensor, Tensor]:
        """The standard deviation and the mean of each row, `[T, 1]`; ranks have parts of one size of each row."""
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
        self.up_proj = column(build, hidden_size, {"up_proj": spec.width}, bias=spec.bias)
        self.down_proj = row(build, spec.width, "down_proj", hidden_size, bias=spec.bias)
        self.activation = build.ops.activation(spec.activation)
        self._activated = None if build.deterministic else self.up_proj.method.activated(spec.activation)

    def forward(self, x: Tensor, rows: Any = None) -> Tensor:
        if self._activated is not None and rows is None:  # adapters add to what is activated
            activated = self._activated(x, self.up_proj.bias)
        else:
            activated = self.activation(self.up_proj(x, rows))
        out: Tensor = self.down_proj(activated, rows)
        return out


def make_mlp(hidden_size: int, spec: MlpSpec, build: Build) -> nn.Module:
    """The MLP of a specification."""
    if spec.sparsity:
        return SparseMLP(hidden_size, spec, build)
    if spec.gated and (spec.gate_scale, spec.out_scale) != (1.0, 1.0):
        return ScaledMLP(hidden_size, spec, build)
    return (GatedMLP if spec.gated else PlainMLP)(hidden_size, spec, build)
