"""Requests for engines with experts on several ranks."""

from typing import Any

from kvern import LLM, SamplingParams
from tests.support.families import similar_prompts

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "threads": 1,
    "max_batch_tokens": 24,
    "max_batch_requests": 4,
    "block_size": 4,
}


PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


PROMPTS = similar_prompts(131)


def answers(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, PARAMS)]
