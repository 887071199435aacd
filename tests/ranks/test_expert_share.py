"""What ranks have of the experts of a mixture: their summands make what one process does, whatever the weights are."""

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvern.errors import ConfigError
from kvern.formats.scaled import TENSOR, Rounding, Scaled
from kvern.layers.experts import Experts
from kvern.layers.linear_format import LinearMethods
from kvern.layers.unquantized import Unquantized
from kvern.models.registry import spec_from_config
from kvern.models.share import WholeExperts, share_of
from kvern.ranks.expert_placement import kept_in_place, place_experts, rank_loads
from kvern.ranks.ranks import Ranks
from kvern.spec.model import MoeSpec
from tests.support.families import make_config
from tests.support.int8_experts import Int8
from tests.support.placed_experts import HIDDEN, SPECS, TOKENS, loaded, placed

PLAIN = LinearMethods(Unquantized())
INT8, BLOCKS, APART = (
    LinearMethods(Unquantized(), ((re.compile("experts"), stored),)) for stored in (Int8(), Int8(2), Int8(joins=False))
)
"""Scales of rows, of two rows, and gate and up in matrices of their own."""
STATIC = LinearMethods(Unquantized(), ((re.compile("experts"), Scaled("e4m3", TENSOR, Rounding("e4m3"), static=True)),))


def cut(spec: MoeSpec, ranks: int) -> MoeSpec:
    return replace(spec, width=spec.width // ranks)


def copied(spec: MoeSpec, ranks: int) -> MoeSpec:
    return replace(spec, placed_over=ranks, redundant=3)


def through(experts: Experts) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    x, weights = torch.randn(TOKENS, HIDDEN, generator=generator), torch.rand(TOKENS, 2, generator=generator)
    out: Tensor = experts(x, weights, experts.share.here(torch.rand(TOKENS, 5, generator=generator).topk(2).indices))
    return out


@pytest.mark.sample(20)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(
    ("linear", "share"),
    [(linear, share) for linear in (PLAIN, INT8, STATIC) for share in (cut, placed, copied)]
    + [(BLOCKS, cut), (APART, cut)],
)
def test_summands_of_ranks(name: str, linear: LinearMethods, share: "type[cut]", size: int) -> None:
    spec = SPECS[name]
    for names in ("parts", "stacked_parts", "fused_parts"):
        expected = through(loaded(spec, linear, Ranks(), names))
        ranks = [loaded(share(spec, size), linear, Ranks(rank, size), names) for rank in range(size)]
        torch.testing.assert_close(sum(map(through, ranks)), expected, rtol=0, atol=1e-5)
        for experts in ranks:
            experts.waits = False
        torch.testing.assert_close(sum(map(through, ranks)), expected, rtol=0, atol=1e-5)


def test_shares_that_begin_within_a_block_are_refused() -> None:
    linear = LinearMethods(Unquantized(), ((re.compile("experts"), Int8(6)),))
    loaded(cut(SPECS["gated"], 2), linear, Ranks(1, 2), "parts")
    with pytest.raises(
        ConfigError,
        match=r"is 4, and model\.experts\.gate_proj is stored as int8_blocks: 6 of its 12 outputs stay together, and a "
        "share has 3; turn enable_expert_parallel on, or choose tensor_parallel_size 2, or a model",
    ):
        loaded(cut(SPECS["gated"], 4), linear, Ranks(0, 4), "parts")


def test_experts_are_on_few_ranks_and_copies_take_turns() -> None:
    ranks = [loaded(copied(SPECS["gated"], 2), PLAIN, Ranks(rank, 2), "parts") for rank in range(2)]
    assert [len(experts.share.held) for experts in ranks] == [4, 4]
    chosen = torch.arange(5).expand(TOKENS, 5)
    first, second = (experts.share.here(chosen) >= 0 for experts in ranks)
    assert torch.equal(first, ~second), "each row is computed on one rank"
    assert sorted(first.sum(0).tolist()) == [0, 7, 7, 7, TOKENS], "three experts are on both"


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("redundant", range(8))
@pytest.mark.parametrize("seed", range(5))
def test_every_expert_is_placed_on_different_ranks_of_like_sizes(ranks: int, redundant: int, seed: int) -> None:
    redundant = min(redundant, (ranks - 1) * 6)
    load = torch.rand(6, generator=torch.Generator().manual_seed(seed)).pow(4).tolist()
    placement = place_experts(load, ranks, redundant)
    assert sum(map(len, placement)) == 6 + redundant and set().union(*placement) == set(range(6))
    assert all(len(set(held)) == len(held) for held in placement)
    assert max(map(len, placement)) - min(map(len, placement)) <= 1
    loads, even = rank_loads(placement, load), place_experts([1.0] * 6, ranks, redundant)
    assert max(loads) <= sum(loads) / ranks + max(load)
    moved = kept_in_place(even, placement)
    assert [sorted(held) for held in moved] == [list(held) for held in placement]
    for before, after in zip(even, moved, strict=True):
        assert all(old == new for old, new in zip(before, after, strict=True) if old in after and new in before)


def test_copies_are_made_of_the_busiest() -> None:
    assert place_experts([5.0, 1.0, 1.0, 1.0], 2, 1) == ((0, 1, 3), (0, 2))


@pytest.mark.parametrize(
    ("size", "whole", "reason"),
    [
        (8, None, "mixtral has 4 attention heads"),
        (1, WholeExperts(), "enable_expert_parallel is on, and tensor_parallel_size is 1: raise it"),
        (8, WholeExperts(), "tensor_parallel_size is 8, and mixtral has 5 experts: lower it to that"),
        (2, WholeExperts(6), "redundant_experts is 6, and 2 ranks have at most 5 more copies of 5 experts"),
    ],
)
def test_what_does_not_go_is_refused(size: int, whole: WholeExperts | None, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        share_of(spec_from_config(make_config("mixtral").to_dict()), size, whole)


def test_experts_that_are_too_odd_to_cut_can_be_placed() -> None:
    spec = spec_from_config(make_config("mixtral", intermediate_size=81).to_dict())
    with pytest.raises(ConfigError, match=r"81 entries in an expert.*enable expert parallel, or choose a size"):
        share_of(spec, 2)
    assert share_of(spec, 2, WholeExperts()).layers[0].mlp.placed_over == 2  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="enable_expert_parallel is on, and llama has no experts"):
        share_of(spec_from_config(make_config("llama").to_dict()), 2, WholeExperts())
