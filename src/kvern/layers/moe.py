"""Mixture of experts: a router sends each token through a few of many gated MLPs."""

from typing import Any

from torch import Tensor, nn

from kvern.layers.build import Build
from kvern.layers.mlp import make_mlp
from kvern.layers.module import Module
from kvern.layers.router import make_router
from kvern.model_spec import MlpSpec, MoeSpec


class MoE(Module):
    """Router and experts, which no adapter changes: `x [T, hidden] -> [T, hidden]`."""

    def __init__(self, hidden_size: int, spec: MoeSpec, build: Build) -> None:
        super().__init__()
        experts = build.experts(hidden_size, spec)
        self.gate = make_router(hidden_size, spec, build, experts.expert_counts)
        self.experts = experts

    def forward(self, x: Tensor, rows: Any = None) -> Tensor:
        weights, topk_ids = self.gate(x)
        out: Tensor = self.experts(x, weights, topk_ids)
        return out


class SharedMoE(MoE):
    """Experts plus an MLP that every token takes, behind a sigmoid gate in some families."""

    def __init__(self, hidden_size: int, spec: MoeSpec, build: Build) -> None:
        super().__init__(hidden_size, spec, build)
        shared = MlpSpec(spec.shared_width, spec.activation)
        self.shared_expert = make_mlp(hidden_size, shared, build.at("shared_expert"))
        self.shared_expert_gate = build.column(hidden_size, {"shared_expert_gate": 1}) if spec.shared_gate else None

    def forward(self, x: Tensor, rows: Any = None) -> Tensor:
        shared: Tensor = self.shared_expert(x, rows)
        if self.shared_expert_gate is not None:
            shared = shared * self.shared_expert_gate(x, rows).sigmoid()
        weights, topk_ids = self.gate(x)
        out: Tensor = self.experts(x, weights, topk_ids, shared)
        return out


def make_moe(hidden_size: int, spec: MoeSpec, build: Build) -> nn.Module:
    return (SharedMoE if spec.shared_width else MoE)(hidden_size, spec, build)
