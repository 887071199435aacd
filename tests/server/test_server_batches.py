"""Files and batches of the API: official client, real files, restarts, a disk that is full."""

import asyncio
import contextlib
import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from kvern import LLM, SamplingParams
from kvern.server.handlers.batches import Answerer, Batches
from kvern.server.keys import ApiKey
from kvern.server.stores.database import DataFolder
from kvern.server.stores.files import Store
from tests.support.served import KEY, PATIENCE, Served, eventually

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
def serving(folder: Path, *options: str) -> Iterator[Served]:
    served = Served(*ARGUMENTS, "--data-dir", str(folder), *options)
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
    eventually(lambda: client.batches.retrieve(batch_id).status in ("completed", "failed", "cancelled"))
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
    assert refused["body"]["error"]["param"] == "messages"
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


@pytest.mark.nightly
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_batch_survives_its_server(tmp_path: Path, how: int) -> None:
    with serving(tmp_path) as served:
        client = served.client()
        batch = begin(client, rows(150, max_tokens=60, ignore_eos=True))
        eventually(lambda: client.batches.retrieve(batch.id).request_counts.completed > 20)
        served.stop(how)
    with serving(tmp_path) as served:
        client = served.client()
        batch = ended(client, batch.id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 150)
        assert set(answers(client, batch.output_file_id)) == {f"row-{number}" for number in range(150)}


def pauses(client: openai.OpenAI, batch_id: str, why: str) -> bool:
    batch = client.batches.retrieve(batch_id)
    assert batch.status in ("validating", "in_progress")
    return why in ((batch.model_extra or {})["paused"] or "")


def complete(client: openai.OpenAI, batch_id: str, count: int) -> None:
    batch = ended(client, batch_id)
    assert (batch.status, batch.request_counts.completed, batch.errors) == ("completed", count, None)
    assert set(answers(client, batch.output_file_id)) == {f"row-{number}" for number in range(count)}


@pytest.mark.nightly
def test_a_batch_waits_while_the_disk_is_full(tmp_path: Path) -> None:
    """The limit on the size of the server's files stands for the disk's end: every write beyond it fails."""
    with serving(tmp_path) as served:
        client = served.client()
        batch = begin(client, rows(300, max_tokens=60, ignore_eos=True))
        eventually(lambda: client.batches.retrieve(batch.id).request_counts.completed > 20)
        before = resource.prlimit(served.process.pid, resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
        eventually(lambda: pauses(client, batch.id, "cannot store this"))
        with pytest.raises(openai.APIStatusError, match="cannot store this") as full:
            client.files.create(file=("rows.jsonl", b"a" * (1 << 21)), purpose="batch")
        assert full.value.status_code == 507
        assert client.completions.create(model="kvern-1m", prompt="Once", max_tokens=2).usage.completion_tokens == 2
        resource.prlimit(served.process.pid, resource.RLIMIT_FSIZE, before)
        complete(client, batch.id, 300)
        assert not [path for path in os.listdir(tmp_path / "files") if path.endswith("_errors")]


def upload_for_ever(client: openai.OpenAI, size: int, made: list[str]) -> None:
    while True:
        made.append(client.files.create(file=("a", b"a" * size), purpose="user_data").id)


@pytest.mark.nightly
def test_a_key_that_fills_the_disk_stops_no_batch_for_good(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("a file system can only be mounted by root")
    try:
        with serving(tmp_path, "--disk-reserve", "0") as served:
            client, other = served.client(), served.client(f"{KEY}-2")
            batch = begin(client, rows(400, max_tokens=60, ignore_eos=True))
            eventually(lambda: client.batches.retrieve(batch.id).request_counts.completed > 20)
            filled: list[str] = []
            for size in (1 << 17, 1 << 12):
                with pytest.raises(openai.APIStatusError, match=r"disk|space") as full:
                    upload_for_ever(other, size, filled)
                assert full.value.status_code == 507
            eventually(lambda: pauses(client, batch.id, "cannot store this"))
            for name in filled:
                other.files.delete(name)
            complete(client, batch.id, 400)
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True, capture_output=True)


@pytest.mark.nightly
def test_a_batch_waits_while_its_key_may_keep_no_more(tmp_path: Path) -> None:
    content = rows(100, max_tokens=20, ignore_eos=True)
    quota = len(content) * 3 // 2
    with serving(tmp_path, "--disk-per-key", str(quota), "--disk-reserve", "0") as served:
        client, other = served.client(), served.client(f"{KEY}-2")
        batch = begin(client, content)
        eventually(lambda: pauses(client, batch.id, f"of {quota}, and"))
        with pytest.raises(openai.APIStatusError, match="delete files") as full:
            client.files.create(file=("rows.jsonl", content), purpose="batch")
        assert full.value.status_code == 413
        file = other.files.create(file=("rows.jsonl", content), purpose="batch")
        for _ in range(2):  # what is deleted is room again
            other.files.delete(file.id)
            file = other.files.create(file=("rows.jsonl", content), purpose="batch")
        assert client.batches.cancel(batch.id).status == "cancelling"
        batch = ended(client, batch.id)
        assert 0 < batch.request_counts.completed == len(answers(client, batch.output_file_id)) < 100


@pytest.mark.nightly
def test_uploads_leave_the_reserve(tmp_path: Path) -> None:
    reserve = str(1 << 60)
    with serving(tmp_path, "--disk-reserve", reserve) as served:
        with pytest.raises(openai.APIStatusError, match=f"less than {reserve} of the server's disk") as full:
            served.client().files.create(file=("rows.jsonl", b"a"), purpose="batch")
        assert full.value.status_code == 507
        assert os.listdir(tmp_path / "files") == []


def work_of(folder: Path, answer: Answerer, content: bytes | None = None) -> list[Any]:
    """The lines of the errors of a batch, of five rows or this content, that is answered by this."""
    owner = "alice"

    async def work() -> list[Any]:
        store = Store(DataFolder(folder, 0), 1 << 30)
        key = ApiKey(owner, b"", per_minute=7)
        others = [ApiKey(str(number), b"") for number in range(3)]

        async def parts() -> AsyncIterator[bytes]:
            yield content or rows(5)

        file_id, _ = await store.write(owner, parts())
        body = {"id": "batch_1", "status": "validating", "endpoint": CHAT, "input_file_id": file_id}
        await store.save("batch", owner, {**body, "errors": None, "expires_at": time.time() + 60})
        batches = Batches(store, [key, *others], {CHAT: answer}, 2)
        await batches.resume()
        stands = batches._work["batch_1"]
        await asyncio.wait_for(stands.task, PATIENCE)
        assert (stands.body["status"], stands.key.per_minute) == ("completed", 7)
        lines = store.path(stands.body["error_file_id"]).read_text().splitlines()
        await batches.stop()
        return [json.loads(line) for line in lines]

    return asyncio.run(work())


def test_a_row_that_fails_in_an_unforeseen_way_fails_alone(tmp_path: Path) -> None:
    async def answer(body: dict[str, Any], key: ApiKey) -> dict[str, Any]:
        raise OverflowError("int too big to convert")

    responses = [line["response"] for line in work_of(tmp_path, answer)]
    assert [response["status_code"] for response in responses] == [500] * 5
    assert "fault" in responses[0]["body"]["error"]["message"] and "big" not in str(responses)


@pytest.mark.parametrize(("size", "together"), [(9 << 20, 1), (1 << 19, 2)])
def test_a_key_has_a_share_for_its_large_rows(tmp_path: Path, size: int, together: int) -> None:
    running: list[int] = []
    most = []

    async def answer(body: dict[str, Any], key: ApiKey) -> dict[str, Any]:
        running.append(len(body["pad"]))
        most.append(len(running))
        await asyncio.sleep(0.2)
        running.pop()
        raise OverflowError

    content = (
        rows(3, pad="a" * size)
        + b"\n"
        + rows(3).replace(b"row-", b"small-").replace(b'"body": {', b'"body": {"pad": "",')
    )
    assert len(work_of(tmp_path, answer, content)) == 6
    assert max(most[:3]) == together


def test_a_batch_whose_key_is_gone_waits_for_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def resume() -> list[str]:
        store = Store(DataFolder(tmp_path, 0), 1 << 20)
        await store.save("batch", "gone", {"id": "batch_1", "status": "in_progress", "endpoint": CHAT})
        batches = Batches(store, [ApiKey("here", b"")], {}, 2)
        await batches.resume()
        begun = list(batches._work)
        await batches.stop()
        return begun

    assert asyncio.run(resume()) == []
    assert "batch_1 waits for a server that has its API key, gone" in caplog.text
