"""Anthropic's message batches by its own client: results, restarts, what is cancelled and what expires."""

import asyncio
import json
import signal
import sqlite3
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from kvern.server.handlers.batches import ANTHROPIC
from kvern.server.stores.database import DataFolder
from kvern.server.stores.files import Store
from tests.support.served import KEY, SMALL, Served, eventually, serving

MODEL: Any = "kvern-1m"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with serving(*SMALL, "--api-key", KEY, f"other:{KEY}-2", "--data-dir", str(folder)) as served:
        yield served


def client_of(server: Served, key: str = KEY) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url.removesuffix("/v1"), api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def claude(server: Served) -> Iterator[anthropic.Anthropic]:
    with client_of(server) as client:
        yield client


def params_of(number: int, **more: Any) -> Any:
    asked = {"model": MODEL, "max_tokens": 8, "temperature": 0}
    return {**asked, "messages": [{"role": "user", "content": f"What is {number} + 1?"}], **more}


def requests_of(count: int, **more: Any) -> Any:
    return [{"custom_id": f"row-{number}", "params": params_of(number, **more)} for number in range(count)]


def ended(claude: anthropic.Anthropic, batch_id: str) -> Any:
    eventually(lambda: claude.messages.batches.retrieve(batch_id).processing_status == "ended")
    return claude.messages.batches.retrieve(batch_id)


def results(claude: anthropic.Anthropic, batch_id: str) -> dict[str, Any]:
    found = list(claude.messages.batches.results(batch_id))
    assert len({line.custom_id for line in found}) == len(found), "a request has two results"
    return {line.custom_id: line.result for line in found}


def test_a_batch_answers_what_the_route_answers(claude: anthropic.Anthropic, server: Served, folder: Path) -> None:
    wrong = {"custom_id": "bad", "params": {"model": MODEL, "max_tokens": 8, "messages": []}}
    begun = claude.messages.batches.create(requests=[*requests_of(6), wrong])
    assert (begun.type, begun.results_url, begun.request_counts.processing) == ("message_batch", None, 7)
    batch = ended(claude, begun.id)
    assert batch.ended_at >= batch.created_at and (batch.expires_at - batch.created_at).total_seconds() == 86400
    assert batch.request_counts.model_dump() == {
        "processing": 0, "succeeded": 6, "errored": 1, "canceled": 0, "expired": 0
    }  # fmt: skip
    found = results(claude, batch.id)
    for number in range(6):
        asked = params_of(number)
        message = claude.messages.create(extra_body={"temperature": asked.pop("temperature")}, **asked)
        given = found[f"row-{number}"]
        assert given.type == "succeeded" and given.message.content == message.content
        assert (given.message.stop_reason, given.message.model) == (message.stop_reason, MODEL)
    assert found["bad"].type == "errored" and found["bad"].error.error.type == "invalid_request_error"
    assert "messages is missing" in found["bad"].error.error.message
    with client_of(server, f"{KEY}-2") as stranger:
        assert not stranger.messages.batches.list().data
        with pytest.raises(anthropic.NotFoundError, match="there is no message_batch"):
            stranger.messages.batches.retrieve(batch.id)
    other = server.client()
    assert not other.batches.list().data and not other.files.list().data, "they are no batches of OpenAI's"
    with pytest.raises(openai.BadRequestError, match="endpoint is '/v1/messages'"):
        other.batches.create(input_file_id="file-a", endpoint="/v1/messages", completion_window="24h")  # type: ignore[arg-type]
    assert claude.messages.batches.delete(batch.id).type == "message_batch_deleted"
    assert not list((folder / "files").glob(f"{batch.id}*"))
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.batches.retrieve(batch.id)


def test_batches_are_listed_in_pages(claude: anthropic.Anthropic) -> None:
    made = [ended(claude, claude.messages.batches.create(requests=requests_of(1)).id).id for _ in range(3)][::-1]
    assert [batch.id for batch in claude.messages.batches.list(limit=1)] == made, "its client turns the pages"
    assert [batch.id for batch in claude.messages.batches.list(limit=1, before_id=made[-1])] == made[1::-1]
    page = claude.messages.batches.list(limit=2)
    assert (page.has_more, page.first_id, page.last_id) == (True, made[0], made[1])
    with pytest.raises(anthropic.NotFoundError, match="there is no 'x' in the list"):
        claude.messages.batches.list(after_id="x")
    for batch_id in made:
        claude.messages.batches.delete(batch_id)


def test_what_is_cancelled(claude: anthropic.Anthropic, server: Served) -> None:
    with server.held():
        batch = claude.messages.batches.create(requests=requests_of(5))
        assert claude.messages.batches.retrieve(batch.id).processing_status == "in_progress"
        with pytest.raises(anthropic.BadRequestError, match="is in_progress: cancel it first"):
            claude.messages.batches.delete(batch.id)
        status, _, said = server.raw("GET", f"/v1/messages/batches/{batch.id}/results")
        assert (status, said["error"]["type"]) == (400, "invalid_request_error")
        eventually(lambda: claude.messages.batches.cancel(batch.id).cancel_initiated_at is not None)
        over = ended(claude, batch.id)
    assert (over.request_counts.canceled, over.request_counts.succeeded) == (5, 0)
    assert {result.type for result in results(claude, batch.id).values()} == {"canceled"}
    with pytest.raises(anthropic.BadRequestError, match="only one that runs can be cancelled"):
        claude.messages.batches.cancel(batch.id)


@pytest.mark.parametrize(
    ("requests", "said"),
    [
        ([], r"requests is \[\]: it must be a list of 1 to 50000 requests"),
        ([{"custom_id": "a"}], r"requests\[0\] is .*: it must be an object with custom_id, and params"),
        ([{"params": {}}], r"requests\[0\]: the row must be an object with custom_id"),
        (requests_of(1) * 2, r"requests\[1\]: custom_id 'row-0' is there twice"),
        (requests_of(1, stream=True), r"requests\[0\]: stream is set"),
    ],
    ids=range(5),
)
def test_requests_that_cannot_be_a_batch(claude: anthropic.Anthropic, requests: Any, said: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=said):
        claude.messages.batches.create(requests=requests)


@pytest.mark.nightly
def test_a_batch_goes_on_after_a_restart_until_it_expires(tmp_path: Path) -> None:
    arguments = (*SMALL, "--api-key", KEY, "--data-dir", str(tmp_path))
    with serving(*arguments) as served, client_of(served) as claude:
        done = claude.messages.batches.create(requests=requests_of(60, max_tokens=64)).id
        eventually(lambda: any((tmp_path / "files").glob(f"{done}_output")))
        with served.held():
            late = claude.messages.batches.create(requests=requests_of(3)).id
            served.stop(signal.SIGKILL)
    with sqlite3.connect(tmp_path / "kvern.db") as database:
        [text] = database.execute("SELECT body FROM objects WHERE id = ?", (late,)).fetchone()
        body = json.dumps({**json.loads(text), "expires_at": 1}).encode()
        database.execute("UPDATE objects SET body = ? WHERE id = ?", (body, late))
    database.close()
    with serving(*arguments) as served, client_of(served) as claude:
        assert ended(claude, done).request_counts.succeeded == 60 and len(results(claude, done)) == 60
        assert ended(claude, late).request_counts.expired == 3
        assert {result.type for result in results(claude, late).values()} == {"expired"}


def test_batches_that_are_too_old_to_be_listed_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvern.server.stores.files.MOST_LISTED", 1)

    async def content() -> AsyncIterator[bytes]:
        yield b"12345678"

    async def work() -> list[str]:
        store = Store(DataFolder(tmp_path, 0), 40)
        for number in range(9):  # more than the owner could keep of all
            await store.write("a", content(), f"msgbatch_{number}")
            await store.append("a", store.path(f"msgbatch_{number}_output"), b"12345678\n")
            await store.save(ANTHROPIC.name, "a", {"id": f"msgbatch_{number}"})
            await store.forget_old(ANTHROPIC.name, "a")
        store.close()
        return sorted(path.name for path in (tmp_path / "files").iterdir())

    assert asyncio.run(work()) == ["msgbatch_8", "msgbatch_8_output"]
