"""Rules for web pages in browsers: pages of this server may do everything, others only what is allowed to their origin.

A browser sends the origin of a page in Origin and Sec-Fetch-Site; other clients send neither. A page whose name was
made to resolve to this machine (DNS rebinding) has the server's own origin under that name; its Host header shows it.
"""

import ipaddress
from collections.abc import Mapping

from kvern.server.config import ServerConfig

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
