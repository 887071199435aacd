"""The HTTP application: routes, keys, and what happens to errors."""

import asyncio
import hmac
import time
from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

import kvern
from kvern.batch.openai_format import CHAT, COMPLETIONS
from kvern.engine.client import EngineClient
from kvern.errors import EngineDied, InvalidParameter, InvalidRequest
from kvern.server import openai
from kvern.server.responses import (
    EventStream,
    HttpError,
    error_body,
    error_response,
    json_response,
    read_object,
    until_gone,
)

OPEN_ROUTES = ("/health",)
IGNORED_HEADER = "x-kvern-ignored-fields"
CLIENT_GONE = 499
"""What an access log shows for a client that left; nobody reads it."""


class Server:
    """The handlers of one engine."""

    def __init__(self, client: EngineClient, models: Sequence[str]) -> None:
        self.client = client
        self.models = list(models)
        self.started = int(time.time())

    def app(self, api_keys: Sequence[str] = ()) -> ASGIApp:
        """The ASGI application. With keys, every route but /health needs one of them."""
        routes = [
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/version", self.version),
            Route("/v1/models", self.list_models),
            Route(COMPLETIONS, self.completions, methods=["POST"]),
            Route(CHAT, self.completions, methods=["POST"]),
        ]
        errors = (HttpError, InvalidParameter, InvalidRequest, EngineDied)
        handled = {**dict.fromkeys(errors, _failed), HTTPException: _refused}
        app = Starlette(routes=routes, exception_handlers=handled)
        return KeyCheck(app, api_keys) if api_keys else app

    async def health(self, request: Request) -> Response:
        """The process lives."""
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """The engine takes requests."""
        ready = self.client.is_ready
        return json_response({"ready": ready}, 200 if ready else 503)

    async def version(self, request: Request) -> Response:
        """Which kvern this is."""
        return json_response({"version": kvern.__version__})

    async def list_models(self, request: Request) -> Response:
        """The names that `model` may have."""
        length = self.client.inputs.max_model_len
        models = [
            {"id": name, "object": "model", "created": self.started, "owned_by": "kvern", "max_model_len": length}
            for name in self.models
        ]
        return json_response({"object": "list", "data": models})

    async def completions(self, request: Request) -> Response | EventStream:
        """Both of OpenAI's completion routes, streamed or at once."""
        body = await read_object(request)
        call = await openai.read_call(body, request.url.path, self.client, self.models)
        headers = {IGNORED_HEADER: ", ".join(call.ignored)} if call.ignored else {}
        if call.stream:
            news = asyncio.Event()
            generations = await openai.submit(call, self.client, news)
            return EventStream(openai.events(call, self.client, generations, news), headers)
        content = await until_gone(openai.answer(call, self.client), request.receive)
        return Response(status_code=CLIENT_GONE) if content is None else json_response(content, headers=headers)


async def _failed(request: Request, error: Exception) -> Response:
    return error_response(error)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail.lower()}"
    return json_response(error_body(error.status_code, message), error.status_code, error.headers)


class KeyCheck:
    """Lets requests pass that carry one of the keys."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_ROUTES or self._knows(scope):
            await self._app(scope, receive, send)
            return
        message = "the API key is missing or unknown: send it as Authorization: Bearer KEY"
        await json_response(error_body(401, message, code="invalid_api_key"), 401)(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        header = dict(scope["headers"]).get(b"authorization", b"")
        kind, _, key = header.partition(b" ")
        matches = [hmac.compare_digest(key.strip(), known) for known in self._keys]  # all: time tells nothing
        return kind.lower() == b"bearer" and any(matches)
