"""The signals of a server.

SIGINT, SIGTERM   no more connections; running requests have `grace_seconds` and are then ended with an error
a second one      the server ends at once
SIGHUP            files are read again (`rereading.py`); on a terminal it ends the process, as the terminal is gone
"""

import asyncio
import contextlib
import faulthandler
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvern.errors import EngineClosed
from kvern.server.startup import tell_systemd

if TYPE_CHECKING:
    import uvicorn

    from kvern.server.app import Server

LAST_SECONDS = 5
"""The seconds after a second signal until the process ends in any case and prints the stacks of its threads."""
CUT_OFF = EngineClosed("the server ended before the answer was complete: ask again")


class Signals:
    """Handles signals. `begin` says when there is a server to end; before, a signal gives up the model that loads."""

    def __init__(self, grace_seconds: float, say: Callable[[str], None], reread: asyncio.Event) -> None:
        loading = asyncio.current_task()
        assert loading is not None
        self._loading = loading
        self._loop = asyncio.get_running_loop()
        self._grace = grace_seconds
        self._say = say
        self._reread = reread
        self._ended: list[int] = []
        self._running: tuple[uvicorn.Server, Server] | None = None

    def listen(self, earlier: Sequence[int]) -> None:
        """Handles signals from now on, and those that arrived `earlier`."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)
        if not sys.stderr.isatty():
            signal.signal(signal.SIGHUP, lambda *_: self._loop.call_soon_threadsafe(self._reread.set))
        if earlier:
            self._ended.extend(earlier)
            self._end()

    def begin(self, http: "uvicorn.Server", application: "Server") -> None:
        """Sets what a signal ends from now on."""
        self._running = http, application

    def _note(self, number: int, _: object) -> None:
        """Handles a signal without the event loop: a second one ends the process even if the loop or a thread hangs."""
        if len(self._ended) == 1:  # a third signal must not restart the countdown
            faulthandler.dump_traceback_later(LAST_SECONDS, exit=True, file=2)
        self._ended.append(number)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if self._running is None:
            self._loading.cancel()
            return
        http, application = self._running
        http.force_exit = http.should_exit  # the second signal
        if http.should_exit:
            return
        http.should_exit = True
        tell_systemd("STOPPING=1")
        load = application.service.load
        if load:
            self._say(
                f"ending: {requests(load)} may run for {self._grace:g} s; a second signal ends the server at once"
            )
        self._loop.call_later(self._grace, self._cut, application)

    def _cut(self, application: "Server") -> None:
        """Ends requests that still run with an error."""
        if load := application.service.load:
            self._say(f"{requests(load)} did not end in {self._grace:g} s: cut off")
        if application.service.keeper is not None:
            application.service.keeper.close(CUT_OFF)
        for engine in application.service.engines:
            for replica in engine.client.replicas:
                replica.workload.close(CUT_OFF)


def requests(number: int) -> str:
    """Returns a number of requests in words."""
    return f"{number} request{'s' if number > 1 else ''}"
