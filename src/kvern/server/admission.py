"""Who is let in: a bounded queue, limits of each key, and how long the others should wait."""

import contextlib
import math
import time
from collections import deque
from collections.abc import Iterator

from kvern.engine.client import EngineClient
from kvern.server.http import HttpError
from kvern.server.keys import ApiKey

RATE_WINDOW = 128
"""So many of the last answers tell how fast answers come."""
LONGEST_RETRY = 60


class Admission:
    """Counts what is asked of one engine."""

    def __init__(self, client: EngineClient, max_queue: int) -> None:
        self._client = client
        self._max_queue = max_queue
        self._ended: deque[float] = deque(maxlen=RATE_WINDOW)
        self._concurrent: dict[str, int] = {}
        self._begun: dict[str, deque[float]] = {}

    @contextlib.contextmanager
    def enter(self, key: ApiKey, sequences: int) -> Iterator[None]:
        """Let a request of so many sequences in, until the block ends. Raises HttpError, 429 or 400."""
        self._check_limits(key)
        self._check_queue(sequences)
        self._concurrent[key.name] = self._concurrent.get(key.name, 0) + 1
        if key.per_minute is not None:
            self._begun.setdefault(key.name, deque(maxlen=key.per_minute)).append(time.monotonic())
        try:
            yield
        finally:
            self._ended.extend([time.monotonic()] * sequences)
            self._concurrent[key.name] -= 1
            if not self._concurrent[key.name]:
                del self._concurrent[key.name]

    def _check_limits(self, key: ApiKey) -> None:
        running = self._concurrent.get(key.name, 0)
        if key.concurrent is not None and running >= key.concurrent:
            message = f"key {key.name} has {running} requests at the same time, its limit: wait until one ends"
            raise self._refusal("concurrent", message, self._seconds_for(1))
        begun = self._begun.get(key.name)
        if key.per_minute is not None and begun is not None and len(begun) == key.per_minute:
            wait = 60 - (time.monotonic() - begun[0])
            if wait > 0:
                message = f"key {key.name} has made {key.per_minute} requests in the last minute, its limit"
                raise self._refusal("per_minute", message, wait)

    def _check_queue(self, sequences: int) -> None:
        most = self._max_queue + self._client.max_batch_requests
        if sequences > most:
            message = f"the request asks for {sequences} sequences, and this server runs and queues {most} at most"
            raise HttpError(400, f"{message}: ask for fewer at once", param="n")
        waiting = self._client.unfinished - self._client.statistics.running
        if waiting + sequences > self._max_queue:
            message = f"{waiting} sequences wait already, and this server lets {self._max_queue} wait"
            raise self._refusal("queue", message, self._seconds_for(waiting + sequences - self._max_queue))

    def _seconds_for(self, sequences: int) -> float:
        """How long so many answers take, by the rate of the last ones."""
        if len(self._ended) < 2:
            return 1.0
        return sequences * (time.monotonic() - self._ended[0]) / len(self._ended)

    def _refusal(self, reason: str, message: str, seconds: float) -> HttpError:
        self._client.metrics.refused(reason)
        retry = max(1, min(LONGEST_RETRY, math.ceil(seconds)))
        headers = {"retry-after": str(retry)}
        return HttpError(429, f"{message}: try again in {retry} s", code="rate_limit_exceeded", headers=headers)
