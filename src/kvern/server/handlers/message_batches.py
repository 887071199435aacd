"""Anthropic's /v1/messages/batches: the handlers. The work is that of OpenAI's batches, whose rows are messages.

A batch is stored as OpenAI's API shows it. Its requests are rows of the file with its own id; answers and errors stay
in the files to which they are written, as lines of the results.
"""

import asyncio
import datetime
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from kvern.api.error_bodies import anthropic_error
from kvern.api.errors import HttpError, wrong_value
from kvern.api.fields import typed
from kvern.api.messages import MESSAGES
from kvern.io.json_lines import json_line
from kvern.server.apis import Apis
from kvern.server.bodies import let_go, read_object
from kvern.server.handlers.batches import (
    ANTHROPIC,
    MOST_ROWS,
    RUNNING,
    Batches,
    RowId,
    answered,
    iter_rows,
    new_batch,
    row_error,
)
from kvern.server.handlers.files import ends_of, page_size, place_in
from kvern.server.http import json_response
from kvern.server.stores.files import Object, Store, paths_of_batch

JSON_LINES = "application/x-jsonl"
LEFT = {"cancelled": "canceled", "expired": "expired"}
"""The result of a request without an answer, by the status of its ended batch; for any other status it is an error."""


class MessageBatches:
    """The handlers."""

    def __init__(self, apis: Apis) -> None:
        self._store = apis.store
        self._batches = apis.get(Batches)

    async def create(self, request: Request) -> Response:
        """POST /v1/messages/batches."""
        body = await read_object(request)
        key = request.state.key
        lines = await asyncio.to_thread(read_requests, body)
        let_go(request, body)
        batch_id = f"msgbatch_{uuid.uuid4().hex}"
        batch = new_batch(batch_id, MESSAGES, batch_id, {})
        batch["request_counts"]["total"] = len(lines)
        await self._store.write(key.name, _each(lines), batch_id)
        try:
            await self._batches.begin(key, batch, ANTHROPIC)
        except BaseException:
            await self._store.remove(key.name, batch_id)
            raise
        return json_response(shown_batch(batch))

    async def list(self, request: Request) -> Response:
        """GET /v1/messages/batches: `limit` batches after `after_id` or before `before_id`, newest first."""
        found = [body for _, body in await self._store.all(ANTHROPIC.name, request.state.key.name)]
        limit, after, before = page_size(request), *map(request.query_params.get, ("after_id", "before_id"))
        if before is not None:
            found = found[: place_in(found, before, "before_id")]
            page = found[-limit:]
        else:
            found = found if after is None else found[place_in(found, after, "after_id") + 1 :]
            page = found[:limit]
        data = [shown_batch(self._batches.now(body)) for body in page]
        return json_response({"data": data, **ends_of(data), "has_more": len(found) > len(page)})

    async def retrieve(self, request: Request) -> Response:
        """GET /v1/messages/batches/{message_batch_id}."""
        return json_response(shown_batch(await self._find(request)))

    async def cancel(self, request: Request) -> Response:
        """POST /v1/messages/batches/{message_batch_id}/cancel."""
        return json_response(shown_batch(self._batches.end(await self._find(request))))

    async def delete(self, request: Request) -> Response:
        """DELETE /v1/messages/batches/{message_batch_id}."""
        body = await self._ended(request, "cancel it first, or wait until it has ended")
        await self._store.remove(request.state.key.name, body["id"])
        return json_response({"id": body["id"], "type": "message_batch_deleted"})

    async def results(self, request: Request) -> Response:
        """GET /v1/messages/batches/{message_batch_id}/results: a line for each request, in any order."""
        body = await self._ended(request, "its results come when it has ended")
        return StreamingResponse(result_lines(self._store, body), media_type=JSON_LINES)

    async def _find(self, request: Request) -> Object:
        name = request.path_params["message_batch_id"]
        return self._batches.now(await self._store.load(ANTHROPIC.name, request.state.key.name, name))

    async def _ended(self, request: Request, advice: str) -> Object:
        body = await self._find(request)
        if body["status"] in RUNNING:
            raise HttpError(400, f"batch {body['id']} is {shown_batch(body)['processing_status']}: {advice}")
        return body


def read_requests(body: dict[str, Any]) -> list[bytes]:
    """Returns the requests of a body as rows of a file. Raises HttpError."""
    requests = typed(body, "requests", list, [])
    if not 0 < len(requests) <= MOST_ROWS:
        raise wrong_value("requests", requests, f"a list of 1 to {MOST_ROWS} requests")
    lines, seen = [], set[str]()
    for number, asked in enumerate(requests):
        if not isinstance(asked, dict) or not isinstance(asked.get("params"), dict):
            raise wrong_value(f"requests[{number}]", asked, "an object with custom_id, and params, an object")
        row = {"custom_id": asked.get("custom_id"), "method": "POST", "url": MESSAGES, "body": asked["params"]}
        line = json_line(row)
        if (problem := row_error(line, MESSAGES, seen)) is not None:
            raise HttpError(400, f"requests[{number}]: {problem}", param="requests")
        lines.append(line + b"\n")
    return lines


def shown_batch(body: Object) -> Object:
    """Returns a batch as Anthropic's API shows it."""
    has_ended = body["status"] not in RUNNING
    done, failed, total = (body["request_counts"][name] for name in ("completed", "failed", "total"))
    left = total - done - failed
    counts = {"processing": 0 if has_ended else total, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0}
    if has_ended:
        counts |= {"succeeded": done, "errored": failed}
        counts[LEFT.get(body["status"], "errored")] += left
    canceling = body["cancelling_at"] is not None
    ended_at = body[f"{body['status']}_at"] if has_ended else None
    return {
        "id": body["id"],
        "type": "message_batch",
        "processing_status": "ended" if has_ended else "canceling" if canceling else "in_progress",
        "request_counts": counts,
        "created_at": _time(body["created_at"]),
        "expires_at": _time(body["expires_at"]),
        "cancel_initiated_at": _time(body["cancelling_at"]),
        "ended_at": _time(ended_at),
        "archived_at": None,
        "results_url": f"{MESSAGES}/batches/{body['id']}/results" if has_ended else None,
    }


def result_lines(store: Store, body: Object) -> Iterator[bytes]:
    """Yields a line for each request of a batch that has ended."""
    paths = [store.path(name) for name in paths_of_batch(body["id"])]
    done = {name for path in paths for name in answered(path)}
    for path in (path for path in paths if path.exists()):
        with path.open("rb") as file:
            yield from file
    result: Object = {"type": LEFT.get(body["status"], "errored")}
    if result["type"] == "errored":
        error = HttpError(500, body["errors"]["data"][0]["message"] if body["errors"] else "it was not answered")
        result["error"] = anthropic_error(error, body["id"])
    for row in iter_rows(store.path(body["id"]), done) if len(done) < body["request_counts"]["total"] else ():
        yield json_line({"custom_id": msgspec.json.decode(row, type=RowId).custom_id, "result": result}) + b"\n"


async def _each(lines: list[bytes]) -> AsyncIterator[bytes]:
    for line in lines:
        yield line


def _time(seconds: int | None) -> str | None:
    return None if seconds is None else datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()
