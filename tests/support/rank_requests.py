"""Requests of all kinds for engines of several ranks, and streams that survive the end of a rank."""

import concurrent.futures
import os
import signal
from collections.abc import Sequence
from typing import Any

import openai

from kvern import LLM, SamplingParams
from kvern.request.outputs import RequestOutput
from kvern.request.sampling_params import StructuredOutput
from tests.support.served import ENGINE, SMALL, STORY, child_of, children_of, command_of, eventually, serving

RANK = "kvern.runner.ranks.rank_process"
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["age"]}
PLAIN = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
SEEDED = PLAIN.replace(temperature=0.9, seed=5)
TOKENS = 400
STORY_SO_FAR = "The little dog ran to the big tree and the little cat ran to the small house. The little "
ASKED: dict[str, SamplingParams] = {
    "greedy": PLAIN,
    "seeded": SEEDED,
    "several": SEEDED.replace(n=3),
    "filters": SEEDED.replace(top_k=30, top_p=0.9, min_p=0.01, typical_p=0.95),
    "rare filters": SEEDED.replace(xtc_probability=0.5, top_n_sigma=2.0, dynatemp_range=0.3),
    "penalties": SEEDED.replace(presence_penalty=0.6, frequency_penalty=0.4, repetition_penalty=1.3),
    "repetitions": PLAIN.replace(dry_multiplier=0.8),
    "biases": PLAIN.replace(logit_bias={20: 4.0}, bad_words=["the"], min_tokens=8),
    "log-probabilities": SEEDED.replace(logprobs=3, prompt_logprobs=2),
    "schema": SEEDED.replace(structured=StructuredOutput(json=SCHEMA), max_tokens=48, ignore_eos=False),
    "pattern": PLAIN.replace(structured=StructuredOutput(regex="(yes|no|maybe), [a-z ]{8,20}"), ignore_eos=False),
    "processors": SEEDED.replace(logits_processors={"double": {}}),
    "beams": PLAIN.replace(beam_width=3, n=2, max_tokens=8, temperature=None),
}


def ranks_of(pid: int) -> list[int]:
    """The processes of an engine's other ranks, of which some may have ended."""
    return [child for child in children_of(pid) if RANK in command_of(child)]


def read(client: openai.OpenAI, seed: int, tokens: int) -> str:
    stream = client.completions.create(
        prompt="Once upon a time", seed=seed, stream=True, **STORY | {"max_tokens": tokens}
    )
    return "".join(chunk.choices[0].text for chunk in stream)


def check_streams(
    how: signal.Signals, option: str, device: str, timeout: str, tokens: int = TOKENS, slower: Sequence[str] = ()
) -> None:
    """Checks that streams of two ranks, of which one ends or hangs, equal those of one process.

    `slower`: options that lengthen a step, so that the rank is hit before its answers of `tokens` tokens end.
    """
    seeds, length = range(6), str(tokens + 112)
    given: dict[str, Any] = {"max_model_len": int(length), "dtype": "float32", "device": device}
    with LLM("kvern-1m", threads=1, kv_cache_tokens=16384, **given) as alone:
        params = [SamplingParams(temperature=0.8, seed=seed, max_tokens=tokens, ignore_eos=True) for seed in seeds]
        expected = [output.outputs[0].text for output in alone.generate(["Once upon a time"] * len(seeds), params)]
    small = [*SMALL, "--device", device, "--max-model-len", length, "--kv-cache-tokens", "16384", *slower]
    with serving(*small, "--engine-timeout", timeout, option, "2") as served:
        with concurrent.futures.ThreadPoolExecutor(len(seeds)) as pool:
            client = served.client()
            texts = [pool.submit(read, client, seed, tokens) for seed in seeds]
            eventually(lambda: served.figure("generation_tokens_total") > tokens / 4)
            engine = served.engine_pid()
            rank = child_of(engine, RANK)
            os.kill(rank, how)
            assert [text.result() for text in texts] == expected
        eventually(lambda: engine not in children_of(served.process.pid))  # another takes over
        eventually(lambda: len(ranks_of(served.engine_pid())) == 1)
        pids = [served.engine_pid(), *ranks_of(served.engine_pid())]
    for pid in [engine, rank, *pids]:
        eventually(lambda pid=pid: not is_running(pid))  # type: ignore[misc]


def is_running(pid: int) -> bool:
    return RANK in command_of(pid) or ENGINE in command_of(pid)


OPTIONS: dict[str, Any] = {
    "model": "kvern-1m",
    "dtype": "float32",
    "device": "cpu",
    "threads": 1,
    "max_model_len": 512,
    "max_batch_tokens": 24,  # most prompts are computed in several steps
    "max_batch_requests": 8,
    "block_size": 4,
    "kv_cache_tokens": 560,  # blocks leave it
}


ALL: dict[str, Any] = {
    "model": "kvern-12m",  # with a draft model of its own
    "deterministic": True,
    "target_itl": "1s",
    "logits_processors": ("follow", "double"),
    "kv_tier": ("host:64MB",),
}
"""Options that go with ranks, but for a proposer, which takes the draft model's place."""


def answers(llm: LLM) -> list[RequestOutput]:
    """All of them in one batch, twice: the second time prompts come out of the prefix cache."""
    prompts = [STORY_SO_FAR + "Once upon a time " * (1 + index % 3) for index in range(len(ASKED))]
    first = llm.generate(prompts, list(ASKED.values()))
    return first + llm.generate(prompts, list(ASKED.values()))
