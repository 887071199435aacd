"""The explanation of a request: for its key, by its ids, and with the cause that was provoked."""

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.served import ENDLESS, FOREVER, QUESTION, SMALL, STORY, Served, eventually, serving

KEYS = "ann:key-of-ann\nbob:key-of-bob\nroot:key-of-root admin=1\n"
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(KEYS)
    with serving(*SMALL, "--api-key-file", str(keys), "--data-dir", str(keys.parent / "data")) as server:
        yield server


def explanation(served: Served, name: str, key: str | None = "key-of-ann") -> dict[str, Any]:
    """The explanation of an ended request, once its record has come."""
    found: dict[str, Any] = {}

    def has_come() -> bool:
        status, _, body = served.raw("GET", f"/v1/requests/{name}/explain", key=key)
        assert status == 200, body
        found.update(body)
        return not body["running"] and bool(body["records"])

    eventually(has_come)
    return found


def ask(served: Served, name: str, key: str = "key-of-ann", **more: Any) -> Any:
    headers = {"x-request-id": name, "traceparent": TRACE}
    return served.client(key).completions.create(
        **{**STORY, "prompt": "Once upon a time", "max_tokens": 8, **more}, extra_headers=headers
    )


def test_a_request_is_explained_to_its_key_and_to_administrators(served: Served) -> None:
    ask(served, "mine/1")
    told = explanation(served, "mine/1")
    assert (told["id"], told["path"], told["model"], told["status"]) == ("mine/1", "/v1/completions", "kvern-1m", 200)
    assert told["traceparent"] == TRACE and told["moves"] == 0 and told["answers"] == 1
    (record,) = told["records"]
    assert (record["prompt_tokens"] > 2, record["answer_tokens"], record["finish_reason"]) == (True, 8, "length")
    assert sum(cause["share"] for cause in told["causes"]) == pytest.approx(1, abs=0.05)
    assert told["causes"] == sorted(told["causes"], key=lambda cause: -cause["seconds"])
    times = [event["seconds"] for event in told["timeline"]]
    assert times == sorted(times) and 0 < told["first_token_seconds"] <= told["seconds"]
    assert "Once" not in json.dumps(told) and "ann" not in json.dumps(told)
    assert explanation(served, "mine/1", "key-of-root") == told
    for name, key in (("mine/1", "key-of-bob"), ("other", "key-of-ann"), ("other", "key-of-root")):
        status, _, body = served.raw("GET", f"/v1/requests/{name}/explain", key=key)
        assert status == 404 and "x-request-id" in body["error"]["message"]
    assert served.raw("GET", "/v1/requests/mine/1/explain", key=None)[0] == 401


def test_one_key_cannot_hide_the_request_of_another_under_the_same_id(served: Served) -> None:
    ask(served, "same", max_tokens=4)
    ask(served, "same", "key-of-bob", max_tokens=5)
    assert explanation(served, "same")["records"][0]["answer_tokens"] == 4
    assert explanation(served, "same", "key-of-bob")["records"][0]["answer_tokens"] == 5


def test_the_id_in_the_answer_is_known_as_well(served: Served) -> None:
    answer = served.client("key-of-ann").chat.completions.create(model="kvern-1m", messages=QUESTION, max_tokens=3, n=2)
    told = explanation(served, answer.id)
    assert told["answer_id"] == answer.id and told["answers"] == 2


MESSAGE = {"messages": QUESTION, "max_tokens": 3}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": MESSAGE,
    "/v1/messages?streamed": {**MESSAGE, "stream": True},
    "/v1/responses": {"input": "Once", "max_output_tokens": 3},
    "/v1/score": {"text_1": "Once", "text_2": "twice"},
    "/v1/rerank": {"query": "Once", "documents": ["a", "b"]},
}


@pytest.mark.parametrize("path", BODIES)
def test_the_ids_of_all_routes_are_known(served: Served, path: str) -> None:
    client = served.client("key-of-ann")
    options: dict[str, Any] = {"body": {"model": "kvern-1m", **BODIES[path]}, "cast_to": httpx.Response}
    said = client.post(path.removeprefix("/v1").partition("?")[0], **options).text
    answer_id = re.search(r'"id": ?"((?:msg_|resp_|score-|rerank-)[^"]+)"', said)
    assert answer_id is not None, said
    told = explanation(served, answer_id[1])
    assert (told["path"], told["answer_id"]) == (path.partition("?")[0], answer_id[1])


def test_an_answer_that_a_stop_string_ended_has_its_record(served: Served) -> None:
    text = ask(served, "whole", max_tokens=40, seed=1).choices[0].text
    ask(served, "stopped", max_tokens=40, seed=1, stop=text[10:14])
    assert explanation(served, "stopped")["records"][0]["finish_reason"] == "stop"


def test_a_stop_string_in_the_last_token_is_the_reason_in_the_record(served: Served) -> None:
    """The engine ends the answer there by its length, before anybody has looked for stop strings."""
    texts = [ask(served, f"tokens-{count}", max_tokens=count, seed=1).choices[0].text for count in range(1, 13)]
    stop = texts[-1][10:14]
    count = next(count for count, text in enumerate(texts, 1) if stop in text)
    answer = ask(served, "stopped-at-once", max_tokens=count, seed=1, stop=stop)
    assert answer.choices[0].finish_reason == "stop" and answer.usage.completion_tokens == count
    assert explanation(served, "stopped-at-once")["records"][0]["finish_reason"] == "stop"


def test_a_background_response_is_explained_to_its_end(served: Served) -> None:
    options: dict[str, Any] = {"model": "kvern-1m", "background": True, "extra_body": {"ignore_eos": True}}
    begun = served.client("key-of-ann").responses.create(
        **options, input="Once", max_output_tokens=60, extra_headers={"x-request-id": "behind"}
    )
    told = explanation(served, "behind")
    assert (told["answer_id"], told["status"], told["answers"]) == (begun.id, 200, 1)
    assert told["records"][0]["answer_tokens"] == 60
    assert told["seconds"] >= told["records"][0]["ended"] and told["timeline"][-1]["text"].startswith("it has ended")
    assert explanation(served, begun.id) == told


def test_rows_of_a_batch_are_not_its_request_s(served: Served) -> None:
    client = served.client("key-of-ann")
    asked = {"model": "kvern-1m", "messages": QUESTION, "max_tokens": 3}
    row = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": asked}
    file = client.files.create(file=("rows.jsonl", json.dumps(row).encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        extra_headers={"x-request-id": "rows"},
    )
    eventually(lambda: client.batches.retrieve(batch.id).status == "completed")
    assert served.raw("GET", "/v1/requests/rows/explain", key="key-of-ann")[0] == 404


def test_the_command_tells_the_same(served: Served) -> None:
    ask(served, "told")
    told = explanation(served, "told")
    command = [sys.executable, "-m", "kvern", "explain", "told", "--base-url", served.url.removesuffix("/v1")]
    text = subprocess.run([*command, "--api-key", "key-of-ann"], capture_output=True, text=True, check=True).stdout
    assert text.startswith(told["summary"]) and "the first byte goes out" in text
    content = subprocess.run(
        [*command, "--api-key", "key-of-ann", "--json"], capture_output=True, text=True, check=True
    ).stdout
    assert json.loads(content) == told
    refused = subprocess.run([*command, "--api-key", "key-of-bob"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and "no request told of this key is known" in refused.stderr.replace("'", "")


def test_waits_are_in_the_metrics(served: Served) -> None:
    ask(served, "counted")
    waited = explanation(served, "counted")["records"][0]["waits"]
    assert served.figure("request_wait_seconds_total", "key-of-root") >= sum(waited.values())


def test_the_log_has_the_waits_of_clients_that_left_and_of_answers_that_a_stop_string_ended(tmp_path: Path) -> None:
    log = tmp_path / "log"
    options = ("--max-batch-requests", "1", "--log-requests", "summary")
    with serving(*ENDLESS, *options, log=log) as served, ThreadPoolExecutor() as pool:
        text = ask(served, "whole", max_tokens=40, seed=1).choices[0].text
        first = served.client().completions.create(**FOREVER, prompt="Once", stream=True)
        next(iter(first))
        body = json.dumps({**STORY, "prompt": "Once", "extra_body": None}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nx-request-id: left\r\nContent-Length: {len(body)}"
        with socket.create_connection((served.host, served.port)) as connection:
            connection.sendall(head.encode() + b"\r\n\r\n" + body)
            eventually(lambda: served.figure("num_requests_waiting") == 1)
        eventually(lambda: "left POST" in log.read_text())
        stopped = pool.submit(ask, served, "stopped", max_tokens=40, seed=1, stop=text[10:14])
        eventually(lambda: served.figure("num_requests_waiting") == 1)
        first.close()
        stopped.result()
        eventually(lambda: "stopped POST" in log.read_text())
    said = log.read_text()
    assert re.search(r"left POST .* finish=abort waits=\S*rows:", said)
    assert re.search(r"stopped POST .* finish=stop waits=\S*rows:", said)


@pytest.mark.nightly
def test_the_engine_that_died_is_named_with_what_it_took() -> None:
    with serving(*SMALL) as served, ThreadPoolExecutor() as pool:
        stream = served.client().completions.create(
            **STORY, prompt="Once upon a time", stream=True, extra_headers={"x-request-id": "moved"}
        )
        next(iter(stream))
        served.kill_engine()
        pool.submit(lambda: list(stream)).result()
        told = explanation(served, "moved", None)
    assert told["moves"] == 1 and "Engine 0 gave it up" in told["summary"]
    assert [event["text"] for event in told["timeline"]].count("engine 0 gets it") == 2
    (lost,) = [cause for cause in told["causes"] if cause["cause"] == "lost"]
    assert "in engine 0: " in lost["text"] and lost["seconds"] > 0
    assert 0 < told["records"][0]["answer_tokens"] < 300


@pytest.mark.nightly
def test_a_preemption_for_lack_of_blocks_is_named() -> None:
    small = ("kvern-1m", "--threads", "1", "--max-model-len", "256", "--kv-cache-tokens", "256", "--dtype", "float32")
    with serving(*small, "--no-prefix-cache") as served, ThreadPoolExecutor() as pool:
        asked = [pool.submit(ask, served, f"crowd-{number}", max_tokens=200) for number in range(3)]
        for one in asked:
            one.result()
        told = [explanation(served, f"crowd-{number}", None) for number in range(3)]
        preempted = [one for one in told if one["records"][0]["preemption_count"]]
        assert preempted, "the cache is too large for this test"
        for one in preempted:
            assert one["records"][0]["waits"]["blocks"] > 0 and "preempted" in json.dumps(one["causes"])
        assert served.figure("request_wait_seconds_total", cause="blocks") > 0


def test_cached_tokens_are_told_by_source(tmp_path: Path) -> None:
    small = ("kvern-1m", "--threads", "1", "--max-model-len", "512", "--kv-cache-tokens", "512", "--dtype", "float32")
    with serving(*small, "--kv-tier", f"disk:{tmp_path}:64MB") as served:
        for number, story in enumerate(("a bird ", "a stone ", "a bird ")):
            ask(served, f"story-{number}", prompt=story * 120, max_tokens=4)
            ask(served, f"again-{number}", prompt=story * 120, max_tokens=4)
        assert "device" in explanation(served, "again-0", None)["records"][0]["cached"]
        told = explanation(served, "story-2", None)
    assert told["records"][0]["cached"].get("disk", 0) > 0
    assert "from the store disk" in json.dumps(told["causes"])
