"""What pages in a browser may do here: those of this server everything, others nothing unless their origin is allowed.

A browser says where a page comes from in Origin and Sec-Fetch-Site; other clients send neither. A page whose name is
made to point at this machine (DNS rebinding) is of the server's own origin by that name, which Host tells.
"""

import ipaddress
from collections.abc import Mapping

from kvern.server.config import ServerConfig

PUBLIC = ("/", "/health", "/ping", "/docs", "/openapi.json")
"""Pages that may be looked at from anywhere."""
SAFE_METHODS = ("GET", "HEAD")
CORS_METHODS = ("GET", "HEAD", "POST", "DELETE")
CORS_SEEN = (
    b"x-request-id, request-id, retry-after, x-kvern-ignored-fields, x-kvern-ignored-tools, x-kvern-template-lacks"
)
PREFLIGHT_SECONDS = b"600"

Headers = Mapping[bytes, bytes]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Origins:
    """The rules of one server; `guards_host` if it has no keys, and only this machine reaches it."""

    def __init__(self, config: ServerConfig, has_keys: bool) -> None:
        self._origins = frozenset(origin.encode() for origin in config.allowed_origins)
        self._hosts = frozenset(name.lower() for name in ("localhost", config.host, *config.allowed_hosts))
        self._methods = ", ".join(CORS_METHODS if "*" in config.allowed_methods else config.allowed_methods).encode()
        self._headers = None if "*" in config.allowed_headers else ", ".join(config.allowed_headers).encode()
        self._credentials = config.allow_credentials
        self._guards_host = not has_keys and config.uds is None and is_loopback(config.host)

    def refusal(self, method: str, path: str, headers: Headers) -> str | None:
        """Why a request is refused; None if it may go on."""
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
        """Pages of this origin may ask, by the option."""
        return origin is not None and (origin in self._origins or b"*" in self._origins)

    def answer_headers(self, method: str, headers: Headers) -> list[tuple[bytes, bytes]]:
        """What lets a page of an allowed origin read an answer, and send what it asks a preflight for."""
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
    """A browser's question whether a page may send something."""
    return method == "OPTIONS" and b"access-control-request-method" in headers


def _shown(value: bytes) -> str:
    return repr(value.decode("latin-1"))[:100]
