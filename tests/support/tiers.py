"""Engines with stores: loads that are never late and always pay, and the tests that hold for every kind of model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvern import LLM, SamplingParams
from kvern.cache import messages
from kvern.cache.windows import WindowedBlocks
from kvern.request.outputs import CompletionOutput
from kvern.request.store_figures import StoreFigures
from kvern.runner.tier import Tier
from tests.support.idle import core_here, is_idle
from tests.support.served import eventually

PAGE_TOKENS = "kvern.cache.messages.PAGE_TOKENS"
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=4)
HOST = ("host:32MB",)


def tier_of(llm: LLM) -> Tier:
    """The tier of an engine in this process."""
    executor: Any = core_here(llm).executor
    found: Tier = executor.tier
    return found


def trust(llm: LLM) -> Tier:
    """Have an engine load whatever its stores have, however long that takes."""
    tier = tier_of(llm)
    tier.computing = None
    tier.shelf._clock = lambda: 0.0
    return tier


def settle(llm: LLM) -> None:
    """All that is written has been put into the stores."""
    while llm._engine.has_work:
        llm._engine.step()
    eventually(lambda: tier_of(llm).shelf.is_quiet)


def stored_files(pages: Path) -> int:
    """The number of files of pages; `settle` waits for those of the first rank alone."""
    return sum(path.is_file() and path.stat().st_size > 1000 for path in pages.rglob("*"))


def forget(llm: LLM) -> None:
    """The prefix cache is empty."""
    settle(llm)
    core_here(llm).scheduler.cache.tree.clear()


def figures(llm: LLM) -> StoreFigures:
    """Those of an engine's first store."""
    return next(iter(tier_of(llm).figures().values()))


def answer(
    llm: LLM, prompt: Sequence[int], params: SamplingParams = GREEDY, **more: Any
) -> tuple[CompletionOutput, int]:
    """The answer of a prompt alone, and how much of it was cached."""
    output = llm.generate([list(prompt)], params, **more)[0]
    return output.outputs[0], output.cached_tokens


def _counted(llm: LLM, length: int) -> int:
    """The tokens of the pages of a hit: all, or where all layers have a window those that the next query sees."""
    cache = core_here(llm).scheduler.cache
    windows = cache.extension(WindowedBlocks)
    page = max(1, messages.PAGE_TOKENS // cache.block_size) * cache.block_size
    seen = 0 if windows is None or not windows.limits.positions else windows.first_seen(length) * cache.block_size
    return length - seen // page * page


def check_hits(llm: LLM, prompt: Sequence[int], params: SamplingParams = GREEDY, **more: Any) -> int:
    """A hit from a store gives the bits of one of equal length in the prefix tree; returns its length."""
    trust(llm)
    forget(llm)
    cache = core_here(llm).scheduler.cache
    cold, known = answer(llm, prompt, params, **more)
    assert known == 0
    settle(llm)
    before = figures(llm)
    assert before.stored_tokens and before.written_bytes, "nothing was moved"
    page = max(1, messages.PAGE_TOKENS // cache.block_size) * cache.block_size
    length = (len(prompt) - 1) // page * page
    cache.tree.evict(cache.tree.size - length // cache.block_size)
    kept = answer(llm, prompt, params, **more)
    assert kept[1] == length and figures(llm).read_bytes == before.read_bytes
    forget(llm)
    moved = answer(llm, prompt, params, **more)
    assert moved[1] == length
    assert figures(llm).hit_tokens == before.hit_tokens + _counted(llm, length)
    assert figures(llm).read_bytes > before.read_bytes
    assert (moved[0].token_ids, moved[0].logprobs) == (kept[0].token_ids, kept[0].logprobs)
    assert moved[0].token_ids == cold.token_ids
    settle(llm)
    assert is_idle(llm)
    return length
