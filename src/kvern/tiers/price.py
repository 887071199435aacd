"""Prices of stores: how long a transfer takes, learnt from those that ended, and whether a store is asked at all."""

import threading
from collections import deque

GAIN = 0.3
"""The share of its error that a transfer corrects."""
LARGEST_ERROR = 3.0
"""The limit of an error relative to the prediction: a thread may have waited for a processor."""
FAILURES, WINDOW_SECONDS = 3, 10.0
"""So many failures in so many seconds turn a store off."""
LONGEST_OFF = 60.0
FORGETTING_SECONDS = 60.0
"""A price above the first one loses half of the excess in so many seconds, or a store that was slow once is never
tried again."""


class Price:
    """Seconds of a transfer: latency + (bytes + bytes before them) / bandwidth. No clock is read here."""

    def __init__(self, latency: float, bandwidth: float) -> None:
        """`latency` in seconds, `bandwidth` in bytes a second: what is expected before anything is known."""
        self._first = latency, bandwidth
        self._latency, self._bandwidth = latency, bandwidth
        self._changed = 0.0
        self.is_known = False
        """A transfer has ended."""

    @property
    def figures(self) -> tuple[float, float]:
        """The latency in seconds and the bandwidth in bytes a second."""
        return self._latency, self._bandwidth

    def seconds(self, count: int, queued: int = 0, now: float = 0.0) -> float:
        """Returns the predicted seconds of a transfer of `count` bytes behind `queued` others."""
        self._forget(now)
        return self._latency + (count + queued) / self._bandwidth

    def learn(self, count: int, seconds: float, now: float = 0.0) -> None:
        """Corrects the price by a transfer of `count` bytes that took so long, or longer: each term takes its part."""
        self._forget(now)
        self.is_known = True
        expected = self._latency + count / self._bandwidth
        error = max(-1.0, min(LARGEST_ERROR, seconds / expected - 1))
        share = self._latency / expected
        self._latency *= 1 + GAIN * error * share
        self._bandwidth /= 1 + GAIN * error * (1 - share)

    def _forget(self, now: float) -> None:
        passed, self._changed = max(0.0, now - self._changed), max(now, self._changed)
        left = 0.5 ** (passed / FORGETTING_SECONDS)
        latency, bandwidth = self._first
        self._latency = min(self._latency, latency + (self._latency - latency) * left)
        self._bandwidth = max(self._bandwidth, 1 / (1 / bandwidth + (1 / self._bandwidth - 1 / bandwidth) * left))


class Breaker:
    """Turns a store off for 1, 2, 4 .. LONGEST_OFF seconds after FAILURES within WINDOW_SECONDS."""

    def __init__(self) -> None:
        self._failures: deque[float] = deque(maxlen=FAILURES)
        self._until = 0.0
        self._seconds = 0.5
        self._lock = threading.Lock()

    def is_on(self, now: float) -> bool:
        """True if the store may be asked."""
        return now >= self._until

    def failed(self, now: float) -> float:
        """Notes a failure; returns for how many seconds it turns the store off, or 0."""
        with self._lock:
            self._failures.append(now)
            if len(self._failures) < FAILURES or now - self._failures[0] > WINDOW_SECONDS or not self.is_on(now):
                return 0.0
            self._failures.clear()
            self._seconds = min(LONGEST_OFF, 2 * self._seconds)
            self._until = now + self._seconds
            return self._seconds

    def worked(self, now: float) -> None:
        """Notes a success: after a while without failures the next time off is short again."""
        with self._lock:
            if not self._failures or now - self._failures[-1] > WINDOW_SECONDS:
                self._seconds = 0.5
