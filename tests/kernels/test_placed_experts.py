"""Experts of which some are on another rank, through the kernels, and experts that overflow on rows of others."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from kvern.formats.compressed_tensors import PackQuantizedMethod
from kvern.formats.fp4 import MX, Mxfp4Blocks
from kvern.formats.groups import Form, GroupedFormat
from kvern.formats.scaled import Block, Scaled
from kvern.kernels.moe import fused_experts
from kvern.layers.build import Build
from kvern.layers.expert_choice import make_experts
from kvern.layers.experts import Experts, StackedExperts
from kvern.layers.fused_packed_experts import FusedPackedExperts
from kvern.layers.linear_format import LinearMethods
from kvern.layers.loadable import Loadable
from kvern.layers.moe import MoE, SharedMoE, make_moe
from kvern.ranks.ranks import Ranks
from kvern.spec.model import MoeSpec
from tests.support.kernels.moe_references import SPECS, experts_reference, make_case
from tests.support.kernels.references import relative_error


def launch(tokens: int) -> object:
    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16)  # never read, so that it takes no memory

    weights, chosen = torch.zeros(tokens, 8), torch.zeros(tokens, 8, dtype=torch.int32)
    return fused_experts(
        empty(tokens, 2048), empty(64, 1536, 2048), empty(64, 2048, 768), weights, chosen, "silu", of=128
    )


LAUNCHES: list[Callable[[], object]] = [lambda: launch(1), lambda: launch(512)]


@pytest.mark.sample(5)
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


MXFP4 = LinearMethods(GroupedFormat("MXFP4", partial(Mxfp4Blocks, form=MX), MX.group))
INT4 = LinearMethods(
    GroupedFormat("pack-quantized", partial(PackQuantizedMethod, form=Form("int4", 64, zero=True)), 64, per_word=8)
)
BLOCKS = LinearMethods(Scaled("e4m3", Block(32, 32)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("tokens", [1, pytest.param(5, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("linear", "width"),
    [(MXFP4, 192), (INT4, 192), pytest.param(BLOCKS, 64, marks=pytest.mark.nightly)],
    ids=["MXFP4", "INT4 in groups that shares cut", "FP8 by blocks"],
)
def test_parts_of_packed_experts(device: torch.device, linear: LinearMethods, width: int, tokens: int) -> None:
    spec = MoeSpec(3, 2, width, activation="clamped_swiglu" if linear is MXFP4 else "silu", bias=linear is MXFP4)

    def make(spec: MoeSpec, kernels: frozenset[str], ranks: Ranks) -> Experts:
        made = make_experts(64, spec, Build(torch.float32, device, 16, kernels, linear=linear, ranks=ranks))
        generator = torch.Generator().manual_seed(5)
        for module in made.modules():
            for part, shape in module.stacked_parts().items() if isinstance(module, Loadable) else ():
                if part not in module.optional_parts():
                    module.load(part, numbers_of(module.part_dtypes().get(part), shape, generator))
        made.finish()
        return made

    x, weights = torch.randn(tokens, 64, device=device), torch.rand(tokens, 2, device=device)
    chosen = torch.rand(tokens, 3, device=device).topk(2).indices.int()
    half, kernels = replace(spec, width=width // 2), frozenset({"moe", "quantized"})
    ranks = [make(half, kernels, Ranks(rank, 2)) for rank in range(2)]
    assert all(isinstance(experts, FusedPackedExperts) for experts in ranks)
    found = ranks[0](x, weights, chosen) + ranks[1](x, weights, chosen)
    expected = make(spec, frozenset(), Ranks())(x, weights, chosen)
    assert relative_error(found, expected.double()) < 1e-4


def numbers_of(dtype: torch.dtype | None, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Any codes, under small scales."""
    if dtype == torch.uint8:
        return torch.randint(118, 123, shape, generator=generator, dtype=dtype)
    if dtype == torch.int32:
        return torch.randint(-(2**31), 2**31 - 1, shape, generator=generator).int()
    return torch.rand(shape, generator=generator) / 16


@pytest.mark.parametrize("lanes", [False, True])
def test_packed_experts_move(device: torch.device, lanes: bool) -> None:
    """A rank has all that another had of its slots, also in the order of lanes, which kernels for Hopper read."""
    spec = MoeSpec(4, 2, 64, activation="clamped_swiglu", bias=True, placed_over=2)
    kernels = frozenset({"moe", "quantized", "hopper_linear"} if lanes else {"moe", "quantized"})

    def make(rank: int) -> FusedPackedExperts:
        dtype = torch.bfloat16 if lanes else torch.float32
        made = make_experts(128, spec, Build(dtype, device, 16, kernels, linear=MXFP4, ranks=Ranks(rank, 2)))
        generator = torch.Generator().manual_seed(5)
        for module in made.modules():
            for part, shape in module.stacked_parts().items() if isinstance(module, Loadable) else ():
                numbers = torch.randint(118, 123, shape, generator=generator, dtype=torch.uint8)
                module.load(part, torch.randn(shape, generator=generator) if "bias" in part else numbers)
        made.finish()
        assert isinstance(made, FusedPackedExperts)
        return made

    first, second = make(0), make(1)
    assert (first.gate_up_proj.scale.dtype == torch.int32) == lanes
    for slot in range(2):
        for there, here in zip(first.tensors_of(slot), second.tensors_of(slot), strict=True):
            there.copy_(here)
    for there, here in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(there, here)
    if not lanes:
        x, weights = torch.randn(1, 128, device=device), torch.rand(1, 2, device=device)
        slots = torch.tensor([[0, 1]], dtype=torch.int32, device=device)
        assert torch.equal(first(x, weights, slots), second(x, weights, slots))
        assert not torch.equal(first(x, weights, slots), make(0)(x, weights, slots))


@pytest.mark.parametrize("waits", [True, False])
def test_experts_that_a_row_has_not_chosen_may_overflow(waits: bool) -> None:
    experts = StackedExperts(64, MoeSpec(4, 2, 48), Build(torch.float32, torch.device("cpu"), 16))
    x, gate_up, down, weights, _ = make_case(torch.device("cpu"), 9, 4, 2, 64, 48, torch.float32)
    gate_up[-1] *= 1e30
    experts.gate_up_proj.copy_(gate_up)
    experts.down_proj.copy_(down)
    experts.waits = waits
    chosen = torch.tensor([[0, 1], [2, 0], [1, 2]] * 3)
    expected = experts_reference(x, gate_up, down, weights, chosen, "silu")
    assert relative_error(experts(x, weights, chosen), expected) < 1e-5
