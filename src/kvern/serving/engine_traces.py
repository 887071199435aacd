"""The engine's side of traces: some of its next steps run under PyTorch's profiler, and requests do not notice."""

import gzip
import logging
import os
import signal
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from kvern.engine.loop import EngineLoop
from kvern.engine.step_watch import StepWatch
from kvern.errors import in_a_line
from kvern.io.children import end_with_parent, give_way
from kvern.request.events import TokenEvent
from kvern.serving.wire import TakeTrace, TraceTaken

if TYPE_CHECKING:
    from torch.profiler import profile

logger = logging.getLogger("kvern")
MOST_BYTES = 256 << 20
"""The limit of a trace in JSON."""
BYTES_OF_EVENT = 256
"""The least bytes of an event in it, on average."""
MOST_SECONDS = 120.0
"""The limit of writing a trace."""
NICE = 10
STDERR = 2


class StepTraces:
    """Runs the core's steps. At most one trace is taken at a time, which the server sees to.

    tell    is called before what may make the engine silent for long: PyTorch's profiler holds Python's lock
    folder  for the trace while it is written; it goes with the engine, however that ends

    step --> the profiler records it   ...   the last one: the profiler ends, and a child process is forked
    step --> as ever; meanwhile the child writes the trace, which would hold Python's lock here --> answers
    """

    def __init__(self, core: EngineLoop, tell: Callable[[], None], folder: Path) -> None:
        self._core = core
        self._tell = tell
        self._folder = folder
        self._asked = TakeTrace(0, 0.0)
        self._left, self._until = 0, 0.0
        self._running: tuple[ExitStack, profile] | None = None
        self._writing: Writing | None = None
        self._error: str | None = None

    @property
    def busy(self) -> bool:
        """A trace is being taken, or is to be answered."""
        return bool(self._left or self._writing or self._error)

    def silence(self, watch: StepWatch | None) -> float:
        """Returns the seconds for which nothing may be heard, as `Busy` has them; the most while a trace is taken."""
        return 0.0 if watch is None or self.busy else watch.silence

    def begin(self, asked: TakeTrace) -> None:
        """Takes a trace of the next steps."""
        self._asked, self._left = asked, asked.steps
        self._until = time.monotonic() + asked.seconds

    def step(self) -> list[TokenEvent]:
        """Runs a step of the core, which the trace has if one is being taken."""
        if not self._left:
            return self._core.step()
        if self._running is None and not self._start():
            return self._core.step()
        from torch.profiler import record_function

        with record_function(f"step {self._asked.steps - self._left + 1}"):
            events = self._core.step()
        self._left -= 1
        if not self._left or time.monotonic() > self._until:
            self._end()
        return events

    def cease(self) -> None:
        """Ends the trace with the steps that have run, as the engine is to sleep."""
        if self._left:
            self._end("the engine falls asleep, and no step ran before: try again when it is awake")

    def answers(self) -> list[TraceTaken]:
        """Returns the answer, once."""
        if self._left and time.monotonic() > self._until:
            self._end()
        if self._writing is not None and (written := self._writing.written()) is not None:
            self._writing = None
            return [written]
        if self._error is not None:
            error_said, self._error = self._error, None
            return [TraceTaken(error=error_said)]
        return []

    def _start(self) -> bool:
        import torch

        from kvern.runner.step_profile import DEVICE, HOST, profiled

        self._tell()
        stack = ExitStack()
        try:
            on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            self._running = stack, stack.enter_context(profiled([HOST, DEVICE] if on_gpu else [HOST], parts=True))
        except Exception as error:  # such as another profiler's that has the card
            logger.exception("no trace can be taken")
            self._left, self._error = 0, f"PyTorch's profiler does not start: {in_a_line(error)}"
            return False
        return True

    def _end(self, without: str | None = None) -> None:
        """Ends the trace; `without` says why there is none if no step ran."""
        self._left = 0
        if self._running is None:
            late = f"no step ran within {self._asked.seconds:g} s: send requests meanwhile, or give more seconds"
            self._error = without or late
            return
        (stack, profiler), self._running = self._running, None
        try:
            self._tell()
            stack.close()
            self._tell()
            self._writing = Writing(profiler, self._folder)
        except Exception as error:
            logger.exception("a trace cannot be ended")
            self._error = f"PyTorch's profiler does not end: {in_a_line(error)}"


class Writing:
    """A child process that writes a trace: in one call of PyTorch, beside which no thread runs Python.

    It has the memory of this process as it is now, uses no device, and ends with this process.
    """

    def __init__(self, profiler: "profile", folder: Path) -> None:
        self._answer = tempfile.TemporaryFile()  # noqa: SIM115
        self._until = time.monotonic() + MOST_SECONDS
        with warnings.catch_warnings():
            # Threads may hold locks for ever in a child: this one waits for none of theirs, or is killed in the end.
            warnings.simplefilter("ignore")
            self._child = os.fork()
        if not self._child:
            try:
                _write(profiler, folder, self._answer)
            finally:
                os._exit(1)

    def written(self) -> TraceTaken | None:
        """Returns the trace, or why there is none; None: it is still being written."""
        ended, status = os.waitpid(self._child, os.WNOHANG)
        if not ended and time.monotonic() < self._until:
            return None
        with self._answer:
            if not ended:
                os.kill(self._child, signal.SIGKILL)
                os.waitpid(self._child, 0)
                return TraceTaken(error=f"the trace was not written within {MOST_SECONDS:g} s: ask for fewer steps")
            self._answer.seek(0)
            answer = self._answer.read()
        if not status:
            return TraceTaken(answer)
        code = os.waitstatus_to_exitcode(status)
        why = answer.decode(errors="replace") if code == 1 else ""  # else it may be a part of the trace
        why = why or f"the process that writes it ended ({code})"
        logger.error("a trace cannot be written: %s", why)
        return TraceTaken(error=why)


def _write(profiler: "profile", folder: Path, answer: IO[bytes]) -> None:
    """Writes the trace, or why there is none, and ends this process, the child, with 0 or 1."""
    end_with_parent()  # also when the engine is killed
    for descriptor in map(int, os.listdir("/dev/fd")):  # sockets would seem open when the engine has ended
        if descriptor > STDERR and descriptor != answer.fileno():
            with suppress(OSError):
                os.close(descriptor)
    give_way(NICE)
    failed = False
    try:
        answer.write(packed(profiler, folder))
        answer.flush()
    except BaseException as error:
        failed = True
        answer.seek(0)
        answer.truncate()
        answer.write(in_a_line(error).encode())
        answer.flush()
    os._exit(failed)


def packed(profiler: "profile", folder: Path) -> bytes:
    """Returns the trace as compressed JSON, written in `folder` before. Raises ValueError if it is too large."""
    results = getattr(profiler.profiler, "kineto_results", None)
    if results is not None:
        _check_size(BYTES_OF_EVENT * len(results.events()))
    with tempfile.TemporaryDirectory(prefix="kvern-trace-", dir=folder) as made:
        file = Path(made, "trace.json")
        profiler.export_chrome_trace(str(file))
        _check_size(file.stat().st_size)
        return gzip.compress(file.read_bytes(), 1)


def _check_size(size: int) -> None:
    if size > MOST_BYTES:
        raise ValueError(f"the trace has {size >> 20} MiB, above {MOST_BYTES >> 20}: ask for fewer steps")
