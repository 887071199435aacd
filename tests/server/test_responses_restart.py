"""What is kept of responses when the server ends, when the disk is full, and when it is another's."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from kvern.server.stores.database import DataFolder
from kvern.server.stores.response_memory import Packed
from kvern.server.stores.responses import ResponseStore
from tests.support.background_responses import FOLLOWED, LONG, SHORT, plain
from tests.support.served import SMALL, Served

Start = Callable[..., Served]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts servers with the same folder."""
    started: list[Served] = []

    def begin(*arguments: str, log: Path | None = None) -> Served:
        (tmp_path / "keys").write_text("alice:alice-key")
        options = ("--api-key-file", str(tmp_path / "keys"), "--data-dir", str(tmp_path / "data"))
        started.append(Served(*SMALL, *options, *arguments, log=log))
        return started[-1]

    yield begin
    for served in started:
        if served.process.returncode is None:
            served.stop(signal.SIGKILL)


def test_a_server_that_is_killed_forgets_no_response(start: Start, tmp_path: Path) -> None:
    before = start()
    client = before.client("alice-key")
    conversation = client.conversations.create(metadata={"a": "b"}).id
    first = client.responses.create(**SHORT, input="Once", conversation=conversation)
    client.responses.create(**SHORT, input="nobody may read this", store=False)
    followed = plain(client.responses.create(**SHORT, **FOLLOWED, input="Once"))
    with before.held():
        asked = {"stream": True}, FOLLOWED
        streams: list[Any] = [client.responses.create(**LONG, **options) for options in asked]
        cut = [next(iter(stream)).response.id for stream in streams]
        cut.append(client.responses.create(**LONG, background=True).id)
        before.stop(signal.SIGKILL)

    after = start()
    client = after.client("alice-key")
    assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
    assert plain(client.responses.retrieve(followed[0]["response"]["id"], stream=True)) == followed
    again = client.responses.create(**SHORT, input="Then", previous_response_id=first.id)
    assert again.output_text == client.responses.create(**SHORT, input="Then", conversation=conversation).output_text
    assert client.conversations.retrieve(conversation).metadata == {"a": "b"}
    for name in cut:
        failed = client.responses.retrieve(name)
        assert failed.status == "failed" and failed.error is not None and "server ended" in failed.error.message
    [told] = client.responses.retrieve(cut[1], stream=True, starting_after=17)
    assert (told.type, told.sequence_number) == ("response.failed", 18)
    assert all(b"nobody may read this" not in path.read_bytes() for path in (tmp_path / "data").iterdir())

    going = client.responses.create(**LONG, background=True).id
    after.stop()  # which waits for it
    last = start("--grace-seconds", "0", "--max-batch-requests", "1")
    client = last.client("alice-key")
    assert client.responses.retrieve(going).status == "incomplete"
    with last.held():
        going = [client.responses.create(**LONG, background=True).id for _ in range(10)][-1]  # nine are before it
        last.process.send_signal(signal.SIGTERM)
    last.close()
    ended = msgspec.json.decode(asyncio.run(_kept(tmp_path / "data", going)).body)
    assert ended["status"] == "failed" and "server ended" in ended["error"]["message"]


async def _kept(folder: Path, name: str) -> Packed:
    store = ResponseStore(DataFolder(folder, 0), 1, 1 << 30)
    found = await store.find("alice", name)
    await store.stop()
    assert isinstance(found, Packed)
    return found


@pytest.mark.nightly
def test_responses_are_answered_without_a_disk(start: Start, tmp_path: Path) -> None:
    """There is no room, then the folder is another server's: what the log says, and memory keeps them meanwhile."""
    log = tmp_path / "log"
    full = start("--disk-reserve", str(1 << 60), log=log)
    client = full.client("alice-key")
    _answers(client)
    with pytest.raises(openai.APIStatusError, match=r"less than .* of the server's disk free") as refused:
        client.conversations.create(items=[{"role": "user", "content": "a"}])
    assert refused.value.status_code == 507
    other_log = tmp_path / "other"
    other = start(log=other_log)
    _answers(other.client("alice-key"))
    full.stop()
    other.stop()
    assert log.read_text().count("responses stay in memory until the server ends: ") == 1
    assert "in use by another server" in other_log.read_text()


def _answers(client: openai.OpenAI) -> None:
    first = client.responses.create(**SHORT, input="Once")
    assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
    assert client.responses.create(**SHORT, input="Then", previous_response_id=first.id).status == "incomplete"
    events: list[Any] = list(client.responses.create(**SHORT, **FOLLOWED, input="Once"))
    assert plain(client.responses.retrieve(events[0].response.id, stream=True)) == plain(events)
    client.responses.delete(first.id)
    with pytest.raises(openai.APIStatusError):
        client.responses.retrieve(first.id)
