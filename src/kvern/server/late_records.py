"""Waits, at the end of requests, until their engines have said what became of the answers.

A client may leave in a long step, and a stop string is found here: the engine tells the record after its step.
"""

import asyncio
from collections.abc import Callable

from kvern.serving.served import ServedRequest

LATE_SECONDS = 60.0
"""The time after the end of a request at which its engine tells nothing of it any more: it has died, or is stuck."""


class LateRecords:
    """Waits for the records of requests that have ended."""

    def __init__(self) -> None:
        self._waiting: dict[ServedRequest, list[Callable[[], None]]] = {}

    def when_told(self, served: ServedRequest, say: Callable[[], None]) -> None:
        """Calls `say` when all records of an ended request are there: at once if they are, or else once it is late."""
        if served.asked <= served.answers:
            say()
            return
        if served not in self._waiting:
            self._waiting[served] = []
            late = asyncio.get_running_loop().call_later(LATE_SECONDS, self._end, served)

            def told() -> None:
                late.cancel()
                self._end(served)

            served.told = told
        self._waiting[served].append(say)

    def end(self) -> None:
        """Nothing is awaited any more: the server ends."""
        for served in [*self._waiting]:
            self._end(served)

    def _end(self, served: ServedRequest) -> None:
        served.told = None
        for say in self._waiting.pop(served, ()):
            say()
