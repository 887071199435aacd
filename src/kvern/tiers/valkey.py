"""A store on a Valkey or Redis server, valkey://host:port/db, or valkeys:// over TLS.

A value is a page, and after it the keyed BLAKE3 of name and page if there is a key. Without one, whoever can write to
the server can change answers. Pages of different keys have different names, so that nobody removes those of others.
User, password, keys and certificates may stand in environment variables, so that a command line does not show them.
"""

import hmac
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

try:
    from blake3 import blake3
    from redis import Redis, exceptions
    from redis.backoff import NoBackoff
    from redis.retry import Retry
except ImportError as error:
    raise ImportError(f"{error}: pip install 'kvern[valkey]'") from error

from kvern.tiers.rare_warnings import RareWarnings
from kvern.tiers.store import Identity

PORT = 6379
CONNECT_SECONDS = 1.0
TIMEOUT_SECONDS = 5.0
READ_BYTES = 1 << 18
MAC_BYTES = 32
LEAST_KEY_CHARACTERS = 16
USER, PASSWORD = "VALKEY_USER", "VALKEY_PASSWORD"
PAGE_KEY, PAGE_KEY_FILE = "VALKEY_PAGE_KEY", "VALKEY_PAGE_KEY_FILE"
CA_FILE = "VALKEY_CA_FILE"
CERT_FILE = "VALKEY_CERT_FILE"
KEY_FILE = "VALKEY_KEY_FILE"
FORM = "valkey://[user:password@]host[:port][/db][?timeout=seconds]"


def valkey(rest: str, identity: Identity) -> "ValkeyStore":
    """Makes the store of an option valkey://host:port/db. Raises ValueError."""
    return ValkeyStore(_connection(rest), identity, _page_key())


def valkeys(rest: str, identity: Identity) -> "ValkeyStore":
    """Makes the store of an option valkeys://host:port/db, with TLS. Raises ValueError."""
    files = {
        "ssl_ca_certs": os.environ.get(CA_FILE),
        "ssl_certfile": os.environ.get(CERT_FILE),
        "ssl_keyfile": os.environ.get(KEY_FILE),
    }
    if missing := [path for path in files.values() if path and not os.path.isfile(path)]:
        raise ValueError(f"there is no file {missing[0]}, which {CA_FILE}, {CERT_FILE} or {KEY_FILE} names")
    return ValkeyStore(_connection(rest) | {"ssl": True} | files, identity, _page_key())


class ValkeyStore:
    """Pages on a server, under kvern:KEY:NAME, where KEY tells keys apart. Methods raise RedisError if it fails.

    `connection`: what `Redis` takes. `key`: 32 bytes for the MAC of values, or None for values without one.
    """

    is_local = False

    def __init__(self, connection: dict[str, Any], identity: Identity, key: bytes | None) -> None:
        # A connection that the server closed is replaced once; a server that does not answer is not asked again.
        retry = Retry(NoBackoff(), 1, supported_errors=(exceptions.ConnectionError,))
        self._redis = Redis(socket_read_size=READ_BYTES, retry=retry, **connection)
        self._seconds = None if identity.max_age is None else max(1, int(identity.max_age))
        self._key = key
        self._begin = f"kvern:{'plain' if key is None else blake3(b'', key=key).hexdigest()[:8]}:"
        self._warnings = RareWarnings(f"{connection['host']}:{connection['port']}")
        self._try()

    def has(self, names: Sequence[bytes]) -> list[bool]:
        """Asks the server which pages it has."""
        return [answer == 1 for answer in self._answers([("EXISTS", self._name(name)) for name in names])]

    def get(self, names: Sequence[bytes], places: Sequence[memoryview]) -> list[bool]:
        """Gets pages. Values that are not what was put are removed."""
        values = self._answers([("GET", self._name(name)) for name in names])
        filled = [self._take(*found) for found in zip(names, values, places, strict=True)]
        self.drop([name for name, value, good in zip(names, values, filled, strict=True) if value and not good])
        return filled

    def put(self, names: Sequence[bytes], places: Sequence[memoryview]) -> list[bool]:
        """Sends the pages that the server does not have."""
        kept = self.has(names)
        lacking = [number for number, is_kept in enumerate(kept) if not is_kept]
        age = () if self._seconds is None else ("EX", self._seconds)
        commands = [
            ("SET", self._name(names[number]), self._value(names[number], places[number]), *age) for number in lacking
        ]
        for number, answer in zip(lacking, self._send(commands), strict=True):
            kept[number] = answer is True
            if isinstance(answer, Exception):  # a full server may still be read from
                self._warnings.warn("put", f"the server refuses pages: {answer}")
        return kept

    def drop(self, names: Sequence[bytes]) -> None:
        """Removes pages."""
        if names:
            self._send([("UNLINK", *map(self._name, names))])

    def close(self) -> None:
        """Closes the connections."""
        self._redis.close()

    def _answers(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Sends commands at once and returns the answers. Raises RedisError, also if a command is refused."""
        answers = self._send(commands)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def _send(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Sends commands at once and returns the answers, some of which may be exceptions. Raises RedisError."""
        if not commands:
            return []
        with self._redis.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)  # type: ignore[no-untyped-call]
            return list(pipeline.execute(raise_on_error=False))

    def _name(self, name: bytes) -> str:
        return self._begin + name.hex()

    def _value(self, name: bytes, place: memoryview) -> bytes:
        return b"".join((place, self._mac(name, place)))

    def _mac(self, name: bytes, page: memoryview) -> bytes:
        if self._key is None:
            return b""
        return blake3(name, key=self._key).update(page).digest()

    def _take(self, name: bytes, value: object, place: memoryview) -> bool:
        """Copies a value to its place if it is what was put."""
        size = len(place)
        if not isinstance(value, bytes) or len(value) != size + (0 if self._key is None else MAC_BYTES):
            return False
        page = memoryview(value)[:size]
        if not hmac.compare_digest(value[size:], self._mac(name, page)):
            return False
        place[:] = page
        return True

    def _try(self) -> None:
        """Says what can be said before the first page. Raises ValueError if the server refuses this user."""
        if self._key is None:
            text = "pages have no MAC, so who can write to the server can change answers: set"
            self._warnings.warn("key", f"{text} {PAGE_KEY} or {PAGE_KEY_FILE}")
        try:
            self.has([bytes(32)])
        except (exceptions.AuthenticationError, exceptions.NoPermissionError) as error:
            self.close()
            raise ValueError(f"the server refuses the user or the password: {error}") from error
        except exceptions.RedisError as error:
            self._warnings.warn("start", f"the server does not answer, and is tried again later: {error}")


def _connection(rest: str) -> dict[str, Any]:
    """Returns what a URL without its scheme says, for `Redis`. Raises ValueError."""
    url = urlsplit(f"valkey:{rest}")
    try:
        port = url.port or PORT
    except ValueError:
        raise ValueError(f"the port must be a number from 1 to 65535, as in {FORM}") from None
    if not rest.startswith("//") or not url.hostname:
        raise ValueError(f"it must name a server, as {FORM}")
    database = url.path.strip("/") or "0"
    if not (database.isascii() and database.isdigit()):
        raise ValueError(f"the database {database!r} must be a number, as in {FORM}")
    return {
        "host": url.hostname,
        "port": port,
        "db": int(database),
        "username": unquote(url.username or "") or os.environ.get(USER),
        "password": unquote(url.password or "") or os.environ.get(PASSWORD),
        "socket_connect_timeout": CONNECT_SECONDS,
        "socket_timeout": _timeout(url),
    }


def _timeout(url: SplitResult) -> float:
    given = dict(parse_qsl(url.query, keep_blank_values=True))
    text = given.pop("timeout", str(TIMEOUT_SECONDS))
    if given:
        raise ValueError(f"there is no setting {next(iter(given))!r}, only timeout: {FORM}")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 600:
        raise ValueError(f"the timeout {text!r} must be a number of seconds above 0 and at most 600")
    return seconds


def _page_key() -> bytes | None:
    """Returns the key for MACs, 32 bytes, or None if there is none. Raises ValueError."""
    secret = os.environ.get(PAGE_KEY)
    if path := os.environ.get(PAGE_KEY_FILE):
        if secret:
            raise ValueError(f"{PAGE_KEY} and {PAGE_KEY_FILE} are both set: leave one out")
        try:
            secret = Path(path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"the file {path} of {PAGE_KEY_FILE} cannot be read: {error}") from error
    elif not secret:
        return None
    if len(secret) < LEAST_KEY_CHARACTERS:
        raise ValueError(
            f"the key of {PAGE_KEY_FILE if path else PAGE_KEY} has {len(secret)} characters: it must have "
            f"{LEAST_KEY_CHARACTERS} at least, such as those of openssl rand -hex 32"
        )
    return blake3(secret.encode(), derive_key_context="kvern 2026 pages of the KV cache on a server").digest()
