"""Files that a running server reads again when they change: its API keys, and the certificate and key of TLS."""

import asyncio
import contextlib
import os
import ssl
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvern.errors import ConfigError
from kvern.server.config import ServerConfig
from kvern.server.startup import check_tls

EVERY = 1.0
"""The seconds between two looks at the files."""

State = tuple[tuple[int, int, int] | None, ...]


class Reread:
    """Reads files again when they have changed and then stayed the same for a look, or when `asked`.

    `read` returns what there is to say. It raises ConfigError if it cannot use what it finds, and keeps what was.
    """

    def __init__(
        self, paths: Sequence[Path], read: Callable[[], str], say: Callable[[str], None], asked: asyncio.Event
    ) -> None:
        self._paths = paths
        self._read = read
        self._say = say
        self._asked = asked
        self._known = self._last = states(paths)

    async def watch(self) -> None:
        """Looks at the files until it is cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EVERY):
                    await self._asked.wait()
            is_asked = self._asked.is_set()
            self._asked.clear()
            self.look(await asyncio.to_thread(states, self._paths), is_asked)

    def look(self, now: State, is_asked: bool) -> None:
        """Reads the files if their state says so."""
        is_settled, self._last = now == self._last, now
        if not is_asked and (now == self._known or not is_settled):
            return
        self._known = now
        try:
            said = self._read()
        except ConfigError as error:
            self._say(f"warning: {error}; what was read before holds")
        else:
            if said:
                self._say(said)


async def read_again(
    server: ServerConfig,
    read_keys: Callable[[], str],
    context: ssl.SSLContext | None,
    say: Callable[[str], None],
    asked: asyncio.Event,
) -> None:
    """Reads the files of keys and of TLS again when they change, or when `asked`."""

    def read() -> str:
        if context is not None and server.tls_cert is not None:
            check_tls(server)
            context.load_cert_chain(server.tls_cert, server.tls_key)
        return read_keys()

    await Reread(server.reread_files, read, say, asked).watch()


def states(paths: Sequence[Path]) -> State:
    """Returns for each file what changes when it is written; None for one that cannot be found."""
    return tuple(_states(paths))


def _states(paths: Sequence[Path]) -> Iterator[tuple[int, int, int] | None]:
    for path in paths:
        try:
            found = os.stat(path)
        except OSError:
            yield None
        else:
            yield found.st_mtime_ns, found.st_size, found.st_ino
