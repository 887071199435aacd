"""The server as a process, driven by the official client and by raw sockets."""

import concurrent.futures
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from kvern import LLM, SamplingParams
from tests.support.served import KEY, PATIENCE, QUESTION, SMALL, STORY, Served, eventually, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    served = Served(
        "--api-key", KEY, "--threads", "1", "--max-model-len", "1024", "--served-model-name", "tiny", "other"
    )
    yield served
    served.stop()


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(threads=1, max_model_len=1024)


def test_chat_is_what_the_engine_says(server: Served, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=2)
    [expected] = llm.chat(QUESTION, params)
    answer = server.client().chat.completions.create(
        model="tiny", messages=QUESTION, temperature=0, max_completion_tokens=24, logprobs=True, top_logprobs=2
    )
    choice = answer.choices[0]
    assert choice.message.content == expected.outputs[0].text
    assert choice.finish_reason == expected.outputs[0].finish_reason
    assert answer.model == "tiny"
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert answer.usage.completion_tokens == len(expected.outputs[0].token_ids)
    tables = expected.outputs[0].logprobs
    tops = [next(iter(table.values())).logprob for table in tables]
    assert [entry.logprob for entry in choice.logprobs.content] == pytest.approx(tops, abs=1e-4)


def test_a_stream_adds_up_to_the_answer(server: Served) -> None:
    client = server.client()
    options: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "n": 2, "seed": 3, "max_tokens": 40}
    whole = client.chat.completions.create(**options)
    texts, finished, usage = {0: "", 1: ""}, {}, None
    for chunk in client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            finished[choice.index] = choice.finish_reason
    assert texts == {choice.index: choice.message.content for choice in whole.choices}
    assert finished == {choice.index: choice.finish_reason for choice in whole.choices}
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_completions_of_texts_tokens_and_lists(server: Served, llm: LLM) -> None:
    client = server.client()
    params = SamplingParams(temperature=0, max_tokens=16)
    texts = ["Once upon a time", "The fox"]
    expected = [output.outputs[0].text for output in llm.generate(texts, params)]
    ids = [llm.tokenizer.encode(text) for text in texts]
    for prompt in (texts, ids):
        answer = client.completions.create(model="other", prompt=prompt, temperature=0)
        assert [choice.text for choice in answer.choices] == expected
        assert [choice.index for choice in answer.choices] == [0, 1]
    echoed = client.completions.create(model="tiny", prompt=texts[0], temperature=0, echo=True)
    assert echoed.choices[0].text == texts[0] + expected[0]
    streamed = {0: "", 1: ""}
    for chunk in client.completions.create(model="tiny", prompt=texts, temperature=0, stream=True, logprobs=1):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert list(streamed.values()) == expected


def test_stop_strings_never_show(server: Served, llm: LLM) -> None:
    [full] = llm.generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=40))
    stop = full.outputs[0].text[20:24]
    options: dict[str, Any] = {"model": "tiny", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 40}
    chunks = list(server.client().completions.create(**options, stop=stop, stream=True))
    text = "".join(chunk.choices[0].text for chunk in chunks)
    assert text == full.outputs[0].text.split(stop)[0]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_many_at_once(server: Served, llm: LLM) -> None:
    prompts = [f"What is {number} + {number * 7}?" for number in range(40)]
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=24)
    expected = [output.outputs[0].text for output in llm.generate(prompts, params)]
    client = server.client()

    def ask(prompt: str) -> str:
        answer = client.completions.create(model="tiny", prompt=prompt, temperature=0.7, seed=5, max_tokens=24)
        return answer.choices[0].text

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, prompts)) == expected


BREAKERS = "dry_sequence_breakers"


@pytest.mark.parametrize(
    ("body", "status", "said", "param"),
    [
        (b"{", 400, "not valid JSON", None),
        (b"[]", 400, "must be an object", None),
        (b'{"prompt": "\xff"}', 400, "not valid JSON", None),
        (b'{"model": "gpt"}', 404, "no model 'gpt'", "model"),
        (b"{}", 400, "prompt is None", "prompt"),
        (b'{"prompt": []}', 400, "prompt is []", "prompt"),
        (b'{"prompt": [5, 99999999]}', 400, "token id 99999999", None),
        (b'{"prompt": "a", "temperature": -1}', 400, "temperature is -1", "temperature"),
        (b'{"prompt": "a", "temperature": "hot"}', 400, "temperature: expected float", "temperature"),
        (b'{"prompt": "a", "n": 1000000000}', 400, "n is 1000000000", "n"),
        (b'{"prompt": "a", "stream": "yes"}', 400, "stream is 'yes'", "stream"),
        (b'{"prompt": "a", "suffix": "b"}', 400, "suffix is 'b'", "suffix"),
        (b'{"prompt": "a", "echo": true, "logprobs": 1, "stream": true}', 400, "echo, logprobs", "echo"),
        (json.dumps({"prompt": [7] * 5000}).encode(), 400, "5000 tokens", None),
        (json.dumps({"prompt": ["a"] * 300}).encode(), 400, "300 prompts", "prompt"),
        (json.dumps({"prompt": "a", "stop": ["a"] * 10_000}).encode(), 400, "stop has 10000 entries", "stop"),
        (b'{"prompt": "a", "logit_bias": {"1": 1e99}}', 400, "logit_bias of token 1", "logit_bias"),
        (json.dumps({"prompt": "a", "dry_sequence_breakers": ["a"] * 33}).encode(), 400, "33 entries", BREAKERS),
        (json.dumps({"prompt": "a", "dry_sequence_breakers": ["a" * 41]}).encode(), 400, "41 characters", BREAKERS),
        (b'{"prompt": "a", "n": 500}', 400, "n is 500: this server takes 128", "n"),
        (b'{"prompt": "a", "best_of": 2, "stream": true}', 400, "best_of is 2", "best_of"),
        (b'{"prompt": "a", "beam_width": 100}', 400, "beam_width is 100", "beam_width"),
        (b'{"prompt": "a", "beam_width": 2, "temperature": 1}', 400, "temperature is 1.0 with", "temperature"),
        (b'{"prompt": "a", "use_beam_search": true, "n": 3, "best_of": 2}', 400, "n is 3, above", "n"),
        (b'{"prompt": "a", "use_beam_search": 1}', 400, "use_beam_search is 1", None),
        (b'{"prompt": "a", "timeout": -1}', 400, "timeout is -1", "timeout"),
        (b'{"prompt": "a", "cache_salt": 5}', 400, "cache_salt is 5: it must be a text", "cache_salt"),
        (b'{"prompt": "' + b"a" * (17 << 20) + b'"}', 413, "bytes", None),
    ],
    ids=range(28),
)
def test_bad_requests_are_told_why(server: Served, body: bytes, status: int, said: str, param: str | None) -> None:
    found, _, content = server.raw("POST", "/v1/completions", body)
    assert (found, content["error"]["param"]) == (status, param)
    assert said in content["error"]["message"]
    assert server.raw("POST", "/v1/completions", b'{"prompt": "a", "max_tokens": 1}')[0] == 200


def test_fields_without_meaning_are_named(server: Served) -> None:
    chat = {"messages": QUESTION, "max_tokens": 1}
    for path, body in (
        ("/v1/completions", {"prompt": "a", "max_tokens": 1, "extra_body": {"top_k": 3}}),
        ("/v1/chat/completions", chat),
        ("/v1/messages", chat),
        ("/v1/responses", {"input": "a", "max_output_tokens": 1}),
    ):
        assert "x-kvern-ignored-fields" not in server.raw("POST", path, json.dumps(body).encode())[1]
        status, headers, _ = server.raw("POST", path, json.dumps(body | {"colour": "red"}).encode())
        assert (status, headers["x-kvern-ignored-fields"]) == (200, "colour")


def test_keys_guard_every_route_but_health(server: Served) -> None:
    assert server.raw("GET", "/health", key=None)[0] == 200
    for method, path in (("GET", "/v1/models"), ("GET", "/ready"), ("GET", "/nothing"), ("POST", "/v1/completions")):
        for key in (None, "wrong"):
            status, _, content = server.raw(method, path, key=key)
            assert (status, content["error"]["code"]) == (401, "invalid_api_key")
    with pytest.raises(openai.AuthenticationError):
        server.client("wrong").models.list()
    assert [model.id for model in server.client().models.list()] == ["tiny", "other"]
    assert server.raw("GET", "/ready")[2] == {"ready": True}
    assert server.raw("GET", "/nothing")[0] == 404
    assert server.raw("DELETE", "/v1/models")[0] == 405


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_leave_make_room(server: Served, stream: bool) -> None:
    """More requests than the cache holds, all abandoned: the next one is served at once."""
    body = {"prompt": "Once", "max_tokens": 1000, "ignore_eos": True, "n": 16, "stream": stream}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Length: {len(data)}\r\n\r\n"
    connections = [socket.create_connection((server.host, server.port)) for _ in range(40)]
    for connection in connections:
        connection.sendall(head.encode() + data)
    if stream:
        assert connections[0].recv(1)
    for connection in connections:
        connection.close()
    answer = server.client().completions.create(model="tiny", prompt="The fox", max_tokens=4)
    assert answer.usage.completion_tokens <= 4


def test_the_http_process_does_not_import_torch() -> None:
    modules = "kvern.server.run, kvern.structured.compiler, sys"
    code = f"import {modules}; print({{'torch', 'transformers', 'fastapi'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.nightly)])
def test_streams_survive_their_engine(how: int) -> None:
    """Killed, or hanging, in mid-answer: another engine goes on, and no token is lost or doubled."""
    prompts = [f"Once upon a time there were {number}" for number in range(12)]
    params = SamplingParams(temperature=0.8, seed=9, max_tokens=300, ignore_eos=True)
    llm = LLM("kvern-1m", threads=1, dtype="float32")
    expected = [output.outputs[0].text for output in llm.generate(prompts, params)]
    beams = SamplingParams(beam_width=3, n=2, max_tokens=300, ignore_eos=True)
    best = [answer.text for answer in llm.generate(prompts[0], beams)[0].outputs]
    with serving(*SMALL, "--engine-timeout", "3") as served:
        client = served.client()
        begun = threading.Barrier(len(prompts) + 1)

        def read(prompt: str) -> str:
            stream = client.completions.create(prompt=prompt, seed=9, stream=True, **STORY)
            text = next(iter(stream)).choices[0].text
            begun.wait(PATIENCE)
            return text + "".join(chunk.choices[0].text for chunk in stream)

        def search() -> list[str]:
            options = STORY | {"temperature": 0, "n": 2, "extra_body": {"ignore_eos": True, "beam_width": 3}}
            return [choice.text for choice in client.completions.create(prompt=prompts[0], **options).choices]

        with concurrent.futures.ThreadPoolExecutor(len(prompts) + 1) as pool:
            searched = pool.submit(search)
            texts = [pool.submit(read, prompt) for prompt in prompts]
            engine = served.engine_pid()
            begun.wait(PATIENCE)
            os.kill(engine, how)
            eventually(lambda: served.raw("GET", "/ready")[0] == 503)
            late = client.completions.create(prompt=prompts[0], seed=9, **STORY)  # waits for the next engine
            assert [text.result() for text in texts] == expected
            assert searched.result() == best
        assert late.choices[0].text == expected[0]
        assert served.engine_pid() != engine
        assert served.raw("GET", "/ready")[0] == 200


@pytest.mark.nightly  # by day, one that runs requests is ended so
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_both_processes(how: int) -> None:
    with serving(*SMALL) as served:
        engine = served.engine_pid()
        assert served.stop(how) == 0
        eventually(lambda: not Path(f"/proc/{engine}").exists())


@pytest.mark.nightly
def test_an_engine_does_not_outlive_its_server() -> None:
    """Killed while it streams, so that the engine still has things to say."""
    with serving(*SMALL) as served:
        stream = served.client().completions.create(prompt="Once", stream=True, **(STORY | {"max_tokens": 450}))
        next(iter(stream))
        engine = served.engine_pid()
        assert served.stop(signal.SIGKILL) == -signal.SIGKILL
        eventually(lambda: not Path(f"/proc/{engine}").exists())


def test_a_start_that_fails_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for arguments, said in (
            (
                ["--port", port],
                f"cannot listen on 127.0.0.1:{port}: Address already in use; end the program that has it, or ",
            ),
            (["--model", str(tmp_path / "none")], "there is no such folder"),
            (["--max-model-len", "99999999"], "max_model_len is 99999999"),
        ):
            command = [sys.executable, "-m", "kvern", "serve", *arguments]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 2
            assert done.stderr.startswith("kvern serve: error: ") and said in done.stderr
            assert done.stderr.count("\n") == 1
