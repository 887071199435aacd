"""Layers of every kind, shared by ranks: whole engines of two processes give what transformers gives."""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvern import LLM, SamplingParams
from tests.families import make_checkpoint, reference_greedy, similar_prompts
from tests.latent_engine import GREEDY, OPTIONS, OUTPUT

SHARED: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon_h1": ("falcon_h1", {"mamba_n_groups": 1}),
    "qwen3_5": ("qwen3_5", {}),
    "lfm2": ("lfm2", {}),
    "olmo2": ("olmo2", {}),
    "cohere": ("cohere", {}),
    "deepseek_v3": ("deepseek_v3", {"first_k_dense_replace": 3}),
    "deepseek_v32": ("deepseek_v32", {"first_k_dense_replace": 3}),
}
"""Families, and what their tiny models have else; a group of state heads is on both ranks."""
USUAL = ("falcon_h1", "olmo2")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in USUAL else pytest.mark.nightly) for name in SHARED]
)
def test_two_ranks_answer_as_transformers_does(name: str, tiny_model: Path, tmp_path: Path) -> None:
    """Chunks of several sizes, preemptions, hits of prefixes, samples and beams."""
    family, changes = SHARED[name]
    folder = make_checkpoint(family, tmp_path, vocab_size=288, eos_token_id=1, **changes)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / file, folder)
    prompts = similar_prompts(200)
    expected = [reference_greedy(folder, prompt, OUTPUT) for prompt in prompts]
    drawn = [
        SamplingParams(temperature=0.9, seed=3, n=2, max_tokens=OUTPUT, ignore_eos=True),
        SamplingParams(beam_width=3, n=2, max_tokens=OUTPUT),
    ]

    def answers(llm: LLM, params: SamplingParams = GREEDY) -> list[list[list[int]]]:
        return [[item.token_ids for item in output.outputs] for output in llm.generate(prompts, params)]

    options = OPTIONS | {"device": "cpu", "kv_cache_tokens": 64}
    with LLM(str(folder), **options) as alone:
        expected_draws = [answers(alone, params) for params in drawn]
    with LLM(str(folder), tensor_parallel_size=2, **options) as ranked:
        scheduler: Any = ranked._engine.core.scheduler
        dice = random.Random(5)
        for budget in (4, 11):
            scheduler.limits = scheduler.limits.__class__(budget, 4, 100)
            dice.shuffle(order := list(range(len(prompts))))
            found = ranked.generate([prompts[place] for place in order], GREEDY)
            assert [output.outputs[0].token_ids for output in found] == [expected[place] for place in order]
        assert [answers(ranked, params) for params in drawn] == expected_draws
        statistics = ranked.statistics()
    assert statistics.preemptions > 0 and statistics.cached_tokens > 0
