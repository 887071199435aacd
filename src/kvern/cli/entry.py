"""Where the command begins: the process of an engine that will serve starts before the command line is understood.

It imports PyTorch, which takes longer than all that a server does before it has an engine.
"""

import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import Any

from kvern.cli.stderr_relay import relay_stderr
from kvern.cpu.cores import limit_spinning
from kvern.engine.child import EngineChild, EngineProcess

_begun: list[EngineProcess] = []
_handlers: dict[int, Any] = {}
"""Of signals, before the process was begun."""
signals: list[int] = []
"""That came before the server could take them. In the midst of an import an exception may be lost, as in any callback
of the interpreter, so they are only noted."""


def main() -> int:
    """Run the command of `sys.argv` and return its exit code."""
    limit_spinning()
    arguments = sys.argv[1:]
    if arguments[:1] == ["serve"] and not any(argument.startswith(("-h", "--help")) for argument in arguments):
        relay_stderr()
        _begin()
    from kvern.cli.main import main as run

    try:
        return run(arguments)
    finally:
        for process in _begun:  # the command was not understood
            process.kill()


@contextlib.contextmanager
def engine_process() -> Iterator[EngineProcess]:
    """The process that was begun, or one that begins now; with the block it ends, and signals are whose they were."""
    if not _begun:
        _begin()
    process = _begun.pop()
    try:
        yield process
    finally:
        process.kill()
        process.forget()
        for number, handler in _handlers.items():
            signal.signal(number, handler)
        signals.clear()


def _begin() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # until the server has handlers
        _handlers[number] = signal.signal(number, _note)
    _begun.append(EngineChild())


def _note(number: int, _: Any) -> None:
    """The second ends the process at once: a model may be downloaded meanwhile."""
    signals.append(number)
    signal.signal(number, signal.SIG_DFL)
