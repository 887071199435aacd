"""Experts with fixed random weights that are placed over ranks."""

from dataclasses import replace

import torch

from kvern.layers.build import Build
from kvern.layers.expert_choice import make_experts
from kvern.layers.experts import Experts
from kvern.layers.linear_format import LinearMethods
from kvern.layers.loadable import Loadable
from kvern.ranks.ranks import Ranks
from kvern.spec.model import MoeSpec

HIDDEN, TOKENS = 8, 14
SPECS = {
    "gated": MoeSpec(5, 2, 12),
    "not gated": MoeSpec(5, 2, 12, activation="relu2", gated=False),
    "biases": MoeSpec(5, 2, 12, activation="clamped_swiglu", bias=True),
}


def placed(spec: MoeSpec, ranks: int) -> MoeSpec:
    return replace(spec, placed_over=ranks)


def loaded(spec: MoeSpec, linear: LinearMethods, ranks: Ranks, names: str) -> Experts:
    """Experts of a checkpoint that is always the same."""
    experts = make_experts(HIDDEN, spec, Build(torch.float32, torch.device("cpu"), 16, linear=linear, ranks=ranks))
    generator = torch.Generator().manual_seed(3)
    for module in experts.modules():
        if isinstance(module, Loadable):
            for part, shape in (getattr(module, names)() or module.parts()).items():
                if part.endswith("qweight"):
                    module.load(part, torch.randint(-7, 8, shape, generator=generator).to(torch.int8))
                else:
                    module.load(part, torch.rand(shape, generator=generator) / 9)
    experts.finish()
    return experts
