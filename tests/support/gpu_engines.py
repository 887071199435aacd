"""Options, conversations and steps of the engines that tests on GPUs compare."""

from typing import Any

from training.exam import questions
from training.text import TASKS

from kvern import LLM, SamplingParams
from tests.support.internals import engine_of

GREEDY = SamplingParams(temperature=0, max_tokens=48)
SMALL: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "kv_cache_tokens": 64 * 512,
    "max_batch_requests": 64,
}
"""Each engine says what memory it takes, since others run beside it, and captures few graphs."""
HALVES = SMALL | {"dtype": "bfloat16"}


def held_out() -> list[list[dict[str, Any]]]:
    """200 conversations that the embedded model was not trained on, without their last answers."""
    conversations = [question.messages[:-1] for task in TASKS for question in questions(task, 200 // len(TASKS) + 1)]
    return conversations[:200]


def steps(llm: LLM, count: int) -> None:
    for _ in range(count):
        engine_of(llm).step()
