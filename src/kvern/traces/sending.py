"""Sends traces of requests to a collector of OpenTelemetry, through a process of its own (`exporter.py`).

    offer --> queue of MOST_QUEUED bytes --writer thread--> the process --OTLP--> the collector
                                         <--reader thread-- what was sent or lost

What the queue cannot take is dropped and counted. Nothing here waits for the collector, nor raises.
"""

import contextlib
import importlib.util
import logging
import os
import random
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

import msgspec
from prometheus_client import CollectorRegistry, Counter

from kvern.errors import ConfigError
from kvern.io.bytecode import bytecode_environment
from kvern.traces.spans import Span, Trace

logger = logging.getLogger("kvern")
EXTRA = "opentelemetry.exporter.otlp.proto.http"
SPECIFIC, GENERAL = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"
MOST_QUEUED = 8 << 20
"""Bytes of traces that wait for the process."""
LONGEST_REST = 60.0
"""Seconds after which a process that ended is started again at the latest: 1 at first, then more each time."""
ENDING_SECONDS = 3.0
"""The server waits so long at its end for the traces that are queued."""
WARNING_SECONDS = 600.0


class Report(msgspec.Struct):
    """The result of one export: `Exported` of the process."""

    sent: int = 0
    lost: int = 0
    reason: str = ""


class TraceFigures:
    """Counts of spans that were sent, that a collector did not take, and that were dropped before."""

    engine_name = None

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        text = "Spans of traces: sent, lost (the collector did not take them) or dropped (too many waited)."
        spans = Counter("kvern:trace_spans", text, ["result"], registry=self.registry)
        self.sent, self.lost, self.dropped = (spans.labels(result) for result in ("sent", "lost", "dropped"))


def traces_url(endpoint: str) -> str:
    """Returns the URL of a collector's traces: that of `endpoint`, with /v1/traces if it has no path.

    Raises ConfigError if it is no URL of HTTP.
    """
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"otlp_traces_endpoint {endpoint!r} is no URL of HTTP: name the collector's, like http://localhost:4318"
        )
    return endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"


def wanted_url(endpoint: str | None, environment: Mapping[str, str]) -> str | None:
    """Returns the URL for traces: of the option `endpoint`, or of OpenTelemetry's variables; None if nobody wants any.

    Raises ConfigError if the option is wrong, or its extra is not installed. Variables, which may be meant for other
    programs, are ignored with a warning where they cannot be obeyed.
    """
    if endpoint is not None:
        url = traces_url(endpoint)
        if not has_extra():
            raise ConfigError(f"otlp_traces_endpoint is {endpoint}: traces need pip install 'kvern[traces]'")
        return url
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or environment.get("OTEL_TRACES_EXPORTER") == "none":
        return None
    name = SPECIFIC if environment.get(SPECIFIC) else GENERAL
    if not (given := environment.get(name)):
        return None
    protocol = environment.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    protocol = environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
    reason = "" if has_extra() else "that needs pip install 'kvern[traces]'"
    if protocol != "http/protobuf":
        reason = f"its protocol is {protocol}, and kvern speaks http/protobuf"
    if not reason:
        try:
            return traces_url(given if name == SPECIFIC else f"{given.rstrip('/')}/v1/traces")
        except ConfigError as error:
            reason = str(error)
    logger.warning("no traces are sent to %s of %s: %s", given, name, reason)
    return None


def has_extra() -> bool:
    """True if OpenTelemetry's exporter is installed."""
    try:
        return importlib.util.find_spec(EXTRA) is not None
    except ModuleNotFoundError:
        return False


class Traces:
    """The way of traces out of the server. `offer` may be called by any thread."""

    def __init__(self, url: str, say: Callable[[str], None]) -> None:
        """Starts the process and its threads, and sends a first trace of one span, whose fate is told."""
        self.figures = TraceFigures()
        self._url, self._say = url, say
        self._queue: deque[tuple[bytes, int]] = deque()
        self._queued = 0
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._told: bool | None = None
        """True if the last report was good; None: there was none."""
        self._warned = 0.0
        self._writer = threading.Thread(target=self._write, name="kvern-traces", daemon=True)
        now = time.time()
        self.offer(Trace(random.randbytes(16), 0, [Span("kvern start", now, now)]))
        self._writer.start()

    def offer(self, trace: Trace) -> None:
        """Queues a trace, or drops it if too many wait."""
        content = msgspec.msgpack.encode(trace)
        frame = len(content).to_bytes(4, "little") + content
        with self._changed:
            if self._closing.is_set() or self._queued + len(frame) > MOST_QUEUED:
                self.figures.dropped.inc(len(trace.spans))
                return
            self._queue.append((frame, len(trace.spans)))
            self._queued += len(frame)
            self._changed.notify()

    def close(self) -> None:
        """Sends what is queued, within ENDING_SECONDS, and ends the process."""
        with self._changed:
            self._closing.set()
            self._changed.notify()
        self._writer.join(ENDING_SECONDS)
        if self._writer.is_alive() and self._process is not None:
            self._process.kill()
            self._writer.join()

    def _write(self) -> None:
        """The writer thread: hands the queue to the process, which is started again when it has ended."""
        rest = 1.0
        while not self._closing.wait(rest - 1):
            began = time.monotonic()
            try:
                self._serve()
            except OSError as error:
                self._warn(f"the process that sends traces does not start: {error}")
            if not self._closing.is_set():
                self._warn("the process that sends traces has ended; it is started again")
            rest = 2.0 if time.monotonic() - began > LONGEST_REST else min(LONGEST_REST, 2 * rest)

    def _serve(self) -> None:
        """Runs one process until it ends, or the server does and nothing is queued."""
        process = subprocess.Popen(  # noqa: S603 (no shell, our own words)
            [sys.executable, "-m", "kvern.traces.exporter", self._url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | bytecode_environment(),
        )
        self._process = process
        reader = threading.Thread(target=self._read, args=(process,), name="kvern-trace-reports", daemon=True)
        reader.start()
        assert process.stdin is not None
        spans = 0
        with contextlib.suppress(OSError), process.stdin as pipe:  # it may have ended: what it had is lost
            while (found := self._next(process)) is not None:
                frame, spans = found
                pipe.write(frame)
                pipe.flush()
                spans = 0
        self.figures.dropped.inc(spans)
        process.wait()
        reader.join()

    def _next(self, process: "subprocess.Popen[bytes]") -> tuple[bytes, int] | None:
        """The next of the queue, when there is one; None at the end, or if the process has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing.is_set() or process.poll() is not None)
            if not self._queue or process.returncode is not None:
                return None
            self._queued -= len(self._queue[0][0])
            return self._queue.popleft()

    def _read(self, process: "subprocess.Popen[bytes]") -> None:
        """Counts what one process says."""
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                with contextlib.suppress(msgspec.DecodeError):  # it may be a library's word
                    self._heard(msgspec.json.decode(line, type=Report))
        process.wait()
        with self._changed:
            self._changed.notify()

    def _heard(self, report: Report) -> None:
        self.figures.sent.inc(report.sent)
        self.figures.lost.inc(report.lost)
        if report.lost:
            self._warn(f"traces are not taken by {self._url}: {report.reason}")
        elif not self._told:
            self._say(f"traces go to {self._url}" + (" again" if self._told is False else ""))
        self._told = not report.lost

    def _warn(self, text: str) -> None:
        """Warns, unless it has just done so."""
        if self._told is not False or time.monotonic() - self._warned > WARNING_SECONDS:
            self._warned = time.monotonic()
            logger.warning("%s", text)
        self._told = False
