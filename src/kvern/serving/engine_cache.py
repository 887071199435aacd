"""The engine's side of the server's index of prefixes: tells what its cache has, as it changes.

server --WatchCache--> CacheTeller --CacheChanges 0, all names--> server
                           |-------CacheChanges 1, 2, ... what came and went since--> server
"""

from collections.abc import Callable

from kvern.engine.loop import EngineLoop
from kvern.serving.wire import CacheChanges

MOST_NAMES = 4096
"""The most names of a message, some 70 KB; what is left goes with the next step."""


class CacheTeller:
    """Tells with each step what has changed, once the server wants to know."""

    def __init__(self, core: EngineLoop, send: Callable[[CacheChanges], None]) -> None:
        self._core = core
        self._send = send
        self._number = 0

    def watch(self, wanted: bool) -> None:
        """Tell all anew from now on, or nothing."""
        self._core.watch_cache(wanted)
        self._number = 0
        if wanted:
            self.tell()

    def tell(self) -> None:
        """Tell what has changed, if anything has."""
        names = self._core.cached_names
        if names is not None and (names.has_news or not self._number):
            self._send(CacheChanges(self._number, *names.take(MOST_NAMES), self._core.store_prices()))
            self._number += 1
