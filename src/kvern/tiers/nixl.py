"""The host memory of another machine's engines, nixl://HOST:PORT, which is read without a word of them.

A page server there (`tiers/page_server.py`) says where pages are, and a process here reads them by NIXL (`nixl_reader`)
to memory that this store has, too. Nothing is locked: what is read may have changed, which the header and the sum tell.
A read that takes too long, as its machine may have stopped, ends with that process: nothing is written afterwards.
"""

import contextlib
import importlib.util
import mmap
import os
import socket as sockets
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import zmq

from kvern.io.bytecode import bytecode_environment
from kvern.tiers.nixl_agent import INSTALL
from kvern.tiers.nixl_reader import DONE, MOST_SPANS
from kvern.tiers.remote_pages import (
    Found,
    Has,
    Hello,
    Kept,
    Refused,
    Span,
    Welcome,
    Where,
    connect,
    decode_answer,
    encode,
    peer_secret,
    read_address,
    resolved,
)
from kvern.tiers.store import Identity

if importlib.util.find_spec("nixl_cu13") is None:
    raise ImportError(f"No module named 'nixl_cu13': {INSTALL}")

ANSWER_SECONDS = 1.0
READ_SECONDS = 4.0
"""Seconds of a read: addresses are of use for no longer."""
START_SECONDS = 30.0
"""Seconds in which the process that reads imports what it needs."""
STAGING_BYTES = 32 << 20


def nixl(rest: str, identity: Identity) -> "NixlStore":
    """Makes the store of an option nixl://HOST:PORT. Raises ValueError."""
    if identity.max_age is not None:
        raise ValueError("host memory does not know how old a page is: leave the greatest age out")
    if not rest.startswith("//"):
        raise ValueError("it must name another server's kv_tier_listen, as nixl://HOST:PORT")
    return NixlStore(read_address(rest[2:]), peer_secret())


class _Line:
    """Questions to a page server, one at a time. Any thread may ask."""

    def __init__(self, address: tuple[str, int], secret: str) -> None:
        self._address, self._secret = address, secret
        self._socket: zmq.Socket[bytes] | None = None
        self._lock = threading.Lock()

    def ask(self, question: Hello | Has | Where) -> Welcome | Kept | Found:
        """Returns the answer. Raises OSError if there is none."""
        with self._lock:
            if self._socket is None:
                address = resolved(self._address)
                self._socket = zmq.Context.instance().socket(zmq.REQ)
                connect(self._socket, address, self._secret)
            self._socket.send(encode(question))
            if not self._socket.poll(int(ANSWER_SECONDS * 1000)):
                self._close()
                raise OSError(f"{self.name} does not answer, or has another secret")
            answer: Welcome | Kept | Found | Refused = decode_answer(self._socket.recv())
        if isinstance(answer, Refused):
            raise OSError(f"{self.name} refuses: {answer.reason}")
        return answer

    @property
    def name(self) -> str:
        """The address of the page server."""
        return f"{self._address[0]}:{self._address[1]}"

    def close(self) -> None:
        """Ends the connection."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class _Reader:
    """The process that reads, and the memory to which it does."""

    def __init__(self, host: str) -> None:
        descriptor = os.memfd_create("kvern-nixl")
        try:
            os.ftruncate(descriptor, STAGING_BYTES)
            self.staging = memoryview(mmap.mmap(descriptor, STAGING_BYTES))
            self._line, other = sockets.socketpair(sockets.AF_UNIX, sockets.SOCK_SEQPACKET)
            with other:
                inherited = other.fileno(), descriptor
                words = [sys.executable, "-m", "kvern.tiers.nixl_reader", *map(str, inherited), host]
                self._process = subprocess.Popen(  # noqa: S603 (no shell, our own words)
                    words,
                    stdin=subprocess.DEVNULL,
                    pass_fds=inherited,
                    env={**os.environ, **bytecode_environment()},
                )
        finally:
            os.close(descriptor)
        self.epoch: int | None = None
        """The epoch of the memory from which it reads; None: it reads from none yet."""

    def wait(self, seconds: float) -> None:
        """Waits for the process. Raises OSError if it fails, ends, or takes longer."""
        self._line.settimeout(seconds)
        answer = self._line.recv(1 << 10)
        if answer != DONE:
            raise OSError(answer.decode(errors="replace") or "the process that reads has ended")

    def connect(self, welcome: Welcome) -> None:
        """Reads the memory as it is in an epoch. Raises OSError."""
        self._line.send(msgspec.msgpack.encode(welcome.agent))
        self.wait(READ_SECONDS)
        self.epoch = welcome.epoch

    def read(self, spans: Sequence[Span]) -> None:
        """Reads spans one behind the other into `staging`.

        Raises OSError.
        """
        self._line.send(msgspec.msgpack.encode(spans))
        self.wait(READ_SECONDS)

    def close(self) -> None:
        """Ends the process: it writes nothing any more."""
        self._line.close()
        self._process.kill()
        self._process.wait()


class _Piece(NamedTuple):
    """A part of page `page`, from its byte `start` on, at an address."""

    page: int
    start: int
    address: int
    size: int


class NixlStore:
    """A store that only reads. Any thread may call its methods, which raise OSError if the other does not answer."""

    is_local = False
    is_read_only = True
    has_whole_pages = True

    def __init__(self, address: tuple[str, int], secret: str) -> None:
        self._host = address[0]
        self._questions, self._places = _Line(address, secret), _Line(address, secret)
        self._reader: _Reader | None = None
        self._lock = threading.Lock()
        threading.Thread(target=self._begin, name="kvern-nixl", daemon=True).start()

    def _begin(self) -> None:
        """The process starts meanwhile, and connects if the other is there."""
        with contextlib.suppress(OSError), self._lock:  # whoever reads next is told
            self._connected()

    def has(self, names: Sequence[bytes]) -> list[bool]:
        answer = self._questions.ask(Has(names))
        assert isinstance(answer, Kept)
        return answer.pages

    def get(self, names: Sequence[bytes], places: Sequence[memoryview]) -> list[bool]:
        with self._lock:
            reader = self._connected()
            found = self._places.ask(Where(names, [len(place) for place in places]))
            assert isinstance(found, Found)
            if found.epoch != reader.epoch:
                reader.epoch = None
                raise OSError(f"the memory at {self._questions.name} is another meanwhile")
            with self._ends_if_it_fails():
                for batch in _batches(found.pages):
                    reader.read([(piece.address, piece.size) for piece in batch])
                    start = 0
                    for piece in batch:
                        target = places[piece.page][piece.start : piece.start + piece.size]
                        target[:] = reader.staging[start : start + piece.size]
                        start += piece.size
        return [sum(size for _, size in spans) == len(place) for spans, place in zip(found.pages, places, strict=True)]

    def _connected(self) -> _Reader:
        """The process that reads, connected to the memory as it is."""
        if self._reader is None:
            with self._ends_if_it_fails():
                self._reader = _Reader(self._host)
                self._reader.wait(START_SECONDS)
        if self._reader.epoch is None:
            welcome = self._places.ask(Hello())
            assert isinstance(welcome, Welcome)
            with self._ends_if_it_fails():
                self._reader.connect(welcome)
        return self._reader

    @contextlib.contextmanager
    def _ends_if_it_fails(self) -> Iterator[None]:
        """Ends the process that reads if it fails or is late: the next one is new."""
        try:
            yield
        except OSError as error:
            self._end()
            raise OSError(f"pages at {self._questions.name} cannot be read: {error or 'it takes too long'}") from error

    def _end(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def put(self, names: Sequence[bytes], places: Sequence[memoryview]) -> list[bool]:
        return [False] * len(names)

    def drop(self, names: Sequence[bytes]) -> None:
        """Nothing: the memory is the other server's."""

    def close(self) -> None:
        with self._lock:
            self._end()
        self._questions.close()
        self._places.close()


def _batches(pages: Sequence[Sequence[Span]]) -> Iterator[list[_Piece]]:
    """Cuts pages into what is read at once."""
    batch: list[_Piece] = []
    room = STAGING_BYTES
    for page, spans in enumerate(pages):
        start = 0
        for address, size in spans:
            while size:
                if not room or len(batch) == MOST_SPANS:
                    yield batch
                    batch, room = [], STAGING_BYTES
                count = min(size, room)
                batch.append(_Piece(page, start, address, count))
                start += count
                address += count
                size -= count
                room -= count
    if batch:
        yield batch
