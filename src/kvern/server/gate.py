"""Before and after the handlers: keys, request ids, and a line in the log if one is wanted."""

import base64
import binascii
import logging
import re
import time
import uuid
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvern.server.http import HttpError, error_body, json_response, path_of
from kvern.server.keys import ANYONE, ApiKey, find_key
from kvern.server.messages import error_for

logger = logging.getLogger("kvern.requests")

OPEN_ROUTES = ("/health",)
NOBODY = ApiKey(ANYONE, b"")
REQUEST_ID = re.compile(rb"[\w.:/+=-]{1,128}")


class Gate:
    """Lets requests pass that carry one of the keys; without keys, all. Each answer has a header `x-request-id`.

    Handlers find an `ApiKey` as `key` in the request's state, the id as `request_id`, and `body_seconds`. `default` is
    for requests when there are no keys.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Sequence[ApiKey],
        default: ApiKey = NOBODY,
        body_seconds: float = 30.0,
        log: bool = False,
    ) -> None:
        self._app = app
        self._keys = keys
        self._default = default
        self._body_seconds = body_seconds
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        headers = dict(scope["headers"])
        request_id: bytes = headers.get(b"x-request-id", b"") or uuid.uuid4().hex.encode()
        status = 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        app, key = self._app, self._default
        if not REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex.encode()
            message = "x-request-id may have 128 letters, digits and . : / + = - _ at most"
            app = json_response(error_body(400, message), 400)
        elif self._keys and path_of(scope) not in OPEN_ROUTES:
            found = find_key(self._keys, secret_of(scope["method"], headers))
            if found is None:
                app = _no_key(path_of(scope))
            else:
                key = found
        scope.setdefault("state", {}).update(key=key, request_id=request_id.decode(), body_seconds=self._body_seconds)
        try:
            await app(scope, receive, answer)
        finally:
            if self._log:
                logger.info(
                    "%s %s %s %d key=%s %.3f s",
                    *(request_id.decode(), scope["method"], scope["path"], status, key.name, time.monotonic() - began),
                )


def secret_of(method: str, headers: dict[bytes, bytes]) -> bytes:
    """The key of a request: as Bearer token, as x-api-key, or as the password of Basic.

    A browser asks its user for a password by itself and sends it here from then on, also for pages of other sites.
    Those cannot send JSON here, so a body of any other type wants one of the first two.
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


def _no_key(path: str) -> ASGIApp:
    message = "the API key is missing or unknown: send it as Authorization: Bearer KEY"
    headers = {"www-authenticate": 'Basic realm="kvern", charset="UTF-8"'}
    return error_for(path, HttpError(401, message, code="invalid_api_key", headers=headers))
