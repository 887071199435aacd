"""OpenAI's /v1/batches: the handlers, and the work of every batch: rows of a file, answered beside other requests.

    status: validating --> in_progress --> finalizing --> completed
                 |              |
               failed    cancelling, expired, failed     (answers so far are kept)

A batch survives a restart: each answer is appended to the output file at once, and rows that have an answer are skipped
then. While the disk is full, or the key's part of it, `paused` in the batch says so.
"""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextvars import Context
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvern.api.batch_rows import answer_row, message_row, read_row
from kvern.api.completions import CHAT, COMPLETIONS
from kvern.api.embeddings import EMBEDDINGS
from kvern.api.error_bodies import anthropic_error, as_sent, body_of, status_of
from kvern.api.errors import HttpError, wrong_value
from kvern.api.fields import read_metadata, typed
from kvern.api.messages import MESSAGES
from kvern.api.other_names import sent_names
from kvern.api.scores import SCORE
from kvern.api.text_pairs import RERANK
from kvern.errors import EngineClosed, EngineUnavailable, InvalidRequest, KvernError, ServerBusy, shown
from kvern.io.json_lines import BYTE_ORDER_MARK, json_line, read_json, wide_encoding
from kvern.server.apis import Apis
from kvern.server.bodies import MAX_BODY_BYTES, SMALL_BODY_BYTES, Lane, check_counts, decode_object, read_object
from kvern.server.handlers.completions import Completions
from kvern.server.handlers.files import OUTPUT, PART_BYTES, file_object, page_of
from kvern.server.handlers.messages import MessagesApi
from kvern.server.handlers.scores import Rerank, Scores
from kvern.server.handlers.whole_answers import Embeddings
from kvern.server.http import json_response, write_large
from kvern.server.keys import ApiKey
from kvern.server.service import Answerer
from kvern.server.stores.database import NoRoom
from kvern.server.stores.files import Object, Store, paths_of_batch

logger = logging.getLogger("kvern")


ENDPOINTS = (CHAT, COMPLETIONS, EMBEDDINGS, SCORE, RERANK)
WINDOW_SECONDS = 24 * 3600
MOST_ROWS = 50_000
MOST_ERRORS = 100
"""The number of errors that are reported for a file."""
RUNNING = ("validating", "in_progress", "finalizing", "cancelling")
COUNTED_EVERY = 1.0
"""Seconds between two saves of a batch's counts."""
PAUSE = 1.0
"""Seconds until a batch that found the disk full tries again."""

FAULT = "the server has a fault; its log tells more"


@dataclass(frozen=True)
class BatchKind:
    """The differences between the batches of two APIs."""

    name: str
    """The kind of their objects in the store."""
    row: Callable[[str, str, int, object], object]
    """Makes a line of an answer, from the row's id, the request's id, the status and the answer's body."""
    failed: Callable[[Exception, str], object]
    """Makes the body of an error, with the request's id."""
    keeps_files: bool
    """Answers become files of the API."""


OPENAI = BatchKind("batch", answer_row, lambda error, _: body_of(error), keeps_files=True)
ANTHROPIC = BatchKind("message_batch", message_row, anthropic_error, keeps_files=False)


class Work:
    """One running batch. `body` is the batch as OpenAI's API shows it."""

    def __init__(
        self,
        store: Store,
        key: ApiKey,
        body: Object,
        answer: Answerer,
        width: int,
        places: asyncio.Semaphore,
        lane: Lane,
    ) -> None:
        self.body = body
        self._kind = ANTHROPIC if body["endpoint"] == MESSAGES else OPENAI
        self.use(key, places)
        self._store = store
        self._answer = answer
        self._width = width
        self._lane = lane
        self._reading = asyncio.Lock()
        self.saved = False
        """True once the final state is on disk. Until then this object alone knows it."""
        self._cancelled = asyncio.Event()
        self._writing = asyncio.Lock()
        self._output, self._errors = (store.path(name) for name in paths_of_batch(body["id"]))
        self.task = asyncio.create_task(self._run(), context=Context())  # it outlives the request that began it

    def use(self, key: ApiKey, places: asyncio.Semaphore) -> None:
        """Asks with this key from the next row on."""
        self.key = dataclasses.replace(key, is_batch=True)
        self._places = places

    def cancel(self) -> None:
        """Ends the batch early; the answers so far are kept."""
        if self.body["status"] in ("validating", "in_progress"):
            self._enter("cancelling")
            self._cancelled.set()

    async def _run(self) -> None:
        try:
            end = await self._through()
            if end != "failed":
                self._enter("finalizing")
            await self._keep_files()
            self._enter(end)
            await self._until_room(self._save)
        except HttpError as error:
            await self._fail(error)
        except OSError as error:
            await self._fail(HttpError(507, f"the server cannot store this: {error.strerror or error}", code="storage"))
        except Exception:
            logger.exception("batch %s cannot go on", self.body["id"])
            await self._fail(HttpError(500, FAULT))

    async def _through(self) -> str:
        """Answers all rows. Returns the status in which the batch ends."""
        path = self._store.path(self.body["input_file_id"])
        total, errors = await asyncio.to_thread(check_rows, path, self.body["endpoint"])
        if errors:
            self.body["errors"] = {"object": "list", "data": errors}
            return "failed"
        self._take_back_files()
        done = {name for file in (self._output, self._errors) for name in await asyncio.to_thread(answered, file)}
        failed = len(await asyncio.to_thread(answered, self._errors))
        self.body["request_counts"] = {"total": total, "completed": len(done) - failed, "failed": failed}
        if self.body["status"] == "cancelling":
            return "cancelled"
        self._enter("in_progress")
        await self._until_room(self._save)
        rows = iter_rows(path, done)
        tasks = [asyncio.create_task(self._worker(rows)) for _ in range(min(self._width, total))]
        stopper, counter = asyncio.create_task(self._cancelled.wait()), asyncio.create_task(self._count())
        everything: asyncio.Future[Any] = asyncio.gather(*tasks)
        either: list[asyncio.Future[Any]] = [everything, stopper]
        left = max(0.0, self.body["expires_at"] - time.time())
        try:
            await asyncio.wait(either, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if everything.done():
                everything.result()
                return "completed"
            return "cancelled" if self._cancelled.is_set() else "expired"
        finally:
            for task in (*tasks, stopper, counter):
                task.cancel()
            await asyncio.gather(*tasks, stopper, counter, everything, return_exceptions=True)

    async def _worker(self, rows: Iterator[bytes]) -> None:
        while True:
            async with contextlib.AsyncExitStack() as held:
                async with self._reading:  # One row of the batch at a time waits for a place.
                    await held.enter_async_context(self._places)
                    row = await asyncio.to_thread(next, rows, b"")
                    if len(row) > SMALL_BODY_BYTES:
                        await held.enter_async_context(self._lane.room(self.key.name, len(row)))
                if not row:
                    return
                name = msgspec.json.decode(row, type=RowId).custom_id
                request_id = uuid.uuid4().hex
                status, answer = await self._answer_row(row, request_id)
                del row
            line = await write_large(functools.partial(self._kind.row, name, request_id, status, answer), json_line)
            del answer
            await self._until_room(functools.partial(self._write_whole, bytes(line) + b"\n", status == 200))

    async def _write_whole(self, line: bytes, is_answer: bool) -> None:
        written = asyncio.create_task(self._write(line, is_answer))
        try:
            await asyncio.shield(written)
        except asyncio.CancelledError:
            with contextlib.suppress(HttpError):
                await written  # what is in the file is counted
            raise

    async def _write(self, line: bytes, is_answer: bool) -> None:
        async with self._writing:
            await self._store.append(self.key.name, self._output if is_answer else self._errors, line)
            self.body["request_counts"]["completed" if is_answer else "failed"] += 1

    async def _until_room(self, write: Callable[[], Awaitable[None]]) -> None:
        """Writes as soon as the disk has room."""
        while True:
            try:
                await write()
            except NoRoom as error:
                if self.body.get("paused") is None:
                    logger.warning("batch %s pauses: %s", self.body["id"], error)
                self.body["paused"] = error.message
                await asyncio.sleep(PAUSE)
            else:
                self.body["paused"] = None
                return

    async def _answer_row(self, row: bytes, request_id: str) -> tuple[int, object]:
        while True:
            body = (await asyncio.to_thread(read_json, row))["body"]
            names = sent_names(body)  # read now, because the answerer empties the body
            try:
                return 200, await self._answer(body, self.key)
            except HttpError as error:
                if error.headers is not None and "retry-after" in error.headers:
                    await asyncio.sleep(float(error.headers["retry-after"]))
                    continue
                return error.status, self._kind.failed(as_sent(error, names), request_id)
            except EngineClosed as error:
                raise asyncio.CancelledError from error  # the server ends: the next server process answers the row
            except (EngineUnavailable, ServerBusy) as error:
                await asyncio.sleep(error.seconds)
            except KvernError as error:
                return status_of(error), self._kind.failed(as_sent(error, names), request_id)
            except Exception:
                logger.exception("a row of batch %s failed", self.body["id"])
                return 500, self._kind.failed(HttpError(500, FAULT), request_id)

    async def _count(self) -> None:
        while True:
            await asyncio.sleep(COUNTED_EVERY)
            with contextlib.suppress(NoRoom):
                await self._save()

    def _take_back_files(self) -> None:
        """Takes back the output files if an earlier server process stopped while it finished the batch."""
        for path in (self._output, self._errors):
            kept = self._store.path(f"file-{path.name}")
            if kept.exists():
                kept.rename(path)

    async def _keep_files(self) -> None:
        """Turns the files of answers and of errors into files of the API, unless they are empty."""
        for path, name in ((self._output, "output"), (self._errors, "error")):
            if self._kind.keeps_files and path.exists():
                file_id = f"file-{path.name}"
                size = path.stat().st_size
                path.rename(self._store.path(file_id))
                body = file_object(file_id, size, f"{self.body['id']}_{name}.jsonl", OUTPUT)
                await self._until_room(functools.partial(self._store.save, "file", self.key.name, body))
                self.body[f"{name}_file_id"] = file_id

    async def _fail(self, error: HttpError) -> None:
        logger.warning("batch %s failed: %s", self.body["id"], error)
        problem = {"code": error.code or "server_error", "line": None, "message": error.message, "param": error.param}
        self.body["errors"] = {"object": "list", "data": [problem]}
        self._enter("failed")
        for write in (self._keep_files, self._save):
            with contextlib.suppress(HttpError, OSError):  # the next server tries again
                await self._until_room(write)

    def _enter(self, status: str) -> None:
        self.body["status"] = status
        self.body[f"{status}_at"] = self.body.get(f"{status}_at") or int(time.time())

    async def _save(self) -> None:
        await self._store.save(self._kind.name, self.key.name, self.body)
        self.saved = self.body["status"] not in RUNNING


def check_rows(path: Path, endpoint: str) -> tuple[int, list[Object]]:
    """Returns the number of rows of an input file, and its errors."""
    seen: set[str] = set()
    errors: list[Object] = []
    number = 0
    with path.open("rb") as file:
        for number, line in enumerate(lines_of(file), 1):
            problem = wide_encoding(line) if number == 1 else None
            message = row_error(line, endpoint, seen) if problem is None else f"the file is wrong: {problem}"
            if number > MOST_ROWS:
                message = f"the file has more than {MOST_ROWS} rows: split it"
            if message:
                errors.append({"code": "invalid_row", "line": number, "message": message, "param": None})
            if problem is not None or len(errors) == MOST_ERRORS or number > MOST_ROWS:
                break
    if not number:
        errors.append({"code": "empty_file", "line": None, "message": "the file holds no request", "param": None})
    return number, errors


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """Yields the lines that are not blank. At most one byte more than the limit of a row is read of each."""
    while line := file.readline(MAX_BODY_BYTES + 1):
        end = line
        while not end.endswith(b"\n") and (end := file.readline(PART_BYTES)):
            pass
        line = line.removeprefix(BYTE_ORDER_MARK)
        if line.strip():
            yield line


def row_error(line: bytes, endpoint: str, seen: set[str]) -> str | None:
    """Returns what is wrong with a row, None if nothing is. Adds its custom_id to `seen`."""
    if len(line) > MAX_BODY_BYTES:
        return f"the row has more than {MAX_BODY_BYTES} bytes: send less"
    try:
        row = decode_object(line)
        check_counts(row.get("body"))
        asked = read_row(row, [endpoint])
    except HttpError as error:
        return str(error).replace("the body", "the row", 1)
    except InvalidRequest as error:
        return str(error)
    if asked.custom_id in seen:
        return f"custom_id {shown(asked.custom_id)} is there twice: make each different"
    if asked.body.get("stream"):
        return "stream is set: a batch has no streams"
    seen.add(asked.custom_id)
    return None


class RowId(msgspec.Struct):
    """The custom_id of a row or of an answer."""

    custom_id: str


def iter_rows(path: Path, done: set[str]) -> Iterator[bytes]:
    """Yields the rows whose custom_id is not in `done`."""
    with path.open("rb") as file:
        for line in lines_of(file):
            if not done or msgspec.json.decode(line, type=RowId).custom_id not in done:
                yield line


def answered(path: Path) -> list[str]:
    """Returns the custom_ids in a file of answers. Removes an incomplete last line from the file."""
    if not path.exists():
        return []
    names, size = [], 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            names.append(msgspec.json.decode(line, type=RowId).custom_id)
            size += len(line)
    with path.open("r+b") as file:
        file.truncate(size)
    return names


def new_batch(batch_id: str, endpoint: str, file_id: str, metadata: Object) -> Object:
    """Returns a batch that begins, as OpenAI's API shows it."""
    now = int(time.time())
    states = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    return {
        "id": batch_id,
        "object": "batch",
        "endpoint": endpoint,
        "errors": None,
        "input_file_id": file_id,
        "completion_window": "24h",
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now,
        "expires_at": now + WINDOW_SECONDS,
        **dict.fromkeys(f"{state}_at" for state in states),
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": metadata,
        "paused": None,
    }


MOST_UNFINISHED = 16
"""The limit of each key."""


class Batches:
    """Handlers of batches. `answerers` maps each endpoint to its answerer; at most `width` rows of a key run at once.

    Large rows share a `Lane` of their own, so that none of them waits for a body that a client is sending.
    """

    def __init__(self, store: Store, users: Sequence[ApiKey], answerers: dict[str, Answerer], width: int) -> None:
        self._store = store
        self._users = {key.name: key for key in users}
        self._places: dict[tuple[str, int], asyncio.Semaphore] = {}
        self._lane = Lane(len(users))
        self._beginning: Counter[str] = Counter()
        self._answerers = answerers
        self._width = width
        self._work: dict[str, Work] = {}

    @classmethod
    def for_server(cls, apis: Apis) -> "Batches":
        """The handlers of a server."""
        completions = apis.get(Completions)
        answerers = {path: completions.answerer(path) for path in (CHAT, COMPLETIONS)}
        for path, kind in ((EMBEDDINGS, Embeddings), (SCORE, Scores), (RERANK, Rerank)):
            answerers[path] = apis.get(kind).answer
        answerers[MESSAGES] = apis.get(MessagesApi).answer
        return cls(apis.store, apis.service.keys.users, answerers, apis.width)

    async def resume(self) -> None:
        """Continues the batches that an earlier server process left unfinished."""
        if not self._store.exists:
            return
        try:
            batches = [found for kind in (OPENAI, ANTHROPIC) for found in await self._store.all(kind.name)]
        except HttpError as error:
            logger.warning("batches are not continued: %s", error)
            return
        for owner, body in batches:
            if body["id"] in self._work:
                continue
            if body["status"] in RUNNING and owner in self._users:
                self._begin(self._users[owner], body)
            elif body["status"] in RUNNING:
                logger.warning("batch %s waits for a server that has its API key, %s", body["id"], owner)

    async def change_keys(self, users: Sequence[ApiKey]) -> None:
        """Goes on with other keys: batches of a key that is gone stay where they stand until it comes back."""
        self._users = {key.name: key for key in users}
        gone = [work for work in self._work.values() if work.key.name not in self._users and not work.task.done()]
        for work in gone:
            work.task.cancel()
        await asyncio.gather(*(work.task for work in gone), return_exceptions=True)
        for work in gone:
            self._work.pop(work.body["id"], None)
        for work in self._work.values():
            if work.key.name in self._users:
                work.use(self._users[work.key.name], self._places_of(self._users[work.key.name]))
        await self.resume()

    async def stop(self) -> None:
        """Stops all batches without ending them; a later server process continues them."""
        for work in self._work.values():
            work.task.cancel()
        await asyncio.gather(*(work.task for work in self._work.values()), return_exceptions=True)
        self._store.close()

    async def create(self, request: Request) -> Response:
        """POST /v1/batches."""
        body = await read_object(request)
        key: ApiKey = request.state.key
        endpoint, window = body.get("endpoint"), body.get("completion_window", "24h")
        endpoints = [path for path in self._answerers if path in ENDPOINTS]
        if endpoint not in endpoints:
            raise wrong_value("endpoint", endpoint, f"one of {', '.join(endpoints)}")
        if window != "24h":
            raise wrong_value("completion_window", window, "24h")
        source = await self._store.load("file", key.name, typed(body, "input_file_id", str, ""))
        batch = new_batch(f"batch_{uuid.uuid4().hex}", endpoint, source["id"], read_metadata(body))
        await self.begin(key, batch, OPENAI)
        return json_response(batch)

    async def list(self, request: Request) -> Response:
        """GET /v1/batches: a page of `limit` batches after the one named `after`, newest first."""
        found = [self.now(body) for _, body in await self._store.all("batch", request.state.key.name)]
        return json_response(page_of(found, request))

    async def retrieve(self, request: Request) -> Response:
        """GET /v1/batches/{batch_id}."""
        return json_response(await self._find(request))

    async def cancel(self, request: Request) -> Response:
        """POST /v1/batches/{batch_id}/cancel."""
        return json_response(self.end(await self._find(request)))

    async def _find(self, request: Request) -> Object:
        body = await self._store.load("batch", request.state.key.name, request.path_params["batch_id"])
        return self.now(body)

    async def begin(self, key: ApiKey, body: Object, kind: BatchKind) -> None:
        """Begins a new batch. Raises HttpError 429 if the key has too many that have not ended."""
        unfinished = sum(work.key.name == key.name for work in self._work.values()) + self._beginning[key.name]
        if unfinished >= MOST_UNFINISHED:
            message = f"key {key.name} has {unfinished} unfinished batches, and may have {MOST_UNFINISHED}"
            raise HttpError(429, f"{message}: wait until one ends", headers={"retry-after": "60"})
        self._beginning[key.name] += 1
        try:
            await self._store.save(kind.name, key.name, body)
            await self._store.forget_old(kind.name, key.name)
            self._begin(key, body)
        finally:
            self._beginning[key.name] -= 1

    def now(self, body: Object) -> Object:
        """Returns a batch of the store as it is at present."""
        return self._work[body["id"]].body if body["id"] in self._work else body

    def end(self, body: Object) -> Object:
        """Cancels a batch and returns it. Raises HttpError if it does not run."""
        work = self._work.get(body["id"])
        if work is None or work.task.done():
            message = f"batch {body['id']} is {body['status']}: only one that runs can be cancelled"
            raise HttpError(400, message)
        work.cancel()
        return work.body

    def _begin(self, key: ApiKey, body: Object) -> None:
        answer, places = self._answerers[body["endpoint"]], self._places_of(key)
        work = Work(self._store, key, body, answer, self._width, places, self._lane)
        self._work[body["id"]] = work
        work.task.add_done_callback(lambda _: self._work.pop(body["id"]) if work.saved else None)

    def _places_of(self, key: ApiKey) -> asyncio.Semaphore:
        """The places of all batches of a key, as many as it may have rows at once."""
        most = min(self._width, key.concurrent or self._width)
        return self._places.setdefault((key.name, most), asyncio.Semaphore(most))
