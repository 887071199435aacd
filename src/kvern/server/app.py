"""The HTTP application: its routes and its error handlers."""

import time
from collections.abc import Awaitable, Callable, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvern.api.completions import CHAT, COMPLETIONS
from kvern.api.embeddings import EMBEDDINGS
from kvern.api.errors import HttpError
from kvern.api.messages import COUNT_TOKENS, MESSAGES, model_entry, models_page
from kvern.api.rerank import RERANK
from kvern.api.scores import SCORE
from kvern.errors import KvernError
from kvern.observe.metrics import together
from kvern.server.chat_page import page_routes
from kvern.server.config import ServerConfig
from kvern.server.gate import Gate
from kvern.server.handlers.adapters import AdaptersApi
from kvern.server.handlers.batches import Batches
from kvern.server.handlers.completions import Completions
from kvern.server.handlers.conversations import Conversations
from kvern.server.handlers.embeddings import Embeddings
from kvern.server.handlers.engines import EnginesApi
from kvern.server.handlers.files import Files
from kvern.server.handlers.messages import MessagesApi
from kvern.server.handlers.ollama import OllamaApi
from kvern.server.handlers.relevance import Relevance
from kvern.server.handlers.rerank import Rerank
from kvern.server.handlers.responses import Responses
from kvern.server.handlers.scores import Scores
from kvern.server.handlers.tokens import Tokens
from kvern.server.http import CLIENT_GONE, PAGE_HEADERS, error_response, is_anthropic, json_response, path_of
from kvern.server.keys import ApiKey
from kvern.server.openapi.document import document
from kvern.server.openapi.page import page
from kvern.server.openapi.schemas import Schema
from kvern.server.service import Service
from kvern.server.signposts import Signposts, by_all_names
from kvern.server.stores.database import DataFolder, default_folder
from kvern.server.stores.files import Store
from kvern.server.stores.responses import ResponseStore
from kvern.serving.client import EngineClient
from kvern.version import __version__

METRICS_ROUTES = ("/metrics", "/load", "/ready", "/version", "/health", "/ping")
"""Routes that a key with metrics=1 may read."""
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Server:
    """Handlers that belong to no single API, and the engines, one for each model."""

    def __init__(
        self,
        clients: Sequence[EngineClient],
        config: ServerConfig,
        keys: Sequence[ApiKey] = (),
        figures_of_all: Callable[[], Awaitable[bytes]] | None = None,
    ) -> None:
        """`figures_of_all` returns the text of /metrics where several server processes share engines that another
        process adds and removes; None: `figures` returns it."""
        self._keys = keys
        self._figures_of_all = figures_of_all
        self.service = Service(clients, config, keys)
        self.completions = Completions(self.service)
        self.embeddings = Embeddings(self.service)
        relevance = Relevance(self.service)
        self.scores, self.rerank = Scores(self.service, relevance), Rerank(self.service, relevance)
        self._folder = DataFolder(config.data_dir or default_folder(), config.disk_reserve)
        self.store = Store(self._folder, config.disk_per_key)
        kept = ResponseStore(self._folder, len(self.service.users), config.disk_per_key)
        self.responses, self.conversations = Responses(self.service, kept), Conversations(kept.conversations)
        answerers = {path: self.completions.answerer(path) for path in (CHAT, COMPLETIONS)}
        answerers |= {EMBEDDINGS: self.embeddings.answer, SCORE: self.scores.answer, RERANK: self.rerank.answer}
        width = sum(client.max_batch_requests for client in clients)
        self.batches = Batches(self.store, self.service.users, answerers, width)
        self.started = int(time.time())

    def app(self) -> ASGIApp:
        """Returns the ASGI application. If there are keys, every route but /health and /ping needs one of them."""
        responses, batches = self.responses, self.batches
        claude, files = MessagesApi(self.service), Files(self.store)
        tokens = Tokens(self.service)
        routes = [
            Route("/health", self.health),
            Route("/ping", self.ping, methods=["GET", "POST"]),
            Route("/ready", self.ready),
            Route("/load", self.load),
            Route("/version", self.version),
            Route("/metrics", self.metrics),
            Route("/openapi.json", self.description),
            Route("/docs", self.documentation),
            Route("/tokenize", tokens.tokenize, methods=["POST"]),
            Route("/detokenize", tokens.detokenize, methods=["POST"]),
            Route("/v1/models", self.list_models),
            Route("/v1/models/{model:path}", self.model),
            *AdaptersApi(self.service).routes(),
            *(EnginesApi(self.service).routes() if self._figures_of_all is None else ()),
            Route(COMPLETIONS, self.completions.create, methods=["POST"]),
            Route(CHAT, self.completions.create, methods=["POST"]),
            Route(EMBEDDINGS, self.embeddings.create, methods=["POST"]),
            Route(SCORE, self.scores.create, methods=["POST"]),
            Route(RERANK, self.rerank.create, methods=["POST"]),
            Route("/v1/responses", responses.create, methods=["POST"]),
            Route("/v1/responses/{response_id}", responses.retrieve, methods=["GET"]),
            Route("/v1/responses/{response_id}", responses.delete, methods=["DELETE"]),
            Route("/v1/responses/{response_id}/cancel", responses.cancel, methods=["POST"]),
            Route("/v1/responses/{response_id}/input_items", responses.input_items, methods=["GET"]),
            *self.conversations.routes(),
            Route(MESSAGES, claude.create, methods=["POST"]),
            Route(COUNT_TOKENS, claude.count_tokens, methods=["POST"]),
            Route("/v1/files", files.create, methods=["POST"]),
            Route("/v1/files", files.list, methods=["GET"]),
            Route("/v1/files/{file_id}", files.retrieve, methods=["GET"]),
            Route("/v1/files/{file_id}", files.delete, methods=["DELETE"]),
            Route("/v1/files/{file_id}/content", files.content, methods=["GET"]),
            Route("/v1/batches", batches.create, methods=["POST"]),
            Route("/v1/batches", batches.list, methods=["GET"]),
            Route("/v1/batches/{batch_id}", batches.retrieve, methods=["GET"]),
            Route("/v1/batches/{batch_id}/cancel", batches.cancel, methods=["POST"]),
            *OllamaApi(self.service).routes(),
            *page_routes(),
        ]
        handled = {
            HttpError: _failed,
            KvernError: _failed,
            HTTPException: Signposts(routes).refused,
            ClientDisconnect: _gone,
            RecursionError: _nested,
            Exception: _broken,
        }
        app = Starlette(routes=routes, exception_handlers=handled)
        return by_all_names(Gate(_walled(app), self._keys, self.service.users, self.service.config), routes)

    async def stop(self) -> None:
        """Ends background work and releases the data folder."""
        await self.responses.stop()
        await self.batches.stop()
        self._folder.leave()

    async def health(self, request: Request) -> Response:
        """GET /health: the process lives."""
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """GET /ready: every model has an engine that takes requests."""
        trouble, several = self.service.trouble, self.service.replicas
        told = {"engines": several} if several else {}
        if trouble is None:
            return json_response({"ready": True, **told})
        return json_response({"ready": False, "reason": trouble, **told}, 503)

    async def ping(self, request: Request) -> Response:
        """GET or POST /ping: as /ready, for clients without a key, without the reason."""
        return Response(status_code=503 if self.service.trouble else 200, media_type="text/plain")

    async def load(self, request: Request) -> Response:
        """GET /load: the number of requests in the server, for load balancers."""
        self._check_watcher(request)
        return json_response({"server_load": self.service.load})

    async def version(self, request: Request) -> Response:
        """GET /version: the version of kvern."""
        return json_response({"version": __version__})

    async def metrics(self, request: Request) -> Response:
        """GET /metrics: metrics in Prometheus's text format."""
        self._check_watcher(request)
        text = self.figures() if self._figures_of_all is None else await self._figures_of_all()
        return Response(text, headers={"content-type": METRICS_TYPE})

    def figures(self) -> bytes:
        """Returns the metrics of this process in Prometheus's text format."""
        return together([figures for engine in self.service.engines for figures in engine.client.metrics])

    def _check_watcher(self, request: Request) -> None:
        """Refuses keys that may not read metrics of several keys: they need admin=1 or metrics=1. Raises HttpError."""
        key: ApiKey = request.state.key
        if len(self.service.users) > 1 and not (key.admin or key.metrics):
            message = "the metrics tell what other keys do: read them with an API key with metrics=1 or admin=1"
            raise HttpError(403, message, code="permission_denied")

    async def description(self, request: Request) -> Response:
        """GET /openapi.json: the API as an OpenAPI document."""
        return json_response(self._described())

    async def documentation(self, request: Request) -> Response:
        """GET /docs: the OpenAPI document as a page."""
        return HTMLResponse(page(self._described()), headers=PAGE_HEADERS)

    def _described(self) -> Schema:
        vocab_size = max(engine.client.inputs.vocab_size for engine in self.service.engines)
        return document(self.service.names, vocab_size, bool(self._keys))

    async def list_models(self, request: Request) -> Response:
        """GET /v1/models: the names that `model` may have."""
        engines = self.service.engines
        if is_anthropic(request.scope):
            lengths = {name: engine.client.inputs.max_model_len for engine in engines for name in engine.names}
            return json_response(models_page(lengths, self.started))
        entries = [engine.entry(name, self.started) for engine in engines for name in engine.names]
        return json_response({"object": "list", "data": entries})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{model}: one of these names."""
        name = request.path_params["model"]
        engine = self.service.engine_of(name)
        if is_anthropic(request.scope):
            return json_response(model_entry(name, engine.client.inputs.max_model_len, self.started))
        return json_response(engine.entry(name, self.started))


def _walled(app: ASGIApp) -> ASGIApp:
    """Refuses keys with metrics=1 on every route but those of metrics."""

    async def walled(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["state"]["key"].metrics and path_of(scope) not in METRICS_ROUTES:
            message = f"an API key with metrics=1 may only read {', '.join(METRICS_ROUTES)}: use another"
            refusal = error_response(HttpError(403, message, code="permission_denied"), scope)
            await refusal(scope, receive, send)
        else:
            await app(scope, receive, send)

    return walled


async def _failed(request: Request, error: Exception) -> Response:
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
