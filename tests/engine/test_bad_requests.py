"""Every bad parameter, request and option is answered by one line that names it, and leaves nothing behind."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvern import LLM, SamplingParams
from kvern.errors import ConfigError, InvalidParameter, InvalidRequest, KvernError
from kvern.request.request import RequestOptions
from kvern.request.sampling_params import StructuredOutput
from tests.support.idle import is_idle
from tests.support.internals import engine_of

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture
def llm(tiny_llm: LLM) -> Iterator[LLM]:
    """The shared engine, which every test leaves idle."""
    yield tiny_llm
    assert is_idle(tiny_llm)


BAD_PARAMETERS: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens is 0: it must be a finite number at least 1"),
    ({"max_tokens": -3}, "max_tokens is -3"),
    ({"max_tokens": 1.5}, "max_tokens is 1.5: it must be a whole number"),
    ({"max_tokens": "5"}, "max_tokens is '5': it must be a number"),
    ({"temperature": -0.1}, "temperature is -0.1: it must be a finite number at least 0"),
    ({"temperature": float("nan")}, "temperature is nan"),
    ({"temperature": float("inf")}, "temperature is inf"),
    ({"top_p": -0.1}, "top_p is -0.1: it must be a finite number at least 0 and at most 1"),
    ({"stop": "a\ud800"}, "stop holds '\\ud800', half of a surrogate pair"),
    ({"bad_words": ["a", "\udc00"]}, "bad_words holds '\\udc00', half of a surrogate pair"),
    ({"structured": StructuredOutput(choice=["\ud800"])}, "structured holds '\\ud800', half of a surrogate pair"),
    ({"logits_processors": {"\ud800": {}}}, "logits_processors holds '\\ud800', half of a surrogate pair"),
    ({"max_tokens": 2**64}, "max_tokens is 18446744073709551616: it must be a finite number at least 1 and at most"),
    ({"min_tokens": 10**5000}, "min_tokens is a whole number of 16610 bits"),
    ({"prompt_logprobs_from": 2**64}, "prompt_logprobs_from is 18446744073709551616"),
    ({"temperature": 10**400}, "temperature is a whole number of 1329 bits"),
    ({"visible_token_ids": [2**31]}, "a token id of visible_token_ids is 2147483648"),
    ({"logit_bias": [1]}, "logit_bias is [1]: it must be an object"),
    ({"logit_bias": {5: 1e10}}, "logit_bias of token 5 is 10000000000.0"),
    ({"ignore_eos": "yes"}, "ignore_eos is 'yes': it must be true or false"),
    ({"structured": "a"}, "structured is 'a': it must be a StructuredOutput"),
    ({"structured": StructuredOutput(json={"maximum": 2**64})}, "structured holds a whole number of more than 64 bits"),
    ({"logits_processors": {"a": {"b": 2**64}}}, "logits_processors holds a whole number of more than 64 bits"),
    ({"stop": {"a" * 10_000: 1}}, "it must be a list"),
    ({"top_p": 1.01}, "top_p is 1.01"),
    ({"top_p": True}, "top_p is True"),
    ({"top_k": -2}, "top_k is -2"),
    ({"min_p": 1.5}, "min_p is 1.5"),
    ({"typical_p": 0}, "typical_p is 0"),
    ({"repetition_penalty": 0}, "repetition_penalty is 0"),
    ({"presence_penalty": 2.5}, "presence_penalty is 2.5"),
    ({"frequency_penalty": -2.5}, "frequency_penalty is -2.5"),
    ({"n": 0}, "n is 0"),
    ({"n": 5000}, "n is 5000"),
    ({"seed": 2**70}, "seed is"),
    ({"logprobs": -1}, "logprobs is -1"),
    ({"prompt_logprobs": 101}, "prompt_logprobs is 101"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9, above max_tokens 8"),
    ({"stop": [""]}, "stop holds ''"),
    ({"stop": 7}, "stop is 7: it must be a list"),
    ({"bad_words": "word"}, "bad_words is 'word': it must be a list"),
    ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
    ({"stop_token_ids": ["5"]}, "a token id of stop_token_ids is '5'"),
    ({"logit_bias": {"5": 1.0}}, "a token id of logit_bias is '5'"),
    ({"logit_bias": {5: float("nan")}}, "logit_bias of token 5 is nan"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_PARAMETERS, ids=range(len(BAD_PARAMETERS)))
def test_bad_parameters_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**fields)
    assert message in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 250


def test_values_that_other_programs_send_for_nothing(llm: LLM) -> None:
    """-1 is no limit and no seed, and a top_p of 0 is greedy, also from a model's generation config."""
    assert SamplingParams(max_tokens=-1, seed=-1, top_k=-1) == SamplingParams(top_k=-1)
    assert SamplingParams().replace(max_tokens=-1).max_tokens is None
    greedy, drawn = (
        llm.generate("a", params)[0].outputs[0].token_ids for params in (GREEDY, GREEDY.replace(temperature=9))
    )
    for share in (0, 0.0, 1e-46):
        params = GREEDY.replace(temperature=9, top_p=share, seed=3)
        assert llm.generate("a", params)[0].outputs[0].token_ids == greedy != drawn
        assert SamplingParams().resolved({"top_p": share, "temperature": 0.7}).temperature == 0
    assert len(llm.generate([5] * 250, SamplingParams(max_tokens=-1, ignore_eos=True))[0].outputs[0].token_ids) == 6


@pytest.mark.parametrize("priority", [2**63, -(2**63) - 1, 2**5000, 1.5, True, "1"])
def test_a_priority_has_64_bits(llm: LLM, priority: Any) -> None:
    with pytest.raises(InvalidParameter, match=r"priority is .*: it must be a"):
        engine_of(llm).inputs.request("a", "a", GREEDY, RequestOptions(priority=priority))


BAD_REQUESTS: list[tuple[Any, dict[str, Any], type[KvernError], str]] = [
    ("", {}, InvalidRequest, "the prompt is empty"),
    ([], {}, InvalidRequest, "the prompt is empty"),
    ([[]], {}, InvalidRequest, "the prompt is empty"),
    (None, {}, InvalidRequest, "the prompt is None: it must be a text or a list of token ids"),
    ([1.5], {}, InvalidRequest, "the prompt is 1.5"),
    ([["word"]], {}, InvalidRequest, "the prompt holds 'word' at position 0"),
    ([5, 288], {}, InvalidRequest, "the prompt holds token id 288 at position 1: the model has ids 0 to 287"),
    ([-1], {}, InvalidRequest, "token id -1 at position 0"),
    ([5] * 256, {}, InvalidRequest, "the prompt has 256 tokens, and at most 255 leave room"),
    ("a", {"stop_token_ids": [288]}, InvalidParameter, "stop_token_ids holds token id 288"),
    ("a", {"logit_bias": {300: 1.0}}, InvalidParameter, "logit_bias holds token id 300"),
    ("a", {"allowed_token_ids": [1], "min_tokens": 2}, InvalidParameter, "bad_words or min_tokens ban all of them"),
    ("a", {"allowed_token_ids": [69], "bad_words": ["a"]}, InvalidParameter, "ban all of them"),
]


@pytest.mark.parametrize(("prompt", "fields", "error", "message"), BAD_REQUESTS, ids=str)
def test_bad_requests_are_named_and_run_nothing(
    llm: LLM, prompt: Any, fields: dict[str, Any], error: type[KvernError], message: str
) -> None:
    params, steps = SamplingParams(**fields), llm.statistics().steps
    ways: list[Callable[[], object]] = [lambda: llm.generate(prompt, params)]
    if isinstance(prompt, str) or (prompt and all(isinstance(token, int) for token in prompt)):
        ways += [lambda: next(llm.stream(prompt, params)), lambda: llm.generate([[5, 6], prompt], params)]
    for way in ways:
        with pytest.raises(error) as caught:
            way()
        assert message in str(caught.value) and "\n" not in str(caught.value)
        assert is_idle(llm) and llm.statistics().steps == steps


def test_prompts_and_parameters_must_match(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="there are 2 prompts and 1 sampling parameters"):
        llm.generate(["a", "b"], [GREEDY])
    with pytest.raises(InvalidRequest, match="conversation is empty"):
        llm.chat([], GREEDY)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 513}, "max_model_len is 513, above the model's 512"),
        ({"max_model_len": 100, "kv_cache_tokens": 64}, "room for 64 tokens"),
        ({"block_size": 0}, "block_size is 0: it must be at least 1"),
        ({"data_parallel_size": -1}, "data_parallel_size is -1: it must be at least 1"),
        ({"policy": "fastest"}, "policy is 'fastest': it must be one of fcfs, priority, sjf, prefix"),
        ({"max_batch_tokens": 8, "max_batch_requests": 9}, "max_batch_tokens is 8, below max_batch_requests 9"),
    ],
    ids=str,
)
def test_bad_options_are_named(tiny_model: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(str(tiny_model), **options)
