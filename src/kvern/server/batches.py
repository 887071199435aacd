"""OpenAI's /v1/batches: files of requests, worked through beside the others, that survive a restart.

    in a batch's life: validating --> in_progress --> finalizing --> completed
                            |              |
                          failed    cancelling, expired, failed     (what was answered so far stays)

Each answer is appended to the output file when it is there. After a restart the rows that have one are left out.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvern.batch.openai_format import CHAT, COMPLETIONS
from kvern.errors import EngineDied, KvernError, shown
from kvern.server.bodies import MAX_BODY_BYTES, check_counts, decode_object, read_object
from kvern.server.files import OUTPUT, PART_BYTES, file_object, page_of
from kvern.server.http import HttpError, error_body, json_response, status_of
from kvern.server.keys import ApiKey
from kvern.server.service import typed
from kvern.server.store import Object, Store

logger = logging.getLogger("kvern")

Answerer = Callable[[dict[str, Any], ApiKey], Awaitable[dict[str, Any]]]
"""From the body of a request to the body of its answer."""

EMBEDDINGS = "/v1/embeddings"
SCORE = "/v1/score"
ENDPOINTS = (CHAT, COMPLETIONS, EMBEDDINGS, SCORE)
WINDOW_SECONDS = 24 * 3600
MOST_ROWS = 50_000
MOST_ERRORS = 100
"""Of a file that are told; the first ones are enough to mend it."""
RUNNING = ("validating", "in_progress", "finalizing", "cancelling")
COUNTED_EVERY = 1.0
"""Seconds after which the counts of a batch are written down."""


class Batches:
    """The handlers, and the work. `answerers` answer the requests of each endpoint; `width` rows run at once."""

    def __init__(self, store: Store, answerers: dict[str, Answerer], width: int) -> None:
        self._store = store
        self._answerers = answerers
        self._width = width
        self._work: dict[str, Work] = {}

    async def resume(self) -> None:
        """Go on with what an earlier server left."""
        if not self._store.exists:
            return
        try:
            batches = await self._store.all("batch")
        except HttpError as error:
            logger.warning("batches are not continued: %s", error)
            return
        for owner, body in batches:
            if body["status"] in RUNNING:
                self._begin(owner, body)

    async def stop(self) -> None:
        """Leave all work where it stands; a later server goes on."""
        for work in self._work.values():
            work.task.cancel()
        await asyncio.gather(*(work.task for work in self._work.values()), return_exceptions=True)
        self._store.close()

    async def create(self, request: Request) -> Response:
        """POST /v1/batches."""
        body = await read_object(request)
        owner = request.state.key.name
        endpoint, window = body.get("endpoint"), body.get("completion_window", "24h")
        if not isinstance(endpoint, str) or endpoint not in self._answerers:
            message = f"endpoint is {shown(endpoint)}: it must be one of {', '.join(self._answerers)}"
            raise HttpError(400, message, param="endpoint")
        if window != "24h":
            raise HttpError(400, f"completion_window is {window!r:.20}: it must be 24h", param="completion_window")
        source = await self._store.load("file", owner, typed(body, "input_file_id", str, ""))
        now = int(time.time())
        times = dict.fromkeys(f"{name}_at" for name in ("in_progress", "finalizing", "completed", "failed", "expired"))
        batch = {
            "id": f"batch_{uuid.uuid4().hex}",
            "object": "batch",
            "endpoint": endpoint,
            "errors": None,
            "input_file_id": source["id"],
            "completion_window": window,
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            "expires_at": now + WINDOW_SECONDS,
            **times,
            "cancelling_at": None,
            "cancelled_at": None,
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": typed(body, "metadata", dict, {}),
        }
        await self._store.save("batch", owner, batch)
        self._begin(owner, batch)
        return json_response(batch)

    async def list(self, request: Request) -> Response:
        """GET /v1/batches, the newest first, `limit` of them behind the one named `after`."""
        found = [self._now(body) for _, body in await self._store.all("batch", request.state.key.name)]
        return json_response(page_of(found, request))

    async def retrieve(self, request: Request) -> Response:
        """GET /v1/batches/{batch_id}."""
        return json_response(await self._find(request))

    async def cancel(self, request: Request) -> Response:
        """POST /v1/batches/{batch_id}/cancel."""
        body = await self._find(request)
        work = self._work.get(body["id"])
        if work is None or work.task.done():
            message = f"batch {body['id']} is {body['status']}: only one that runs can be cancelled"
            raise HttpError(400, message)
        work.cancel()
        return json_response(work.body)

    async def _find(self, request: Request) -> Object:
        body = await self._store.load("batch", request.state.key.name, request.path_params["batch_id"])
        return self._now(body)

    def _now(self, body: Object) -> Object:
        return self._work[body["id"]].body if body["id"] in self._work else body

    def _begin(self, owner: str, body: Object) -> None:
        work = Work(self._store, owner, body, self._answerers[body["endpoint"]], self._width)
        self._work[body["id"]] = work
        work.task.add_done_callback(lambda _: self._work.pop(body["id"]) if work.saved else None)


class Work:
    """One batch that runs; `body` is how it stands."""

    def __init__(self, store: Store, owner: str, body: Object, answer: Answerer, width: int) -> None:
        self.body = body
        self._store = store
        self._owner = owner
        self._key = ApiKey(f"{owner} batch", b"")  # its turns are not those of the requests that somebody waits for
        self._answer = answer
        self._width = width
        self.saved = False
        """The end is written down. If the disk did not take it, this object is all that knows of it."""
        self._cancelled = asyncio.Event()
        self._writing = asyncio.Lock()
        self._output = store.path(f"{body['id']}_output")
        self._errors = store.path(f"{body['id']}_errors")
        self.task = asyncio.create_task(self._run())

    def cancel(self) -> None:
        """End it, and keep what it has."""
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
            await self._save()
        except HttpError as error:
            await self._fail(error)
        except OSError as error:
            await self._fail(HttpError(507, f"the server cannot store this: {error.strerror or error}", code="storage"))

    async def _through(self) -> str:
        """Answer all rows; the state in which the batch ends."""
        path = self._store.path(self.body["input_file_id"])
        total, errors = await asyncio.to_thread(check_rows, path, self.body["endpoint"])
        if errors:
            self.body["errors"] = {"object": "list", "data": errors}
            return "failed"
        done = {name for file in (self._output, self._errors) for name in await asyncio.to_thread(answered, file)}
        failed = len(await asyncio.to_thread(answered, self._errors))
        self.body["request_counts"] = {"total": total, "completed": len(done) - failed, "failed": failed}
        if self.body["status"] == "cancelling":
            return "cancelled"
        self._enter("in_progress")
        await self._save()
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

    async def _worker(self, rows: Iterator[Object]) -> None:
        while (row := next(rows, None)) is not None:
            status, answer = await self._answer_row(row["body"])
            request_id = uuid.uuid4().hex
            response = {"status_code": status, "request_id": request_id, "body": answer}
            line = {"id": f"batch_req_{request_id}", "custom_id": row["custom_id"], "response": response, "error": None}
            path = self._output if status == 200 else self._errors
            written = asyncio.create_task(self._write(path, line, "completed" if status == 200 else "failed"))
            try:
                await asyncio.shield(written)
            except asyncio.CancelledError:
                await written  # what is in the file is counted
                raise

    async def _write(self, path: Path, line: Object, count: str) -> None:
        async with self._writing:
            await asyncio.to_thread(append, path, msgspec.json.encode(line) + b"\n")
            self.body["request_counts"][count] += 1

    async def _answer_row(self, body: dict[str, Any]) -> tuple[int, Object]:
        while True:
            try:
                return 200, await self._answer(dict(body), self._key)
            except HttpError as error:
                if error.status == 429 and error.headers is not None:
                    await asyncio.sleep(float(error.headers["retry-after"]))
                    continue
                return error.status, error_body(error.status, error.message, error.param, error.code)
            except EngineDied as error:
                if "closed" in str(error):
                    raise asyncio.CancelledError from error  # the server ends: the row is another's
                return 500, error_body(500, str(error))
            except KvernError as error:
                return status_of(error), error_body(status_of(error), str(error))

    async def _count(self) -> None:
        while True:
            await asyncio.sleep(COUNTED_EVERY)
            await self._save()

    async def _keep_files(self) -> None:
        """Give the files of answers and of errors their ids, if they hold something."""
        for path, name in ((self._output, "output"), (self._errors, "error")):
            if path.exists():
                file_id = f"file-{path.name}"
                size = path.stat().st_size
                path.rename(self._store.path(file_id))
                body = file_object(file_id, size, f"{self.body['id']}_{name}.jsonl", OUTPUT)
                await self._store.save("file", self._owner, body)
                self.body[f"{name}_file_id"] = file_id

    async def _fail(self, error: HttpError) -> None:
        logger.warning("batch %s failed: %s", self.body["id"], error)
        problem = {"code": error.code or "server_error", "line": None, "message": error.message, "param": error.param}
        self.body["errors"] = {"object": "list", "data": [problem]}
        self._enter("failed")
        with contextlib.suppress(HttpError):  # what cannot be written now is tried again by the next server
            await self._keep_files()
        with contextlib.suppress(HttpError):
            await self._save()

    def _enter(self, status: str) -> None:
        self.body["status"] = status
        self.body[f"{status}_at"] = self.body.get(f"{status}_at") or int(time.time())

    async def _save(self) -> None:
        await self._store.save("batch", self._owner, self.body)
        self.saved = self.body["status"] not in RUNNING


def check_rows(path: Path, endpoint: str) -> tuple[int, list[Object]]:
    """The number of rows of an input file, and what is wrong with them."""
    seen: set[str] = set()
    errors: list[Object] = []
    number = 0
    with path.open("rb") as file:
        for number, line in enumerate(lines_of(file), 1):
            message = row_error(line, endpoint, seen)
            if number > MOST_ROWS:
                message = f"the file has more than {MOST_ROWS} rows: split it"
            if message:
                errors.append({"code": "invalid_row", "line": number, "message": message, "param": None})
            if len(errors) == MOST_ERRORS or number > MOST_ROWS:
                break
    if not number:
        errors.append({"code": "empty_file", "line": None, "message": "the file holds no request", "param": None})
    return number, errors


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """The lines that hold something, of which no more is read than a row may have and one byte."""
    while line := file.readline(MAX_BODY_BYTES + 1):
        end = line
        while not end.endswith(b"\n") and (end := file.readline(PART_BYTES)):
            pass
        if line.strip():
            yield line


def row_error(line: bytes, endpoint: str, seen: set[str]) -> str | None:
    """What is wrong with a row; None if nothing. Its custom_id is added to `seen`."""
    if len(line) > MAX_BODY_BYTES:
        return f"the row has more than {MAX_BODY_BYTES} bytes: send less"
    try:
        row = decode_object(line)
        check_counts(row.get("body"))
    except HttpError as error:
        return str(error).replace("the body", "the row", 1)
    if not isinstance(row.get("custom_id"), str) or not isinstance(row.get("body"), dict):
        return "the row must be an object with custom_id, a text, and body, an object"
    if row.get("method", "POST") != "POST" or row.get("url") != endpoint:
        return (
            f"method and url are {row.get('method')!r:.20} and {row.get('url')!r:.60}: they must be POST and {endpoint}"
        )
    if row["custom_id"] in seen:
        return f"custom_id {row['custom_id']!r:.80} is there twice: make each different"
    if row["body"].get("stream"):
        return "stream is set: a batch has no streams"
    seen.add(row["custom_id"])
    return None


def iter_rows(path: Path, done: set[str]) -> Iterator[Object]:
    """The rows that have no answer yet."""
    with path.open("rb") as file:
        for line in lines_of(file):
            row = msgspec.json.decode(line)
            if row["custom_id"] not in done:
                yield row


def answered(path: Path) -> list[str]:
    """The custom_ids in a file of answers, whose last line is cut off if it is torn."""
    if not path.exists():
        return []
    names, size = [], 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            names.append(msgspec.json.decode(line)["custom_id"])
            size += len(line)
    with path.open("r+b") as file:
        file.truncate(size)
    return names


def append(path: Path, line: bytes) -> None:
    """Write a whole line, or nothing."""
    size = path.stat().st_size if path.exists() else 0
    try:
        with path.open("ab") as file:
            file.write(line)
    except OSError:
        with contextlib.suppress(OSError), path.open("r+b") as file:
            file.truncate(size)
        raise
