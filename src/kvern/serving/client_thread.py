"""The client of a model's engines in a thread, for programs that have no event loop or several.

    any thread  -- coroutine -->  the thread's event loop: EngineClient  -- messages -->  engine processes

`AsyncLLM` awaits what the coroutine returns, `LLM` blocks until it returns.
"""

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import cached_property
from typing import Any, TypeVar

from kvern.config import EngineConfig
from kvern.errors import EngineClosed
from kvern.models.implementation import describe_model
from kvern.models.loader import read_config
from kvern.request.events import EngineStatistics, all_together
from kvern.serving.client import EngineClient
from kvern.serving.shared_engine import check_process
from kvern.spec.model import ModelSpec

T = TypeVar("T")

CLOSED = "the engine is closed"


class ClientThread:
    """An `EngineClient` and the thread that runs its event loop.

    The engines end with `close`, when this object is collected, or when the interpreter ends. Every call but `close`
    raises EngineDied in a process that was forked from the one in which this was made.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Start the engines and wait until they are ready. Raises ConfigError with the reason of one that cannot."""
        self.config = config
        self.client = EngineClient(config, grammars_apart=False)
        self._process = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kvern-engines", daemon=True)
        self._thread.start()
        self._close = weakref.finalize(self, _end, self.client, self._loop, self._thread, self._process)
        try:
            self.wait(self.client.__aenter__())
        except BaseException:
            self.close()
            raise

    @cached_property
    def spec(self) -> ModelSpec:
        """The model's description."""
        folder = self.client.folder
        return describe_model(folder, read_config(folder), self.client.config.model_implementation)

    @property
    def adapters(self) -> list[str]:
        """The names of the adapters that requests may use."""
        return [adapter.name for adapter in self.client.adapters.names.all()]

    def statistics(self) -> EngineStatistics:
        """The counters of all engines since the start; an engine that died counts as far as it had told."""
        return all_together([replica.statistics for replica in self.client.replicas])

    @property
    def closed(self) -> bool:
        """True once the engines were told to end."""
        return not self._close.alive

    def submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Run a coroutine in the loop. Raises EngineClosed after `close`."""
        try:
            check_process(self._process)
            if self.closed:
                raise EngineClosed(CLOSED)
        except BaseException:
            work.close()
            raise
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop and return its result. An exception in this thread cancels it."""
        done = self.submit(work)
        try:
            return done.result()
        except BaseException:
            done.cancel()
            raise

    def soon(self, work: Callable[[], object]) -> None:
        """Call a function in the loop, after what was submitted before; after `close` nothing happens."""
        if not self.closed and os.getpid() == self._process:
            self._loop.call_soon_threadsafe(work)

    def close(self) -> None:
        """End the engines. Requests that run fail with EngineClosed."""
        self._close()


def _end(client: EngineClient, loop: asyncio.AbstractEventLoop, thread: threading.Thread, process: int) -> None:
    """End the engines and the thread. A process that was forked from the one that made them does nothing.

    Python may collect the owner in the thread itself, which then cannot wait for its own end.
    """
    if os.getpid() != process:
        return
    if threading.current_thread() is thread:
        loop.create_task(client.__aexit__()).add_done_callback(lambda _: loop.stop())
        return
    try:
        asyncio.run_coroutine_threadsafe(client.__aexit__(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
