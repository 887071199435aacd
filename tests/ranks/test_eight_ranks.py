"""Four and eight processes compute one model: the tokens of one process, however they share it."""

from pathlib import Path
from typing import Any

import pytest

from kvern import LLM, SamplingParams
from tests.support.families import make_checkpoint

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # within PEFT
]
SIZES: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,  # on several ranks each
    "head_dim": 8,
    "num_experts": 8,
    "moe_intermediate_size": 32,
}
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "threads": 1,
    "max_model_len": 128,
    "max_batch_tokens": 16,
    "kv_cache_tokens": 1024,
}
PROMPTS = [[1 + number, *range(10, 12 + 5 * number), 7] for number in range(6)]
PARAMS = [
    SamplingParams(temperature=0.8 * (number % 2), seed=number, max_tokens=12, ignore_eos=True)
    for number in range(len(PROMPTS))
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("mixture"), **SIZES)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    with LLM(str(model), **OPTIONS) as alone:
        return answers(alone)


def answers(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 4},
        {"tensor_parallel_size": 8},
        {"tensor_parallel_size": 8, "enable_expert_parallel": True},
        {"tensor_parallel_size": 8, "enable_expert_parallel": True, "enable_dp_attention": True},
        {"pipeline_parallel_size": 4},
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 4},
        {"tensor_parallel_size": 4, "pipeline_parallel_size": 2, "enable_expert_parallel": True},
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel_size": 2},
        {"tensor_parallel_size": 4, "data_parallel_size": 2, "enable_expert_parallel": True},
    ],
    ids=str,
)
def test_many_ranks_give_the_tokens_of_one_process(
    options: dict[str, Any], model: Path, expected: list[list[int]]
) -> None:
    with LLM(str(model), **OPTIONS | options) as divided:
        assert answers(divided) == expected
