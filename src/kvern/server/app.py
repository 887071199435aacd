"""The HTTP application: which handler a route has, and what happens to errors."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

import kvern
from kvern.batch.chat_body import template_variables
from kvern.batch.openai_format import CHAT, COMPLETIONS
from kvern.engine.client import EngineClient
from kvern.errors import KvernError
from kvern.server import messages, openai, openapi
from kvern.server.adapters import Adapters
from kvern.server.batch_routes import Batches
from kvern.server.batches import EMBEDDINGS, SCORE, Answerer
from kvern.server.bodies import let_go, read_object
from kvern.server.chat_page import page_routes
from kvern.server.config import ServerConfig
from kvern.server.embeddings import Embeddings
from kvern.server.files import Files
from kvern.server.gate import Gate
from kvern.server.http import (
    EventStream,
    HttpError,
    error_body,
    ignored_header,
    json_response,
    path_of,
    until_gone,
)
from kvern.server.keys import ApiKey
from kvern.server.openapi_page import page
from kvern.server.responses import Responses
from kvern.server.scores import Scores
from kvern.server.service import Service, typed
from kvern.server.store import Store, default_folder

CLIENT_GONE = 499
"""What a log shows for a client that left; nobody reads it."""
MOST_DECODED = 1 << 17
"""Token ids to turn into text at once, where the model's context is shorter."""
METRICS_ROUTES = ("/metrics", "/ready", "/version", "/health")
"""What a key with metrics=1 may read."""
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Server:
    """The handlers of one engine."""

    def __init__(
        self, client: EngineClient, config: ServerConfig, models: Sequence[str], keys: Sequence[ApiKey] = ()
    ) -> None:
        self._keys = keys
        self.service = Service(client, config, models, keys)
        self.embeddings = Embeddings(self.service)
        self.store = Store(config.data_dir or default_folder(), config.disk_per_key, config.disk_reserve)
        answerers = {CHAT: self._answerer(CHAT), COMPLETIONS: self._answerer(COMPLETIONS)}
        self.scores = Scores(self.service)
        answerers |= {EMBEDDINGS: self.embeddings.answer, SCORE: self.scores.answer}
        self.batches = Batches(self.store, self.service.users, answerers, client.max_batch_requests)
        self.started = int(time.time())

    def app(self) -> ASGIApp:
        """The ASGI application. With keys, every route but /health needs one of them."""
        responses, claude, files, batches, adapters = (
            Responses(self.service),
            messages.MessagesApi(self.service),
            Files(self.store),
            self.batches,
            Adapters(self.service),
        )
        routes = [
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/version", self.version),
            Route("/metrics", self.metrics),
            Route("/openapi.json", self.description),
            Route("/docs", self.documentation),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/v1/models", self.list_models),
            Route("/v1/models/{model:path}", self.model),
            Route("/v1/load_lora_adapter", adapters.load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", adapters.unload, methods=["POST"]),
            Route(COMPLETIONS, self.completions, methods=["POST"]),
            Route(CHAT, self.completions, methods=["POST"]),
            Route(EMBEDDINGS, self.embeddings.create, methods=["POST"]),
            Route(SCORE, self.scores.create, methods=["POST"]),
            Route("/v1/responses", responses.create, methods=["POST"]),
            Route("/v1/responses/{response_id}", responses.retrieve, methods=["GET"]),
            Route("/v1/responses/{response_id}", responses.delete, methods=["DELETE"]),
            Route("/v1/responses/{response_id}/cancel", responses.cancel, methods=["POST"]),
            Route(messages.PATH, claude.create, methods=["POST"]),
            Route(messages.COUNT_PATH, claude.count_tokens, methods=["POST"]),
            Route("/v1/files", files.create, methods=["POST"]),
            Route("/v1/files", files.list, methods=["GET"]),
            Route("/v1/files/{file_id}", files.retrieve, methods=["GET"]),
            Route("/v1/files/{file_id}", files.delete, methods=["DELETE"]),
            Route("/v1/files/{file_id}/content", files.content, methods=["GET"]),
            Route("/v1/batches", batches.create, methods=["POST"]),
            Route("/v1/batches", batches.list, methods=["GET"]),
            Route("/v1/batches/{batch_id}", batches.retrieve, methods=["GET"]),
            Route("/v1/batches/{batch_id}/cancel", batches.cancel, methods=["POST"]),
            *page_routes(),
        ]
        handled = {
            HttpError: _failed,
            KvernError: _failed,
            HTTPException: _refused,
            ClientDisconnect: _gone,
            RecursionError: _nested,
            Exception: _broken,
        }
        app = Starlette(routes=routes, exception_handlers=handled)
        config = self.service.config
        return Gate(_walled(app), self._keys, self.service.users, config)

    async def health(self, request: Request) -> Response:
        """The process lives."""
        return json_response({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """The engine takes requests."""
        client = self.service.client
        if client.is_ready:
            return json_response({"ready": True})
        return json_response({"ready": False, "reason": str(client.trouble or "the engine is being replaced")}, 503)

    async def version(self, request: Request) -> Response:
        """Which kvern this is."""
        return json_response({"version": kvern.__version__})

    async def metrics(self, request: Request) -> Response:
        """Figures for Prometheus. Those of several keys are for a key of Prometheus's own, or an administrator's."""
        key: ApiKey = request.state.key
        if len(self.service.users) > 1 and not (key.admin or key.metrics):
            message = "the metrics tell what other keys do: read them with an API key with metrics=1 or admin=1"
            raise HttpError(403, message, code="permission_denied")
        return Response(self.service.client.metrics.text(), headers={"content-type": METRICS_TYPE})

    async def description(self, request: Request) -> Response:
        """The API as an OpenAPI document."""
        return json_response(self._described())

    async def documentation(self, request: Request) -> Response:
        """The same for readers."""
        headers = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'"}
        return HTMLResponse(page(self._described()), headers=headers)

    def _described(self) -> openapi.Schema:
        return openapi.document(self.service.names, self.service.client.inputs.vocab_size, bool(self._keys))

    async def list_models(self, request: Request) -> Response:
        """The names that `model` may have."""
        return json_response({"object": "list", "data": [self._model(name) for name in self.service.names]})

    async def model(self, request: Request) -> Response:
        """One of them."""
        return json_response(self._model(self.service.model({"model": request.path_params["model"]})))

    def _model(self, name: str) -> dict[str, object]:
        inputs = self.service.client.inputs
        sizes = {"max_model_len": inputs.max_model_len, "vocab_size": inputs.vocab_size}
        parent = {} if name in self.service.models else {"parent": self.service.models[0]}
        return {"id": name, "object": "model", "created": self.started, "owned_by": "kvern", **sizes, **parent}

    async def tokenize(self, request: Request) -> Response:
        """A text, or a conversation, as token ids."""
        body = await read_object(request)
        service = self.service
        service.model(body)
        with service.admission.enter(request.state.key):
            if "messages" in body:
                tools = typed(body, "tools", list, None)
                token_ids = await openai.conversation(body["messages"], tools, service, template_variables(body))
            else:
                special = typed(body, "add_special_tokens", bool, True)
                token_ids = await service.client.encode(typed(body, "prompt", str, ""), special)
        with_texts = typed(body, "return_token_strs", bool, False)
        let_go(request, body)
        answer: dict[str, Any] = {
            "tokens": token_ids,
            "count": len(token_ids),
            "max_model_len": service.client.inputs.max_model_len,
        }
        if with_texts:
            name = service.client.tokenizer.id_to_token
            answer["token_strs"] = await asyncio.to_thread(lambda: [name(token) for token in token_ids])
        return json_response(answer)

    async def detokenize(self, request: Request) -> Response:
        """Token ids as text."""
        body = await read_object(request)
        self.service.model(body)
        tokens = typed(body, "tokens", list, [])
        most = max(self.service.client.inputs.max_model_len, MOST_DECODED)
        if len(tokens) > most:
            raise HttpError(400, f"tokens holds {len(tokens)}: this server takes {most} at most", param="tokens")
        if not all(type(token) is int and 0 <= token < 2**31 for token in tokens):
            raise HttpError(400, "tokens must be a list of token ids", param="tokens")
        with self.service.admission.enter(request.state.key):
            return json_response({"prompt": await self.service.client.decode(tokens)})

    async def completions(self, request: Request) -> Response | EventStream:
        """Both of OpenAI's completion routes, streamed or at once."""
        body = await read_object(request)
        service = self.service
        if service.config.log_requests == "prompts":
            openai.log_body(body, request.state.request_id)
        call = await openai.read_call(body, path_of(request.scope), service, request.state.key)
        headers = ignored_header(body, call.known)
        let_go(request, body)
        if call.stream:
            running = await service.start(call.ask)
            return EventStream(openai.events(call, running, service), running.close, headers)
        outputs = await until_gone(service.run(call.ask), request.receive)
        if outputs is None:
            return Response(status_code=CLIENT_GONE)
        return json_response(openai.answer(call, outputs, service), headers=headers)

    def _answerer(self, url: str) -> Answerer:
        async def answer(body: dict[str, Any], key: ApiKey) -> dict[str, Any]:
            call = await openai.read_call(body, url, self.service, key)
            body.clear()
            return openai.answer(call, await self.service.run(call.ask), self.service)

        return answer


def _walled(app: ASGIApp) -> ASGIApp:
    """Keys of Prometheus see nothing but figures."""

    async def walled(scope: Scope, receive: Receive, send: Send) -> None:
        path = path_of(scope)
        if scope["type"] == "http" and scope["state"]["key"].metrics and path not in METRICS_ROUTES:
            message = f"an API key with metrics=1 may only read {', '.join(METRICS_ROUTES)}: use another"
            refusal = messages.error_for(path, HttpError(403, message, code="permission_denied"))
            await refusal(scope, receive, send)
        else:
            await app(scope, receive, send)

    return walled


async def _failed(request: Request, error: Exception) -> Response:
    return messages.error_for(path_of(request.scope), error)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail.lower()}"
    return json_response(error_body(error.status_code, message), error.status_code, error.headers)


async def _nested(request: Request, error: Exception) -> Response:
    """Only what was sent can be so deep."""
    refused = HttpError(400, "the body is nested too deeply: use fewer levels")
    return messages.error_for(path_of(request.scope), refused)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)


async def _broken(request: Request, error: Exception) -> Response:
    """A fault of this server: its log has the traceback, under the request's id."""
    message = f"the server has a fault; its log tells more under request id {request.state.request_id}"
    return json_response(error_body(500, message), 500)
