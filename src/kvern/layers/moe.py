"""Mixture of experts: a router sends each token through a few of many gated MLPs."""

import re

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvern.layers.build import Build
from kvern.layers.loadable import Loadable, copy_rows
from kvern.layers.mlp import ACTIVATIONS, make_mlp
from kvern.layers.module import Module
from kvern.layers.router import make_router
from kvern.model_spec import MlpSpec, MoeSpec

_EXPERT_PART = re.compile(r"experts\.(\d+)\.(gate|up|down)_proj\.weight")


class Experts(Loadable):
    """The weights of all experts: `gate_up_proj [experts, 2 * width, hidden]`, `down_proj [experts, hidden, width]`.

    `expert_counts [experts]` int64, on the device, holds how many tokens each expert has had since the model was built,
    those that pad a batch included. Routers made of kernels keep it; beside PyTorch's it stays zero.
    """

    expert_counts: Tensor

    def __init__(self, hidden_size: int, spec: MoeSpec, build: Build) -> None:
        super().__init__()
        self.spec, self.hidden_size = spec, hidden_size
        self.gate_up_proj = build.empty(spec.experts, 2 * spec.width, hidden_size)
        self.down_proj = build.empty(spec.experts, hidden_size, spec.width)
        self.activation = ACTIVATIONS[spec.activation]
        counts = torch.zeros(spec.experts, dtype=torch.int64, device=build.device)
        self.register_buffer("expert_counts", counts, persistent=False)

    def forward(self, x: Tensor, weights: Tensor, topk_ids: Tensor, add: Tensor | None = None) -> Tensor:
        """Sum `x [T, hidden]` through the experts `topk_ids [T, top_k]`, times `weights [T, top_k]`.

        `add [T, hidden]`, if given, is added to the sum.
        """
        out, weights = torch.zeros_like(x), weights.to(x.dtype)
        order = topk_ids.flatten().argsort(stable=True)
        counts = torch.bincount(topk_ids.flatten(), minlength=self.spec.experts).tolist()
        start = 0
        for expert, count in enumerate(counts):
            if count:
                picked = order[start : start + count]
                start += count
                tokens = picked // self.spec.top_k
                gate, up = F.linear(x[tokens], self.gate_up_proj[expert]).chunk(2, -1)
                part = F.linear(self.activation(gate).mul_(up), self.down_proj[expert])
                out.index_add_(0, tokens, part * weights.view(-1, 1)[picked])
        return out if add is None else out + add

    def parts(self) -> dict[str, tuple[int, ...]]:
        width, hidden = self.spec.width, self.hidden_size
        shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
        return {
            f"experts.{expert}.{kind}_proj.weight": shape
            for expert in range(self.spec.experts)
            for kind, shape in shapes.items()
        }

    def fused_parts(self) -> dict[str, tuple[int, ...]]:
        return {f"experts.{name}": tuple(weight.shape) for name, weight in self.named_parameters()}

    def load(self, part: str, tensor: Tensor, first_row: int = 0) -> None:
        match = _EXPERT_PART.fullmatch(part)
        if match is None:
            copy_rows(self.get_parameter(part.removeprefix("experts.")), tensor, first_row)
            return
        expert, kind = int(match[1]), match[2]
        target = self.down_proj[expert] if kind == "down" else self.gate_up_proj[expert]
        copy_rows(target, tensor, first_row + (self.spec.width if kind == "up" else 0))


def make_experts(hidden_size: int, spec: MoeSpec, build: Build) -> Experts:
    """The experts of a specification, of kernels if the build has them and they know the activation."""
    if "moe" in build.kernels and spec.activation in ("silu", "gelu", "gelu_tanh"):
        from kvern.layers.fused_moe import FusedExperts

        return FusedExperts(hidden_size, spec, build)
    return Experts(hidden_size, spec, build)


class MoE(Module):
    """Router and experts: `x [T, hidden] -> [T, hidden]`."""

    def __init__(self, hidden_size: int, spec: MoeSpec, build: Build) -> None:
        super().__init__()
        experts = make_experts(hidden_size, spec, build)
        self.gate = make_router(hidden_size, spec, build, experts.expert_counts)
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        weights, topk_ids = self.gate(x)
        out: Tensor = self.experts(x, weights, topk_ids)
        return out


class SharedMoE(MoE):
    """Experts plus an MLP that every token takes, behind a sigmoid gate in some families."""

    def __init__(self, hidden_size: int, spec: MoeSpec, build: Build) -> None:
        super().__init__(hidden_size, spec, build)
        self.shared_expert = make_mlp(hidden_size, MlpSpec(spec.shared_width, spec.activation), build)
        self.shared_expert_gate = build.column(hidden_size, {"shared_expert_gate": 1}) if spec.shared_gate else None

    def forward(self, x: Tensor) -> Tensor:
        shared: Tensor = self.shared_expert(x)
        if self.shared_expert_gate is not None:
            shared = shared * self.shared_expert_gate(x).sigmoid()
        weights, topk_ids = self.gate(x)
        out: Tensor = self.experts(x, weights, topk_ids, shared)
        return out


def make_moe(hidden_size: int, spec: MoeSpec, build: Build) -> nn.Module:
    return (SharedMoE if spec.shared_width else MoE)(hidden_size, spec, build)
