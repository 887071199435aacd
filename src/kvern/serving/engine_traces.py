"""The engine's side of traces: some of its next steps run under PyTorch's profiler, and requests do not notice."""

import gzip
import logging
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from kvern.engine.loop import EngineLoop
from kvern.engine.step_watch import StepWatch
from kvern.errors import in_a_line
from kvern.request.events import TokenEvent
from kvern.serving.wire import TakeTrace, TraceTaken

if TYPE_CHECKING:
    from torch.profiler import profile

logger = logging.getLogger("kvern")
MOST_BYTES = 256 << 20
"""The limit of a trace in JSON."""
BYTES_OF_EVENT = 256
"""The least bytes of an event in it, on average."""


class StepTraces:
    """Runs the core's steps. At most one trace is taken at a time, which the server sees to.

    tell    is called before what may make the engine silent for long: PyTorch's profiler holds Python's lock
    folder  for the trace while it is written; it goes with the engine, however that ends
    """

    def __init__(self, core: EngineLoop, tell: Callable[[], None], folder: Path) -> None:
        self._core = core
        self._tell = tell
        self._folder = folder
        self._pool = ThreadPoolExecutor(1, "kvern-traces")
        self._asked = TakeTrace(0, 0.0)
        self._left, self._until = 0, 0.0
        self._running: tuple[ExitStack, profile] | None = None
        self._packing: Future[bytes] | None = None
        self._error: str | None = None

    @property
    def busy(self) -> bool:
        """A trace is being taken, or is to be answered."""
        return bool(self._left or self._packing or self._error)

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
        if self._packing is not None and self._packing.done():
            packing, self._packing = self._packing, None
            try:
                return [TraceTaken(packing.result())]
            except Exception as error:
                logger.exception("a trace cannot be written")
                self._error = in_a_line(error)
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
            self._packing = self._pool.submit(packed, profiler, self._folder)
        except Exception as error:
            logger.exception("a trace cannot be ended")
            self._error = f"PyTorch's profiler does not end: {in_a_line(error)}"


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
