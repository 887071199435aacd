"""Hits of every kind of model: with windows, with states, of latents, in 8 bits, out of host memory and off a disk."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvern import LLM
from kvern.cache.states import StatePool
from kvern.cache.windows import WindowedBlocks
from tests.support.families import make_checkpoint
from tests.support.idle import core_here
from tests.support.tiers import HOST, PAGE_TOKENS, check_hits

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "threads": 1,
    "block_size": 4,
    "max_model_len": 96,
    "kv_cache_tokens": 240,
    "max_batch_requests": 2,
    "max_batch_tokens": 32,
}
PROMPT = [10 + place * 7 % 110 for place in range(61)]
WINDOWED = ["gemma3", "gpt_oss", "mixtral"]
"""Some layers have a window, in several tables, in one; all have."""
HYBRID = ["qwen3_5", "nemotron_h"]
NIGHTLY = ["gemma2", "gemma4", "phi3", "cohere2", "olmo3", "qwen3_next", "granitemoehybrid", "lfm2", "deepseek_v3"]
FAMILIES = [
    "llama",
    *WINDOWED,
    *HYBRID,
    *(pytest.param(family, marks=pytest.mark.nightly) for family in NIGHTLY),
]
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PAGE_TOKENS, 8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = make_checkpoint(family, tmp_path_factory.mktemp(family))
        return made[family]

    return make


@pytest.mark.parametrize("kind", ["host", "disk"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_hit_gives_the_bits_of_the_prefix_tree(
    family: str, kind: str, model: Callable[[str], Path], tmp_path: Path
) -> None:
    option = HOST if kind == "host" else (f"disk:{tmp_path / 'pages'}:1GB",)
    with LLM(str(model(family)), kv_tier=option, **OPTIONS) as llm:
        cache = core_here(llm).scheduler.cache
        assert (cache.extension(WindowedBlocks) is not None) == (family in (*WINDOWED, *NIGHTLY[:5]))
        assert (cache.extension(StatePool) is not None) == (family in (*HYBRID, *NIGHTLY[5:8]))
        assert check_hits(llm, PROMPT) == 56
