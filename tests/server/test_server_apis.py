"""The other APIs of the server, driven by their official clients where there is one."""

import base64
import itertools
import json
import shutil
from collections.abc import Iterator
from typing import Any

import anthropic
import numpy
import openai
import pytest
import torch

from kvern import LLM, SamplingParams
from kvern.errors import InvalidRequest
from tests.support.served import KEY, QUESTION, Served
from tests.support.tiny_model import make_tiny_model

STORY = "Tell me a story about a fox."


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    data = tmp_path_factory.mktemp("data")
    served = Served(
        "--api-key", KEY, f"reader:{KEY}-2", "--threads", "1", "--max-model-len", "1024", "--data-dir", str(data)
    )
    yield served
    served.stop()


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(threads=1, max_model_len=1024)


@pytest.fixture(scope="module")
def client(server: Served) -> openai.OpenAI:
    return server.client()


@pytest.fixture(scope="module")
def claude(server: Served) -> Iterator[anthropic.Anthropic]:
    url = server.url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0) as made:
        yield made


def answer(llm: LLM, messages: list[dict[str, str]], **params: Any) -> str:
    [output] = llm.chat(messages, SamplingParams(temperature=0, **params))
    return output.outputs[0].text


# OpenAI's completions, what the first file leaves out


def test_echo_with_logprobs_scores_the_prompt(client: openai.OpenAI, llm: LLM) -> None:
    """What evaluation harnesses ask for: how probable was this text?"""
    ids = llm.tokenizer.encode("The fox ran over the hill.")
    [expected] = llm.generate([ids], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, logprobs=1))
    for max_tokens, extra in ((1, 1), (0, 0)):
        given = client.completions.create(
            model="kvern-12m", prompt=ids, max_tokens=max_tokens, temperature=0, echo=True, logprobs=1
        )
        logprobs = given.choices[0].logprobs
        assert len(logprobs.tokens) == len(logprobs.top_logprobs) == len(ids) + extra
        assert logprobs.token_logprobs[0] is None
        wanted = [table[token].logprob for token, table in zip(ids[1:], expected.prompt_logprobs[1:], strict=True)]
        assert logprobs.token_logprobs[1 : len(ids)] == pytest.approx(wanted, abs=1e-4)
        text = "".join(logprobs.tokens)
        assert [
            text[start:].startswith(token) for start, token in zip(logprobs.text_offset, logprobs.tokens, strict=True)
        ]
        assert given.usage.completion_tokens == extra


def test_offsets_are_of_the_text_that_is_sent(client: openai.OpenAI, llm: LLM) -> None:
    """Special tokens that the text lacks take no room, and parts of a character begin where it does."""
    prompt = "Né 日本 \U0001f600 fox"
    ids = [llm.tokenizer.bos_token_id or llm.tokenizer.token_to_id("<|bos|>") or 0, *llm.tokenizer.encode(prompt)]
    for given in (prompt, ids):
        answer = client.completions.create(
            model="kvern-12m", prompt=given, max_tokens=12, echo=True, logprobs=2, temperature=0, stop=["zzz"]
        )
        [choice] = answer.choices
        logprobs, text = choice.logprobs, choice.text
        assert text.startswith(prompt)
        data = text.encode()
        offsets = [*logprobs.text_offset, len(text)]
        assert offsets == sorted(offsets) and offsets[0] == 0
        for token, start, end in zip(logprobs.tokens, offsets, offsets[1:], strict=False):
            if token.startswith("bytes:"):
                part = bytes(int(byte, 16) for byte in token.removeprefix("bytes:\\x").split("\\x"))
                assert part in data and part in text[start : end + 1].encode()
            else:
                assert text[start:end] in (token, "")
        assert any(token.startswith("bytes:") for token in logprobs.tokens)
        assert "".join(text[start:end] for start, end in itertools.pairwise(offsets)) == text


def test_tokens_that_are_written_alike_are_all_told(client: openai.OpenAI) -> None:
    """Each of the most probable tokens has a name of its own, by which the token of the answer is found."""
    prompt = "日本 \U0001f600 é"
    answer = client.completions.create(model="kvern-12m", prompt=prompt, max_tokens=1, echo=True, logprobs=100)
    [choice] = answer.choices
    assert choice.logprobs is not None
    told = choice.logprobs
    for token, logprob, top in zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True):
        if top is not None:
            assert len(top) in (100, 101) and top[token] == logprob
            assert "\ufffd" not in "".join(top)


def test_best_of_gives_the_most_probable(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "kvern-12m", "prompt": STORY, "seed": 3, "max_tokens": 12, "temperature": 1.5}
    options["extra_body"] = {"ignore_eos": True}
    every = client.completions.create(**options, n=6, logprobs=0)
    means = {choice.text: numpy.mean(choice.logprobs.token_logprobs) for choice in every.choices}
    best = client.completions.create(**options, n=2, best_of=6)
    assert [choice.text for choice in best.choices] == sorted(means, key=lambda text: -means[text])[:2]
    assert best.choices[0].logprobs is None
    assert best.usage.completion_tokens == every.usage.completion_tokens


def test_beam_search_under_all_its_names(client: openai.OpenAI, llm: LLM) -> None:
    options: dict[str, Any] = {"model": "kvern-12m", "prompt": STORY, "max_tokens": 12}
    params = SamplingParams(beam_width=4, n=2, max_tokens=12)
    beams = llm.generate(STORY, params)[0].outputs
    for extra in ({"beam_width": 4}, {"use_beam_search": True, "best_of": 4, "temperature": 0}):
        given = client.completions.create(**options, n=2, logprobs=1, extra_body=extra)
        assert [choice.text for choice in given.choices] == [answer.text for answer in beams]
        assert [len(choice.logprobs.tokens) for choice in given.choices] == [len(answer.token_ids) for answer in beams]
    chat: dict[str, Any] = {"model": "kvern-12m", "messages": QUESTION, "max_tokens": 24, "n": 3}
    whole = client.chat.completions.create(**chat, extra_body={"use_beam_search": True})
    texts = [choice.message.content for choice in whole.choices]
    prompt = llm.chat_prompt(QUESTION)
    beams = llm.generate(prompt, SamplingParams(beam_width=3, n=3, max_tokens=24))[0].outputs
    assert texts == [answer.text for answer in beams]
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**chat, stream=True, extra_body={"use_beam_search": True}):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_parts_of_content_and_the_developer_role(client: openai.OpenAI, llm: LLM) -> None:
    expected = answer(llm, [{"role": "system", "content": "Answer."}, *QUESTION], max_tokens=24)
    messages: list[Any] = [
        {"role": "developer", "content": [{"type": "text", "text": "Answer."}]},
        {"role": "user", "content": [{"type": "text", "text": QUESTION[0]["content"]}]},
    ]
    given = client.chat.completions.create(model="kvern-12m", messages=messages, temperature=0, max_tokens=24)
    assert given.choices[0].message.content == expected
    messages[1]["content"] = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    with pytest.raises(openai.BadRequestError, match="a content part is of type 'image_url'"):
        client.chat.completions.create(model="kvern-12m", messages=messages)


def test_models_tokens_and_versions(server: Served, client: openai.OpenAI, llm: LLM) -> None:
    assert client.models.retrieve("kvern-12m").id == "kvern-12m"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")
    ids = llm.tokenizer.encode(STORY)
    body = json.dumps({"prompt": STORY, "return_token_strs": True}).encode()
    status, _, told = server.raw("POST", "/tokenize", body)
    assert (status, told["tokens"], told["count"], told["max_model_len"]) == (200, ids, len(ids), 1024)
    assert "".join(told["token_strs"]) == f"<|begin|>{STORY}"
    assert server.raw("POST", "/detokenize", json.dumps({"tokens": ids[1:]}).encode())[2] == {
        "prompt": STORY,
        "content": STORY,
    }
    for fields, special in (({}, False), ({"add_special": True}, True)):  # llama.cpp's
        told = server.raw("POST", "/tokenize", json.dumps({"content": STORY, **fields}).encode())[2]["tokens"]
        assert told == llm.tokenizer.encode(STORY, special)
    for path, wrong, said in (
        ("tokenize", {}, "prompt is missing"),
        ("tokenize", {"prompt": "a", "content": "a"}, "prompt and content are both set"),
        ("tokenize", {"content": "a", "with_pieces": True}, "with_pieces is True: send return_token_strs"),
        ("detokenize", {}, "tokens is missing"),
    ):
        status, _, told = server.raw("POST", f"/{path}", json.dumps(wrong).encode())
        assert status == 400 and told["error"]["message"].startswith(said)
    chat = server.raw("POST", "/tokenize", json.dumps({"messages": QUESTION}).encode())[2]["tokens"]
    assert chat == llm.tokenizer.chat_prompt_ids(QUESTION)
    assert server.raw("GET", "/version")[2]["version"]


# /v1/responses


def test_a_response_and_what_follows_it(client: openai.OpenAI, llm: LLM) -> None:
    first = client.responses.create(
        model="kvern-12m", input=QUESTION[0]["content"], temperature=0, max_output_tokens=24
    )
    text = answer(llm, QUESTION, max_tokens=24)
    assert (first.output_text, first.status) == (text, "completed")
    assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
    with pytest.raises(openai.BadRequestError, match="was not made with background"):
        client.responses.cancel(first.id)
    more = "What is 20 - 5?"
    second = client.responses.create(
        model="kvern-12m", input=more, previous_response_id=first.id, temperature=0, max_output_tokens=24
    )
    conversation = [*QUESTION, {"role": "assistant", "content": text}, {"role": "user", "content": more}]
    assert second.output_text == answer(llm, conversation, max_tokens=24)
    assert second.usage.total_tokens == second.usage.input_tokens + second.usage.output_tokens
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="there is no response"):
        client.responses.retrieve(first.id)


def test_who_asks_for_a_response_is_a_short_text(client: openai.OpenAI) -> None:
    for user, said in (("a" * 513, "user has 513 characters: at most 512"), ({}, "user is {}: it must be a text")):
        with pytest.raises(openai.BadRequestError, match=said):
            client.responses.create(model="kvern-12m", input="a", max_output_tokens=1, user=user)  # type: ignore[arg-type]


def test_events_of_a_response(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "kvern-12m", "input": QUESTION[0]["content"], "temperature": 0}
    cut = client.responses.create(**options, max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    last = list(client.responses.create(**options, max_output_tokens=2, stream=True))[-1]
    assert (last.type, last.response.output_text) == ("response.incomplete", cut.output_text)
    whole = client.responses.create(**options)
    with client.responses.stream(**options) as stream:  # the client's helper checks the order of the events
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == whole.output_text
    assert kinds[0] == "response.created"
    assert "response.output_text.delta" in kinds


def test_a_response_in_the_background_can_be_cancelled(server: Served, client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "kvern-12m", "background": True, "extra_body": {"ignore_eos": True}}
    begun = client.responses.create(**options, input=STORY, max_output_tokens=900)
    assert begun.status in ("queued", "in_progress")
    assert client.responses.cancel(begun.id).status == "cancelled"
    short = client.responses.create(**options, input=STORY, max_output_tokens=3)
    while (short := client.responses.retrieve(short.id)).status in ("queued", "in_progress"):
        pass
    assert short.usage.output_tokens == 3
    with pytest.raises(openai.NotFoundError):  # another key's
        server.client(f"{KEY}-2").responses.retrieve(short.id)


# Anthropic's messages


def test_messages_at_once_and_streamed(claude: anthropic.Anthropic, llm: LLM) -> None:
    options: dict[str, Any] = {
        "model": "kvern-12m",
        "max_tokens": 40,
        "system": "Answer.",
        "extra_body": {"temperature": 0},
    }
    conversation = [{"role": "system", "content": "Answer."}, {"role": "user", "content": STORY}]
    expected = answer(llm, conversation, max_tokens=40)
    whole = claude.messages.create(**options, messages=[{"role": "user", "content": STORY}])
    assert whole.content[0].text == expected
    assert whole.stop_reason == "max_tokens"
    prompt = len(llm.tokenizer.chat_prompt_ids(conversation))
    assert whole.usage.input_tokens + whole.usage.cache_read_input_tokens == prompt
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": STORY}]}]
    with claude.messages.stream(**options, messages=messages) as stream:
        assert "".join(stream.text_stream) == expected
        assert stream.get_final_message().usage.output_tokens == 40
    stop = expected.split()[5]
    stopped = claude.messages.create(**options, messages=messages, stop_sequences=[stop])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert stopped.content[0].text == expected.split(stop)[0]
    assert claude.messages.count_tokens(model="kvern-12m", system="Answer.", messages=messages).input_tokens == prompt


def test_messages_with_tools_reach_the_template(claude: anthropic.Anthropic, client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    called = {"id": "t1", "name": "get_weather", "input": {"city": "Oslo"}}
    messages: list[Any] = [
        {"role": "user", "content": "Weather in Oslo?"},
        {"role": "assistant", "content": [{"type": "tool_use", **called}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "Rain."}]},
    ]
    tool: Any = {"name": "get_weather", "description": "The weather.", "input_schema": schema}
    counted = claude.messages.count_tokens(model="kvern-12m", messages=messages, tools=[tool]).input_tokens
    function = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    same: list[Any] = [
        messages[0],
        {"role": "assistant", "content": "", "tool_calls": [{"id": "t1", "type": "function", "function": function}]},
        {"role": "tool", "content": "Rain.", "tool_call_id": "t1"},
    ]
    tools: Any = [
        {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": schema}}
    ]
    chat = client.chat.completions.create(model="kvern-12m", messages=same, tools=tools, max_tokens=1)
    assert chat.usage.prompt_tokens == counted


def test_errors_of_messages_have_their_own_shape(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        claude.messages.create(model="claude", max_tokens=1, messages=[{"role": "user", "content": "a"}])
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="temperature is -1"):
        claude.messages.create(
            model="kvern-12m", max_tokens=1, messages=[{"role": "user", "content": "a"}], extra_body={"temperature": -1}
        )


# Embeddings


def test_embeddings_are_the_last_hidden_state(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    folder = make_tiny_model(tmp_path / "model")
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
    prompts = [list(range(10, 50)), [7, 8, 9], list(range(10, 45))]
    expected = []
    with torch.inference_mode():
        for prompt in prompts:
            state = model(torch.tensor([prompt])).last_hidden_state[0, -1]
            expected.append((state / state.norm()).tolist())
    with LLM(str(folder), threads=1) as llm:
        with pytest.raises(InvalidRequest, match="gives no embeddings"):
            llm.embed(prompts)
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
        for given, vector in zip(llm.embed(prompts), expected, strict=True):
            assert given == pytest.approx(vector, abs=1e-4)
        assert len(llm.embed(prompts[1], dimensions=4)[0]) == 4
    shutil.rmtree(folder / "1_Pooling")
    arguments = ("--model", str(folder), "--threads", "1", "--dtype", "float32")
    served = Served(*arguments)
    try:
        client = served.client()
        with pytest.raises(openai.BadRequestError, match="gives no embeddings: it was not trained for that"):
            client.embeddings.create(model=str(folder), input=prompts)
        pooling = folder / "1_Pooling"
        pooling.mkdir()
        (pooling / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
        with pytest.raises(openai.BadRequestError, match="pools by 'mean_tokens': only lasttoken"):
            client.embeddings.create(model=str(folder), input=prompts)
        (pooling / "config.json").write_text('{"pooling_mode_lasttoken": true}')
        for _ in range(2):  # the second time from the prefix cache
            given = client.embeddings.create(model=str(folder), input=prompts)
            for item, vector in zip(given.data, expected, strict=True):
                assert item.embedding == pytest.approx(vector, abs=1e-4)
        short = client.embeddings.create(model=str(folder), input=prompts[0], dimensions=4, encoding_format="float")
        assert numpy.linalg.norm(short.data[0].embedding) == pytest.approx(1)
        assert given.usage.prompt_tokens == 78
        raw = served.raw("POST", "/v1/embeddings", b'{"input": [7, 8, 9], "encoding_format": "base64"}')[2]
        vector = numpy.frombuffer(base64.b64decode(raw["data"][0]["embedding"]), "<f4")
        assert vector.tolist() == pytest.approx(expected[1], abs=1e-4)
    finally:
        served.stop()
