"""The engine process that `kvern serve` will use, and signals that arrive before the server can handle them.

The process starts before the command line is parsed: it imports PyTorch, which takes longer than all that a server does
before it has an engine.
"""

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

from kvern.serving.child import EngineChild, EngineProcess

_begun: list[EngineProcess] = []
_handlers: dict[int, Any] = {}
"""The handlers of signals before the process was started."""
signals: list[int] = []
"""Signals that arrived before the server could handle them. They are only recorded: an exception that a handler raises
during an import may be lost, as in any callback of the interpreter."""


def begin() -> None:
    """Starts the process. Signals are recorded from now on, until the server has handlers."""
    for number in (signal.SIGINT, signal.SIGTERM):
        _handlers[number] = signal.signal(number, _note)
    _begun.append(EngineChild())


def kill() -> None:
    """Kills the process if no command has used it, because the command line was wrong."""
    for process in _begun:
        process.kill()


@contextlib.contextmanager
def engine_process() -> Iterator[EngineProcess]:
    """Yields the process, started now if it was not yet. At the end it is killed and the earlier signal handlers are
    restored."""
    if not _begun:
        begin()
    process = _begun.pop()
    try:
        yield process
    finally:
        process.kill()
        process.forget()
        for number, handler in _handlers.items():
            signal.signal(number, handler)
        signals.clear()


def _note(number: int, _: Any) -> None:
    """Records a signal. A second one ends the process at once: a model may be downloading."""
    signals.append(number)
    signal.signal(number, signal.SIG_DFL)
