"""Messages between servers about the pages that one has in host memory, and the sockets for them: msgpack, CurveZMQ.

reader --> Hello: how to read     Has: which pages are there     Where: at which addresses --> page server
reader <-- Welcome                Kept                           Found                     <-- page server

All servers have one secret, of which the key of the listener is derived: who knows it may read all pages.
"""

import hashlib
import os
import re
import socket as sockets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq
from zmq.utils import z85

PROTOCOL = 1
PEER_KEY, PEER_KEY_FILE = "KV_PEER_KEY", "KV_PEER_KEY_FILE"
LEAST_KEY_CHARACTERS = 16
HOST = re.compile(r"[A-Za-z0-9_.-]+")
Span = tuple[int, int]
"""An address in the page server's memory, and bytes."""


class Hello(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Asks how pages are read."""

    protocol: int = PROTOCOL


class Has(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Asks which pages are there."""

    names: Sequence[bytes]


class Where(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Asks where pages of these lengths are."""

    names: Sequence[bytes]
    lengths: Sequence[int]


class Welcome(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Describes the memory for a NIXL agent, as it is in this `epoch`."""

    epoch: int
    agent: bytes


class Kept(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Says which pages are there."""

    pages: list[bool]


class Found(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Says where each page is, in order; nothing: it is not there. The memory may change at any time."""

    epoch: int
    pages: list[list[Span]]


class Refused(msgspec.Struct, tag=True, array_like=True, gc=False):
    """Says why there is no answer."""

    reason: str


encode = msgspec.msgpack.Encoder().encode
decode_question = msgspec.msgpack.Decoder(Hello | Has | Where).decode
decode_answer = msgspec.msgpack.Decoder(Welcome | Kept | Found | Refused).decode


def peer_secret() -> str:
    """The secret of all servers that read each other's pages, from the environment. Raises ValueError."""
    secret, path = os.environ.get(PEER_KEY), os.environ.get(PEER_KEY_FILE)
    if secret and path:
        raise ValueError(f"{PEER_KEY} and {PEER_KEY_FILE} are both set: leave one out")
    if path:
        try:
            secret = Path(path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"the file {path} of {PEER_KEY_FILE} cannot be read: {error}") from error
    if not secret or len(secret) < LEAST_KEY_CHARACTERS:
        raise ValueError(
            f"{PEER_KEY_FILE if path else PEER_KEY} has {len(secret or '')} characters: set {PEER_KEY} or "
            f"{PEER_KEY_FILE} to the secret of all servers, {LEAST_KEY_CHARACTERS} characters at least, such as those "
            "of openssl rand -hex 32"
        )
    return secret


def listen(socket: "zmq.Socket[Any]", address: tuple[str, int], secret: str) -> None:
    """Binds a socket for those who know the secret. Raises zmq.ZMQError."""
    socket.set(zmq.CURVE_SERVER, 1)
    socket.set(zmq.CURVE_SECRETKEY, _curve_key(secret))
    socket.set(zmq.LINGER, 0)
    socket.bind(f"tcp://{address[0]}:{address[1]}")


def connect(socket: "zmq.Socket[Any]", address: tuple[str, int], secret: str) -> None:
    """Connects to a listener with the secret, now or when there is one."""
    public, own = zmq.curve_keypair()
    socket.set(zmq.CURVE_SERVERKEY, zmq.curve_public(_curve_key(secret)))
    socket.set(zmq.CURVE_PUBLICKEY, public)
    socket.set(zmq.CURVE_SECRETKEY, own)
    socket.set(zmq.LINGER, 0)
    socket.connect(f"tcp://{address[0]}:{address[1]}")


def read_address(text: str) -> tuple[str, int]:
    """The host and the port of HOST:PORT. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    if not colon or not HOST.fullmatch(host) or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"{text!r} must be HOST:PORT, with a name or IPv4 address and a port from 1 to 65535")
    return host, int(port)


def resolved(address: tuple[str, int]) -> tuple[str, int]:
    """The address with the host's present IPv4 address, which may take seconds. Raises OSError."""
    try:
        return sockets.gethostbyname(address[0]), address[1]
    except OSError as error:
        raise OSError(f"the host {address[0]} is not found: {error}") from error


def _curve_key(secret: str) -> bytes:
    """The secret key of the listener."""
    return z85.encode(hashlib.blake2b(secret.encode(), digest_size=32, person=b"kvern peers").digest())
