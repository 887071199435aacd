"""Warnings of stores, which may have the same trouble with each page."""

import logging
import threading
import time

WARN_SECONDS = 600.0

logger = logging.getLogger("kvern")


class RareWarnings:
    """Warns of a store, named `where`: of each kind of trouble once in ten minutes. Any thread may warn."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._last: dict[str, float] = {}
        self._lock = threading.Lock()

    def warn(self, kind: str, text: str) -> None:
        """Logs a warning, unless there was one of this kind a short while ago."""
        now = time.monotonic()
        with self._lock:
            is_new = now - self._last.get(kind, -WARN_SECONDS) >= WARN_SECONDS
            if is_new:
                self._last[kind] = now
        if is_new:
            logger.warning("%s, a store of KV pages: %s", self._where, text)
