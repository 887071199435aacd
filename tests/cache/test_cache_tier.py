"""Blocks that leave the cache and come back: the same answers as without, and less to compute."""

from pathlib import Path
from typing import Any

import pytest

from kvern import LLM, SamplingParams
from kvern.config import EngineConfig
from kvern.errors import ConfigError
from kvern.runner.plan import Layout
from kvern.runner.tiered import TIERS
from tests.support.host_tier import HostTier
from tests.support.idle import is_idle
from tests.support.internals import core_of

PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "threads": 1,
    "block_size": 4,
    "max_model_len": 64,
    "kv_cache_tokens": 120,
    "max_batch_requests": 2,
}


@TIERS.register("host")
def host_tier(config: EngineConfig, layout: Layout) -> HostTier:
    return HostTier(CAPACITY[-1])


CAPACITY = [200]
"""Blocks of the next tier."""


def with_tier(folder: Path, blocks: int) -> tuple[LLM, HostTier]:
    """An engine that keeps blocks that leave its cache in host memory, and that memory."""
    CAPACITY.append(blocks)
    llm = LLM(folder, kv_tier="host", **OPTIONS)
    tier: Any = core_of(llm).executor
    return llm, tier.tier


def test_conversations_that_left_the_cache_go_on(tiny_model: Path) -> None:
    """Each turn evicts the blocks of all other conversations."""
    plain = LLM(tiny_model, **OPTIONS)
    tiered, tier = with_tier(tiny_model, 200)
    talks = [list(range(20 + 40 * talk, 50 + 40 * talk)) for talk in range(4)]
    for turn in range(3):
        expected = plain.generate(talks, PARAMS)
        outputs = tiered.generate(talks, PARAMS)
        assert [output.outputs[0].token_ids for output in outputs] == [item.outputs[0].token_ids for item in expected]
        if turn:
            computed = [len(talk) - output.cached_tokens for talk, output in zip(talks, outputs, strict=True)]
            assert max(computed) <= 5, "what was said before was computed again"
        for talk, output in zip(talks, outputs, strict=True):
            talk += [*output.outputs[0].token_ids, 7]
    assert tier.saved and tier.loaded and is_idle(tiered)


def test_a_tier_that_forgets_changes_no_answer(tiny_model: Path) -> None:
    plain = LLM(tiny_model, **OPTIONS)
    tiered, tier = with_tier(tiny_model, 20)
    prompts = [[*range(20, 36), number, *range(number, number + 12)] for number in range(60, 66)] * 2
    for _ in range(3):
        expected = [output.outputs[0].token_ids for output in plain.generate(prompts, PARAMS)]
        assert [output.outputs[0].token_ids for output in tiered.generate(prompts, PARAMS)] == expected
    assert tier.loaded and is_idle(tiered)


def test_a_tier_without_the_prefix_cache_is_refused(tiny_model: Path) -> None:
    """Such a tier would never be asked for a block."""
    with pytest.raises(ConfigError, match="kv_tier host needs the prefix cache"):
        LLM(tiny_model, kv_tier="host", **OPTIONS | {"prefix_cache": False})
