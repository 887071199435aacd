"""What one key can do to another, and learn of it: nothing."""

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from kvern.errors import ConfigError
from kvern.server.bodies import LARGE_BODIES_BYTES, MAX_BODY_BYTES, Lane
from kvern.server.config import ServerConfig
from kvern.server.keys import read_keys
from tests.support.served import PATIENCE, SMALL, STORY, Served, eventually

KEYS = """
alice:alice-key
bob:bob-key
few:few-key per_minute=3
admin:admin-key admin=1
figures:figures-key metrics=1
"""
USERS = 4
SLOTS, QUEUE = 2, 16
SHARE = QUEUE // USERS
LONG: dict[str, Any] = STORY | {"prompt": "Once", "max_tokens": 450}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("walls")
    (folder / "keys").write_text(KEYS)
    options = ("--max-batch-requests", str(SLOTS), "--max-queue", str(QUEUE), "--data-dir", str(folder))
    served = Served(*SMALL, "--api-key-file", str(folder / "keys"), *options)
    yield served
    served.stop()


def post(server: Served, path: str, body: dict[str, Any], key: str) -> tuple[int, dict[str, str], Any]:
    return server.raw("POST", path, json.dumps(body).encode(), key)


def test_no_key_finds_out_what_another_asked(server: Served) -> None:
    def cached(name: str) -> int:
        prompt = "The secret number that nobody may know is 271828, and it is " * 4
        answer = server.client(f"{name}-key").completions.create(model="kvern-1m", prompt=prompt, max_tokens=1)
        return answer.usage.prompt_tokens_details.cached_tokens

    assert cached("alice") == 0
    assert cached("alice") > 30
    assert [cached("bob"), cached("admin")] == [0, 0]


def test_figures_are_for_keys_of_their_own(server: Served) -> None:
    def status(path: str, key: str) -> int:
        return server.raw("GET", path, key=key)[0]

    assert server.raw("GET", "/metrics", key="alice-key")[0] == 403
    assert server.figure("num_requests_running", "figures-key") == server.figure("num_requests_running", "admin-key")
    assert status("/ready", "figures-key") == 200
    assert [status(path, "figures-key") for path in ("/v1/models", "/v1/files", "/")] == [403] * 3
    refused, _, body = post(server, "/v1/completions", {"prompt": "a"}, "figures-key")
    assert (refused, body["error"]["code"]) == (403, "permission_denied")


def test_one_key_fills_the_queue_for_itself_alone(server: Served) -> None:
    alice, bob = server.client("alice-key"), server.client("bob-key")
    with server.held():
        streams = [alice.completions.create(n=(SLOTS + QUEUE) // 2, stream=True, **LONG) for _ in range(2)]
        with pytest.raises(openai.RateLimitError, match="more requests than it lets wait: try again") as full:
            alice.completions.create(**LONG)
        assert "18" not in str(full.value) and str(QUEUE) not in str(full.value)
        with pytest.raises(openai.RateLimitError, match="more requests than it lets wait: try again"):
            bob.completions.create(n=SHARE + 1, **LONG)
    answer = bob.completions.create(n=SHARE, **(LONG | {"max_tokens": 2}))
    assert answer.usage.completion_tokens == 2 * SHARE
    for stream in streams:
        stream.close()
    eventually(lambda: server.figure("num_requests_running", "admin-key") == 0)


@pytest.mark.nightly
def test_streams_of_one_key_leave_room_for_another_s_first_token(server: Served) -> None:
    alice, bob = server.client("alice-key"), server.client("bob-key")
    ended = list[str]()

    def read(name: str, stream: Any) -> None:
        assert list(stream)
        ended.append(name)

    with server.held():
        long = alice.completions.create(stream=True, n=SLOTS + QUEUE, **LONG)
        short = bob.completions.create(stream=True, **(LONG | {"max_tokens": 1}))
    threads = [threading.Thread(target=read, args=item) for item in (("alice", long), ("bob", short))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ended == ["bob", "alice"]


def test_rows_and_small_requests_count(server: Served) -> None:
    few = server.client("few-key")
    for path, body in (("tokenize", {"prompt": "a"}), ("detokenize", {"tokens": [7]})):
        assert post(server, f"/{path}", body, "few-key")[0] == 200
    row = {"method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 1}}
    rows = [json.dumps({"custom_id": str(number), **row}) for number in range(2)]
    file = few.files.create(file=("rows.jsonl", "\n".join(rows).encode()), purpose="batch")
    asked: dict[str, Any] = {
        "input_file_id": file.id,
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    batch = few.batches.create(**asked)
    eventually(lambda: few.batches.retrieve(batch.id).request_counts.completed == 1)
    counted = {"messages": [{"role": "user", "content": "a"}]}
    status, headers, body = post(server, "/v1/messages/count_tokens", counted, "few-key")
    assert status == 429 and 1 < int(headers["retry-after"]) <= 60
    assert "few has made 3 requests in the last minute" in body["error"]["message"]
    others = [few.batches.create(**asked) for _ in range(15)]
    with pytest.raises(openai.RateLimitError, match="few has 16 unfinished batches, and may have 16"):
        few.batches.create(**asked)
    for item in (batch, *others):
        few.batches.cancel(item.id)
    eventually(lambda: few.batches.retrieve(batch.id).status == "cancelled")
    counts = few.batches.retrieve(batch.id).request_counts
    assert (counts.completed, counts.failed) == (1, 0)


def test_what_a_step_reports_is_bounded(server: Served) -> None:
    body = {"prompt": ["a"] * 8, "n": 100, "logprobs": 100}
    status, _, answer = post(server, "/v1/completions", body, "alice-key")
    assert (status, answer["error"]["param"]) == (400, "logprobs")
    body = {"prompt": ["Once upon a time there was a fox. " * 50] * 8, "prompt_logprobs": 100, "max_tokens": 1}
    status, _, answer = post(server, "/v1/completions", body, "alice-key")
    assert (status, answer["error"]["param"]) == (400, "prompt_logprobs")


def test_what_each_answer_brings_to_the_engine_is_bounded(server: Served) -> None:
    body = {"prompt": ["a"] * 4, "n": 100, "allowed_token_ids": [9] * 100_000}
    status, _, answer = post(server, "/v1/completions", body, "alice-key")
    assert status == 400 and "ask for fewer answers at once" in answer["error"]["message"]


@pytest.mark.parametrize("route", ["arguments", "schema"])
def test_json_in_texts_is_bounded(server: Served, route: str) -> None:
    text = '{"a": [' + "{}," * 200_000 + "{}]}"
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": text}}
    asked = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
    body = {"messages": asked} if route == "arguments" else {"messages": asked[:1], "guided_json": text}
    status, _, answer = post(server, "/v1/chat/completions", body, "alice-key")
    assert status == 400 and "more values than fit in one request" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({str(number): "" for number in range(17)}, "17 entries: at most 16"),
        ({"a" * 65: ""}, "a name of 65 characters: at most 64"),
        ({"a": "a" * 513}, "metadata\\['a'\\] must be a text of at most 512"),
        ({"a": 1}, "metadata\\['a'\\] must be a text"),
    ],
)
def test_metadata_has_limits(server: Served, metadata: Any, said: str) -> None:
    client = server.client("alice-key")
    with pytest.raises(openai.BadRequestError, match=said):
        client.responses.create(model="kvern-1m", input="a", metadata=metadata)
    file = client.files.create(file=("a", b"a"), purpose="batch")
    options: dict[str, Any] = {"endpoint": "/v1/completions", "completion_window": "24h", "metadata": metadata}
    with pytest.raises(openai.BadRequestError, match=said):
        client.batches.create(input_file_id=file.id, **options)


def test_a_response_that_was_left_has_ended(server: Served) -> None:
    client = server.client("alice-key")
    options: dict[str, Any] = {"model": "kvern-1m", "input": "Once", "extra_body": {"ignore_eos": True}}
    with server.held():
        stream = client.responses.create(**options, max_output_tokens=400, stream=True)
        created = next(iter(stream))
        assert client.responses.retrieve(created.response.id).status == "in_progress"
        stream.close()
        eventually(lambda: client.responses.retrieve(created.response.id).status == "cancelled")
    late = options | {"extra_body": {"ignore_eos": True, "timeout": 0.01}}
    events = list(client.responses.create(**late, max_output_tokens=400, stream=True))
    assert events[-1].type == "response.failed"
    assert client.responses.retrieve(events[0].response.id).status == "failed"


def test_large_bodies_of_one_key_leave_room_for_another() -> None:
    async def take() -> None:
        lane = Lane(2)
        part = LARGE_BODIES_BYTES // 2 // MAX_BODY_BYTES
        held = [asyncio.create_task(lane.take("alice", MAX_BODY_BYTES)) for _ in range(2 * part)]
        await asyncio.wait_for(lane.take("bob", MAX_BODY_BYTES), PATIENCE)
        assert [task.done() for task in held] == [True] * part + [False] * part
        held.pop().cancel()
        lane.give("alice", MAX_BODY_BYTES)
        await asyncio.wait(held, timeout=PATIENCE, return_when=asyncio.ALL_COMPLETED)
        assert all(task.done() for task in held) == (part == 2)
        for _ in range(part):
            lane.give("alice", MAX_BODY_BYTES)
        lane.give("bob", MAX_BODY_BYTES)
        whole = [lane.take(str(number), MAX_BODY_BYTES) for number in range(LARGE_BODIES_BYTES // MAX_BODY_BYTES)]
        await asyncio.wait_for(asyncio.gather(*whole), PATIENCE)  # all of it is free

    asyncio.run(take())


def test_names_of_keys_stay_when_others_go() -> None:
    both, [left] = (read_keys(ServerConfig(api_key=keys)) for keys in (("first", "second"), ("second",)))
    assert both[1] == left
    assert both[0].name != left.name
    assert "second" not in left.name


@pytest.mark.parametrize(
    "line", ["a:", ":a", "a/b:c", "a per_minute=99999999999", "a admins=1", "a admin=2", "a concurrent=1 concurrent=2"]
)
def test_lines_that_are_no_key(line: str) -> None:
    with pytest.raises(ConfigError, match=r"not of the form|no limit of a key"):
        read_keys(ServerConfig(api_key=(line,)))
