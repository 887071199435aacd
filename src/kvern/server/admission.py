"""Admission of requests: a bounded queue, limits of each API key, and the time after which a client may try again."""

import contextlib
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator

from kvern.api.errors import HttpError
from kvern.server.keys import ApiKey
from kvern.serving.client import EngineClient

RATE_WINDOW = 128
"""The number of a key's last answers from which its rate is estimated."""
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
            self._begun.setdefault(key.name, deque(maxlen=key.per_minute)).append(time.monotonic())

    def end(self, key: ApiKey) -> None:
        """Counts a request that has ended."""
        _subtract(self._concurrent, key.line, 1)

    def excess(self, key: ApiKey) -> tuple[str, str, float | None] | None:
        """Returns why a key may not begin another request now: a reason, a message, and the seconds to wait if
        known."""
        running = self._concurrent[key.line]
        if key.concurrent is not None and running >= key.concurrent:
            message = f"key {key.name} has {running} requests at the same time, its limit: wait until one ends"
            return "concurrent", message, None
        begun = self._begun.get(key.name)
        if key.per_minute is not None and begun is not None and len(begun) == key.per_minute:
            wait = 60 - (time.monotonic() - begun[0])
            if wait > 0:
                message = f"key {key.name} has made {key.per_minute} requests in the last minute, its limit"
                return "per_minute", message, wait
        return None


class Admission:
    """Admits requests to one engine; `limits` count the requests to all engines, and `users` is the number of keys.

    A key may fill the queue while the queue has free places. When it is full, each key may still have its share of
    `max_queue` waiting, and rows of its batches the same again, so that at most three times `max_queue` wait in all.
    """

    def __init__(self, client: EngineClient, max_queue: int, users: int, limits: KeyLimits) -> None:
        self._client = client
        self._max_queue = max_queue
        self._users = users
        self._limits = limits
        self._ended: dict[str, deque[float]] = {}
        self._arriving: Counter[str] = Counter()

    @contextlib.contextmanager
    def enter(self, key: ApiKey, sequences: int = 0) -> Iterator[None]:
        """Admits a request of `sequences` sequences until the block ends. Raises HttpError 429, 403 or 400."""
        if 0 in (key.concurrent, key.per_minute):
            message = f"key {key.name} may ask no model: its limit of requests is 0"
            raise HttpError(403, message, code="permission_denied")
        excess = self._limits.excess(key)
        if excess is not None:
            reason, message, seconds = excess
            raise self._refusal(reason, message, self._seconds_for(key, 1) if seconds is None else seconds)
        if sequences:
            self._check_queue(key, sequences)
        self._limits.begin(key)
        try:
            yield
        finally:
            self._ended.setdefault(key.line, deque(maxlen=RATE_WINDOW)).extend([time.monotonic()] * sequences)
            self._limits.end(key)

    @contextlib.contextmanager
    def arriving(self, key: ApiKey, sequences: int) -> Iterator[Callable[[int], None]]:
        """Counts sequences as waiting while their prompts are prepared.

        The block calls the yielded function with the number of sequences that it has handed to the engine.
        """
        left = sequences
        self._arriving[key.line] += sequences

        def arrived(number: int) -> None:
            nonlocal left
            left -= number
            _subtract(self._arriving, key.line, number)

        try:
            yield arrived
        finally:
            arrived(left)

    def _check_queue(self, key: ApiKey, sequences: int) -> None:
        most = self._max_queue + self._client.max_batch_requests
        if sequences > most:
            message = f"the request asks for {sequences} sequences, and this server runs and queues {most} at most"
            raise HttpError(400, f"{message}: ask for fewer at once", param="n")
        excess = self._client.generations.unfinished + self._arriving.total() + sequences - most
        if excess <= 0:
            return
        waiting = self._client.generations.waiting(key.line) + self._arriving[key.line]
        if self._users > 1 and waiting + sequences <= self._max_queue // self._users:
            return
        if self._users == 1:
            waiting = self._max_queue + excess - sequences
            message = f"{waiting} sequences wait already, and this server lets {self._max_queue} wait"
        else:  # nothing of what other keys do
            message, excess = "the server has more requests than it lets wait", sequences
        raise self._refusal("queue", message, self._seconds_for(key, excess))

    def _seconds_for(self, key: ApiKey, sequences: int) -> float:
        """Estimates the seconds that the next `sequences` answers take, from the rate of the key's last answers."""
        ended = self._ended.get(key.line)
        if ended is None or len(ended) < 2:
            return 1.0
        return sequences * (time.monotonic() - ended[0]) / len(ended)

    def _refusal(self, reason: str, message: str, seconds: float) -> HttpError:
        self._client.refusals.count(reason)
        retry = max(1, min(LONGEST_RETRY, math.ceil(seconds)))
        headers = {"retry-after": str(retry)}
        return HttpError(429, f"{message}: try again in {retry} s", code="rate_limit_exceeded", headers=headers)


def _subtract(counts: Counter[str], line: str, number: int) -> None:
    counts[line] -= number
    if not counts[line]:
        del counts[line]
