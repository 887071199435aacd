"""The limits of API keys: how many requests each has at the same time, and in a minute."""

import contextlib
import math
import time
from collections import Counter, deque
from collections.abc import Iterator

from kvern.api.errors import HttpError
from kvern.server.keys import ApiKey

LONGEST_RETRY = 60


class KeyLimits:
    """Counters of each key's requests, over all engines."""

    def __init__(self) -> None:
        self._concurrent: Counter[str] = Counter()
        self._begun: dict[str, deque[float]] = {}

    @property
    def running(self) -> int:
        """The number of running requests of all keys."""
        return self._concurrent.total()

    def begin(self, key: ApiKey) -> None:
        """Counts a request that begins."""
        self._concurrent[key.line] += 1
        if key.per_minute is not None:
            begun = self._begun.get(key.name, ())
            if not isinstance(begun, deque) or begun.maxlen != key.per_minute:  # the limit is new
                begun = self._begun[key.name] = deque(begun, maxlen=key.per_minute)
            begun.append(time.monotonic())

    def end(self, key: ApiKey) -> None:
        """Counts a request that has ended."""
        subtract(self._concurrent, key.line, 1)

    @contextlib.contextmanager
    def waiting(self, key: ApiKey) -> Iterator[None]:
        """Counts a request that waits for a wake before it begins. Raises HttpError 429 or 403."""
        check_any(key)
        if (excess := self.excess(key)) is not None:
            raise busy(excess[1], excess[2] or 1.0)
        self._concurrent[key.line] += 1
        try:
            yield
        finally:
            self.end(key)

    def excess(self, key: ApiKey) -> tuple[str, str, float | None] | None:
        """Returns why a key may not begin another request now: a reason, a message, and the seconds to wait if
        known."""
        running = self._concurrent[key.line]
        if key.concurrent is not None and running >= key.concurrent:
            message = f"key {key.name} has {running} requests at the same time, its limit: wait until one ends"
            return "concurrent", message, None
        begun = self._begun.get(key.name)
        if key.per_minute is not None and begun is not None and len(begun) >= key.per_minute:
            wait = 60 - (time.monotonic() - begun[-key.per_minute])
            if wait > 0:
                message = f"key {key.name} has made {key.per_minute} requests in the last minute, its limit"
                return "per_minute", message, wait
        return None


def check_any(key: ApiKey) -> None:
    """Refuses a key that may ask no model at all. Raises HttpError 403."""
    if 0 in (key.concurrent, key.per_minute):
        raise HttpError(403, f"key {key.name} may ask no model: its limit of requests is 0")


def busy(message: str, seconds: float) -> HttpError:
    """Returns the refusal of a request that may come again after so many seconds."""
    retry = max(1, min(LONGEST_RETRY, math.ceil(seconds)))
    return HttpError(429, f"{message}: try again in {retry} s", headers={"retry-after": str(retry)})


def subtract(counts: Counter[str], line: str, number: int) -> None:
    """Takes a number from the count of a line, which is forgotten at 0."""
    counts[line] -= number
    if not counts[line]:
        del counts[line]
