"""Sampling options on a GPU: the CPU's answers, in any company.

Run with `pytest -m gpu`.
"""

from typing import Any

import pytest
import torch

from kvern import LLM, SamplingParams
from tests.support.gpu_engines import SMALL, held_out
from tests.support.internals import check_integrity, runner_of
from tests.support.outputs import token_ids
from tests.support.speculation import speculating

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

LENGTH: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
DRY: dict[str, Any] = {"dry_multiplier": 2.0, "dry_allowed_length": 1, "dry_sequence_breakers": ["\n", "the fox"]}
IN_KERNELS = [
    SamplingParams(temperature=0, repetition_penalty=1.3, logprobs=20, **LENGTH),
    SamplingParams(temperature=0.8, seed=6, presence_penalty=1.0, frequency_penalty=0.3, top_p=0.9, **LENGTH),
    SamplingParams(temperature=1.0, seed=7, logit_bias={40: 3.0, 50: -100.0}, typical_p=0.8, logprobs=0, **LENGTH),
    SamplingParams(temperature=1.0, seed=8, allowed_token_ids=list(range(30, 300)), bad_words=["the", "a b"], **LENGTH),
    SamplingParams(temperature=0.9, seed=9, min_tokens=30, top_k=20, min_p=0.02, max_tokens=40),
]
"""A graph does all that these ask for."""
PARAMS = [
    *IN_KERNELS,
    SamplingParams(temperature=0, **DRY, **LENGTH),
    SamplingParams(temperature=0.8, seed=1, **LENGTH),
    SamplingParams(temperature=0.9, seed=2, dry_multiplier=0.8, dry_penalty_last_n=20, logprobs=1, **LENGTH),
    SamplingParams(temperature=0.9, seed=3, xtc_probability=0.5, xtc_threshold=0.05, n=2, **LENGTH),
    SamplingParams(temperature=1.2, seed=4, top_n_sigma=1.0, top_k=30, presence_penalty=1.0, **LENGTH),
    SamplingParams(temperature=1.0, seed=5, dynatemp_range=0.6, min_p=0.02, **DRY, **LENGTH),
]
GREEDY = [
    SamplingParams(temperature=0, **DRY, **LENGTH),
    SamplingParams(beam_width=3, n=2, max_tokens=20, **DRY),
    SamplingParams(temperature=0, presence_penalty=0.7, repetition_penalty=1.2, min_tokens=12, max_tokens=20),
    SamplingParams(beam_width=3, frequency_penalty=0.5, logit_bias={40: 2.0}, bad_words=["the"], max_tokens=20),
]


def asked(params: list[SamplingParams], count: int) -> list[SamplingParams]:
    return [params[index % len(params)] for index in range(count)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": False},
        {"cuda_graphs": False},
        {"triton_kernels": False},
        {"max_batch_tokens": 64, "max_batch_requests": 32},
        {"kv_cache_tokens": 1024},
    ],
    ids=str,
)
def test_no_switch_no_company_and_no_draft_changes_the_answers(options: dict[str, Any]) -> None:
    conversations = held_out()[:44]
    llm = LLM(device="cuda", **(SMALL | options))
    expected = llm.chat(conversations, asked(PARAMS, 44))
    alone = [llm.chat([conversations[index]], [PARAMS[index]])[0] for index in range(len(PARAMS))]
    assert token_ids(alone) == token_ids(expected[: len(PARAMS)])
    with speculating(llm, expected, 0.7) as oracle:
        assert token_ids(llm.chat(conversations, asked(PARAMS, 44))) == token_ids(expected)
    assert oracle.guessed > 500
    check_integrity(llm)


def test_greedy_and_beams_are_the_cpus() -> None:
    conversations = held_out()[:20]
    expected = LLM(device="cpu", **SMALL).chat(conversations, asked(GREEDY, 20))
    assert token_ids(LLM(device="cuda", **SMALL).chat(conversations, asked(GREEDY, 20))) == token_ids(expected)


def test_only_what_pytorch_does_splits_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(device="cuda", **SMALL)
    llm.chat(held_out()[:11], asked(PARAMS, 11))
    graphs = runner_of(llm).graphs[0]
    run, in_parts = graphs.run, list[int]()

    def noted(step: Any) -> Any:
        outputs = run(step)
        if outputs is not None and outputs.sampled is None:
            in_parts.append(len(step.scheduled))
        return outputs

    monkeypatch.setattr(graphs, "run", noted)
    answers = llm.chat(held_out()[:11], [*IN_KERNELS, *[SamplingParams(temperature=0.8, max_tokens=20)] * 6])
    assert all(answer.outputs[0].token_ids for answer in answers)
    assert in_parts == []  # one graph from embedding to token
    llm.chat(held_out()[:1], PARAMS[-1])
    assert in_parts
