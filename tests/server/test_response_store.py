"""What is kept of responses and conversations on disk and in memory, and its limits."""

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvern.api.errors import HttpError
from kvern.server.stores.database import DataFolder
from kvern.server.stores.response_memory import (
    MOST_RESPONSE_BYTES,
    MOST_STORED,
    MOST_STORED_BYTES,
    EventLog,
    Packed,
    Record,
    ResponseMemory,
    as_json,
    events_of,
)
from kvern.server.stores.responses import MOST_CONVERSATIONS, ResponseStore


def record(owner: str, name: str, size: int = 0) -> Record:
    body = {"id": name, "status": "in_progress", "background": False, "output": [], "metadata": {"a": "a" * size}}
    return Record(owner, body, as_json([]), as_json([]))


def test_what_runs_is_not_forgotten() -> None:
    most = MOST_STORED_BYTES // 2
    memory = ResponseMemory(most)
    with pytest.raises(HttpError, match=f"and at most {MOST_RESPONSE_BYTES} are kept: send less, or store false"):
        memory.add(record("alice", "large", MOST_RESPONSE_BYTES))
    size, fit = MOST_RESPONSE_BYTES - 1024, most // MOST_RESPONSE_BYTES
    first, *others = [record("alice", str(number), size) for number in range(fit)]
    for one in (first, *others):
        memory.add(one)
    with pytest.raises(HttpError, match=f"alice has {fit} responses that run") as full:
        memory.add(record("alice", "more", size))
    assert full.value.status == 429
    memory.end(first, first.packed())
    assert isinstance(memory.find("alice", "0"), Packed)
    memory.add(record("alice", "more", size))
    assert memory.find("alice", "0") is None
    assert memory.find("alice", "1") is others[0]
    assert memory.find("bob", "1") is None


async def _kept(store: ResponseStore, one: Record) -> None:
    store.hold(one)
    one.body["status"] = "completed"
    await store.end(one)


def test_the_oldest_responses_on_disk_go_first(tmp_path: Path) -> None:
    quota = 8 * MOST_RESPONSE_BYTES

    async def fill() -> None:
        store = ResponseStore(DataFolder(tmp_path, 0), 2, quota)
        await _kept(store, record("bob", "bob's"))
        for number in range(MOST_STORED + 1):
            await _kept(store, record("alice", str(number)))
        for owner, name in (("alice", "1"), ("bob", "bob's")):
            found = await store.find(owner, name)
            assert isinstance(found, Packed) and msgspec.json.decode(found.body)["status"] == "completed"
        for number in range(8):
            await _kept(store, record("alice", f"large {number}", MOST_RESPONSE_BYTES - 1024))
        assert await store.find("alice", "large 0")
        for name in ("0", "900"):
            with pytest.raises(HttpError, match="there is no response"):
                await store.find("alice", name)
        await store.stop()

    asyncio.run(fill())


def test_a_response_that_has_outgrown_its_quota_is_forgotten_and_no_other(tmp_path: Path) -> None:
    async def fill() -> None:
        store = ResponseStore(DataFolder(tmp_path, 0), 1, 1 << 20)
        await _kept(store, record("alice", "first"))
        grown = record("alice", "grown")
        store.hold(grown)
        await store.begin(grown)
        grown.body |= {"status": "completed", "output": ["a" * (1 << 20)]}
        await store.end(grown)
        assert await store.find("alice", "first")
        with pytest.raises(HttpError, match="there is no response"):
            await store.find("alice", "grown")
        rows = await store._database.run(lambda database: database.execute("SELECT id FROM responses").fetchall())
        assert rows == [("first",)]
        await store.stop()

    asyncio.run(fill())


def test_what_a_full_disk_did_not_take_is_written_when_it_does(tmp_path: Path) -> None:
    def limit(pages: int) -> Callable[[sqlite3.Connection], object]:
        return lambda database: database.execute(f"PRAGMA max_page_count = {pages}")

    async def fill() -> None:
        first = DataFolder(tmp_path, 0)
        store = ResponseStore(first, 1, 1 << 30)
        begun = record("alice", "begun", 100)
        store.hold(begun)
        await store.begin(begun)
        await store._database.run(limit(1))  # what there is stays, and no more comes
        begun.body["metadata"]["a"] = "a" * 100_000
        begun.body["status"] = "completed"
        await store.end(begun)
        await _kept(store, record("alice", "new", 100_000))
        assert all(store._memory.find("alice", name) is not None for name in ("begun", "new"))
        await store._database.run(limit(1 << 20))
        await store.stop()
        store = ResponseStore(DataFolder(tmp_path, 0), 1, 1 << 30)
        with pytest.raises(HttpError, match="in use by another server"):
            await store.find("alice", "new")
        await store.stop()
        first.leave()

    async def look() -> None:
        store = ResponseStore(DataFolder(tmp_path, 0), 1, 1 << 30)
        for name in ("begun", "new"):
            found = await store.find("alice", name)
            assert isinstance(found, Packed) and msgspec.json.decode(found.body)["status"] == "completed"
        await store.stop()

    asyncio.run(fill())
    asyncio.run(look())


def test_conversations_have_limits(tmp_path: Path) -> None:
    async def fill() -> None:
        folder = DataFolder(tmp_path, 0)
        responses = ResponseStore(folder, 1, 3 * MOST_RESPONSE_BYTES // 2)
        store, large = responses.conversations, [{"id": "a", "text": "a" * (MOST_RESPONSE_BYTES - 1024)}]
        first = await store.create("alice", {}, large)
        with pytest.raises(HttpError, match="over its limit of"):
            await store.add("alice", first["id"], large)
        with pytest.raises(HttpError, match=r"bytes of conversations, and .* more do not fit: delete some"):
            await store.create("alice", {}, large)
        await store.create("bob", {}, large)
        for _ in range(MOST_CONVERSATIONS - 1):
            await store.create("alice", {}, [])
        with pytest.raises(HttpError, match=f"{MOST_CONVERSATIONS} conversations of {MOST_CONVERSATIONS}: delete some"):
            await store.create("alice", {}, [])
        await store.remove("alice", first["id"])
        await store.create("alice", {}, large)
        await responses.stop()

    asyncio.run(fill())


@pytest.mark.parametrize("kinds", [["text"], ["text", "summary"]])
def test_events_are_kept_small_and_told_to_whoever_follows(kinds: list[str]) -> None:
    response: dict[str, Any] = {"status": "in_progress", "output": []}
    deltas = [{"type": kinds[number % len(kinds)], "item_id": "a", "delta": str(number // 2)} for number in range(1000)]
    events = [
        ("response.created", {"type": "response.created", "response": response}),
        *((one["type"], one) for one in deltas),
    ]

    async def follow(log: EventLog, after: int) -> list[int]:
        return [event["sequence_number"] async for _, event in log.follow(after)]

    async def tell() -> None:
        log = EventLog(response)
        followers = [asyncio.create_task(follow(log, after)) for after in (-1, 500, 2000)]
        for event in events:
            log.add(event)
            await asyncio.sleep(0)
        response["status"] = "completed"
        log.add(("response.completed", {"type": "response.completed", "response": response}))
        assert not any(follower.done() for follower in followers)
        log.close()
        assert [await follower for follower in followers] == [list(range(1002)), list(range(501, 1002)), []]
        assert len(log.packed()) < 8 * len(deltas)
        told = [event async for event in log.follow(-1)]
        again = events_of(msgspec.json.encode(response), log.packed(), -1)
        assert told == [(kind, msgspec.json.decode(msgspec.json.encode(fields))) async for kind, fields in again]
        assert [event["response"]["status"] for _, event in (told[0], told[-1])] == ["in_progress", "completed"]
        assert told[500][1] == deltas[499] | {"sequence_number": 500}

    asyncio.run(tell())
