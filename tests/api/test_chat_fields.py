"""Fields of chat completions and completions that clients of other servers send, through the official client."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from kvern.text.tokenizer import Tokenizer
from tests.support.served import QUESTION, Served, serving
from tests.support.thinking_model import thinking_model

OPEN = {"chat_template_kwargs": {"open": True}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return thinking_model(tmp_path_factory.mktemp("fields") / "model", special=True)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    arguments = ("--threads", "1", "--max-model-len", "300", "--served-model-name", "tiny", "--dtype", "float32")
    with serving("--model", str(folder), *arguments) as served:
        yield served


@pytest.fixture(scope="module")
def client(server: Served) -> openai.OpenAI:
    return server.client()


def ask(client: openai.OpenAI, messages: list[Any] = QUESTION, **fields: Any) -> Any:
    """A chat completion; fields that the client does not know go beside the others."""
    own = {name: fields.pop(name) for name in ("stream", "stream_options", "n") if name in fields}
    options: dict[str, Any] = {"max_tokens": 30, "seed": 1, "temperature": 1.0, **fields}
    return client.chat.completions.create(model="tiny", messages=messages, extra_body=options, **own)


def test_thought_tokens_are_counted_by_token(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    """The same in answers, at the end of streams, in each chunk, and in responses."""
    end = tokenizer.token_to_id("</think>")
    fields = {**OPEN, "thinking_token_budget": 9, "return_token_ids": True, "n": 2}
    whole = ask(client, **fields)
    counts = [choice.token_ids.index(end) for choice in whole.choices]
    assert max(counts) > 1
    assert whole.usage.completion_tokens_details.reasoning_tokens == sum(counts)
    for choice in whole.choices:
        assert choice.message.reasoning == choice.message.reasoning_content != ""
    options = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}
    chunks = list(ask(client, **fields, stream=True, stream_options=options))
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == sum(counts)
    for index, count in enumerate(counts):
        mine = [chunk for chunk in chunks if chunk.choices and chunk.choices[0].index == index]
        thought = [chunk.usage.completion_tokens_details.reasoning_tokens for chunk in mine]
        assert thought == sorted(thought)
        assert thought[-1] == count
        said = [token for chunk in mine for token in chunk.choices[0].token_ids]
        assert mine[-1].usage.completion_tokens == len(said)
        assert said == whole.choices[index].token_ids
        deltas = [chunk.choices[0].delta for chunk in mine]
        for name in ("reasoning", "reasoning_content"):
            texts = [getattr(delta, name, None) or "" for delta in deltas]
            assert "".join(texts) == whole.choices[index].message.reasoning
    hidden = ask(client, **fields, include_reasoning=False)
    assert hidden.usage.completion_tokens_details == whole.usage.completion_tokens_details
    response = client.responses.create(
        model="tiny", input=QUESTION, max_output_tokens=30, extra_body={"seed": 1, "thinking_budget": 9, **OPEN}
    )
    assert response.usage.output_tokens_details.reasoning_tokens == counts[0]


@pytest.mark.parametrize("most", [0, 3])
def test_log_probabilities_have_openais_form(client: openai.OpenAI, most: int) -> None:
    """As many as were asked for, whatever was sampled, and the bytes of parts of characters."""
    fields = {"logprobs": True, "top_logprobs": most, "ignore_eos": True, "skip_special_tokens": False}
    choice = ask(client, **fields, max_tokens=60).choices[0]
    assert choice.logprobs.refusal is None
    entries = choice.logprobs.content
    assert len(entries) == 60
    for entry in entries:
        assert len(entry.top_logprobs) == most
        found = [top.logprob for top in entry.top_logprobs]
        assert found == sorted(found, reverse=True)
    spelled = b"".join(bytes(entry.bytes) for entry in entries)
    assert spelled.decode(errors="replace") == choice.message.content
    assert any(entry.bytes and entry.bytes[0] >= 0x80 and len(entry.bytes) == 1 for entry in entries)
    if most:
        assert any(entry.token not in {top.token for top in entry.top_logprobs} for entry in entries)
    streamed = ask(client, **fields, max_tokens=60, stream=True)
    parts = [part for chunk in streamed for part in (chunk.choices[0].logprobs.content if chunk.choices else ())]
    assert parts == entries


def test_tokens_of_held_back_text_are_told_once(client: openai.OpenAI) -> None:
    """With thinking that is not shown, and tools, text waits; log-probabilities and ids of all tokens come."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    fields = {**OPEN, "thinking_budget": 9, "include_reasoning": False, "logprobs": True, "return_token_ids": True}
    whole = ask(client, **fields, tools=[tool]).choices[0]
    chunks = [chunk.choices[0] for chunk in ask(client, **fields, tools=[tool], stream=True)]
    assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
    assert [entry for chunk in chunks for entry in chunk.logprobs.content] == whole.logprobs.content
    assert len(whole.logprobs.content) == len(whole.token_ids)


def test_the_older_log_probabilities(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": "the fox", "max_tokens": 20, "seed": 2, "logprobs": 2}
    options["extra_body"] = {"ignore_eos": True, "return_token_ids": True}
    choice = client.completions.create(**options).choices[0]
    assert choice.prompt_token_ids == tokenizer.encode("the fox")
    texts = [tokenizer.id_to_token(token) for token in choice.token_ids]
    assert "\N{REPLACEMENT CHARACTER}" in texts, "some tokens are a part of a character"
    for said, text in zip(choice.logprobs.tokens, texts, strict=True):
        assert said == text or (said.startswith("bytes:") and "\N{REPLACEMENT CHARACTER}" in text)
    chunks = [chunk.choices[0] for chunk in client.completions.create(**options, stream=True)]
    assert chunks[0].prompt_token_ids == choice.prompt_token_ids
    assert not hasattr(chunks[1], "prompt_token_ids")
    offsets = [offset for chunk in chunks for offset in chunk.logprobs.text_offset]
    assert offsets == choice.logprobs.text_offset
    options["extra_body"] |= {"return_tokens_as_token_ids": True, "prompt_logprobs": 1}
    named = client.completions.create(**options, echo=True).choices[0]
    ids = choice.prompt_token_ids + choice.token_ids
    assert named.logprobs.tokens == [f"token_id:{token}" for token in ids]
    for name, table in list(zip(named.logprobs.tokens, named.logprobs.top_logprobs, strict=True))[1:]:
        assert name in table
        assert len(table) in (2, 3)
    assert [table is None for table in named.prompt_logprobs] == [True] + [False] * (len(choice.prompt_token_ids) - 1)


def test_an_answer_goes_on_with_the_last_message(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    messages = [*QUESTION, {"role": "assistant", "content": "It is 4"}]
    fields = {"continue_final_message": True, "return_token_ids": True}
    plain = ask(client, messages, **fields)
    assert tokenizer.decode(plain.prompt_token_ids, skip_special_tokens=False).endswith("<|assistant|>It is 4")
    assert not hasattr(plain.choices[0].message, "reasoning")
    echoed = ask(client, messages, **fields, add_generation_prompt=False, echo=True)
    assert echoed.choices[0].message.content == "It is 4" + plain.choices[0].message.content
    streamed = ask(client, messages, **fields, echo=True, stream=True)
    texts = [chunk.choices[0].delta.content or "" for chunk in streamed]
    assert "".join(texts) == echoed.choices[0].message.content
    thinking = [*QUESTION, {"role": "assistant", "content": "<think>Let me"}]
    assert ask(client, thinking, **fields, thinking_budget=5).choices[0].message.reasoning


def test_prompts_that_are_cut(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    text = "the quick brown fox " * 40
    ids = tokenizer.encode(text)
    assert len(ids) > 300
    for given in (text, ids):
        for extra, kept in (
            ({"truncate_prompt_tokens": 7}, ids[-7:]),
            ({"truncate_prompt_tokens": 7, "truncation_side": "right"}, ids[:7]),
            ({"truncate_prompt_tokens": -1}, ids[-292:]),
        ):
            body = {"return_token_ids": True, **extra}
            answer = client.completions.create(model="tiny", prompt=given, max_tokens=8, extra_body=body)
            assert answer.choices[0].prompt_token_ids == kept
    long = [{"role": "user", "content": text}]
    assert ask(client, long, truncate_prompt_tokens=-1, max_tokens=8).usage.prompt_tokens == 292
    with pytest.raises(openai.BadRequestError, match="context length of 300 tokens: the prompt is too long") as refused:
        ask(client, long)
    assert refused.value.code == "context_length_exceeded"  # agents make their conversations shorter then


def test_what_an_answer_says_of_its_server(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    fields = {"request_id": "mine-1", "service_tier": "auto", "stop": ["e", "o", "a"], "max_tokens": 250}
    whole = ask(client, **fields)
    assert (whole.id, whole.service_tier) == ("chatcmpl-mine-1", "default")
    assert whole.system_fingerprint.startswith("kvern-")
    assert whole.choices[0].stop_reason in fields["stop"]
    assert "refusal" in whole.choices[0].message.model_fields_set
    last = list(ask(client, **fields, stream=True, stream_interval=50))[-1]
    assert (last.id, last.choices[0].stop_reason) == (whole.id, whole.choices[0].stop_reason)
    assert (last.system_fingerprint, last.service_tier) == (whole.system_fingerprint, "default")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"top_logprobs": 3}, "top_logprobs is 3 without logprobs: set logprobs to true"),
    ({"logprobs": True, "top_logprobs": 101}, "top_logprobs is 101"),
    ({"chat_template": "{{ messages }}"}, "a template is a program"),
    ({"prompt_embeds": "AAAA"}, "send prompt, a text or a list of token ids"),
    ({"kv_transfer_params": {}}, "kv_transfer_params is {}: this server computes prompts itself"),
    ({"functions": [{"name": "f"}]}, "send tools instead"),
    ({"function_call": {"name": "f"}}, "older name of tool_choice"),
    ({"modalities": ["text", "audio"]}, "modalities is"),
    ({"web_search_options": {}}, "searches nothing"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "both set"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens is 0"),
    ({"truncation_side": "middle"}, "truncation_side is 'middle'"),
    ({"request_id": "a\nb"}, "request_id is"),
    ({"reasoning_effort": "low", "reasoning": {"effort": "high"}}, "they mean the same"),
    ({"thinking": {"type": "maybe"}}, "thinking.type is 'maybe'"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, r"messages\[0\].content: a content part"),
    ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "send it in tool_calls"),
]


@pytest.mark.parametrize(("fields", "said"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_not_done_is_refused_by_name(client: openai.OpenAI, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said) as refused:
        ask(client, **fields)
    assert refused.value.param is not None or "messages" in fields


def test_what_has_no_effect_is_taken(server: Served) -> None:
    body = {
        "messages": QUESTION, "max_tokens": 1, "prompt_cache_key": "a", "prediction": None,
        "store": False, "metadata": {"a": "b"}, "user": "a", "logprobs": False, "top_logprobs": 0, "functions": [],
        "spaces_between_special_tokens": True, "documents": [{"text": "a"}], "thinking": {"type": "disabled"},
    }  # fmt: skip
    status, headers, _ = server.raw("POST", "/v1/chat/completions", json.dumps(body).encode())
    assert status == 200
    assert "x-kvern-ignored-fields" not in headers
    text = {"prompt": "a", "max_tokens": 1, "tools": [], "mm_processor_kwargs": {}}
    status, headers, _ = server.raw("POST", "/v1/completions", json.dumps(text).encode())
    assert (status, headers["x-kvern-ignored-fields"]) == (200, "mm_processor_kwargs")
