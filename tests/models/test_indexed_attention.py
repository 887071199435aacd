"""Latent attention to what an indexer selects: the same keys, however a prompt came into the cache."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kvern import LLM
from kvern.config import EngineConfig
from kvern.errors import ConfigError, UnsupportedModel
from kvern.layers.indexed_attention import Asked, places_of, selection
from kvern.models.loader import LoadOptions, load_model, read_config
from kvern.models.registry import spec_from_config
from kvern.quantize.checkpoint import Checkpoint
from kvern.runner.device import check_indexers, check_kernels
from kvern.runner.memory import bytes_of_token
from tests.support.families import make_checkpoint, reference_logits
from tests.support.latent_engine import GREEDY, OPTIONS, PROMPTS, answers, check_steps, expected_answers
from tests.support.model_outputs import PROMPT, TOLERANCE, DenseAttend, error, logits
from tests.support.speculation import speculating

TOP_K = 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("deepseek_v32", tmp_path_factory.mktemp("indexed"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return expected_answers(folder)


def random_asked(count: int) -> tuple[Asked, torch.Tensor]:
    """Queries and index keys of small whole numbers, so that many scores are equal, and sums exact."""
    generator = torch.Generator().manual_seed(4)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randint(-1, 2, shape, generator=generator).float()

    return Asked(numbers(count, 3, 4), numbers(count, 3)), numbers(count, 4)


def test_of_equal_scores_the_earliest_keys_are_selected() -> None:
    asked, keys = random_asked(30)
    chosen = selection(asked, keys, torch.arange(30), TOP_K)
    for query, row in enumerate(chosen):
        products = torch.relu(keys[: query + 1] @ asked.queries[query].T) @ asked.weights[query]
        best = sorted(range(query + 1), key=lambda key: (-products[key].item(), key))[:TOP_K]
        assert row.nonzero().flatten().tolist() == sorted(best)


def test_calibrations_are_refused(folder: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"deepseek_v32 has an indexer, .* through which calibrations do not go"):
        Checkpoint(folder, torch.device("cpu"))


@pytest.mark.parametrize("size", [1, 4, 11])
def test_chunks_select_what_the_whole_prompt_does(size: int) -> None:
    asked, keys = random_asked(30)
    whole = selection(asked, keys, torch.arange(30), TOP_K)
    for rows in torch.arange(30).split(size):
        end = int(rows[-1]) + 1
        assert torch.equal(selection(asked.of(rows), keys[:end], rows, TOP_K), whole[rows, :end])


def test_places_are_those_of_what_is_selected() -> None:
    selected = torch.tensor([[False, True, False, True], [True, False, False, False]])
    places, is_key = places_of(selected, 3)
    assert is_key.tolist() == [[True, True, False], [True, False, False]]
    assert places[is_key].tolist() == [1, 3, 0]


def test_runs_of_queries_and_wanted_ones_change_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, wanted = load_model(folder), torch.tensor([3, 7, 40])
    with torch.inference_mode():
        whole = decoder(torch.tensor(PROMPT), torch.arange(41), DenseAttend(decoder))
        monkeypatch.setattr("kvern.layers.indexed_attention.MOST_NUMBERS", 2000)
        parts = decoder(torch.tensor(PROMPT), torch.arange(41), DenseAttend(decoder))
        some = decoder(torch.tensor(PROMPT), torch.arange(41), DenseAttend(decoder), wanted)
    torch.testing.assert_close(parts, whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(some, whole[wanted], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("part", ["wq_b", "wk", "k_norm", "weights_proj"])
def test_every_part_of_the_indexer_is_seen_in_the_logits(part: str, folder: Path) -> None:
    decoder = load_model(folder)
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            if f"indexer.{part}." in name:
                weight.copy_(weight.flip(0))
    assert error(decoder, folder) > 10 * TOLERANCE


def test_index_keys_have_room_beside_latents(folder: Path) -> None:
    assert bytes_of_token(spec_from_config(read_config(folder)), torch.bfloat16) == 3 * 2 * (20 + 8 + 12)


@pytest.mark.sample(2)
@pytest.mark.parametrize("cpu_kernels", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("kv_cache_tokens", [4 * 64, 64])
def test_chunks_preemptions_and_hits_change_no_answer(
    folder: Path, expected: list[list[int]], cpu_kernels: bool, kv_cache_tokens: int
) -> None:
    check_steps(folder, expected, kv_cache_tokens, kernels=cpu_kernels)


def test_drafts_change_no_answer(folder: Path, expected: list[list[int]]) -> None:
    with LLM(str(folder), **OPTIONS, kv_cache_tokens=512) as llm:
        with speculating(llm, llm.generate(PROMPTS, GREEDY)) as oracle:
            assert answers(llm) == expected
        assert oracle.guessed


@pytest.mark.parametrize("quantization", ["fp8", "int8"])
def test_weights_of_heads_stay_plain_beside_quantized_ones(quantization: str, folder: Path) -> None:
    decoder = load_model(folder, LoadOptions(quantization=quantization))
    indexer: Any = decoder.layers[0].self_attn.indexer  # type: ignore[union-attr]
    assert indexer.weights_proj.method.name == "unquantized" != indexer.wq_b.method.name
    rows = torch.stack((logits(decoder, PROMPT).flatten(), reference_logits(folder, PROMPT).flatten()))
    assert 0.7 < torch.corrcoef(rows)[0, 1] < 1 - TOLERANCE


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layer_types": ["full_attention"] * 3}, "layer type 'full_attention' is unknown; known: indexed_attention"),
        ({"layer_types": ["indexed_attention"] * 2}, "layer_types has 2 entries, and num_hidden_layers is 3"),
        ({"index_topk": 0}, "top_k is 0: it must be above 0"),
        ({"index_n_heads": 0}, "heads is 0: it must be above 0"),
        ({"index_head_dim": 6}, r"index_head_dim is 6: 8 entries \(qk_rope_head_dim\) are rotated"),
        ({"q_lora_rank": None}, "an indexer reads the latents of queries, and q_lora_rank is None"),
    ],
)
def test_what_cannot_be_described_is_refused_by_name(changes: dict[str, Any], reason: str, folder: Path) -> None:
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        spec_from_config(read_config(folder) | changes)
    assert "\n" not in str(caught.value)


def test_gpus_and_determinism_are_refused(folder: Path) -> None:
    spec = spec_from_config(read_config(folder))
    check_kernels(spec, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"device cuda does not go with deepseek_v32.*indexers"):
        check_kernels(spec, torch.device("cuda"))
    with pytest.raises(ConfigError, match="deterministic does not go with deepseek_v32"):
        check_indexers(EngineConfig(model="model", deterministic=True), spec)
