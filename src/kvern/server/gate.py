"""The steps before and after every handler: API keys, origins of web pages, request ids, and the request log."""

import base64
import binascii
import contextlib
import dataclasses
import logging
import re
import time
import uuid
from collections.abc import Sequence

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as ASGIMessage

from kvern.api.errors import HttpError
from kvern.server.bodies import Lane
from kvern.server.config import ServerConfig
from kvern.server.http import error_response, is_anthropic, path_of
from kvern.server.keys import ApiKey, find_key
from kvern.server.origins import Origins, is_preflight

logger = logging.getLogger("kvern.requests")

OPEN_ROUTES = ("/health", "/ping")
REQUEST_ID = re.compile(rb"[\w.:/+=-]{1,128}")


class Gate:
    """Admits requests that carry one of the API keys; without keys, all. Each answer has a header `x-request-id`.

    The state of each request has its `key`, `request_id`, `body_seconds`, `logs_bodies`, the `lane` of large bodies,
    and `held`, what is released when the answer begins. `users` are the keys that may ask a model, or one that stands
    for anyone; the first is used for requests without a key.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[ApiKey], users: Sequence[ApiKey], config: ServerConfig) -> None:
        self._app = app
        self._keys = keys
        self._default = users[0]
        self._config = config
        self._origins = Origins(config, bool(keys))
        self._lane = Lane(len(users))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        headers = dict(scope["headers"])
        request_id: bytes = headers.get(b"x-request-id", b"")
        is_bad_id = bool(request_id) and REQUEST_ID.fullmatch(request_id) is None
        if is_bad_id or not request_id:
            request_id = uuid.uuid4().hex.encode()
        added = [(b"x-request-id", request_id), *self._origins.answer_headers(scope["method"], headers)]
        if is_anthropic(scope):
            added.append((b"request-id", request_id))
        status = 0
        held = contextlib.ExitStack()

        async def answer(message: ASGIMessage) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *added]
                held.close()
            await send(message)

        state = scope.setdefault("state", {})
        state["request_id"] = request_id.decode()
        app, key = self._find(scope, headers, is_bad_id)
        state.update(
            key=key,
            body_seconds=self._config.request_timeout,
            logs_bodies=self._config.log_requests == "prompts",
            lane=self._lane,
            held=held,
        )
        try:
            await app(scope, receive, answer)
        finally:
            held.close()
            if self._config.log_requests != "none":
                path = scope["raw_path"].decode("ascii", "backslashreplace")
                logger.info(
                    "%s %s %s %d key=%s %.3f s",
                    *(request_id.decode(), scope["method"], path, status, key.name, time.monotonic() - began),
                )

    def _find(self, scope: Scope, headers: dict[bytes, bytes], is_bad_id: bool) -> tuple[ASGIApp, ApiKey]:
        """Returns the application that answers, and the key of the request."""
        path, method = path_of(scope), scope["method"]
        if is_bad_id:
            message = "x-request-id may have 128 letters, digits and . : / + = - _ at most"
            return error_response(HttpError(400, message), scope), self._default
        refusal = self._origins.refusal(method, path, headers)
        if refusal is not None:
            return error_response(HttpError(403, refusal, code="permission_denied"), scope), self._default
        if self._origins.allows(headers.get(b"origin")) and is_preflight(method, headers):
            return Response(status_code=204), self._default
        if not self._keys:
            return self._app, dataclasses.replace(self._default, client=scope["state"].get("client", ""))
        if path in OPEN_ROUTES:
            return self._app, self._default
        secret = secret_of(method, headers)
        found = find_key(self._keys, secret)
        return (_no_key(scope, bool(secret)), self._default) if found is None else (self._app, found)


def secret_of(method: str, headers: dict[bytes, bytes]) -> bytes:
    """Returns the key of a request: its Bearer token, x-api-key, or password of HTTP Basic.

    A browser repeats a password on its own, also for pages of other sites. Those cannot send JSON to this server, so
    the password counts only for JSON bodies and for GET and HEAD.
    """
    kind, _, value = headers.get(b"authorization", b"").partition(b" ")
    if kind.lower() == b"bearer":
        return value.strip()
    is_json = headers.get(b"content-type", b"").startswith(b"application/json")
    if kind.lower() == b"basic" and (is_json or method in ("GET", "HEAD")):
        try:
            return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return headers.get(b"x-api-key", b"")


def _no_key(scope: Scope, was_sent: bool) -> ASGIApp:
    what = "the API key is none of this server's" if was_sent else "this server needs an API key"
    message = f"{what}: send one as Authorization: Bearer KEY, or as x-api-key: KEY"
    headers = {"www-authenticate": 'Basic realm="kvern", charset="UTF-8"'}
    return error_response(HttpError(401, message, code="invalid_api_key", headers=headers), scope)
