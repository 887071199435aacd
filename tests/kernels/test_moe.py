"""Routing, alignment and experts beside float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from kvern.kernels import moe, moe_direct
from kvern.kernels.moe import ACTIVATIONS, fused_experts
from kvern.kernels.moe_routing import align, most_blocks, route
from kvern.layers.build import Build
from kvern.layers.experts import StackedExperts
from kvern.layers.moe import MoE, make_moe
from kvern.layers.tuned_experts import MOST_TOKENS
from kvern.layers.tuning import tune
from kvern.spec.model import MoeSpec
from tests.support.kernels.moe_references import SPECS, Biases, Case, experts_reference, make_biases, make_case
from tests.support.kernels.references import relative_error
from tests.support.pairwise import pairwise


def launch(
    tokens: int,
    experts: int,
    top_k: int,
    hidden: int,
    width: int,
    *,
    activation: str = "silu",
    add: bool = False,
    deterministic: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    gated: bool = True,
) -> object:
    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)  # never read, so that it takes no memory

    return fused_experts(
        empty(tokens, hidden),
        empty(experts, 2 * width if gated else width, hidden),
        empty(experts, hidden, width),
        torch.zeros(tokens, top_k),
        torch.zeros(tokens, top_k, dtype=torch.int32),
        activation,
        add=empty(tokens, hidden) if add else None,
        deterministic=deterministic,
    )


def launch_route(experts: int, top_k: int, dtype: torch.dtype, whole: bool, turns: int = 0) -> object:
    counts = torch.zeros(experts, dtype=torch.int64) if whole else None
    slots = torch.zeros(turns, experts, dtype=torch.int32) if turns else None
    return route(torch.zeros(4, experts, dtype=dtype), top_k, whole, 1.0, counts, slots)


LAUNCHES: list[Callable[[], object]] = [
    *(lambda turns=turns: launch_route(128, 8, torch.bfloat16, True, turns) for turns in (0, 1, 12)),
    lambda: launch_route(512, 10, torch.float32, False),
    lambda: launch_route(5, 2, torch.float16, True),
    lambda: align(torch.zeros(32, 6, dtype=torch.int64), 160, 16),
    lambda: launch(512, 128, 8, 2048, 768),
    *(lambda tokens=tokens: launch(tokens, 8, 2, 4096, 14336) for tokens in (1, 32, 8192)),
    *(lambda tokens=tokens: launch(tokens, 60, 4, 2048, 1408, add=True) for tokens in (1, 32)),
    *(lambda kind=kind: launch(1, 4, 2, 64, 48, activation=kind) for kind in ACTIVATIONS),
    *(lambda kind=kind: launch(8, 4, 2, 64, 48, activation=kind, deterministic=True) for kind in ACTIVATIONS),
    *(lambda tokens=tokens: launch(tokens, 128, 6, 2688, 1856, activation="relu2", gated=False) for tokens in (1, 64)),
    lambda: launch(8, 128, 8, 2048, 768, deterministic=True),
    lambda: launch(8, 128, 8, 2048, 768, deterministic=True, dtype=torch.float32),
]


def routing_reference(
    logits: torch.Tensor, top_k: int, renormalize: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    weights, chosen = logits.double().softmax(-1).sort(dim=-1, descending=True, stable=True)
    weights, chosen = weights[:, :top_k], chosen[:, :top_k]
    return (weights / weights.sum(-1, keepdim=True) if renormalize else weights) * scale, chosen


@pytest.mark.parametrize("turns", [1, 3])
def test_route_gives_what_stands_for_an_expert(device: torch.device, turns: int) -> None:
    logits = torch.randn(7, 8, generator=torch.Generator().manual_seed(turns)).to(device)
    slots = torch.arange(8 * turns, dtype=torch.int32, device=device).view(turns, 8) - 9
    counts, other = torch.zeros(2, 8, dtype=torch.int64, device=device)
    weights, chosen = route(logits, 3, True, 1.0, counts)
    same, found = route(logits, 3, True, 1.0, other, slots)
    assert torch.equal(found, slots[torch.arange(7, device=device).remainder(turns)[:, None], chosen])
    assert torch.equal(weights, same) and torch.equal(counts, other)


@pytest.mark.parametrize(("experts", "top_k"), [(4, 1), (8, 2), (8, 4), (5, 5), (160, 6)])
@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize(("renormalize", "scale"), [(True, 1.0), (False, 2.5)])
def test_route(device: torch.device, experts: int, top_k: int, tokens: int, renormalize: bool, scale: float) -> None:
    generator = torch.Generator().manual_seed(experts)
    logits = (4 * torch.randn(tokens, experts + 3, generator=generator)).to(device)[:, :experts]
    counts = torch.arange(experts, device=device)
    weights, chosen = route(logits, top_k, renormalize, scale, counts)
    expected, expected_chosen = routing_reference(logits, top_k, renormalize, scale)
    assert weights.dtype == torch.float32 and chosen.dtype == torch.int32
    assert torch.equal(chosen.long(), expected_chosen)
    assert relative_error(weights, expected) < 1e-6
    assert torch.equal(
        counts, torch.arange(experts, device=device) + chosen.long().flatten().bincount(minlength=experts)
    )


def test_route_takes_the_lower_of_equal_experts(device: torch.device) -> None:
    logits = torch.tensor([[1.0, 3, 2, 3, 2, 2], [0, 0, 0, 0, 0, 0], [-1, -1, 5, 5, 5, -1]]).half().to(device)
    weights, chosen = route(logits, 4, True, 1.0)
    assert chosen.tolist() == [[1, 3, 2, 4], [0, 1, 2, 3], [2, 3, 4, 0]]
    assert relative_error(weights, routing_reference(logits, 4, True, 1.0)[0]) < 1e-6


def test_route_of_no_numbers_stays_in_range(device: torch.device) -> None:
    logits = torch.full((2, 6), float("nan"), device=device)
    logits[1] = float("-inf")
    chosen = route(logits, 3, True, 1.0)[1]
    assert chosen.min() >= 0 and chosen.max() < 6


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "rows", "chunk", "multiple"),
    pairwise([1, 3, 40], [(4, 1, 16), (8, 2, 16), (37, 2, 64), (3, 3, 16)], [(32, 4), (4096, 1)]),
)
def test_align(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    tokens: int,
    experts: int,
    top_k: int,
    rows: int,
    chunk: int,
    multiple: int,
) -> None:
    monkeypatch.setattr("kvern.kernels.moe_routing.CHUNK", chunk)
    generator = torch.Generator().manual_seed(tokens)
    scores = torch.rand(tokens, experts, generator=generator)
    scores[:, experts // 2] = 2.0  # everyone's choice; the others get few tokens or none
    chosen = scores.topk(top_k).indices.to(device)
    blocks = align(chosen, experts, rows, multiple)
    pairs = chosen.numel()
    assert blocks.experts.shape[0] % multiple == 0
    assert 0 <= blocks.experts.shape[0] - most_blocks(pairs, experts, rows) < multiple
    expected_pairs: list[int] = []
    expected_experts: list[int] = []
    for expert in range(experts):
        mine = (chosen.flatten() == expert).nonzero().flatten().tolist()
        count = -(-len(mine) // rows)
        expected_pairs += mine + [pairs] * (count * rows - len(mine))
        expected_experts += [expert] * count
    assert blocks.pairs.tolist()[: len(expected_pairs)] == expected_pairs
    assert blocks.experts.tolist() == expected_experts + [-1] * (len(blocks.experts) - len(expected_experts))
    assert blocks.pairs[blocks.places.long()].tolist() == list(range(pairs))


@pytest.mark.parametrize("pairs", [1, 5, 64, 1000])
@pytest.mark.parametrize("experts", [1, 4, 100])
def test_most_blocks_is_reached(pairs: int, experts: int) -> None:
    touched = min(pairs, experts)
    worst = [1] * (touched - 1) + [pairs - touched + 1]
    assert most_blocks(pairs, experts, 16) == sum(-(-count // 16) for count in worst)


PATHS = ("direct", "grouped", "deterministic")


def run(
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    case: Case,
    activation: str,
    add: torch.Tensor | None = None,
    biases: Biases = None,
) -> torch.Tensor:
    monkeypatch.setattr(moe_direct, "SHARED_BYTES", 1 << 40 if path == "direct" else -1)
    return fused_experts(*case, activation, biases=biases, add=add, deterministic=path == "deterministic")


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("path", "tokens", "experts", "top_k", "dtype"),
    pairwise(
        PATHS,
        (1, 3, 17, 40),
        [(4, 1), (4, 2), (8, 4)],
        [torch.float32, torch.float16],
        possible=lambda path, tokens, *_: (path, tokens) != ("direct", 40),
    ),
)
def test_experts(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    tokens: int,
    experts: int,
    top_k: int,
    dtype: torch.dtype,
) -> None:
    case = make_case(device, tokens, experts, top_k, 64, 48, dtype, seed=tokens)
    out = run(monkeypatch, path, case, "silu")
    assert out.dtype == dtype
    assert relative_error(out, experts_reference(*case, "silu")) < (1e-5 if dtype is torch.float32 else 1e-3)


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("path", "activation", "hidden", "width", "top_k"),
    pairwise(PATHS, [*ACTIVATIONS], [(200, 32, 3), (64, 100, 1), (40, 17, 3)]),
)
def test_activations_odd_sizes_and_what_is_added(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    activation: str,
    hidden: int,
    width: int,
    top_k: int,
) -> None:
    x, gate_up, down, weights, chosen = make_case(device, 3, 6, top_k, hidden, width, torch.float32)
    if activation == "relu2":  # of experts without a gate
        gate_up = gate_up[:, :width].contiguous()
    case = x, gate_up, down, weights, chosen.long()
    add = torch.randn(3, hidden + 4, generator=torch.Generator().manual_seed(1)).to(device)[:, :hidden]
    biases = make_biases(6, hidden, width, device) if activation == "clamped_swiglu" else None
    out = run(monkeypatch, path, case, activation, add, biases)
    assert relative_error(out, experts_reference(*case, activation, biases) + add.double()) < 1e-5


@pytest.mark.parametrize("rows", [16, 32, 64, 128])
def test_blocks_of_every_size(device: torch.device, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    case = make_case(device, 40, 4, 2, 96, 160, torch.float16)
    monkeypatch.setattr(moe, "rows_of_block", lambda pairs, experts: rows)
    out = run(monkeypatch, "grouped", case, "silu")
    assert relative_error(out, experts_reference(*case, "silu")) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_deterministic_results_depend_on_no_other_token(device: torch.device, dtype: torch.dtype) -> None:
    x, gate_up, down, weights, chosen = make_case(device, 40, 8, 2, 96, 80, dtype)
    everyone = fused_experts(x, gate_up, down, weights, chosen, "silu", deterministic=True)
    for row in (0, 23, 39):
        one = slice(row, row + 1)
        alone = fused_experts(x[one], gate_up, down, weights[one], chosen[one], "silu", deterministic=True)
        if device.type == "cuda":
            assert torch.equal(alone[0], everyone[row])
        else:  # interpreted, products are NumPy's, whose last bits depend on a row's place on some processors
            torch.testing.assert_close(alone[0], everyone[row], rtol=1e-6, atol=1e-6)


def test_tokens_that_all_choose_one_expert(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    x, gate_up, down, weights, chosen = make_case(device, 40, 4, 1, 64, 48, torch.float32)
    case = (x, gate_up, down, weights, torch.full_like(chosen, 2))
    assert relative_error(run(monkeypatch, "grouped", case, "gelu"), experts_reference(*case, "gelu")) < 1e-5


def test_weights_of_experts_that_nobody_chose_are_not_read(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in PATHS:
        x, gate_up, down, weights, chosen = make_case(device, 9, 8, 2, 64, 48, torch.float32)
        gate_up[-1], down[-1] = float("nan"), float("nan")
        assert run(monkeypatch, path, (x, gate_up, down, weights, chosen), "silu").isfinite().all()


def test_shapes_of_launches() -> None:
    qwen = 3 * 768 * 2048 * 2
    assert [moe_direct.runs_direct(tokens, 8, 128, qwen) for tokens in (1, 2, 8)] == [True, True, False]
    assert [moe.rows_of_block(tokens * 8, 128) for tokens in (1, 32, 128, 256, 512, 8192)] == [16, 16, 16, 32, 64, 128]
    assert all(rows in moe.TILES for rows in (moe.rows_of_block(2**power, 100) for power in range(20)))
    found = [moe_direct.inputs_of_step(inputs, 128) for inputs in (2048, 768, 96, 48, 17, 16)]
    assert found == [128, 128, 32, 64, 32, 16]


def test_ways_are_timed_over_random_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts that are alike get the way that is fastest for so many tokens; what is known is not timed again."""
    spec, times = MoeSpec(6, 2, 24), {8: (0, 1), 512: (3, 2)}
    build = Build(torch.bfloat16, torch.device("cpu"), 1, frozenset({"moe"}))
    asked: list[dict[str, object]] = []
    monkeypatch.setattr("kvern.kernels.moe.fused_experts", lambda x, *_, **given: asked.append(given))
    layers = [StackedExperts(64, spec, build) for _ in range(2)]

    def clock(calls: list[Any]) -> float:
        way, x, weights, topk_ids = calls[0].args
        assert x.shape[1] == 64 and weights.shape == topk_ids.shape == (x.shape[0], 2)
        assert (topk_ids[:, 0] != topk_ids[:, 1]).all() and topk_ids.max() < 6
        for call in calls:
            call()
        return float(times.get(x.shape[0], (1, 1))[way])

    timed = tune(nn.ModuleList(layers), clock, {})
    assert set(timed) == {
        f"experts, unquantized, 2 of 6, 24 x 64, torch.bfloat16, {tokens} rows" for tokens in MOST_TOKENS
    }
    assert [way["tiles"] for way in asked[:4]] == [0, 0, 1, 1]
    assert tune(nn.ModuleList(layers), clock, timed) == {}
    asked.clear()
    for tokens in (3, 400, 10000):
        layers[1](torch.empty(tokens, 64), None, None)
    assert [way["tiles"] for way in asked] == [0, 1, 0] and not any(way["hopper"] for way in asked)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_layers_of_kernels_agree_with_those_of_pytorch(device: torch.device, name: str, deterministic: bool) -> None:
    spec = SPECS[name]
    plain, fused = (
        make_moe(32, spec, Build(torch.float32, device, 16, kernels, deterministic=deterministic))
        for kernels in (frozenset[str](), frozenset({"moe"}))
    )
    assert isinstance(plain, MoE) and isinstance(fused, MoE)
    assert isinstance(fused.experts, StackedExperts) and fused.experts.is_fused == (spec.activation != "relu")
    assert [key for key, _ in fused.named_parameters()] == [key for key, _ in plain.named_parameters()]
    generator = torch.Generator().manual_seed(3)
    for parameter in plain.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    fused.load_state_dict(plain.state_dict())
    x = torch.randn(7, 32, generator=generator).to(device)
    assert relative_error(fused(x), plain(x).double()) < 1e-5
    assert torch.equal(fused.experts.expert_counts, plain.experts.expert_counts)
    fused(x[:2])
    chosen = torch.cat((plain.gate(x)[1], plain.gate(x[:2])[1]))
    assert torch.equal(fused.experts.expert_counts, chosen.flatten().bincount(minlength=spec.experts))
