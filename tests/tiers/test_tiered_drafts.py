"""Draft heads guess as well behind what came out of a store as behind what the prefix tree has."""

from pathlib import Path
from typing import Any

import pytest

from kvern import LLM, SamplingParams
from tests.support.head_drafting import drafting, make_model_with_layer, write_head
from tests.support.idle import core_here, is_idle
from tests.support.internals import drafter_of, vocab_size_of
from tests.support.served import eventually
from tests.support.speculation import AnyLength
from tests.support.tiers import PAGE_TOKENS, answer, figures, forget, settle, stored_files, tier_of, trust
from tests.support.tiny_model import make_tiny_model

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "threads": 1,
    "max_model_len": 96,
    "kv_cache_tokens": 256,
    "block_size": 4,
    "max_batch_tokens": 16,
}
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = [5 + place * 7 % 110 for place in range(45)]
BLOCKS = 10
"""Those of the pages of the prompt."""


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PAGE_TOKENS, 8)


def make(kind: str, folder: Path) -> tuple[Path, str]:
    """A model, and what guesses for it, which may be its own layer."""
    if kind == "mtp":
        return make_model_with_layer("deepseek_v3", folder / "target"), kind
    target = make_tiny_model(folder / "target")
    write_head(kind, folder / "head", target)
    return target, str(folder / "head")


@pytest.mark.parametrize("kind", ["eagle", "eagle3", pytest.param("mtp", marks=pytest.mark.nightly)])
def test_a_head_guesses_the_same(kind: str, tmp_path: Path) -> None:
    target, head = make(kind, tmp_path)
    with LLM(str(target), **OPTIONS) as llm:
        expected = answer(llm, PROMPT, PARAMS)[0].token_ids
    options = OPTIONS | {"draft_model": head, "kv_tier": (f"disk:{tmp_path / 'pages'}:1GB",)}
    with LLM(str(target), **options) as llm, drafting(llm, 4) as found:
        trust(llm)
        forget(llm)
        tree = core_here(llm).scheduler.cache.tree
        assert answer(llm, PROMPT, PARAMS)[0].token_ids == expected
        settle(llm)
        tree.evict(tree.size - BLOCKS)
        found.clear()
        kept, cached = answer(llm, PROMPT, PARAMS)
        assert (kept.token_ids, cached) == (expected, 40)
        drafts = [*found]
        assert drafts
        forget(llm)
        for cache in drafter_of(llm).caches:
            cache.fill_(9.0)  # what lies there otherwise may be right
        found.clear()
        before = figures(llm).read_bytes
        moved, cached = answer(llm, PROMPT, PARAMS)
        assert (moved.token_ids, cached) == (expected, 40) and figures(llm).read_bytes > before
        assert [*found] == drafts, "a head does not see what came out of the store"
        settle(llm)
        assert is_idle(llm)


def test_pages_without_those_of_the_head_are_no_hit(tmp_path: Path) -> None:
    """They are computed again once; what has no head finds the pages of what has one."""
    target, head = make("eagle", tmp_path)
    tiered: dict[str, Any] = {"kv_tier": (f"disk:{tmp_path / 'pages'}:1GB",)}
    cached = []
    for more in ({}, {"draft_model": head}, {"draft_model": head}, {}):
        with LLM(str(target), **OPTIONS, **tiered, **more) as llm:
            store: Any = trust(llm).shelf.stores[0].store
            store.scan()
            cached.append(answer(llm, PROMPT, PARAMS)[1])
            settle(llm)
    assert cached == [0, 0, 40, 40]


@pytest.mark.nightly
def test_ranks_share_the_pages_of_a_head(tmp_path: Path) -> None:
    target, head = make("eagle", tmp_path)
    tiered = {"draft_model": head, "kv_tier": (f"disk:{tmp_path / 'pages'}:1GB",), "device": "cpu"}
    cached = []
    for ranks in (2, 1):
        with LLM(str(target), **OPTIONS | tiered, tensor_parallel_size=ranks) as llm:
            store: Any = trust(llm).shelf.stores[0].store
            store.scan()
            cached.append(answer(llm, PROMPT, PARAMS)[1])
            settle(llm)
            eventually(lambda: stored_files(tmp_path / "pages") == 24)  # those of the other rank, too
    assert cached == [0, 40]


def computed_tokens(llm: LLM) -> list[int]:
    """The tokens of each step of the draft model, from now on."""
    drafter, found = drafter_of(llm), list[int]()
    compute = drafter._compute

    def noted(scheduled: Any) -> Any:
        found.extend(item.count for item in scheduled)
        return compute(scheduled)

    drafter._compute = noted
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_draft_model_computes_no_prompt_again(ranks: int, tmp_path: Path) -> None:
    """It guesses the same; a hit whose keys of the draft model are missing is a hit, and it catches up."""
    target = make_tiny_model(tmp_path / "target")
    expected = None
    options = OPTIONS | {"draft_model": str(target), "kv_tier": (f"disk:{tmp_path / 'pages'}:1GB",), "device": "cpu"}
    with LLM(str(target), **options, cpu_kernels=False, tensor_parallel_size=ranks) as llm:
        core_here(llm).drafting = AnyLength(None, vocab_size_of(llm), 4)
        trust(llm)
        for keeps, least, most in ((True, 45, 70), (True, 5, 25), (False, 45, 70)):
            forget(llm)
            tier_of(llm).keeps_drafts = keeps
            counts = computed_tokens(llm)
            found, cached = answer(llm, PROMPT, PARAMS)
            settle(llm)
            eventually(lambda: stored_files(tmp_path / "pages") == 22)  # those of the other rank, too
            assert expected in (None, found.token_ids)
            assert cached == (0 if expected is None else 40)
            assert least <= sum(counts) <= most
            expected = found.token_ids
            del drafter_of(llm)._compute
        statistics = llm.statistics()
        assert statistics.accepted_tokens == statistics.draft_tokens > 0, "a model guesses itself"
        assert is_idle(llm)
