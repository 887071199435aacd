"""Sampling through the whole engine: log-probabilities, seeds in any company, samples of one prompt."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from kvern import LLM, SamplingParams

PROMPT = [ord(letter) % 200 + 30 for letter in "a prompt that is longer than two blocks of tokens"]


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


def reference_logprobs(reference: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return reference(torch.tensor([tokens])).logits[0].log_softmax(-1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_those_of_the_model(tiny_llm: LLM, reference: Any, temperature: float) -> None:
    """Of its own logits: neither temperature nor penalties nor filters change them."""
    params = SamplingParams(
        temperature=temperature, seed=3, max_tokens=12, logprobs=4, prompt_logprobs=2, top_k=50, presence_penalty=1.0
    )
    (result,) = tiny_llm.generate(PROMPT, params)
    answer = result.outputs[0]
    expected = reference_logprobs(reference, PROMPT + answer.token_ids)
    assert answer.logprobs is not None and result.prompt_logprobs is not None
    assert len(answer.logprobs) == len(answer.token_ids) and len(result.prompt_logprobs) == len(PROMPT)
    assert result.prompt_logprobs[0] is None
    entries = [(entry, 2) for entry in result.prompt_logprobs[1:]] + [(entry, 4) for entry in answer.logprobs]
    for place, (token, (entry, count)) in enumerate(zip((PROMPT + answer.token_ids)[1:], entries, strict=True)):
        assert entry is not None
        best = expected[place].topk(count)
        assert next(iter(entry)) == token and set(entry) == {token, *best.indices.tolist()}
        for other, logprob in entry.items():
            assert logprob.logprob == pytest.approx(expected[place, other].item(), abs=1e-4)
            assert logprob.rank == (expected[place] > expected[place, other]).sum() + 1
            assert logprob.token == tiny_llm.tokenizer.id_to_token(other)
    total = sum(entry[token].logprob for token, entry in zip(answer.token_ids, answer.logprobs, strict=True))
    assert answer.cumulative_logprob == pytest.approx(total)


def test_prompt_logprobs_do_not_depend_on_the_prefix_cache(tiny_llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)
    first, again = (tiny_llm.generate(PROMPT, params)[0] for _ in range(2))
    assert first.prompt_logprobs == again.prompt_logprobs and again.cached_tokens == 0
    assert tiny_llm.generate(PROMPT, SamplingParams(max_tokens=2))[0].cached_tokens > 0


def test_greedy_is_what_the_model_finds_most_probable(tiny_llm: LLM, reference: Any) -> None:
    answer = tiny_llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))[0].outputs[0]
    expected = reference_logprobs(reference, PROMPT + answer.token_ids)
    assert answer.token_ids == expected[len(PROMPT) - 1 : -1].argmax(-1).tolist()


CROWD = [
    SamplingParams(temperature=1.0, seed=index, max_tokens=24, ignore_eos=True, **fields)
    for index, fields in enumerate(
        [
            {},
            {"top_k": 20},
            {"top_p": 0.9, "frequency_penalty": 0.3},
            {"min_p": 0.02, "repetition_penalty": 1.2, "dry_multiplier": 0.8, "dry_allowed_length": 1},
            {"typical_p": 0.8, "logprobs": 1},
            {"top_k": 40, "top_p": 0.8, "bad_words": ["the"], "xtc_probability": 0.5, "top_n_sigma": 2.0},
            {"logit_bias": {77: 2.0}, "prompt_logprobs": 1, "dynatemp_range": 0.6},
        ]
    )
]
CROWD_PROMPTS = [PROMPT[: 20 + 3 * index] if index % 2 else PROMPT[index:] for index in range(len(CROWD))]


def answers(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in llm.generate(prompts, params)]


@pytest.fixture(scope="module")
def alone(tiny_llm: LLM) -> list[list[int]]:
    return [answers(tiny_llm, [prompt], [params])[0] for prompt, params in zip(CROWD_PROMPTS, CROWD, strict=True)]


def test_seeded_requests_get_the_same_tokens_in_any_batch(tiny_llm: LLM, alone: list[list[int]]) -> None:
    assert len({tuple(tokens) for tokens in alone}) == len(CROWD)
    for order in (list(range(7)), [3, 0, 6, 2], [6, 5, 4, 3, 2, 1, 0]):
        found = answers(tiny_llm, [CROWD_PROMPTS[index] for index in order], [CROWD[index] for index in order])
        assert found == [alone[index] for index in order]


def test_another_seed_gives_other_tokens(tiny_llm: LLM, alone: list[list[int]]) -> None:
    changed = [params.replace(seed=1000 + index) for index, params in enumerate(CROWD)]
    assert all(new != old for new, old in zip(answers(tiny_llm, CROWD_PROMPTS, changed), alone, strict=True))


SWITCHES: dict[str, tuple[Any, Any]] = {
    "kv_cache": ("paged", "contiguous"),
    "prefix_cache": (True, False),
    "chunked_prefill": (True, False),
    "batching": ("continuous", "static"),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("choices", list(itertools.product((0, 1), repeat=4)), ids=str)
def test_no_switch_changes_seeded_tokens(tiny_model: Path, alone: list[list[int]], choices: tuple[int, ...]) -> None:
    options = {name: values[choice] for (name, values), choice in zip(SWITCHES.items(), choices, strict=True)}
    with LLM(str(tiny_model), max_model_len=96, max_batch_requests=4, max_batch_tokens=32, threads=1, **options) as llm:
        assert answers(llm, CROWD_PROMPTS, CROWD) == alone


@pytest.mark.sample(1)
@pytest.mark.parametrize("policy", ["priority", "sjf", "prefix"])
def test_no_policy_and_no_preemption_changes_seeded_tokens(
    tiny_model: Path, alone: list[list[int]], policy: str
) -> None:
    with LLM(
        str(tiny_model), max_model_len=96, kv_cache_tokens=128, block_size=4, policy=policy, seed=5, threads=1
    ) as llm:
        prompts, params = CROWD_PROMPTS * 3, CROWD * 3
        assert answers(llm, prompts, params) == alone * 3
        assert llm.statistics().preemptions > 0


def test_samples_of_a_prompt_differ_and_share_its_blocks(tiny_llm: LLM) -> None:
    prompt = [200 + index % 7 for index in range(40)]
    params = SamplingParams(temperature=1.0, seed=11, n=5, max_tokens=12, ignore_eos=True)
    (result,) = tiny_llm.generate(prompt, params)
    assert [answer.index for answer in result.outputs] == list(range(5)) and result.finished
    assert len({tuple(answer.token_ids) for answer in result.outputs}) == 5
    assert 32 <= result.cached_tokens < 40, "the samples take two blocks of 16 tokens, or more, from the first one"
    assert result.outputs[0].token_ids == tiny_llm.generate(prompt, params.replace(n=1))[0].outputs[0].token_ids
    (again,) = tiny_llm.generate(prompt, params)
    assert [answer.token_ids for answer in again.outputs] == [answer.token_ids for answer in result.outputs]


def test_requests_without_a_seed_differ_and_depend_on_the_engine_seed(tiny_model: Path) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=8)
    runs = []
    for seed in (0, 0, 1):
        with LLM(str(tiny_model), max_model_len=64, seed=seed, threads=1) as llm:
            runs.append(answers(llm, [PROMPT[:9]] * 3, [params] * 3))
    assert runs[0] == runs[1] != runs[2]
    assert len({tuple(tokens) for tokens in runs[0]}) == 3


def test_constraints_hold_for_whole_answers(tiny_llm: LLM) -> None:
    base = SamplingParams(temperature=1.0, seed=1, max_tokens=40, ignore_eos=True)
    allowed = [tiny_llm.tokenizer.encode(letter)[0] for letter in "aeiu"]
    (only,) = answers(tiny_llm, [PROMPT], [base.replace(allowed_token_ids=allowed)])
    assert set(only) == set(allowed)
    first, second = only[:2]
    bad_word = tiny_llm.tokenizer.decode([first, second])
    (without,) = answers(tiny_llm, [PROMPT], [base.replace(allowed_token_ids=allowed, bad_words=[bad_word])])
    assert without[0] == first and (first, second) not in itertools.pairwise(without)
    stop = base.replace(allowed_token_ids=allowed, stop_token_ids=[first], min_tokens=9)
    answer = tiny_llm.generate(PROMPT, stop)[0].outputs[0]
    assert len(answer.token_ids) > 9 and answer.token_ids.index(first) == len(answer.token_ids) - 1
    assert (answer.finish_reason, answer.stop_reason) == ("stop", first)
