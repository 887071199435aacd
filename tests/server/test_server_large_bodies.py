"""Large bodies: refused in time or worked on in turn, while small requests beside them are answered soon."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator

import pytest

from kvern.api.response_items import packed_reasoning
from tests.support.raw_requests import (
    CHAT,
    CLAUDE,
    MEGABYTE,
    POST,
    RESPONSES,
    SCORE,
    TEXT,
    connect,
    form,
    most_resident,
    resident,
    small_requests_are_answered,
    upload,
)
from tests.support.served import SMALL, Served, eventually, serving


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    data = str(tmp_path_factory.mktemp("data"))
    with serving(*SMALL, "--request-timeout", "2", "--data-dir", data) as served:
        yield served


MESSAGE = b'{"role":"user","content":"a"}'
UPDATE = b'{"type":"configuration_update"}'
CALL = b'{"type":"function_call","call_id":"c","name":"f","arguments":""}'
THOUGHT = b'{"type":"reasoning","content":[{"type":"text","text":"' + b"a" * 4000 + b'"}]}'
BOMB = b'{"type":"reasoning","encrypted_content":"' + packed_reasoning("a" * (5 * MEGABYTE)).encode() + b'"}'
TOOL = b'{"type":"function","name":"f"}'
SPACE = b'{"type":"namespace","name":"a","tools":[' + b",".join([TOOL] * 20_000) + b"]}"
ALLOWED = b'{"tools":[' + SPACE + b'],"input":"a","tool_choice":{"type":"allowed_tools","tools":['
FIELDS = b",".join(b'"%d":0' % number for number in range(150_000))
WRONG = b'"top_p":7}'
SAID = b'{"max_tokens":1,"messages":[' + MESSAGE + b"],"


def many(before: bytes, item: bytes, after: bytes, size: int = 15 * MEGABYTE) -> bytes:
    return before + b",".join([item] * (size // (len(item) + 1))) + after


LARGE: list[tuple[str, str, Callable[[], bytes], str]] = [
    ("messages", CHAT, lambda: many(b'{"messages":[', MESSAGE, b"]}"), "more values than fit"),
    ("few messages", CHAT, lambda: many(b'{"messages":[', MESSAGE, b"]}", 400_000), "messages holds"),
    (
        "parts",
        CHAT,
        lambda: many(b'{"messages":[{"role":"user","content":[', b'{"text":"a"}', b"]}]}", 400_000),
        "parts",
    ),
    ("tools", CHAT, lambda: many(b'{"tools":[', b"{}", b"]}", 6000), "tools holds"),
    ("extra", CHAT, lambda: many(b'{"extra_body":{"messages":[', MESSAGE, b"]}}", 400_000), "messages holds"),
    ("items", RESPONSES, lambda: many(b'{"input":[', MESSAGE, b"]}", 400_000), "input holds"),
    ("updates", RESPONSES, lambda: many(b'{"input":[', UPDATE, b"]," + FIELDS + b"," + WRONG, 200_000), "0 fields"),
    ("thoughts", RESPONSES, lambda: many(b'{"input":[', CALL + b"," + THOUGHT, b"]," + WRONG), "top_p is 7"),
    ("bombs", RESPONSES, lambda: many(b'{"input":[' + MESSAGE + b",", BOMB, b"]," + WRONG), "top_p is 7"),
    ("allowed tools", RESPONSES, lambda: many(ALLOWED, TOOL, b"]}}", 600_000), "at most 512"),
    ("a type", CLAUDE, lambda: many(SAID + b'"tools":[{"name":"a","type":"', b"_", b'"}],' + WRONG), "top_p is 7"),
    ("ids", TEXT, lambda: many(b'{"prompt":[', b"7", b"]}"), "more values than fit"),
    ("a million ids", TEXT, lambda: many(b'{"prompt":[', b"7", b"]}", 2_000_000), "the prompt has 1000000 tokens"),
    ("dicts", TEXT, lambda: many(b'{"x":[', b"{}", b"]}"), "more values than fit"),
    ("a word", TEXT, lambda: b'{"prompt":"' + b"a" * (15 * MEGABYTE) + b'"}', "characters"),
    ("a word said", CHAT, lambda: many(b'{"messages":[{"role":"user","content":"', b"a", b'"}]}'), "characters"),
    ("a word counted", "/tokenize", lambda: b'{"prompt":"' + b"a" * (15 * MEGABYTE) + b'"}', "characters"),
    ("detokenize", "/detokenize", lambda: many(b'{"tokens":[', b"7", b"]}", 2_000_000), "tokens holds 1000000"),
    ("braces in a text", TEXT, lambda: b'{"prompt":"' + b'{[:,\\"' * (2 * MEGABYTE) + b'"}', "characters"),
]


@pytest.mark.sample(5)
@pytest.mark.parametrize(("path", "body", "said"), [case[1:] for case in LARGE], ids=[case[0] for case in LARGE])
def test_large_bodies(server: Served, path: str, body: Callable[[], bytes], said: str) -> None:
    with small_requests_are_answered(server):
        status, _, content = server.raw("POST", path, body())
    assert status in (400, 413)
    assert said in content["error"]["message"]


def test_many_log_probabilities_are_written_beside_others(server: Served) -> None:
    prompts = [[7 + number] * 480 for number in range(2)]
    bodies: dict[str, dict[str, object]] = {
        TEXT: {"prompt": prompts, "prompt_logprobs": 100, "max_tokens": 1, "logprobs": 3},
        CHAT: {
            "messages": [{"role": "user", "content": "a"}],
            "n": 8,
            "max_tokens": 60,
            "logprobs": True,
            "top_logprobs": 100,
        },
    }
    for path, body in bodies.items():
        with small_requests_are_answered(server):
            status, _, answer = server.raw("POST", path, json.dumps(body).encode())
        assert status == 200, answer
        if path == TEXT:
            assert [len(choice["prompt_logprobs"]) for choice in answer["choices"]] == [480] * 2
            assert all(len(table) >= 100 for table in answer["choices"][1]["prompt_logprobs"][1:])
        else:
            tokens = [entry for choice in answer["choices"] for entry in choice["logprobs"]["content"]]
            assert {len(entry["top_logprobs"]) for entry in tokens} == {100}


@pytest.mark.nightly
def test_memory_goes_back_after_large_bodies() -> None:
    """Of several at once, which wait for each other."""
    with serving(*SMALL) as server:
        server.raw("POST", TEXT, b'{"prompt": "Once", "max_tokens": 1}')
        before = resident(server)
        bodies = [case[2]() for case in LARGE] * 2
        paths = [case[1] for case in LARGE] * 2
        threads = [
            threading.Thread(target=server.raw, args=("POST", path, body))
            for path, body in zip(paths, bodies, strict=True)
        ]
        with small_requests_are_answered(server):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert most_resident(server) < before + 500
        eventually(lambda: resident(server) < before + 250)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("path", "begin"),
    [
        (TEXT, b'{"max_tokens":500,"n":16,"ignore_eos":true,"prompt":"Once'),
        (SCORE, b'{"continuations":[' + b",".join([b'"%s"' % (b" fox" * 100)] * 256) + b'],"context":"Once'),
    ],
    ids=["completions", "scores"],
)
def test_large_bodies_do_not_wait_for_answers(server: Served, path: str, begin: bytes) -> None:
    """More than are worked on at the same time, whose answers take long: another one is read meanwhile."""
    field = b'","user":"' + b"a" * (15 * MEGABYTE) + b'"}'
    body = begin + field
    with contextlib.ExitStack() as connections:
        for _ in range(8):
            connection = connections.enter_context(connect(server))
            connection.sendall(
                POST.replace(TEXT.encode(), path.encode()) + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
            )
        assert server.raw("POST", "/tokenize", b'{"prompt":"Once' + field)[2]["count"] == 2
        assert server.figure("num_requests_running") + server.figure("num_requests_waiting") > 0


def test_scores_of_a_long_context_many_times(server: Served) -> None:
    before = most_resident(server)
    context, continuations = b"[" + b"7," * 999_999 + b"7]", b"[" + b"[7]," * 999 + b"[7]]"
    with small_requests_are_answered(server):
        body = b'{"context":' + context + b',"continuations":' + continuations + b"}"
        status, _, content = server.raw("POST", SCORE, body)
    assert status == 400 and "1000001 tokens with its context" in content["error"]["message"]
    assert most_resident(server) < before + 300


def test_a_row_of_a_hundred_megabytes(server: Served) -> None:
    row = (
        b'{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"prompt":"'
        + b"a" * (100 * MEGABYTE)
        + b'"}}'
    )
    many_ids = (
        b'{"custom_id":"b","method":"POST","url":"/v1/completions","body":{"prompt":[' + b"7," * 4_000_000 + b"7]}}"
    )
    kind, body = form(content=row + b"\n" + many_ids + b"\n")
    before = most_resident(server)
    with small_requests_are_answered(server):
        file_id = json.loads(upload(server, kind, body).partition(b"\r\n\r\n")[2])["id"]
        wanted = json.dumps({"input_file_id": file_id, "endpoint": TEXT, "completion_window": "24h"}).encode()
        batch = server.raw("POST", "/v1/batches", wanted)[2]
        eventually(lambda: server.raw("GET", f"/v1/batches/{batch['id']}")[2]["status"] == "failed")
    errors = server.raw("GET", f"/v1/batches/{batch['id']}")[2]["errors"]["data"]
    assert "more than 16777216 bytes" in errors[0]["message"]
    assert "more values than fit" in errors[1]["message"]
    assert most_resident(server) < before + 400
