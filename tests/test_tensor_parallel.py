"""What ranks have of a model, and what they refuse: logits here, whole engines in `test_rank_engines.py`."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from kvern import LLM
from kvern.device.ranks import Ranks
from kvern.errors import ConfigError
from kvern.models.decoder import Decoder
from kvern.models.loader import load_model, read_config
from kvern.models.registry import spec_from_config
from kvern.models.share import share_of
from tests.families import FAMILIES, make_checkpoint, make_config
from tests.test_model_parity import PROMPT, logits

SECONDS = 60.0
Result = TypeVar("Result")
FEW = ("llama3", "llama_bias", "gemma3", "phi3", "gpt_neox")
"""Tied embeddings, biases, norms of each head, fused tensors, tensors that are reordered first."""


def of_ranks(folder: Path, size: int, compute: Callable[[Decoder], Result]) -> list[Result]:
    """What each of `size` ranks, which are threads here, computes of its share of a model."""

    def run(rank: int) -> Result:
        ranks = Ranks(rank, size)
        ranks.connect(folder / f"meeting-{size}", torch.device("cpu"), SECONDS)
        return compute(load_model(folder, ranks=ranks))

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))


def check(folder: Path, size: int) -> None:
    expected = logits(load_model(folder), PROMPT)
    found = of_ranks(folder, size, lambda decoder: logits(decoder, PROMPT))
    assert (found[0] - expected).abs().max() < 1e-4
    assert all(torch.equal(found[0], other) for other in found), "each rank samples from the same numbers"


@pytest.mark.parametrize("family", FEW)
def test_ranks_compute_what_one_process_does(family: str, tmp_path: Path) -> None:
    check(make_checkpoint(family, tmp_path), 2)


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_all_families_are_shared_or_refused(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(family, tmp_path)
    try:
        share_of(spec_from_config(read_config(folder)), 2)
    except ConfigError:
        return
    check(folder, 2)


def test_ranks_have_the_same_kv_heads_where_there_are_fewer(tmp_path: Path) -> None:
    check(make_checkpoint("llama", tmp_path), 4)  # of 2 KV heads


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


def test_each_rank_holds_its_share_alone(tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path)
    whole, ranks = load_model(folder), Ranks(1, 2)
    share = load_model(folder, ranks=ranks)
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
    ("options", "reason"),
    [
        ({"max_adapters": 2}, "adapters and tensor_parallel_size 2 are not possible together yet"),
        ({"quantization": "int8"}, "quantized weights or a GGUF file and tensor_parallel_size 2"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype int8 and"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0: it must be at least 1"),
    ],
)
def test_what_ranks_cannot_do_yet_is_refused_by_name(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        LLM("kvern-12m", **{"tensor_parallel_size": 2, "device": "cpu", **options})


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "lfm2", "olmo2", "gemma3n"])
def test_models_that_ranks_cannot_share_yet_are_refused_by_name(family: str) -> None:
    with pytest.raises(ConfigError, match="which is not possible together yet"):
        share_of(spec_from_config(make_config(family).to_dict()), 2)
