"""Engines with other numbers of ranks find each other's pages: they are named by heads of the whole model."""

import mmap
from pathlib import Path
from typing import Any

import pytest

from kvern import LLM, SamplingParams
from kvern.tiers.arena import ARENA, OwnedArena, map_arena
from kvern.tiers.host import HostStore
from tests.support.families import make_checkpoint
from tests.support.idle import core_here
from tests.support.served import eventually
from tests.support.tiers import settle, stored_files, tier_of

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "threads": 1,
    "max_model_len": 256,
    "kv_cache_tokens": 512,
    "max_batch_requests": 2,
}
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = [10 + place * 7 % 110 for place in range(150)]
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


def asked(folder: Path, pages: Path, stored: int = 2, **options: Any) -> tuple[list[int], int]:
    """The answer of an engine that just started, and what was cached; all ranks have `stored` files then."""
    with LLM(str(folder), kv_tier=(f"disk:{pages}:1GB",), **OPTIONS | options) as llm:
        tier = tier_of(llm)
        tier.computing = None
        tier.shelf._clock = lambda: 0.0
        store: Any = tier.shelf.stores[0].store
        store.scan()  # or its thread may not have read the folder yet
        output = llm.generate([PROMPT], PARAMS)[0]
        settle(llm)
        eventually(lambda: stored_files(pages) >= stored)
        return list(output.outputs[0].token_ids), output.cached_tokens


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("family", "writer", "readers"),
    [
        ("llama", {"tensor_parallel_size": 2}, [{}, {"tensor_parallel_size": 4}]),
        pytest.param("llama", {}, [{"tensor_parallel_size": 2}], marks=pytest.mark.nightly),
        pytest.param("deepseek_v3", {"tensor_parallel_size": 2}, [{}], marks=pytest.mark.nightly),
        ("deepseek_v3", {}, [{"tensor_parallel_size": 2}]),
        ("gemma3", {"tensor_parallel_size": 2}, [{}]),
        pytest.param("gemma3", {}, [{"tensor_parallel_size": 2}], marks=pytest.mark.nightly),
        pytest.param("mixtral", {"tensor_parallel_size": 2}, [{}], marks=pytest.mark.nightly),
    ],
)
def test_pages_are_read_by_any_number_of_ranks(
    family: str, writer: dict[str, Any], readers: list[dict[str, Any]], tmp_path: Path
) -> None:
    folder, pages = make_checkpoint(family, tmp_path / "model"), tmp_path / "pages"
    stored = 2 * {"deepseek_v3": 1, "gemma3": 6}.get(family, 2)  # of each head, also of two tables with a window
    expected, cached = asked(folder, pages, stored, **writer)
    assert cached == 0
    assert stored_files(pages) == stored
    for reader in readers:
        found = asked(folder, pages, stored, **reader)
        assert found == (expected, 128)
        assert stored_files(pages) == stored, "the same pages have other names"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "divided", "stored"),
    [
        pytest.param("qwen3_next", {}, 6, marks=pytest.mark.nightly),
        ("qwen3_next", {"tensor_parallel_size": 2}, 8),
        pytest.param("falcon_h1", {"pipeline_parallel_size": 2}, 11, marks=pytest.mark.nightly),
    ],
)
def test_states_are_read_by_as_many_ranks(family: str, divided: dict[str, Any], stored: int, tmp_path: Path) -> None:
    """Each rank has the states of its share of the heads, or of its layers."""
    folder, pages = make_checkpoint(family, tmp_path / "model"), tmp_path / "pages"
    expected, _ = asked(folder, pages, stored, **divided)
    assert asked(folder, pages, stored, **divided) == (expected, 128)
    if divided:
        assert asked(folder, pages) == (expected, 0), "states of other shares"


@pytest.mark.nightly
def test_stages_read_the_pages_of_their_layers(tmp_path: Path) -> None:
    folder, pages = make_checkpoint("llama", tmp_path / "model"), tmp_path / "pages"
    stages = {"pipeline_parallel_size": 2}
    expected, _ = asked(folder, pages, 8, **stages)
    assert asked(folder, pages, 8, **stages) == (expected, 128)
    assert asked(folder, pages) == (expected, 0), "pages of other layers"


def test_other_numbers_are_other_pages(tmp_path: Path) -> None:
    folder, pages = make_checkpoint("llama", tmp_path / "model"), tmp_path / "pages"
    asked(folder, pages)
    for options in (
        {"dtype": "bfloat16"},
        {"kv_cache_dtype": "int8"},
        {"block_size": 32},
        {"quantization": "int8"},
        {"deterministic": True},
    ):
        assert asked(folder, pages, **options)[1] == 0, options
    assert asked(folder, pages)[1] == 128


def test_all_ranks_give_memory_of_pages_back(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = OwnedArena()
    monkeypatch.setenv(ARENA, arena.path)

    def pages(rank: int) -> int:
        memory = map_arena(1 << 20, rank, 2)
        assert memory is not None
        copy = mmap.mmap(-1, len(memory))
        copy[:] = memory[:]
        return HostStore(len(copy), copy).pages

    with LLM(str(tiny_model), kv_tier=(f"host:{2 << 20}",), tensor_parallel_size=2, **OPTIONS) as llm:
        llm.generate([PROMPT], PARAMS)
        settle(llm)
        eventually(lambda: pages(0) == pages(1) > 0)
        core_here(llm).release_pages(2 << 20)
        eventually(lambda: pages(0) == pages(1) == 0)
    arena.close()
