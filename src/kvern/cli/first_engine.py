"""The process of the engine that `kvern serve` will use, and the signals that come before the server can take them.

The process starts before the command line is understood: it imports PyTorch, which takes longer than all that a server
does before it has an engine.
"""

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

from kvern.serving.child import EngineChild, EngineProcess

_begun: list[EngineProcess] = []
_handlers: dict[int, Any] = {}
"""The handlers of signals before the process was begun."""
signals: list[int] = []
"""Signals that came before the server could take them. They are only noted: an exception that a handler raises during
an import may be lost, as in any callback of the interpreter."""


def begin() -> None:
    """Start the process. From now on signals are noted until the server has handlers."""
    for number in (signal.SIGINT, signal.SIGTERM):
        _handlers[number] = signal.signal(number, _note)
    _begun.append(EngineChild())


def kill() -> None:
    """Kill the process if no command has used it: the command line was not understood."""
    for process in _begun:
        process.kill()


@contextlib.contextmanager
def engine_process() -> Iterator[EngineProcess]:
    """Gives the process that was begun, or one that begins now. At the end the process ends and the earlier signal
    handlers are back.
    """
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
    """Note a signal. The second one ends the process at once: a model may be downloaded meanwhile."""
    signals.append(number)
    signal.signal(number, signal.SIG_DFL)
