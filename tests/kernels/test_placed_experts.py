"""Experts of which some are on another rank, through the kernels."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvern.device.ranks import Ranks
from kvern.kernels.moe import fused_experts
from kvern.layers.build import Build
from kvern.layers.loadable import Loadable
from kvern.layers.moe import MoE, SharedMoE, make_moe
from kvern.model_spec import MoeSpec
from tests.kernels.test_moe import SPECS
from tests.kernels.test_norm import relative_error


def launch(tokens: int) -> object:
    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16)  # never read, so that it takes no memory

    weights, chosen = torch.zeros(tokens, 8), torch.zeros(tokens, 8, dtype=torch.int32)
    return fused_experts(
        empty(tokens, 2048), empty(64, 1536, 2048), empty(64, 2048, 768), weights, chosen, "silu", of=128
    )


LAUNCHES: list[Callable[[], object]] = [lambda: launch(1), lambda: launch(512)]


@pytest.mark.parametrize("name", ["softmax", "sigmoid", "top 1"])
@pytest.mark.parametrize(("redundant", "tokens"), [(0, 1), (0, 14), (2, 14)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_experts_that_are_elsewhere_add_nothing(
    device: torch.device, name: str, redundant: int, tokens: int, deterministic: bool
) -> None:
    spec = (SPECS | {"top 1": MoeSpec(5, 1, 24)})[name]

    def make(spec: MoeSpec, kernels: frozenset[str], rank: int = 0) -> MoE:
        build = Build(
            torch.float32, device, 16, kernels, deterministic=deterministic, ranks=Ranks(rank, spec.placed_over)
        )
        made = make_moe(32, replace(spec, shared_width=spec.shared_width // spec.placed_over), build.at("mlp"))
        assert isinstance(made, MoE)
        generator = torch.Generator().manual_seed(3)
        for module in made.modules():
            for part, shape in module.parts().items() if isinstance(module, Loadable) else ():
                module.load(part, torch.randn(shape, generator=generator) / 4)
        return made

    x = torch.randn(tokens, 32, generator=torch.Generator().manual_seed(4)).to(device)
    placed = replace(spec, placed_over=2, redundant=redundant)
    summands = []
    for rank in range(2):
        share = make(placed, frozenset({"moe"}), rank)
        shared = share.shared_expert(x) if isinstance(share, SharedMoE) else None
        summands.append(share.routed(x, x, shared))
    assert relative_error(summands[0] + summands[1], make(spec, frozenset())(x).double()) < 1e-5
