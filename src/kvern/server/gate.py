"""The steps before and after every handler: API keys, origins of web pages, request ids, and the request log.

Pages of this server may do everything, others only what is allowed to their origin. A browser sends the origin of a
page in Origin and Sec-Fetch-Site; other clients send neither. A page whose name was made to resolve to this machine
(DNS rebinding) has the server's own origin under that name; its Host header shows it.
"""

import base64
import binascii
import contextlib
import dataclasses
import ipaddress
import logging
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence

from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as ASGIMessage

from kvern.api.errors import HttpError
from kvern.server.bodies import Lane
from kvern.server.config import ServerConfig
from kvern.server.http import error_response, is_anthropic, path_of
from kvern.server.keys import PROBES, ApiKey, find_key
from kvern.server.service import Service
from kvern.server.usage import CURRENT, RequestUsage
from kvern.serving.served import SERVED, ServedRequest, key_hash

PUBLIC = ("/", "/health", "/ping", "/docs", "/openapi.json")
"""Paths that every page may read."""
SAFE_METHODS = ("GET", "HEAD")
CORS_METHODS = ("GET", "HEAD", "POST", "DELETE")
CORS_SEEN = (
    b"x-request-id, request-id, retry-after, x-kvern-ignored-fields, x-kvern-ignored-tools, x-kvern-template-lacks"
)
PREFLIGHT_SECONDS = b"600"

Headers = Mapping[bytes, bytes]


def is_loopback(host: str) -> bool:
    """True if only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Origins:
    """The rules of one server. The Host header is checked if there are no keys and only this machine reaches the
    server."""

    def __init__(self, config: ServerConfig, has_keys: bool) -> None:
        self._origins = frozenset(origin.encode() for origin in config.allowed_origins)
        self._hosts = frozenset(name.lower() for name in ("localhost", config.host, *config.allowed_hosts))
        self._methods = ", ".join(CORS_METHODS if "*" in config.allowed_methods else config.allowed_methods).encode()
        self._headers = None if "*" in config.allowed_headers else ", ".join(config.allowed_headers).encode()
        self._credentials = config.allow_credentials
        self._guards_host = not has_keys and config.uds is None and is_loopback(config.host)

    def refusal(self, method: str, path: str, headers: Headers) -> str | None:
        """Returns why a request is refused; None if it is allowed."""
        host = headers.get(b"host", b"")
        if self._guards_host and host and not self._knows(host):
            return f"Host is {_shown(host)}: a server without keys knows it only if it is in allowed_hosts"
        origin, site = headers.get(b"origin"), headers.get(b"sec-fetch-site", b"none")
        if self.allows(origin):
            return None
        if site in (b"same-origin", b"none"):
            is_foreign = origin is not None and site == b"none" and origin.partition(b"://")[2] != host
        else:
            is_foreign = origin is not None or method not in SAFE_METHODS
        if is_foreign and not (method in SAFE_METHODS and path in PUBLIC):
            said = "" if origin is None else f" {_shown(origin)}"
            return f"the page's origin{said} is not this server's: put it into allowed_origins to let its pages ask"
        return None

    def allows(self, origin: bytes | None) -> bool:
        """True if the options allow pages of this origin."""
        return origin is not None and (origin in self._origins or b"*" in self._origins)

    def answer_headers(self, method: str, headers: Headers) -> list[tuple[bytes, bytes]]:
        """Returns the headers that let pages of an allowed origin read an answer, or that answer a preflight
        request."""
        origin = headers.get(b"origin")
        if origin is None or not self.allows(origin):
            return []
        found = [(b"access-control-allow-origin", origin), (b"vary", b"origin")]
        if self._credentials:
            found.append((b"access-control-allow-credentials", b"true"))
        if not is_preflight(method, headers):
            return [*found, (b"access-control-expose-headers", CORS_SEEN)]
        asked = headers.get(b"access-control-request-headers", b"")
        found += [(b"access-control-allow-methods", self._methods), (b"access-control-max-age", PREFLIGHT_SECONDS)]
        allowed = asked if self._headers is None else self._headers
        return [*found, (b"access-control-allow-headers", allowed)] if allowed else found

    def _knows(self, host: bytes) -> bool:
        name = host.decode("latin-1").lower()
        name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
        if name in self._hosts:
            return True
        try:
            return bool(ipaddress.ip_address(name))
        except ValueError:
            return False


def is_preflight(method: str, headers: Headers) -> bool:
    """True if a browser asks whether a page may send a request."""
    return method == "OPTIONS" and b"access-control-request-method" in headers


def _shown(value: bytes) -> str:
    return repr(value.decode("latin-1"))[:100]


logger = logging.getLogger("kvern.requests")

OPEN_ROUTES = ("/health", "/ping")
NOBODY = "-"
"""The name in log and metrics of who sent no key that is known."""
REQUEST_ID = re.compile(rb"[\w.:/+=-]{1,128}")
TRACEPARENT = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[\x21-\x7e]{1,64})?")
CLIENT_ADDRESS = re.compile(r"[0-9a-fA-F.:]{2,45}")


VERSIONS = re.compile(r"(?:/v[12])*(?=/)")


def own_names(routes: Sequence[Route]) -> Callable[[str], str]:
    """Returns a function that adds a missing /v1 to a path or drops one too many: clients' URLs end either way."""
    paths = [route.path.split("/") for route in routes]
    versioned = {parts[2] for parts in paths if parts[1] == "v1"}
    others = {parts[1] for parts in paths} - {"v1", ""}

    def own_name(path: str) -> str:
        found = VERSIONS.match(path)
        rest = path[found.end() :] if found else path
        name = rest.split("/", 2)[1] if found else ""
        return f"/v1{rest}" if name in versioned else rest if name in others else path

    return own_name


class Gate:
    """Admits requests that carry one of the API keys; without keys, all. Each answer has a header `x-request-id`.

    Paths of the `routes` are known by their names with and without /v1.

    The state of each request has its `key`, `request_id`, `body_seconds`, `logs_bodies`, the `lane` of large bodies,
    and `held`, what is released when the answer begins. The key of requests without one is the service's first.
    """

    def __init__(self, app: ASGIApp, service: Service, routes: Sequence[Route]) -> None:
        self._app = app
        self._own_name = own_names(routes)
        self._keys = service.keys
        self._config = service.config
        self._figures = service.figures
        self._note_end = service.note_end
        self._late = service.late
        self._origins = Origins(service.config, bool(service.keys.known))
        self._lane = Lane(len(service.keys.users))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        scope["path"] = scope.get("root_path", "") + self._own_name(path_of(scope))
        headers = dict(scope["headers"])
        request_id: bytes = headers.get(b"x-request-id", b"")
        is_bad_id = bool(request_id) and REQUEST_ID.fullmatch(request_id) is None
        if is_bad_id or not request_id:
            request_id = uuid.uuid4().hex.encode()
        added = [(b"x-request-id", request_id), *self._origins.answer_headers(scope["method"], headers)]
        if is_anthropic(scope):
            added.append((b"request-id", request_id))
        status = 0
        served = ServedRequest(request_id.decode(), path_of(scope), "", _traceparent(headers))
        held = contextlib.ExitStack()

        async def answer(message: ASGIMessage) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *added]
                held.close()
            elif served.first_byte is None:
                served.first_byte = served.seconds
            await send(message)

        state = scope.setdefault("state", {})
        state["request_id"] = request_id.decode()
        app, key = self._find(scope, headers, is_bad_id)
        state.update(
            key=key or self._keys.users[0],
            body_seconds=self._config.request_timeout,
            logs_bodies=self._config.log_requests == "prompts",
            lane=self._lane,
            held=held,
        )
        usage = RequestUsage()
        CURRENT.set(usage)
        served.key = key_hash(state["key"].name, state["key"].client)
        SERVED.set(served)
        try:
            await app(scope, receive, answer)
        finally:
            held.close()
            self._note_end(served, status)
            self._note(scope, served, NOBODY if key is None else key.name, usage, time.monotonic() - began)

    def _note(self, scope: Scope, served: ServedRequest, name: str, usage: RequestUsage, seconds: float) -> None:
        """Counts a request that has ended, and logs it when its waits are known."""
        status = served.status
        if status < 400 and path_of(scope) in PROBES:
            return
        self._figures.answered(name, status)
        if self._config.log_requests != "none":
            path = scope["raw_path"].decode("ascii", "backslashreplace")
            asked = scope["state"]["request_id"], scope["method"], path, status, name, client_shown(scope)

            def say() -> None:
                usage.waits = served.waits
                logger.info("%s %s %s %d key=%s from=%s %s%.3f s", *asked, usage, seconds)

            self._late.when_told(served, say)

    def _find(self, scope: Scope, headers: dict[bytes, bytes], is_bad_id: bool) -> tuple[ASGIApp, ApiKey | None]:
        """Returns the application that answers, and the key of the request; None if it has none that is known."""
        path, method = path_of(scope), scope["method"]
        if is_bad_id:
            message = "x-request-id may have 128 letters, digits and . : / + = - _ at most"
            return error_response(HttpError(400, message), scope), None
        refusal = self._origins.refusal(method, path, headers)
        if refusal is not None:
            return error_response(HttpError(403, refusal), scope), None
        if self._origins.allows(headers.get(b"origin")) and is_preflight(method, headers):
            return Response(status_code=204), None
        if not self._keys.known:
            return self._app, dataclasses.replace(self._keys.users[0], client=scope["state"].get("client", ""))
        if path in OPEN_ROUTES:
            return self._app, None
        secret = secret_of(method, headers)
        found = find_key(self._keys.known, secret)
        if found is None:
            return _no_key(scope, bool(secret)), None
        if found.metrics and path not in PROBES:
            message = f"an API key with metrics=1 may only read {', '.join(PROBES)}: use another"
            return error_response(HttpError(403, message), scope), found
        return self._app, found


def _traceparent(headers: Headers) -> str | None:
    """Returns the header of W3C Trace Context, if it is one."""
    found = headers.get(b"traceparent", b"")
    return found.decode() if TRACEPARENT.fullmatch(found) else None


def client_shown(scope: Scope) -> str:
    """Returns the address of a client as a proxy that is trusted tells it; `-` for a Unix socket, or if it is none."""
    address = str((scope.get("client") or ("",))[0])
    return address if CLIENT_ADDRESS.fullmatch(address) else NOBODY


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
