"""Layers of every kind, shared by ranks: engines of two processes give what transformers gives."""

import random
from pathlib import Path
from typing import Any

import pytest

from kvern import LLM, SamplingParams
from tests.support.families import make_checkpoint
from tests.support.internals import core_of, vocab_size_of
from tests.support.latent_engine import GREEDY, OPTIONS, OUTPUT, PROMPTS, answers, expected_answers
from tests.support.speculation import AnyLength, Remembered

SHARED: dict[str, dict[str, Any]] = {
    "falcon_h1": {"mamba_n_groups": 1},
    "qwen3_5": {},
    "lfm2": {},
    "olmo2": {},
    "cohere": {},
    "deepseek_v3": {"first_k_dense_replace": 3},
    "gemma3n": {},
    "gemma4": {},
    "gemma4_vision": {},
}
"""Families, and what their tiny models have otherwise: heads of a state in one group, on both ranks; no experts."""


@pytest.mark.nightly
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name == "falcon_h1" else pytest.mark.nightly) for name in SHARED]
)
def test_two_ranks_answer_as_transformers_does(family: str, tmp_path: Path) -> None:
    """Chunks of several sizes, preemptions, hits of prefixes, drafts, samples and beams."""
    folder = make_checkpoint(family, tmp_path, **SHARED[family])
    expected = expected_answers(folder)
    options = OPTIONS | {"device": "cpu", "kv_cache_tokens": 64}
    with LLM(str(folder), **options) as alone:
        expected_draws = draws(alone)
    with LLM(str(folder), tensor_parallel_size=2, **options) as ranked:
        core: Any = core_of(ranked)
        known = [prompt + answer for prompt, answer in zip(PROMPTS, expected, strict=True)]
        core.drafting = AnyLength(Remembered(known), vocab_size_of(ranked))
        dice = random.Random(5)
        for budget in (4, 11):
            core.scheduler.limits = core.scheduler.limits.__class__(budget, 4, 100)
            order = dice.sample(range(len(PROMPTS)), len(PROMPTS))
            assert answers(ranked, [PROMPTS[place] for place in order]) == [expected[place] for place in order]
        assert draws(ranked) == expected_draws
        statistics = ranked.statistics()
    assert statistics.preemptions > 0 and statistics.cached_tokens > 0 and any(statistics.drafts_by_position)


def draws(llm: LLM) -> list[list[list[int]]]:
    """Two samples and two beams of each prompt."""
    drawn = [GREEDY.replace(temperature=0.9, seed=3, n=2), SamplingParams(beam_width=3, n=2, max_tokens=OUTPUT)]
    outputs = [output for params in drawn for output in llm.generate(PROMPTS, params)]
    return [[item.token_ids for item in output.outputs] for output in outputs]
