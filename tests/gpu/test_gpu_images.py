"""Models that read images on a GPU: the CPU's answers, in any company, and steps that are captured.

Run with `pytest -m gpu`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from kvern import LLM, RequestOutput, SamplingParams
from tests.support.internals import runner_of
from tests.support.vision_models import FAMILIES, make_vision_model, picture

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

CARRIERS = {"mistral3", "qwen3_vl", "qwen3_5", "gemma4"}
"""The families with which all options are tried: rows alone, positions by axes, states, tokens that see each other."""
PARAMS = SamplingParams(temperature=0, max_tokens=6, logprobs=1, ignore_eos=True)
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 768, "max_batch_requests": 8, "gpu_memory_share": 0.1}


def talk(*parts: Image.Image | str) -> list[dict[str, Any]]:
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts
    ]
    return [{"role": "user", "content": content}]


CONVERSATIONS = [
    talk(picture(100, 60), "what is in this picture"),
    talk("one", picture(30, 200), "and", picture(64, 64), "two"),
    talk("no picture at all"),
    talk(picture(20, 20, 1), picture(130, 90, 2), picture(20, 20, 1), "three"),
]


def alike(found: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for output, other in zip(found, expected, strict=True):
        assert output.prompt_token_ids == other.prompt_token_ids
        answer, wanted = output.outputs[0], other.outputs[0]
        assert answer.token_ids == wanted.token_ids
        assert answer.logprobs is not None and wanted.logprobs is not None
        for token, entry, right in zip(answer.token_ids, answer.logprobs, wanted.logprobs, strict=True):
            assert entry[token].logprob == pytest.approx(right[token].logprob, abs=1e-3)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[RequestOutput]]:
    try:
        folder = make_vision_model(request.param, tmp_path_factory.mktemp("vision") / request.param)
    except (ImportError, AttributeError, KeyError, ValueError) as error:
        pytest.skip(f"this version of transformers cannot make a checkpoint: {error}")
    cpu: dict[str, Any] = {"device": "cpu", "dtype": "float32", "cpu_kernels": False, "max_model_len": 768}
    with LLM(str(folder), **cpu) as llm:
        return folder, llm.chat(CONVERSATIONS, PARAMS)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cuda_graphs": False},
        {"overlap": False, "prefix_cache": False},
        {"triton_kernels": False},
        {"max_batch_tokens": 48, "max_batch_requests": 3},
        {"proposer": "ngram"},
    ],
    ids=str,
)
def test_answers_are_those_of_a_cpu(options: dict[str, Any], model: tuple[Path, list[RequestOutput]]) -> None:
    folder, expected = model
    if options and folder.name not in CARRIERS:
        pytest.skip("other families have these options")
    if folder.name == "qwen3_5" and "triton_kernels" in options:
        pytest.skip("states are computed by kernels alone on a GPU")
    with LLM(str(folder), **OPTIONS | options) as llm:
        alike(llm.chat(CONVERSATIONS, PARAMS), expected)
        if "cuda_graphs" not in options and "triton_kernels" not in options:
            while runner_of(llm).idle():
                pass
        alike(llm.chat(CONVERSATIONS, PARAMS), expected)  # from the prefix cache, by graphs
        alike([llm.chat(conversation, PARAMS)[0] for conversation in CONVERSATIONS], expected)


def test_a_conversation_goes_on(model: tuple[Path, list[RequestOutput]]) -> None:
    folder, _ = model
    first = talk(picture(100, 60), "what is in this picture")
    following = [*first, {"role": "assistant", "content": "noise"}, *talk("and", picture(40, 90, 3), "here")]
    with LLM(str(folder), device="cpu", dtype="float32", cpu_kernels=False, max_model_len=768) as llm:
        expected = llm.chat([first, following], PARAMS)
    with LLM(str(folder), **OPTIONS) as llm:
        alike(llm.chat(first, PARAMS), expected[:1])
        alike(llm.chat(following, PARAMS), expected[1:])
