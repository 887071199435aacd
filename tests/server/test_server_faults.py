"""What clients and fate do to a server: afterwards all blocks are free and the next request is served."""

import asyncio
import concurrent.futures
import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvern import LLM, SamplingParams
from tests.support.served import PATIENCE, SMALL, STORY, Served, eventually, serving
from tests.support.tiny_model import make_tiny_model
from tests.support.watched_loop import watched_server


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(*SMALL, "--max-model-len", "2048", "--request-timeout", "1") as served:
        yield served


@pytest.fixture(autouse=True)
def nothing_is_left(server: Served) -> Iterator[None]:
    yield
    eventually(lambda: served_nothing(server))
    assert server.client().completions.create(model="kvern-1m", prompt="Once", max_tokens=2).usage.completion_tokens


def served_nothing(server: Served) -> bool:
    figures = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return all(server.figure(name) == 0 for name in figures)


def connect(server: Served) -> socket.socket:
    return socket.create_connection((server.host, server.port), timeout=PATIENCE)


def request(body: object, path: str = "/v1/completions") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


STREAM = {"prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "stream": True}


def test_five_hundred_clients_leave_in_mid_stream(server: Served) -> None:
    connections = [connect(server) for _ in range(500)]
    for connection in connections:
        connection.sendall(request(STREAM))
    for connection in connections[:20]:
        assert connection.recv(10)
    for connection in connections:
        connection.close()
    eventually(lambda: served_nothing(server))
    assert server.figure("request_success_total", finished_reason="abort") >= 400


def test_blocks_are_free_soon_after_a_client_left(server: Served) -> None:
    """Within a few steps: the engine learns it before its next step."""
    with connect(server) as connection:
        connection.sendall(request(STREAM))
        assert connection.recv(10)
        before = server.figure("generation_tokens_total")
    eventually(lambda: served_nothing(server))
    assert server.figure("generation_tokens_total") - before < 1500


def test_half_closed_sockets(server: Served) -> None:
    """A client that says it will send no more has gone, as far as one can know."""
    with connect(server) as connection:
        connection.sendall(request(STREAM))
        assert connection.recv(10)
        connection.shutdown(socket.SHUT_WR)
        eventually(lambda: served_nothing(server))
    with connect(server) as connection:
        connection.sendall(request(STREAM)[:80])
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(1000) == b""


def test_clients_that_dribble(server: Served) -> None:
    """Head and body must have come within --request-timeout, here a second."""
    with connect(server) as silent, connect(server) as head, connect(server) as body:
        head.sendall(b"GET /health HTTP/1.1\r\nX-A: ")
        body.sendall(request(STREAM)[:-5])
        assert silent.recv(1000) == head.recv(1000) == b""
        said = body.recv(1000) + body.recv(1000)
        assert said.startswith(b"HTTP/1.1 408") and b"did not arrive within 1 s" in said
    with connect(server) as connection:
        with contextlib.suppress(OSError):  # it is closed while we send
            connection.sendall(b"GET /health HTTP/1.1\r\n" + b"X-A: " + b"a" * (1 << 20))
        with contextlib.suppress(ConnectionError):
            assert connection.recv(1000) == b""


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00",
        b"GET / HTTP/9.9\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    ],
    ids=range(4),
)
def test_what_is_not_http(server: Served, data: bytes) -> None:
    with connect(server) as connection:
        connection.sendall(data)
        assert connection.recv(1000).startswith(b"HTTP/1.1 400")


def test_a_body_of_a_hundred_megabytes(server: Served) -> None:
    status, _, content = server.raw("POST", "/v1/completions", b'{"prompt": "' + b"a" * (100 << 20) + b'"}')
    assert status == 413
    assert "the body has more than" in content["error"]["message"]


@pytest.mark.nightly
def test_a_template_that_loops(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    loop = "{% for a in range(99999) %}{% set b = -1 in range(99999)|list %}{% endfor %}"
    (folder / "chat_template.jinja").write_text(loop)
    with serving("--model", str(folder), "--threads", "1") as served:
        body = json.dumps({"messages": [{"role": "user", "content": "a"}]}).encode()
        answers = [served.raw("POST", "/v1/chat/completions", body) for _ in range(3)]
        assert [status for status, _, _ in answers] == [400] * 3
        assert "it computes for more than 2 s" in answers[0][2]["error"]["message"]
        assert "2 renderings took too long" in answers[-1][2]["error"]["message"]


@pytest.mark.nightly
def test_kill_under_64_streams() -> None:
    """Each stream's text is the same as without the kill."""
    prompts = [f"Once upon a time there were {number}" for number in range(64)]
    params = SamplingParams(temperature=0.8, seed=9, max_tokens=150, ignore_eos=True)
    with LLM("kvern-1m", threads=1, dtype="float32") as llm:
        expected = [output.outputs[0].text for output in llm.generate(prompts, params)]
    with serving(*SMALL) as served:
        client = served.client()
        begun = threading.Barrier(65)

        def read(prompt: str) -> str:
            stream = client.completions.create(prompt=prompt, seed=9, stream=True, **(STORY | {"max_tokens": 150}))
            text = next(iter(stream)).choices[0].text
            begun.wait(PATIENCE)
            return text + "".join(chunk.choices[0].text for chunk in stream)

        with concurrent.futures.ThreadPoolExecutor(64) as pool:
            texts = [pool.submit(read, prompt) for prompt in prompts]
            begun.wait(PATIENCE)
            os.kill(served.engine_pid(), signal.SIGKILL)
            assert [text.result() for text in texts] == expected
        eventually(lambda: served_nothing(served))


def test_the_event_loop_is_never_blocked(tmp_path: Path) -> None:
    """No callback computes for 20 ms while long prompts, chats and many streams come and go.

    Processor time of the loop's thread is measured, not the clock: other processes do not count.
    """
    asyncio.run(_watch_the_loop())


async def _watch_the_loop() -> None:
    text = "Tell me a story about a fox and a bear. " * 20_000
    stream = STREAM | {"max_tokens": 250}
    bodies: list[tuple[str, Any]] = [("/v1/completions", stream | {"prompt": f"Once {n}"}) for n in range(48)]
    bodies += [("/v1/completions", {"prompt": text}), ("/tokenize", {"prompt": text})] * 2
    bodies += [("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]})] * 2
    bodies += [("/v1/completions", {"prompt": [7] * 300_000})] * 2
    bodies += [("/v1/completions", {"prompt": ["Once"] * 64, "max_tokens": 20, "logprobs": 5})]
    stop = ["e" * 1023 + chr(200 + number) for number in range(64)]
    bodies += [("/v1/completions", stream | {"prompt": "Once", "n": 8, "stop": stop})]
    async with watched_server() as (ask, times):
        await asyncio.gather(*(ask(path, body) for path, body in bodies))
    assert 0 < max(times) < 0.020
