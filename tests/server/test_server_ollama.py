"""ollama's API, by its own client: programs made for it find kvern."""

import json
from collections.abc import Iterator
from typing import Any

import ollama
import pytest

from kvern import LLM, SamplingParams
from kvern.api.ollama import CHAT, GENERATE, read_body
from kvern.errors import InvalidRequest
from kvern.server.handlers.ollama import shortened
from tests.support.served import QUESTION, Served

GREEDY = {"temperature": 0, "num_predict": 24}


@pytest.fixture(scope="module")
def server(talking_server: Served) -> Served:
    return talking_server


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[ollama.Client]:
    with ollama.Client(host=server.url.removesuffix("/v1")) as client:
        yield client


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(threads=1, max_model_len=1024, dtype="float32")


def said_to(llm: LLM, messages: list[dict[str, Any]]) -> str:
    return llm.chat(messages, SamplingParams(temperature=0, max_tokens=24))[0].outputs[0].text


def test_chat_at_once_and_streamed(client: ollama.Client, llm: LLM) -> None:
    expected = said_to(llm, QUESTION)
    whole = client.chat("kvern-12m", messages=QUESTION, options=GREEDY)
    assert (whole.message.content, whole.done, whole.done_reason, whole.model) == (expected, True, "stop", "kvern-12m")
    parts = list(client.chat("kvern-12m:latest", messages=QUESTION, options=GREEDY, stream=True))
    assert "".join(part.message.content for part in parts) == expected
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    for last in (whole, parts[-1]):
        assert last.prompt_eval_count == len(llm.tokenizer.chat_prompt_ids(QUESTION)) and last.eval_count == 3
        spent = last.load_duration + last.prompt_eval_duration + last.eval_duration
        assert abs(last.total_duration - spent) <= 2 and min(last.prompt_eval_duration, last.eval_duration) > 0
    short = client.chat(
        "kvern-12m", messages=[{"role": "user", "content": "Tell me a story."}], options={"num_predict": 4}
    )
    assert (short.done_reason, short.eval_count) == ("length", 4)


def test_log_probabilities_add_up(client: ollama.Client) -> None:
    wanted: dict[str, Any] = {"messages": QUESTION, "options": GREEDY, "logprobs": True, "top_logprobs": 2}
    whole = client.chat("kvern-12m", **wanted)
    parts = [entry for part in client.chat("kvern-12m", stream=True, **wanted) for entry in part.logprobs or ()]
    assert parts == whole.logprobs and len(parts) == whole.eval_count
    assert all(len(entry.top_logprobs) >= 2 and entry.logprob <= 0 for entry in parts)


def test_generate_with_a_system_raw_and_going_on(client: ollama.Client, llm: LLM) -> None:
    system = {"role": "system", "content": "Be brief."}
    asked = [system, {"role": "user", "content": "The fox"}]
    first = client.generate("kvern-12m", "The fox", system="Be brief.", options=GREEDY)
    assert first.response == said_to(llm, asked)
    second = client.generate("kvern-12m", "And then?", context=first.context, options=GREEDY)
    turns = [*asked, {"role": "assistant", "content": first.response}, {"role": "user", "content": "And then?"}]
    assert second.response == said_to(llm, turns)
    assert second.prompt_eval_count == len(llm.tokenizer.chat_prompt_ids(turns))
    raw = client.generate("kvern-12m", "The fox", raw=True, options=GREEDY)
    plain = llm.generate(["The fox"], SamplingParams(temperature=0, max_tokens=24))[0].outputs[0].text
    assert (raw.response, raw.context) == (plain, None)
    assert (
        "".join(
            part.response for part in client.generate("kvern-12m", "The fox", raw=True, options=GREEDY, stream=True)
        )
        == plain
    )
    assert client.generate("kvern-12m").done_reason == client.chat("kvern-12m").done_reason == "load"


def weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: its name
    """
    return f"sunny in {city}"


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_called_and_answer(client: ollama.Client, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    asked = {"tools": [weather], "options": {"temperature": 0}}
    answers = client.chat("kvern-12m", messages=messages, stream=stream, **asked)
    said = [answer.message for answer in (answers if stream else [answers])]
    [call] = [call for message in said for call in message.tool_calls or ()]
    assert (call.function.name, call.function.arguments) == ("weather", {"city": "Paris"})
    calling = next(message for message in said if message.tool_calls)
    messages += [calling, {"role": "tool", "tool_name": "weather", "content": weather(**call.function.arguments)}]
    assert client.chat("kvern-12m", messages=messages, **asked).message.content


def test_answers_in_a_form(client: ollama.Client) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    answer = client.chat("kvern-12m", messages=QUESTION, format=schema, options={"temperature": 0})
    assert json.loads(answer.message.content).keys() == {"n"}
    free = client.generate(
        "kvern-12m", "Say something as JSON.", format="json", options={"seed": 1, "num_predict": 200}
    )
    assert free.response.lstrip().startswith("{")


def test_models_are_listed_and_described(client: ollama.Client, server: Served) -> None:
    [listed], [running] = client.list().models, client.ps().models
    assert listed.model == running.model == "kvern-12m:latest" and listed.digest == running.digest
    assert (listed.details.parameter_size, listed.details.quantization_level) == ("12.6M", "BF16")
    assert 25e6 < listed.size < 26e6 and (running.size_vram, running.context_length) == (0, 1024)
    for name in (listed.model, "kvern-12m"):
        shown = client.show(name)
        assert shown.capabilities == ["completion", "tools"] and "tool_call" in shown.template
        assert shown.modelinfo["llama.context_length"] == 1024
    assert server.raw("POST", "/api/show", b'{"name": "kvern-12m"}')[0] == 200
    assert int(server.raw("GET", "/api/version")[2]["version"].split(".")[1]) >= 6, "what clients ask for at least"
    assert [shortened(count) for count in (8_030_261_248, 12_588_672, 900, 1500)] == ["8.0B", "12.6M", "900.0", "1.5K"]


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"model": "gpt"}, 404, "there is no model 'gpt': this server has kvern-12m"),
        ({"messages": [{"role": "user", "content": "a", "images": ["eA=="]}]}, 400, "messages[0].images: this"),
        ({"messages": QUESTION, "template": "{{ .Prompt }}"}, 400, "template is '{{ .Prompt }}': the model's own"),
        ({"messages": QUESTION, "options": {"mirostat": 2}}, 400, "options.mirostat is 2: this server has no such"),
        ({"messages": QUESTION, "options": {"top_p": 7}}, 400, "top_p is 7"),
        ({"messages": QUESTION, "options": {"num_predict": "a"}}, 400, "num_predict is 'a': it must be a whole number"),
        ({"messages": QUESTION, "format": "yaml"}, 400, "format is 'yaml': it must be json or a JSON schema"),
        ({"messages": QUESTION, "think": 3}, 400, "think is 3: it must be true, false"),
        ({"messages": ["a"]}, 400, "messages[0] is 'a': it must be an object"),
    ],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_errors_are_texts(server: Served, body: dict[str, Any], status: int, said: str) -> None:
    found, _, content = server.raw("POST", "/api/chat", json.dumps(body).encode())
    assert (found, list(content)) == (status, ["error"]) and said in content["error"]


def test_what_is_not_done_and_what_is_ignored(client: ollama.Client, server: Served) -> None:
    with pytest.raises(ollama.ResponseError, match="this server has kvern-12m and keeps them"):
        client.push("llama3")
    for call in (client.pull, client.delete):
        with pytest.raises(ollama.ResponseError, match="admin=1: start the server with --api-key-file"):
            call("llama3")
    with pytest.raises(ollama.ResponseError, match="suffix is 'b': this model's tokenizer has no tokens for"):
        client.generate("kvern-12m", "a", suffix="b")
    with pytest.raises(ollama.ResponseError, match="gives no embeddings"):
        client.embed("kvern-12m", "a")
    body = {
        "prompt": "a",
        "stream": False,
        "keep_alive": "5m",
        "colour": 1,
        "options": {"num_ctx": 1, "num_predict": 1},
    }
    status, headers, _ = server.raw("POST", "/api/generate", json.dumps(body).encode())
    assert (status, headers["x-kvern-ignored-fields"]) == (200, "colour, options.num_ctx")


def test_options_in_kverns_words() -> None:
    options = {"repeat_penalty": 1.1, "num_predict": -1, "seed": -1, "top_k": 40, "logit_bias": {"5": 1}, "num_gpu": 1}
    params = read_body({"messages": QUESTION, "options": options}, CHAT).params
    assert params == SamplingParams(repetition_penalty=1.1, top_k=40, logit_bias={5: 1.0})
    for think, variables in ((False, {"enable_thinking": False, "thinking": False}), (None, {})):
        conversation = read_body({"prompt": "a", "think": think}, GENERATE).conversation
        assert conversation is not None and conversation.options.variables == variables


def test_results_of_tools_find_their_calls() -> None:
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("a", "b", "a")]
    results = [{"role": "tool", "tool_name": name, "content": name} for name in ("b", "a", "a")]
    conversation = read_body({"messages": [{"role": "assistant", "tool_calls": calls}, *results]}, CHAT).conversation
    assert conversation is not None
    assert [call["id"] for call in conversation.messages[0]["tool_calls"]] == ["call00000", "call00001", "call00002"]
    assert [message["tool_call_id"] for message in conversation.messages[1:]] == ["call00001", "call00000", "call00002"]
    with pytest.raises(InvalidRequest, match="tool_calls"):
        read_body({"messages": [{"role": "assistant", "tool_calls": [1]}]}, CHAT)
