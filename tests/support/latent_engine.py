"""Options, prompts and expected answers for engine tests of models with latent attention."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvern import LLM, SamplingParams
from tests.support.cache_folder import load_kernels
from tests.support.families import reference_greedy, similar_prompts
from tests.support.idle import is_idle
from tests.support.internals import core_of

OUTPUT = 8
GREEDY = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "threads": 1,
    "max_model_len": 64,
    "block_size": 4,
    "max_batch_requests": 4,
    "max_batch_tokens": 11,
}
PROMPTS = similar_prompts(131)


def expected_answers(folder: Path) -> list[list[int]]:
    """The answers of transformers."""
    return [reference_greedy(folder, prompt, OUTPUT) for prompt in PROMPTS]


def answers(llm: LLM, prompts: Sequence[list[int]] = PROMPTS, params: SamplingParams = GREEDY) -> list[list[int]]:
    """The tokens of each prompt's first answer."""
    return [output.outputs[0].token_ids for output in llm.generate(list(prompts), params)]


def check_steps(
    folder: Path, expected: list[list[int]], kv_cache_tokens: int, *, kernels: bool, backend: type | None = None
) -> None:
    """Chunks of several sizes, preemptions where the cache has 64 tokens, and hits of prefixes change no answer."""
    if kernels:
        load_kernels("cpu_attention", 1)
    with LLM(str(folder), **OPTIONS, kv_cache_tokens=kv_cache_tokens, cpu_kernels=kernels) as llm:
        core: Any = core_of(llm)
        assert backend is None or isinstance(core.executor._worker.runner.model.attention, backend)
        dice = random.Random(5)
        for budget in (4, 7, 11):
            core.scheduler.limits = core.scheduler.limits.__class__(budget, 4, 100)
            order = dice.sample(range(len(PROMPTS)), len(PROMPTS))
            assert answers(llm, [PROMPTS[place] for place in order]) == [expected[place] for place in order]
        statistics = llm.statistics()
        assert is_idle(llm)
    assert (statistics.preemptions > 0) == (kv_cache_tokens == 64)
    assert statistics.cached_tokens > 0
