"""OpenAI's /v1/batches: the handlers."""

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from kvern.api.completions import CHAT, COMPLETIONS
from kvern.api.embeddings import EMBEDDINGS
from kvern.api.errors import HttpError
from kvern.api.fields import read_metadata, typed
from kvern.api.rerank import RERANK
from kvern.api.scores import SCORE
from kvern.errors import shown
from kvern.server.apis import Apis
from kvern.server.batches import RUNNING, WINDOW_SECONDS, Work
from kvern.server.bodies import Lane, read_object
from kvern.server.handlers.completions import Completions
from kvern.server.handlers.embeddings import Embeddings
from kvern.server.handlers.files import page_of
from kvern.server.handlers.rerank import Rerank
from kvern.server.handlers.scores import Scores
from kvern.server.http import json_response
from kvern.server.keys import ApiKey
from kvern.server.service import Answerer
from kvern.server.stores.files import Object, Store

logger = logging.getLogger("kvern")

MOST_UNFINISHED = 16
"""The limit of each key."""


class Batches:
    """Handlers of batches. `answerers` maps each endpoint to its answerer; at most `width` rows of a key run at once.

    Large rows share a `Lane` of their own, so that none of them waits for a body that a client is sending.
    """

    def __init__(self, store: Store, users: Sequence[ApiKey], answerers: dict[str, Answerer], width: int) -> None:
        self._store = store
        self._users = {key.name: key for key in users}
        self._places = {key.name: asyncio.Semaphore(min(width, key.concurrent or width)) for key in users}
        self._lane = Lane(len(users))
        self._beginning: Counter[str] = Counter()
        self._answerers = answerers
        self._width = width
        self._work: dict[str, Work] = {}

    @classmethod
    def for_server(cls, apis: Apis) -> "Batches":
        """The handlers of a server."""
        completions = apis.get(Completions)
        scores = apis.get(Scores)
        rerank = apis.get(Rerank)
        answerers = {path: completions.answerer(path) for path in (CHAT, COMPLETIONS)}
        answerers |= {EMBEDDINGS: apis.get(Embeddings).answer, SCORE: scores.answer, RERANK: rerank.answer}
        return cls(apis.store, apis.service.users, answerers, apis.width)

    async def resume(self) -> None:
        """Continues the batches that an earlier server process left unfinished."""
        if not self._store.exists:
            return
        try:
            batches = await self._store.all("batch")
        except HttpError as error:
            logger.warning("batches are not continued: %s", error)
            return
        for owner, body in batches:
            if body["status"] in RUNNING and owner in self._users:
                self._begin(self._users[owner], body)
            elif body["status"] in RUNNING:
                logger.warning("batch %s waits for a server that has its API key, %s", body["id"], owner)

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
        if not isinstance(endpoint, str) or endpoint not in self._answerers:
            message = f"endpoint is {shown(endpoint)}: it must be one of {', '.join(self._answerers)}"
            raise HttpError(400, message, param="endpoint")
        if window != "24h":
            raise HttpError(400, f"completion_window is {shown(window)}: it must be 24h", param="completion_window")
        source = await self._store.load("file", key.name, typed(body, "input_file_id", str, ""))
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
            "metadata": read_metadata(body),
            "paused": None,
        }
        await self._begin_new(key, batch)
        return json_response(batch)

    async def list(self, request: Request) -> Response:
        """GET /v1/batches: a page of `limit` batches after the one named `after`, newest first."""
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

    async def _begin_new(self, key: ApiKey, body: Object) -> None:
        unfinished = sum(work.key.name == key.name for work in self._work.values()) + self._beginning[key.name]
        if unfinished >= MOST_UNFINISHED:
            message = f"key {key.name} has {unfinished} unfinished batches, and may have {MOST_UNFINISHED}"
            headers = {"retry-after": "60"}
            raise HttpError(429, f"{message}: wait until one ends", code="rate_limit_exceeded", headers=headers)
        self._beginning[key.name] += 1
        try:
            await self._store.save("batch", key.name, body)
            await self._store.forget_old("batch", key.name)
            self._begin(key, body)
        finally:
            self._beginning[key.name] -= 1

    def _begin(self, key: ApiKey, body: Object) -> None:
        answer, places = self._answerers[body["endpoint"]], self._places[key.name]
        work = Work(self._store, key, body, answer, self._width, places, self._lane)
        self._work[body["id"]] = work
        work.task.add_done_callback(lambda _: self._work.pop(body["id"]) if work.saved else None)
