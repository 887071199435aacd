"""The HTTP application: its routes, and its errors with advice."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from kvern.api.errors import HttpError
from kvern.errors import KvernError, without_passwords
from kvern.plugins import imported
from kvern.server.apis import Apis
from kvern.server.config import ServerConfig
from kvern.server.gate import Gate
from kvern.server.http import CLIENT_GONE, PAGE_HEADERS, error_response, is_anthropic, json_response, loaded
from kvern.server.keys import ApiKey, KeyRing
from kvern.server.page_files import INDEX, page_files
from kvern.server.service import Service
from kvern.serving.client import EngineClient
from kvern.version import __version__

if TYPE_CHECKING:
    from kvern.residency.keeper import Keeper
    from kvern.server.signposts import Signposts

GREETING = "kvern is running: OpenAI's API is at /v1, Anthropic's at /v1/messages, ollama's at /api; /docs lists all\n"


def page_routes() -> list[Route]:
    """Returns the routes of `/` and of the files that it loads. `/` is the page for browsers and a line of text for
    other programs."""
    files = page_files()
    index = files.pop(INDEX)

    async def greet(request: Request) -> Response:
        if "text/html" in request.headers.get("accept", ""):
            return await index.answer(request)
        return PlainTextResponse(GREETING, headers={"Vary": "Accept"})

    return [Route("/", greet), *(Route(f"/{name}", file.answer) for name, file in files.items())]


SMALLEST_VOCABULARY = 256
"""The vocabulary that the API's description assumes before any of several models was awake."""
BATCH_ROWS = 256
"""Rows of batches that run at once on a server of several models."""
OF_ONE_SERVER = ("admin:EnginesApi", "weights:WeightsApi", "profile:ProfileApi")
"""Handlers that know the engines of one server process alone, of several that share the requests."""
STATES = ("model", "prefill_server", "ready", "reason")
"""The facts that every key may know of a prefill server; what it computed tells of other keys."""
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Server:
    """Handlers that belong to no single API, and the engines, one for each model."""

    def __init__(
        self,
        clients: Sequence[EngineClient],
        config: ServerConfig,
        keys: KeyRing,
        figures_of_all: Callable[[], Awaitable[bytes]] | None = None,
        keeper: "Keeper | None" = None,
    ) -> None:
        """`keeper` is that of several models, see `Service`.

        `figures_of_all` returns the text of /metrics where several server processes share engines that another
        process adds and removes; None: `figures` returns it."""
        self._figures_of_all = figures_of_all
        self.service = Service(clients, config, keys, keeper)
        width = sum(client.replicas.max_batch_requests for client in clients)
        self.apis = Apis(self.service, BATCH_ROWS if keeper is not None else width)
        self.started = int(time.time())

    def app(self) -> ASGIApp:
        """Returns the ASGI application. If there are keys, every route but /health and /ping needs one of them."""
        routes = [
            Route("/health", self.health),
            Route("/ping", self.ping, methods=["GET", "POST"]),
            Route("/ready", self.ready),
            Route("/load", self.load),
            Route("/version", self.version),
            Route("/metrics", self.metrics),
            Route("/openapi.json", self.description),
            Route("/docs", self.documentation),
            Route("/v1/engines", self.engines),
            Route("/v1/models", self.list_models),
            Route("/v1/models/{model:path}", self.model),
            *self.apis.routes(without=OF_ONE_SERVER if self._figures_of_all else ()),
            *page_routes(),
        ]
        handled = {
            HttpError: _failed,
            KvernError: _failed,
            HTTPException: _lost(routes),
            ClientDisconnect: _gone,
            RecursionError: _nested,
            Exception: _broken,
        }
        app = Starlette(routes=routes, exception_handlers=handled)
        return Gate(app, self.service, routes)

    def read_keys(self) -> str:
        """Reads the API keys again, and returns what has changed. Raises ConfigError, and then nothing has changed."""
        said = self.service.keys.read()
        self.service.know_keys()
        self.apis.keys_changed()
        return said

    async def stop(self) -> None:
        """Ends background work, releases the data folder, and tells of all requests that have ended."""
        await self.apis.stop()
        self.service.late.end()

    async def health(self, request: Request) -> Response:
        """GET /health: the process lives."""
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """GET /ready: every model has an engine that takes requests; else why not, and what it waits for."""
        trouble, service = self.service.trouble, self.service
        told = {
            "reason": trouble and without_passwords(" ".join(trouble.split())),
            "degraded": None if trouble else service.degraded,
            "waits_for": service.waits_for,
            "engines": service.replicas,
            "prefill_servers": [{name: one[name] for name in STATES if name in one} for one in service.prefill_servers],
        }
        known = {name: value for name, value in told.items() if value}
        return json_response({"ready": trouble is None, **known}, 503 if trouble else 200)

    async def ping(self, request: Request) -> Response:
        """GET or POST /ping: as /ready, for clients without a key, without the reason."""
        return Response(status_code=503 if self.service.trouble else 200, media_type="text/plain")

    async def load(self, request: Request) -> Response:
        """GET /load: the number of requests in the server, for load balancers."""
        self._check_watcher(request)
        return json_response({"server_load": self.service.load})

    async def engines(self, request: Request) -> Response:
        """GET /v1/engines: the state of each engine, with the verdict on its last seconds, and the CPU time."""
        self._check_watcher(request)
        seconds = time.process_time() if self._figures_of_all is None else None
        servers = {"prefill_servers": found} if (found := self.service.prefill_servers) else {}
        return json_response({"object": "list", "data": self.service.states(), **servers, "processor_seconds": seconds})

    async def version(self, request: Request) -> Response:
        """GET /version: the version of kvern."""
        return json_response({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        """GET /metrics: metrics in Prometheus's text format."""
        self._check_watcher(request)
        await loaded("kvern.observe.exposition")
        text = self.figures() if self._figures_of_all is None else await self._figures_of_all()
        return Response(text, headers={"content-type": METRICS_TYPE})

    def figures(self) -> bytes:
        """Returns the metrics of this process in Prometheus's text format."""
        metrics = (figures for engine in self.service.engines for figures in engine.client.metrics)
        keeper = self.service.keeper
        states = () if keeper is None else (resident.figures for resident in keeper.residents)
        used = {self.service.figures: None} | {engine.figures: None for engine in self.service.engines}
        traced = [] if self.service.tracing is None else [self.service.tracing.traces.figures]
        return bytes(imported("kvern.observe.exposition:engines_text")([*metrics, *states, *used, *traced]))

    def _check_watcher(self, request: Request) -> None:
        """Refuses keys that may not read metrics of several keys: they need admin=1 or metrics=1. Raises HttpError."""
        key: ApiKey = request.state.key
        if len(self.service.keys.users) > 1 and not (key.admin or key.metrics):
            message = "the metrics tell what other keys do: read them with an API key with metrics=1 or admin=1"
            raise HttpError(403, message)

    async def description(self, request: Request) -> Response:
        """The API as an OpenAPI document."""
        return json_response(await asyncio.to_thread(self._described))

    async def documentation(self, request: Request) -> Response:
        """GET /docs: the OpenAPI document as a page."""
        return HTMLResponse(await asyncio.to_thread(self._page), headers=PAGE_HEADERS)

    def _described(self) -> dict[str, Any]:
        from kvern.server.openapi import document

        sizes = [engine.client.inputs.vocab_size for engine in self.service.engines]
        vocab_size = max(sizes, default=SMALLEST_VOCABULARY)
        return document(self.service.names, vocab_size, bool(self.service.keys.known))

    def _page(self) -> str:
        from kvern.server.openapi_page import page

        return page(self._described())

    async def list_models(self, request: Request) -> Response:
        """GET /v1/models: the names that `model` may have."""
        entries = self.service.entries(self.started)
        if is_anthropic(request.scope):
            from kvern.api.messages import models_page

            lengths = {str(entry["id"]): entry.get("max_model_len") for entry in entries}
            return json_response(models_page(lengths, self.started))
        return json_response({"object": "list", "data": entries})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{model}: one of these names."""
        name = request.path_params["model"]
        entry = self.service.entry(name, self.started)
        if is_anthropic(request.scope):
            from kvern.api.messages import model_entry

            return json_response(model_entry(name, entry.get("max_model_len"), self.started))
        return json_response(entry)


def _lost(routes: Sequence[Route]) -> Callable[[Request, Exception], Awaitable[Response]]:
    """Answers what no route takes."""

    async def lost(request: Request, error: Exception) -> Response:
        await loaded("kvern.server.signposts", "kvern.server.error_answers")
        signposts: Signposts = imported("kvern.server.signposts:Signposts")(routes)
        return await signposts.refused(request, error)

    return lost


async def _failed(request: Request, error: Exception) -> Response:
    await loaded("kvern.server.error_answers")
    return error_response(error, request.scope)


async def _nested(request: Request, error: Exception) -> Response:
    """Answers a body that is nested too deeply: nothing else in the server recurses so far."""
    refused = HttpError(400, "the body is nested too deeply: use fewer levels")
    return error_response(refused, request.scope)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)


async def _broken(request: Request, error: Exception) -> Response:
    """Answers an error of the server itself. The log has its traceback, with the request's id."""
    message = f"the server has a fault; its log tells more under request id {request.state.request_id}"
    return error_response(HttpError(500, message), request.scope)
