"""A collector of OpenTelemetry on this machine: OTLP over HTTP, with every fault that one may have."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """What came, and what the collector does: `status` of answers, `hangs`, `floods` (answers without end)."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resources: list[dict[str, str]] = []
        self.requests = 0
        self.status = 200
        self.floods = False
        self.free = threading.Event()
        """Set: answers come at once."""
        self.free.set()
        self.url = ""

    def named(self, name: str) -> list[Span]:
        return [span for span in list(self.spans) if span.name == name]


def attributes(span: Any) -> dict[str, Any]:
    """The attributes of a span or an event as plain values."""
    return {pair.key: _value(pair.value) for pair in span.attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that listens on a free port of this machine."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.requests += 1
            collector.free.wait(60)
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            if collector.status == 200 and self.path == "/v1/traces":
                message = ExportTraceServiceRequest.FromString(body)
                for resource in message.resource_spans:
                    collector.resources.append({a.key: a.value.string_value for a in resource.resource.attributes})
                    for scope in resource.scope_spans:
                        collector.spans += scope.spans
            self.send_response(collector.status if self.path == "/v1/traces" else 404)
            self.end_headers()
            while collector.floods:
                try:
                    self.wfile.write(b"x" * (1 << 20))
                except OSError:
                    return

        def log_message(self, *args: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield collector
    finally:
        collector.floods = False
        collector.free.set()
        server.shutdown()
        thread.join()
        server.server_close()
