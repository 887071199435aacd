"""What ranks have of a model, and what they refuse: logits here, whole engines in `test_rank_engines.py`."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvern import LLM
from kvern.errors import ConfigError
from kvern.layers.build import Build
from kvern.models.checkpoint import read_headers
from kvern.models.decoder import Decoder
from kvern.models.loader import LoadOptions, filled_model, load_model, read_config
from kvern.models.registry import spec_from_config
from kvern.models.share import WholeExperts, share_of
from kvern.ranks.ranks import ALONE, Ranks
from tests.support.divided_families import TENSOR_PARALLEL_CHANGES, TENSOR_PARALLEL_FAMILIES
from tests.support.families import FAMILIES, make_checkpoint, make_config
from tests.support.model_outputs import PROMPT, logits, with_attention
from tests.support.rank_features import OF_EXPERTS
from tests.support.rank_threads import SECONDS, load_with, logits_of_ranks

EXPERTS = ("mixtral", "qwen3_moe", "qwen2_moe", "granitemoe", "glm4_moe", "glm4_moe_groups", "dots1", "qwen3_vl_moe")


def check(folder: Path, size: int, load: Callable[..., Decoder] = load_with, **shared: Any) -> None:
    expected = logits(load(folder), PROMPT)
    found = logits_of_ranks(folder, size, load, **shared)
    assert (found[0] - expected).abs().max() < 1e-4
    assert all(torch.equal(found[0], other) for other in found), "each rank samples from the same numbers"


@pytest.mark.sample(6)
@pytest.mark.parametrize("family", TENSOR_PARALLEL_FAMILIES)
def test_ranks_compute_what_one_process_does(family: str, tmp_path: Path) -> None:
    check(make_checkpoint(family, tmp_path, **TENSOR_PARALLEL_CHANGES.get(family, {})), 2)


@pytest.mark.parametrize(
    ("family", "size", "redundant"),
    [
        ("mixtral", 2, 0),
        ("glm4_moe", 4, 3),
        *(pytest.param(family, 4, 0, marks=pytest.mark.nightly) for family in EXPERTS),
        *(pytest.param(family, 2, 2, marks=pytest.mark.nightly) for family in OF_EXPERTS),
    ],
)
def test_ranks_with_whole_experts_compute_what_one_process_does(
    family: str, size: int, redundant: int, tmp_path: Path
) -> None:
    check(make_checkpoint(family, tmp_path), size, whole_experts=WholeExperts(redundant))


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_all_families_are_shared(family: str, tmp_path: Path) -> None:
    check(make_checkpoint(family, tmp_path, **TENSOR_PARALLEL_CHANGES.get(family, {})), 2)


@pytest.mark.nightly
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {*OF_EXPERTS}))
def test_families_without_experts_are_refused_where_these_are_to_be_whole(family: str) -> None:
    spec = spec_from_config(make_config(family).to_dict())
    with pytest.raises(ConfigError, match=r"^enable_expert_parallel is on, and .* has no experts: leave it off"):
        share_of(spec, 2, WholeExperts())


@pytest.mark.parametrize("family", ["llama", "olmo2"])
def test_ranks_have_the_same_kv_heads_where_there_are_fewer(family: str, tmp_path: Path) -> None:
    check(make_checkpoint(family, tmp_path), 4)  # of 2 KV heads


def test_groups_of_state_heads_may_be_fewer_than_ranks(tmp_path: Path) -> None:
    check(make_checkpoint("falcon_h1", tmp_path, mamba_n_heads=8, mamba_d_head=12), 4)  # 2 groups


def load_with_sinks(folder: Path, ranks: Ranks = ALONE) -> Decoder:
    """A model whose attention has sinks, which stand in its folder."""
    spec = with_attention(sinks=True)(spec_from_config(read_config(folder)))
    build = Build(torch.float32, torch.device("cpu"), 64, ranks=ranks)
    return filled_model(Decoder, share_of(spec, ranks.size), build, folder, read_headers(folder))


def test_each_rank_has_the_sinks_of_its_heads(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"model.layers.{layer}.self_attn.sinks": torch.arange(4.0) + layer for layer in range(3)}
    save_file(tensors, folder / "model.safetensors")
    check(folder, 2, load_with_sinks)


def test_ordered_sums_do_not_depend_on_what_is_beside(tmp_path: Path) -> None:
    """Without kernels, where a library adds up in the order that it likes."""
    given = torch.randn(3, 1000) * torch.tensor([1.0, 1e4, 1e-3])[:, None]

    def run(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        ranks = Ranks(rank, 3)
        ranks.connect(tmp_path / "meeting", torch.device("cpu"), SECONDS, ordered=True)
        return ranks.sum(given[rank].clone()), ranks.least(torch.tensor([rank, 7, -rank]))

    with ThreadPoolExecutor(3) as threads:
        for total, least in threads.map(run, range(3)):
            assert torch.equal(total, given[0] + given[1] + given[2])
            assert least.tolist() == [0, 7, -2]


def test_the_first_rank_goes_on_when_all_have_come(tmp_path: Path) -> None:
    came: list[int] = []

    def run(rank: int) -> list[int]:
        ranks = Ranks(rank, 3)
        ranks.connect(tmp_path / "meeting", torch.device("cpu"), SECONDS)
        for turn in range(20):
            came.append(turn)
            ranks.meet(torch.device("cpu"))
            if rank == 0:
                assert came.count(turn) == 3
        return came

    with ThreadPoolExecutor(3) as threads:
        assert [len(each) for each in threads.map(run, range(3))] == [60] * 3


def test_each_rank_holds_its_share_alone(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    whole, ranks = load_model(folder), Ranks(1, 2)
    share = load_model(folder, LoadOptions(ranks=ranks))
    mlp, whole_mlp = share.layers[0].mlp, whole.layers[0].mlp
    assert torch.equal(mlp.down_proj.method.dequantize(), whole_mlp.down_proj.method.dequantize()[:, 40:])
    gate_up, width = whole_mlp.gate_up_proj.method.dequantize(), 80
    expected = torch.cat((gate_up[40:width], gate_up[width + 40 :]))
    assert torch.equal(mlp.gate_up_proj.method.dequantize(), expected)
    assert share.weight_bytes < 0.52 * whole.weight_bytes


@pytest.mark.parametrize(
    ("size", "reason"),
    [
        (3, "tensor_parallel_size is 3, and llama has 4 attention heads, which so many ranks cannot share evenly"),
        (8, "tensor_parallel_size is 8, and llama has 4 attention heads"),
    ],
)
def test_sizes_that_do_not_divide_a_model_are_refused(size: int, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        share_of(spec_from_config(make_config("llama").to_dict()), size)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("qwen3_5", {}, "qwen3_5 has 2 key heads of a state"),
        (
            "falcon_h1",
            {"mamba_n_groups": 1, "mamba_n_heads": 6},
            "size is 4, and falcon_h1 has 6 heads of a state for each",
        ),
        ("falcon_h1", {"mamba_n_groups": 3}, "has 3 groups of heads of a state"),
    ],
)
def test_sizes_that_do_not_divide_states_are_refused(family: str, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        share_of(spec_from_config(make_config(family, **changes).to_dict()), 4)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0: it must be at least 1"),
        ({"enable_expert_parallel": True}, "enable_expert_parallel is on, and llama has no experts"),
        ({"redundant_experts": 1}, "redundant_experts is 1: it must be 0, or more with enable_expert_parallel"),
        (
            {"redundant_experts": 1, "enable_expert_parallel": True, "deterministic": True},
            "copies of experts, or experts that move",
        ),
    ],
)
def test_what_ranks_cannot_do_yet_is_refused_by_name(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        LLM("kvern-12m", **{"tensor_parallel_size": 2, "device": "cpu", **options})
