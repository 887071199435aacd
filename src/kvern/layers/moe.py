"""Mixture of experts: a router sends each token through a few of many MLPs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from kvern.layers.build import Build
from kvern.layers.expert_choice import make_experts
from kvern.layers.linear import column, row
from kvern.layers.mlp import make_mlp
from kvern.layers.module import Module
from kvern.layers.norm import Norm
from kvern.layers.router import make_router
from kvern.spec.model import MlpSpec, MoeSpec, NormSpec


class MoE(Module):
    """Router and experts, which no adapter changes: `x [T, hidden] -> [T, hidden]`.

    Every rank has the router. What its shares of the experts and of an MLP beside them give is summed over ranks once.
    In DP attention rows go to all ranks before, sums come back, and an MLP beside experts is whole.
    """

    def __init__(self, hidden_size: int, spec: MoeSpec, build: Build) -> None:
        super().__init__()
        self._dp_attention = build.ranks.dp_attention
        shared = build if self._dp_attention is None else replace(build, ranks=self._dp_attention.ranks)
        experts = make_experts(spec.latent or hidden_size, spec, shared)
        self.gate = make_router(hidden_size, shared, experts)
        self.experts = experts
        self._sum: Callable[[Tensor], Tensor] = build.ranks.sum if build.sums else _summand
        self._no_rows = build.empty(0, hidden_size).data

    def routed(self, x: Tensor, inner: Tensor, add: Tensor | None = None) -> Tensor:
        """This rank's summand of the experts' result for `inner`, plus `add`; the rows `x` choose the experts."""
        out: Tensor = self.experts(inner, *self.gate(x), add)
        return out

    def mixed(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """The result of all ranks' experts for `x`, plus the sum of their `add`; or this rank's summand of both."""
        if self._dp_attention is None:
            return self._sum(self.routed(x, x, add))
        everybodys = self._dp_attention.gather(x)
        out = self._dp_attention.sum_scattered(self.routed(everybodys, everybodys), len(x))
        return out if add is None else out + add

    def forward(self, x: Tensor, rows: Any = None) -> Tensor:
        return self.mixed(x)

    def assist(self) -> None:
        """Compute what other ranks' rows choose of this one's experts, in a step in which it has none itself."""
        self.mixed(self._no_rows)


class SharedMoE(MoE):
    """Experts plus an MLP that every token takes, behind a sigmoid gate in some families."""

    def __init__(self, hidden_size: int, spec: MoeSpec, build: Build) -> None:
        super().__init__(hidden_size, spec, build)
        shared = MlpSpec(spec.shared_width, spec.activation, gated=spec.gated)
        self.shared_expert = make_mlp(hidden_size, shared, replace(build.at("shared_expert"), sums=False))
        gate = {"shared_expert_gate": 1}
        self.shared_expert_gate = column(build.whole, hidden_size, gate) if spec.shared_gate else None

    def forward(self, x: Tensor, rows: Any = None) -> Tensor:
        shared: Tensor = self.shared_expert(x, rows)
        if self.shared_expert_gate is not None:
            shared = shared * self.shared_expert_gate(x, rows).sigmoid()
        return self.mixed(x, shared)


class LatentMoE(SharedMoE):
    """Experts over narrower rows; the router, and the MLP that every token takes, read the tokens as they are."""

    def __init__(self, hidden_size: int, spec: MoeSpec, build: Build) -> None:
        super().__init__(hidden_size, spec, build)
        self.fc1_latent_proj = column(build.whole, hidden_size, {"fc1_latent_proj": spec.latent})
        self.fc2_latent_proj = row(build.whole, spec.latent, "fc2_latent_proj", hidden_size)

    def forward(self, x: Tensor, rows: Any = None) -> Tensor:
        mixed: Tensor = self.fc2_latent_proj(self.routed(x, self.fc1_latent_proj(x, rows)), rows)
        return self._sum(mixed.add_(self.shared_expert(x, rows)))


class ExpertsBeside(Module):
    """Experts beside an MLP: each reads the residual through its own norm, and its output's norm is added (Gemma 4)."""

    def __init__(self, hidden_size: int, norm: NormSpec, spec: MoeSpec, build: Build) -> None:
        super().__init__()
        inner = build.at("moe")
        self.experts = make_experts(hidden_size, spec, inner)
        self.gate = make_router(hidden_size, inner, self.experts)
        self.gate_in = Norm(norm, hidden_size, "norm", inner)
        self.experts_in = Norm(norm, hidden_size, "pre_feedforward_layernorm_2", build)
        self.experts_out = Norm(norm, hidden_size, "post_feedforward_layernorm_2", build)
        self.mlp_out = Norm(norm, hidden_size, "post_feedforward_layernorm_1", build)
        self._add, self._sum = build.ops.add, build.ranks.sum

    def forward(self, residual: Tensor, fed: Tensor) -> Tensor:
        """`residual [T, hidden]`, and what the MLP made of its norm."""
        routed = self.experts(self.experts_in(residual), *self.gate(self.gate_in(residual)))
        return self._add(self.mlp_out(fed), self.experts_out(self._sum(routed)))


def _summand(x: Tensor) -> Tensor:
    """A rank's summand, as it is: later layers add up those of all ranks."""
    return x


def make_moe(hidden_size: int, spec: MoeSpec, build: Build) -> nn.Module:
    if spec.latent:
        return LatentMoE(hidden_size, spec, build)
    return (SharedMoE if spec.shared_width else MoE)(hidden_size, spec, build)
