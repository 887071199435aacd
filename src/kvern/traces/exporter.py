"""The process that sends traces to a collector by OTLP over HTTP, so that no collector delays a request.

    stdin   traces, each after its length in 4 bytes; the process ends behind the last
    stdout  a line of JSON after each export: how many spans were sent or lost, and why

One export runs at a time, and nothing is read meanwhile: what the server has to say then waits in the server, which
counts what it drops. Headers, certificates and the like are read from the environment variables of OpenTelemetry's SDK.
"""

import io
import logging
import os
import random
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import msgspec
import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from kvern.traces.spans import Span, Trace
from kvern.version import __version__

BATCH_SPANS = 512
BATCH_SECONDS = 1.0
"""An export begins so long after its first trace at the latest."""
EXPORT_SECONDS = 30.0
"""An export is given up after so long; the SDK ends its attempts after 10, or OTEL_EXPORTER_OTLP_TIMEOUT."""
READ_BYTES = 1 << 16
MOST_ANSWER = 1 << 16


class Exported(msgspec.Struct, omit_defaults=True):
    """A line of what the process says: spans that one export has sent or lost."""

    sent: int = 0
    lost: int = 0
    reason: str = ""


def frames(descriptor: int) -> Iterator[bytes | None]:
    """Yields what comes, each without its length; None when nothing has come for BATCH_SECONDS."""
    kept = b""
    while True:
        while len(kept) >= 4 and len(kept) >= 4 + (size := int.from_bytes(kept[:4], "little")):
            yield kept[4 : 4 + size]
            kept = kept[4 + size :]
        if not select.select([descriptor], [], [], BATCH_SECONDS)[0]:
            yield None
            continue
        if not (read := os.read(descriptor, READ_BYTES)):
            return
        kept += read


def batches(came: Iterator[bytes | None], clock: Callable[[], float] = time.monotonic) -> Iterator[list[Trace]]:
    """Yields traces in batches of about BATCH_SPANS, or what has come within BATCH_SECONDS."""
    batch: list[Trace] = []
    began = 0.0
    for frame in came:
        if frame is not None:
            batch.append(msgspec.msgpack.decode(frame, type=Trace))
            began = began or clock()
        count = sum(len(trace.spans) for trace in batch)
        if batch and (count >= BATCH_SPANS or frame is None or clock() - began >= BATCH_SECONDS):
            yield batch
            batch = []
            began = 0.0
    if batch:
        yield batch


def readable(trace: Trace, resource: Resource) -> list[ReadableSpan]:
    """The spans of a trace in the form of OpenTelemetry's SDK, with new ids."""
    scope = InstrumentationScope("kvern", __version__)
    trace_id = int.from_bytes(trace.trace_id, "big")
    contexts = [_context(trace_id, random.getrandbits(64) or 1) for _ in trace.spans]
    outer = _context(trace_id, trace.parent_id, is_remote=True) if trace.parent_id else None
    return [
        ReadableSpan(
            span.name,
            context,
            outer if span.parent is None else contexts[span.parent],
            resource,
            dict(span.attributes),
            [Event(event.name, dict(event.attributes), _nanoseconds(event.at)) for event in span.events],
            kind=SpanKind.SERVER if span.parent is None else SpanKind.INTERNAL,
            instrumentation_scope=scope,
            status=_status(span),
            start_time=_nanoseconds(span.began),
            end_time=_nanoseconds(span.ended),
        )
        for span, context in zip(trace.spans, contexts, strict=True)
    ]


def _context(trace_id: int, span_id: int, *, is_remote: bool = False) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote, TraceFlags(TraceFlags.SAMPLED))


def _status(span: Span) -> Status:
    return Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET)


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


class ShortAnswers(requests.Session):
    """Reads MOST_ANSWER bytes of an answer at most, whatever the collector says."""

    def request(self, *args: Any, **options: Any) -> requests.Response:
        """See `requests.Session.request`."""
        answer = super().request(*args, **options | {"stream": True})
        whole, answer.raw = answer.raw, io.BytesIO(answer.raw.read(MOST_ANSWER))
        whole.close()
        return answer


class _LastError(logging.Handler):
    """Keeps what the SDK says of a failure, which it logs and does not raise."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            self.text = record.getMessage()


class Sender:
    """Sends batches, each within a bounded time, whatever the collector does."""

    def __init__(self, exporter: SpanExporter, seconds: float = EXPORT_SECONDS) -> None:
        self._exporter, self._seconds = exporter, seconds
        self._resource = Resource.create({SERVICE_VERSION: __version__})
        if str(self._resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
            self._resource = self._resource.merge(Resource({SERVICE_NAME: "kvern"}))
        self._error = _LastError()
        logger = logging.getLogger("opentelemetry")
        logger.addHandler(self._error)
        logger.propagate = False
        signal.signal(signal.SIGALRM, _late)

    def send(self, traces: Sequence[Trace]) -> Exported:
        """Sends traces, and returns what came of it."""
        spans = [span for trace in traces for span in readable(trace, self._resource)]
        self._error.text = ""
        signal.setitimer(signal.ITIMER_REAL, self._seconds)
        try:
            if self._exporter.export(spans) is SpanExportResult.SUCCESS:
                return Exported(sent=len(spans))
            reason = self._error.text
        except Exception as error:  # a library and a collector may do anything; the next batch is another attempt
            reason = f"{type(error).__name__}: {error}"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return Exported(lost=len(spans), reason=reason[:300] or "no reason was given")


class LateAnswer(Exception):
    """No TimeoutError, which libraries take for one of theirs and try again."""


def _late(number: int, frame: FrameType | None) -> None:
    raise LateAnswer("the collector has not answered in time")


def main(endpoint: str) -> int:
    """Sends what comes until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the server ends first, and says its last
    sender = Sender(OTLPSpanExporter(endpoint, session=ShortAnswers()))
    for batch in batches(frames(sys.stdin.fileno())):
        sys.stdout.write(msgspec.json.encode(sender.send(batch)).decode() + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
