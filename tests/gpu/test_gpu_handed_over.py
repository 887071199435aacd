"""Prompts that one engine computes and another answers, over pinned host memory. Run with `pytest -m gpu`.

With one GPU both engines share it.
"""

from typing import Any

import pytest
import torch

from kvern import LLM, SamplingParams
from kvern.serving.replicas import Replica

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
OPTIONS: dict[str, Any] = {"device": "cuda", "dtype": "float32", "kv_cache_tokens": 8192}
LONG = [[10 + (number + place * 7) % 110 for place in range(300 + 200 * number)] for number in range(4)]
KINDS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0, max_tokens=12, logprobs=3),
    "sampled": SamplingParams(temperature=0.9, seed=4, max_tokens=12, presence_penalty=0.5, min_tokens=5),
    "beams": SamplingParams(beam_width=3, max_tokens=6),
}


def replicas(llm: LLM) -> list[Replica]:
    engine: Any = llm._engine
    return list(engine.client.replicas)


@pytest.mark.parametrize("graphs", [True, False])
def test_answers_are_those_of_one_engine(graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.device_count() < 2:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,0")
    options = OPTIONS | {"cuda_graphs": graphs}
    with LLM(**options) as alone:
        expected = {kind: alone.generate(LONG, params) for kind, params in KINDS.items()}
    divided = {"prefill_engines": 1, "decode_engines": 1, "kv_tier": ("host:256MB", "peer")}
    with LLM(**options, **divided) as llm:
        prefill, decode = replicas(llm)
        for number, (kind, params) in enumerate(KINDS.items()):
            found = llm.generate(LONG, params)
            for output, other in zip(found, expected[kind], strict=True):
                assert [one.token_ids for one in output.outputs] == [one.token_ids for one in other.outputs], kind
            if not number:
                assert prefill.statistics.requests == len(LONG)
                assert decode.statistics.stores["peer"].hit_tokens >= sum(len(prompt) // 64 * 64 for prompt in LONG)
                assert decode.statistics.prefill_tokens <= 64 * len(LONG)
