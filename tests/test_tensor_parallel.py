"""What ranks have of a model, and what they refuse: logits here, whole engines in `test_rank_engines.py`."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvern import LLM
from kvern.device.ranks import ALONE, Ranks
from kvern.errors import ConfigError
from kvern.layers.build import Build
from kvern.models.checkpoint import read_headers
from kvern.models.decoder import Decoder
from kvern.models.loader import filled_model, load_model, read_config
from kvern.models.registry import spec_from_config
from kvern.models.share import share_of
from tests.families import FAMILIES, make_checkpoint, make_config
from tests.test_model_parity import PROMPT, logits, with_attention

SECONDS = 60.0
FEW = (
    *("llama3", "llama_bias", "gemma3", "phi3", "gpt_neox", "olmo2", "cohere"),
    *("lfm2", "qwen3_5", "qwen3_next", "granitemoehybrid", "deepseek_v3", "gemma3n"),
)
"""Tied embeddings, biases, norms of each head, fused tensors, tensors that are reordered first, norms of all heads and
with a weight for each, convolutions, states in the orders of two checkpoints and of a group on both ranks, latents,
several residual streams."""
CHANGED: dict[str, dict[str, Any]] = {
    "qwen3_next": {"mlp_only_layers": [0, 1, 2]},
    "granitemoehybrid": {"num_local_experts": 0, "mamba_n_groups": 1},
    "deepseek_v2": {"first_k_dense_replace": 3},
    "deepseek_v3": {"first_k_dense_replace": 3},
    "deepseek_v32": {"first_k_dense_replace": 3},
    "glm4_moe_lite": {"mlp_layer_types": ["dense"] * 3},
    "nemotron_h": {"layers_block_type": ["linear_attention", "mlp", "full_attention"]},
}
"""What tiny models have otherwise here, as no experts."""


def logits_of_ranks(folder: Path, size: int, load: Callable[..., Decoder] = load_model) -> list[torch.Tensor]:
    """Of PROMPT, as each of `size` ranks has them, which are threads here."""

    def compute(rank: int) -> torch.Tensor:
        ranks = Ranks(rank, size)
        ranks.connect(folder / f"meeting-{size}", torch.device("cpu"), SECONDS)
        return logits(load(folder, ranks=ranks), PROMPT)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(compute, range(size)))


def check(folder: Path, size: int, load: Callable[..., Decoder] = load_model) -> None:
    expected = logits(load(folder), PROMPT)
    found = logits_of_ranks(folder, size, load)
    assert (found[0] - expected).abs().max() < 1e-4
    assert all(torch.equal(found[0], other) for other in found), "each rank samples from the same numbers"


@pytest.mark.parametrize("family", FEW)
def test_ranks_compute_what_one_process_does(family: str, tmp_path: Path) -> None:
    check(make_checkpoint(family, tmp_path, **CHANGED.get(family, {})), 2)


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_all_families_are_shared_or_refused(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(family, tmp_path, **CHANGED.get(family, {}))
    try:
        share_of(spec_from_config(read_config(folder)), 2)
    except ConfigError:
        return
    check(folder, 2)


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
        ({"max_adapters": 2}, "adapters and tensor_parallel_size 2 are not possible together yet"),
        ({"quantization": "int8"}, "quantized weights or a GGUF file and tensor_parallel_size 2"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype int8 and"),
        ({"draft_model": "kvern-1m"}, "draft_model kvern-1m and"),
        ({"deterministic": True}, "deterministic and"),
        ({"target_itl": "50ms"}, "target_itl and"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0: it must be at least 1"),
    ],
)
def test_what_ranks_cannot_do_yet_is_refused_by_name(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        LLM("kvern-12m", **{"tensor_parallel_size": 2, "device": "cpu", **options})


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma4_experts"])
def test_models_that_ranks_cannot_share_yet_are_refused_by_name(family: str) -> None:
    with pytest.raises(ConfigError, match="which is not possible together yet"):
        share_of(spec_from_config(make_config(family).to_dict()), 2)
