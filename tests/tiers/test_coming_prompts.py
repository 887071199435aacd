"""Prompts that other engines still compute: what stores have of them is loaded before they come."""

from pathlib import Path
from typing import Any

import pytest

from kvern import LLM, SamplingParams
from kvern.request.request import PromptInput, RequestSpec
from kvern.request.sampling_params import ResolvedParams
from tests.support.idle import core_here, is_idle
from tests.support.served import eventually
from tests.support.tiers import forget, trust

OPTIONS: dict[str, Any] = {
    "threads": 1,
    "dtype": "float32",
    "kv_cache_tokens": 4096,
    "max_batch_tokens": 64,
    "block_size": 16,
}
PROMPT = [10 + (3 + place * 7) % 110 for place in range(210)]
SAMPLED = SamplingParams(temperature=0.9, seed=4, max_tokens=12, presence_penalty=0.5, min_tokens=5)


def test_pages_are_loaded_before_their_request_comes(tiny_model: Path) -> None:
    """It finds them cached, or waits for them, and its answer says which store they are from."""
    with LLM(str(tiny_model), **OPTIONS, kv_tier=("host:32MB",)) as llm:
        core, tier = core_here(llm), trust(llm)
        [expected] = llm.generate([PROMPT], SAMPLED)
        for steps in (0, 1000):
            forget(llm)
            before = tier.figures()["host"].hit_tokens
            core.bring(RequestSpec("0", PromptInput(PROMPT), ResolvedParams(), 30))
            assert core.has_work
            for _ in range(steps):
                assert not core.step()
            [found] = llm.generate([PROMPT], SAMPLED)
            assert found.outputs[0].token_ids == expected.outputs[0].token_ids
            assert tier.figures()["host"].hit_tokens == before + 192
            assert found.cached_tokens == 192
        forget(llm)
        core.bring(RequestSpec("0", PromptInput([5, *PROMPT]), ResolvedParams(), 30))
        assert not core.has_work, "no store has any of it"
        assert is_idle(llm)


def test_what_distant_stores_have_of_a_coming_prompt_is_asked(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is loaded when they have answered, and more of it when what was on its way has come; or the prompt comes."""
    monkeypatch.setattr("kvern.tiers.disk.DiskStore.is_local", False)
    store = f"disk:{tmp_path}:32MB"
    with LLM(str(tiny_model), **OPTIONS, kv_tier=(store,)) as llm:
        core, tier = core_here(llm), trust(llm)
        shelf, cache = tier.shelf, core.scheduler.cache

        def bring(length: int) -> None:
            core.bring(RequestSpec("0", PromptInput(PROMPT[:length]), ResolvedParams(), 30))

        def load() -> int:
            while core.has_work:
                assert not core.step()
            return len(cache.tree.match(b"", PROMPT, 192, [])[0]) * cache.block_size

        llm.generate([PROMPT], SAMPLED)
        forget(llm)
        [shelved] = shelf.stores
        for name in [*shelved.known._names]:
            shelved.known.discard(name)
        bring(130)
        bring(210)
        assert core.has_work and load() == 192, "the last word counts"
        forget(llm)
        bring(130)
        eventually(lambda: shelf.answered(shelf._numbers))
        core.step()
        assert cache.promised == 0 and cache.is_loading
        bring(210)
        assert load() == 192, "what is told while pages come stands behind them"
        forget(llm)
        bring(210)
        [found] = llm.generate([PROMPT], SAMPLED)
        assert found.cached_tokens == 192
        bring(10)
        assert load() and is_idle(llm)
