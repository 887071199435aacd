"""The process that lets other machines read the host memory of a server's engines.

    python -m kvern.tiers.page_server HOST PORT LIST RANKS

It follows the logs of their arenas as engines do (`tiers/peer.py`), has NIXL offer their memory, and says where pages
are; others read them without it where the network's hardware can. It ends when its standard input is closed. The first
line of its output is empty, or says why it cannot start.
"""

import os
import secrets
import sys
import threading
import time
from collections.abc import Callable

import msgspec
import numpy as np
import zmq

from kvern.errors import KvernError, in_a_line
from kvern.tiers.arena import listed
from kvern.tiers.nixl_agent import POLL_SECONDS, NixlAgent, bind_to
from kvern.tiers.peer import FOLLOW_SECONDS, PeerStore, RemoteArena
from kvern.tiers.remote_pages import (
    PROTOCOL,
    Found,
    Has,
    Hello,
    Kept,
    Refused,
    Span,
    Welcome,
    decode_question,
    encode,
    listen,
    peer_secret,
)

BUSY_SECONDS, AWAKE_SECONDS = 0.25, 5.0
"""Seconds after a question in which readers are served without a pause, and with short ones: TCP needs this process."""
AWAKE_POLL, IDLE_POLL = 1, 20
"""Milliseconds."""


class PageServer:
    """Answers questions about the memory in the list at `path`, of engines with so many `ranks`."""

    def __init__(self, agent: NixlAgent, path: str, ranks: int) -> None:
        self._agent = agent
        self._epoch = 0
        """Tells agents' descriptions apart: also those of another process at this address."""
        self._stores = [PeerStore(rank, ranks, self._offer, lambda: listed(path)) for rank in range(ranks)]

    def follow(self) -> None:
        """Sees what engines have published."""
        for store in self._stores:
            store.follow()

    def answer(self, question: bytes) -> Welcome | Kept | Found | Refused:
        """Answers one question."""
        try:
            asked = decode_question(question)
        except msgspec.DecodeError as error:
            return Refused(f"it does not understand the question: {error}")
        if isinstance(asked, Hello):
            self.follow()
            if asked.protocol != PROTOCOL:
                return Refused(f"it speaks version {PROTOCOL} of the protocol, not {asked.protocol}")
            return Welcome(self._epoch, self._agent.description)
        if isinstance(asked, Has):
            each = [store.has(asked.names) for store in self._stores]
            return Kept([any(found) for found in zip(*each, strict=True)])
        if len(asked.names) != len(asked.lengths):
            return Refused(f"the question has {len(asked.names)} names and {len(asked.lengths)} lengths, not as many")
        pages: list[list[Span]] = [[] for _ in asked.names]
        for store in self._stores:
            for at, lent in enumerate(store.lend(asked.names, asked.lengths)):
                if lent is not None and not pages[at]:
                    pages[at] = [(np.frombuffer(part, np.uint8).ctypes.data, len(part)) for part in lent.parts]
        return Found(self._epoch, pages)

    def _offer(self, arena: RemoteArena) -> Callable[[], None]:
        """Has others read an arena; returns what ends that."""
        offered = []
        for part in arena.parts(sys.maxsize):
            offered.append((self._agent.register(np.frombuffer(part, np.uint8).ctypes.data, len(part)), part))
            arena.extend(part)
        self._epoch = secrets.randbits(48)

        def end() -> None:
            for registered, _ in offered:  # the memory is there as long as this function
                self._agent.forget(registered)

        return end


def serve(socket: "zmq.Socket[bytes]", server: PageServer, agent: NixlAgent) -> None:
    """Answers forever."""
    asked = followed = -AWAKE_SECONDS
    while True:
        now = time.monotonic()
        if now - followed >= FOLLOW_SECONDS:
            server.follow()
            followed = now
        is_busy = now - asked < BUSY_SECONDS
        if socket.poll(0 if is_busy else AWAKE_POLL if now - asked < AWAKE_SECONDS else IDLE_POLL):
            socket.send(encode(server.answer(socket.recv())))
            asked = now
        agent.progress()
        if is_busy:
            time.sleep(POLL_SECONDS)


def main(host: str, port: int, path: str, ranks: int) -> None:
    """Listens, says so, and answers. Raises what prevents it."""
    bind_to(host)
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REP)
    listen(socket, (host, port), peer_secret())
    agent = NixlAgent()
    server = PageServer(agent, path, ranks)
    _say("")
    serve(socket, server, agent)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    except Exception as problem:  # NIXL's, too
        _say(in_a_line(problem) if not isinstance(problem, KvernError | OSError | ValueError) else str(problem))
    os._exit(1)
