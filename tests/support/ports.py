"""Ports for servers of tests."""

import contextlib
import random
import socket

LENT = 32_768
"""From here on the system lends ports to connections: one that is free now may be taken when a server starts."""


def free_port() -> int:
    """A port that nobody uses, and nobody the one after it, which some servers listen at too."""
    while True:
        port = random.SystemRandom().randrange(10_000, LENT - 1)
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", port))
            other.bind(("127.0.0.1", port + 1))
            return port
