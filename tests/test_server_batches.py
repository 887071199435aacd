"""Files and batches of the API: official client, real files, restarts, a disk that is full."""

import contextlib
import json
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from kvern import LLM, SamplingParams
from tests.test_server import KEY, Served, eventually

CHAT = "/v1/chat/completions"
ARGUMENTS = (
    "kvern-1m",
    "--threads",
    "1",
    "--max-model-len",
    "512",
    "--dtype",
    "float32",
    "--api-key",
    KEY,
    f"other:{KEY}-2",
)


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Served]:
    served = Served(*ARGUMENTS, "--data-dir", str(folder))
    try:
        yield served
    finally:
        if served.process.poll() is None:
            served.stop()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("data")) as served:
        yield served


def rows(count: int, **body: Any) -> bytes:
    made = [
        {
            "custom_id": f"row-{number}",
            "method": "POST",
            "url": CHAT,
            "body": {"messages": [{"role": "user", "content": f"What is {number} + 1?"}], "temperature": 0, **body},
        }
        for number in range(count)
    ]
    return "\n".join(map(json.dumps, made)).encode()


def begin(client: openai.OpenAI, content: bytes) -> Any:
    file = client.files.create(file=("rows.jsonl", content), purpose="batch")
    assert (file.bytes, client.files.content(file.id).read()) == (len(content), content)
    return client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")


def ended(client: openai.OpenAI, batch_id: str) -> Any:
    eventually(lambda: client.batches.retrieve(batch_id).status in ("completed", "failed", "cancelled"), 60)
    return client.batches.retrieve(batch_id)


def answers(client: openai.OpenAI, file_id: str) -> dict[str, Any]:
    lines = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines), "an answer is there twice"
    return {line["custom_id"]: line["response"] for line in lines}


def test_a_batch_answers_what_the_route_answers(server: Served) -> None:
    client = server.client()
    content = (
        rows(20, max_tokens=8) + b'\n{"custom_id": "bad", "method": "POST", "url": "/v1/chat/completions", "body": {}}'
    )
    batch = ended(client, begin(client, content).id)
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 20, 1)
    with LLM("kvern-1m", threads=1, dtype="float32", max_model_len=512) as llm:
        conversations = [[{"role": "user", "content": f"What is {number} + 1?"}] for number in range(20)]
        expected = [
            output.outputs[0].text for output in llm.chat(conversations, SamplingParams(temperature=0, max_tokens=8))
        ]
    given = answers(client, batch.output_file_id)
    texts = [given[f"row-{number}"]["body"]["choices"][0]["message"]["content"] for number in range(20)]
    assert texts == expected
    [(name, refused)] = answers(client, batch.error_file_id).items()
    assert (name, refused["status_code"]) == ("bad", 400)
    assert "messages" in refused["body"]["error"]["message"]
    listed = client.batches.list(limit=1)
    assert [item.id for item in listed.data] == [batch.id]
    assert {item.id for item in client.files.list(purpose="batch")} == {batch.input_file_id}
    stranger = server.client(f"{KEY}-2")
    for look in (lambda: stranger.batches.retrieve(batch.id), lambda: stranger.files.content(batch.output_file_id)):
        with pytest.raises(openai.NotFoundError):
            look()
    client.files.delete(batch.input_file_id)
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(batch.input_file_id)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no request"),
        (b"{", "not valid JSON"),
        (b'{"custom_id": "a"}', "custom_id, a text, and body"),
        (rows(1) + b"\n" + rows(1), "is there twice"),
        (rows(1).replace(b"chat/", b""), "method and url are"),
        (rows(1, stream=True), "no streams"),
    ],
    ids=range(6),
)
def test_a_file_that_cannot_be_a_batch(server: Served, content: bytes, said: str) -> None:
    client = server.client()
    batch = ended(client, begin(client, content).id)
    assert batch.status == "failed"
    assert said in batch.errors.data[0].message


def test_bad_uploads_and_batches(server: Served) -> None:
    client = server.client()
    with pytest.raises(openai.BadRequestError, match="purpose is 'art'"):
        client.files.create(file=("a", b"a"), purpose="art")  # type: ignore[arg-type]
    assert server.raw("POST", "/v1/files", b"nothing")[0] == 400
    with pytest.raises(openai.NotFoundError, match="there is no file"):
        client.batches.create(input_file_id="file-1", endpoint=CHAT, completion_window="24h")
    with pytest.raises(openai.BadRequestError, match="endpoint is"):
        client.batches.create(input_file_id="x", endpoint="/v1/moderations", completion_window="24h")


def test_a_batch_that_is_cancelled_keeps_its_answers(server: Served) -> None:
    client = server.client()
    batch = begin(client, rows(600, max_tokens=60, ignore_eos=True))
    eventually(lambda: client.batches.retrieve(batch.id).request_counts.completed > 0)
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = ended(client, batch.id)
    assert batch.status == "cancelled"
    assert 0 < batch.request_counts.completed < 600
    assert len(answers(client, batch.output_file_id)) == batch.request_counts.completed


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_batch_survives_its_server(tmp_path: Path, how: int) -> None:
    with serving(tmp_path) as served:
        client = served.client()
        batch = begin(client, rows(300, max_tokens=60, ignore_eos=True))
        eventually(lambda: client.batches.retrieve(batch.id).request_counts.completed > 20)
        served.stop(how)
    with serving(tmp_path) as served:
        client = served.client()
        batch = ended(client, batch.id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 300)
        assert set(answers(client, batch.output_file_id)) == {f"row-{number}" for number in range(300)}


def test_a_full_disk_fails_the_batch_alone(tmp_path: Path) -> None:
    """The limit on the size of the server's files stands for the disk's end: every write beyond it fails."""
    with serving(tmp_path) as served:
        client = served.client()
        batch = begin(client, rows(300, max_tokens=60, ignore_eos=True))
        eventually(lambda: client.batches.retrieve(batch.id).request_counts.completed > 20)
        before = resource.prlimit(served.process.pid, resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
        batch = ended(client, batch.id)
        assert batch.status == "failed"
        assert "cannot store this" in batch.errors.data[0].message
        with pytest.raises(openai.APIStatusError, match="cannot store this") as full:
            client.files.create(file=("rows.jsonl", b"a" * (1 << 21)), purpose="batch")
        assert full.value.status_code == 507
        assert client.completions.create(model="kvern-1m", prompt="Once", max_tokens=2).usage.completion_tokens == 2
        resource.prlimit(served.process.pid, resource.RLIMIT_FSIZE, before)
        again = ended(client, begin(client, rows(3, max_tokens=4)).id)
        assert again.status == "completed"
        assert not [path for path in os.listdir(tmp_path / "files") if path.endswith("_errors")]
