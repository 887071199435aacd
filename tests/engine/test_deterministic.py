"""On a CPU a request's tokens are the same, bit for bit, alone, in any batch, and after whatever stopped it."""

import concurrent.futures
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvern import LLM, RequestOutput, SamplingParams
from kvern.errors import ConfigError
from tests.support.served import PATIENCE, serving

PARAMS = SamplingParams(temperature=0.9, seed=5, max_tokens=60, ignore_eos=True, logprobs=3)
COMPANY = [
    SamplingParams(max_tokens=40, presence_penalty=1.0, logit_bias={9: 1.5}, ignore_eos=True, logprobs=1),
    SamplingParams(max_tokens=30, dry_multiplier=0.8, xtc_probability=0.3, xtc_threshold=0.1, ignore_eos=True),
]
PROMPTS = [[random.Random(seed).randrange(5, 400) for _ in range(1 + 13 * seed)] for seed in range(12)]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("kvern-1m", dtype="bfloat16", deterministic=True, prefix_cache=False, threads=2) as engine:
        yield engine


def answer(output: RequestOutput) -> Any:
    return output.outputs[0].token_ids, output.outputs[0].logprobs


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[Any]:
    return [answer(llm.generate([prompt], PARAMS)[0]) for prompt in PROMPTS]


def test_in_any_batch(llm: LLM, alone: list[Any]) -> None:
    for seed in range(2):
        order = random.Random(seed).choices(range(len(PROMPTS)), k=30)
        prompts = [PROMPTS[index] for index in order]
        outputs = llm.generate([*prompts, [7, 8, 9], [7, 8]], [PARAMS] * len(order) + COMPANY)
        assert [answer(output) for output in outputs[: len(order)]] == [alone[index] for index in order]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_tokens": 512},
        {"max_batch_tokens": 16},
        *(pytest.param(item, marks=pytest.mark.nightly) for item in ({"threads": 1}, {"block_size": 7})),
        {"prefix_cache": True},
    ],
    ids=str,
)
def test_however_steps_are_cut(options: dict[str, Any], alone: list[Any]) -> None:
    """Preempted and computed again as prompts, in small chunks, behind cached blocks."""
    given = {"prefix_cache": False, "threads": 2, "max_model_len": 512, "max_batch_requests": 12} | options
    with LLM("kvern-1m", dtype="bfloat16", deterministic=True, **given) as engine:
        for _ in range(2):
            assert [answer(output) for output in engine.generate(PROMPTS, PARAMS)] == alone
        assert engine.statistics().preemptions or "kv_cache_tokens" not in options


@pytest.mark.nightly
def test_after_the_engine_was_killed() -> None:
    prompts = [f"Once upon a time there were {number}" for number in range(4)]
    params = SamplingParams(temperature=0.8, seed=9, max_tokens=250, ignore_eos=True)
    with LLM("kvern-1m", dtype="bfloat16", deterministic=True, threads=1) as engine:
        expected = [engine.generate([prompt], params)[0].outputs[0].text for prompt in prompts]
    options = ("--model", "kvern-1m", "--dtype", "bfloat16", "--deterministic", "--threads", "1")
    with serving(*options) as served:
        client = served.client()
        begun = threading.Barrier(len(prompts) + 1)

        def read(prompt: str) -> str:
            given = {"temperature": 0.8, "seed": 9, "max_tokens": 250, "extra_body": {"ignore_eos": True}}
            stream = client.completions.create(model="kvern-1m", prompt=prompt, stream=True, **given)
            text: str = next(iter(stream)).choices[0].text
            begun.wait(PATIENCE)
            return text + "".join(chunk.choices[0].text for chunk in stream)

        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            texts = [pool.submit(read, prompt) for prompt in prompts]
            begun.wait(PATIENCE)
            os.kill(served.engine_pid(), signal.SIGKILL)
            assert [text.result() for text in texts] == expected
        assert served.figure("engine_restarts_total") == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cpu_kernels": False}, "there are no kernels cpu_attention"),
        ({"dtype": "float16"}, "choose dtype bfloat16 or float32"),
        ({"max_adapters": 1}, "there may be adapters"),
        ({"quantization": "fp8"}, "none multiplies"),
    ],
    ids=str,
)
def test_what_cannot_be_is_said(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LLM("kvern-1m", **({"dtype": "bfloat16", "deterministic": True} | options))


def test_no_compiler_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="deterministic"):
        LLM("kvern-1m", dtype="bfloat16", deterministic=True, cache_dir=str(tmp_path))
