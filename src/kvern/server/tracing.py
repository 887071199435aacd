"""Traces of a server's requests: which are sent, and the span of each request as a whole."""

import os
import random
from collections.abc import Callable

from kvern.request.record import RequestRecord
from kvern.server.config import ServerConfig
from kvern.server.keys import PROBES
from kvern.server.late_records import LateRecords
from kvern.serving.served import ServedRequest
from kvern.traces import request_spans as names
from kvern.traces.sending import Traces, wanted_url
from kvern.traces.spans import Event, Span, Trace, Value, read_context

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/api/chat": "chat",
    "/v1/completions": "text_completion",
    "/api/generate": "text_completion",
    "/v1/embeddings": "embeddings",
    "/api/embed": "embeddings",
    "/api/embeddings": "embeddings",
}
"""The conventions' names of operations by path; others have their path's last part."""


def start(config: ServerConfig, say: Callable[[str], None]) -> "Tracing | None":
    """Starts what sends traces; None: nobody wants any. `say` prints. Raises ConfigError."""
    url = wanted_url(config.otlp_traces_endpoint, os.environ)
    return None if url is None else Tracing(Traces(url, say), config.trace_share)


class Tracing:
    """Is told of each request that has ended."""

    def __init__(self, traces: Traces, share: float) -> None:
        self.traces = traces
        self._sampling = names.Sampling(share)

    def ended(self, served: ServedRequest, late: LateRecords) -> None:
        """Sends the trace of a request, if it is one of those that are traced, when its records are there."""
        failed = served.status >= 500 or served.status == 0
        if served.path in PROBES or (served.model is None and not failed):
            return  # it asked no model
        context = None if served.traceparent is None else read_context(served.traceparent)
        if not self._sampling.takes(context, served.ended or 0.0, failed=failed):
            return
        trace_id, parent_id = (random.randbytes(16), 0) if context is None else (context.trace_id, context.parent_id)
        late.when_told(served, lambda: self.traces.offer(trace_of(served, trace_id, parent_id)))


def trace_of(served: ServedRequest, trace_id: bytes, parent_id: int) -> Trace:
    """Returns the trace of a request that has ended."""
    records = sorted((record for _, record in served.records), key=lambda record: record.arrived)
    prompts = [record for _, record in served.prompts]
    return Trace(trace_id, parent_id, names.request_spans(_whole(served, records), records, _text(served), prompts))


def _text(served: ServedRequest) -> Span | None:
    """Returns the span of making text of tokens; None: there were none."""
    if served.first_token is None:
        return None
    ended = served.arrived + max(served.first_token, served.text.until)
    return Span(
        "detokenize", served.arrived + served.first_token, ended, 0, {"kvern.busy_seconds": served.text.seconds}
    )


def _prompts(records: list[RequestRecord]) -> dict[str, int]:
    """Returns the tokens of the prompts whose answers have these records, by their names."""
    found: dict[str, int] = {}
    for record in records:
        found.setdefault(record.request_id.partition("#")[0], record.prompt_tokens)
    return found


def _whole(served: ServedRequest, records: list[RequestRecord]) -> Span:
    operation = OPERATIONS.get(served.path, served.path.rpartition("/")[2])
    found: dict[str, Value] = {
        names.OPERATION: operation,
        names.PROVIDER: "kvern",
        names.URL_PATH: served.path,
        names.STATUS_CODE: served.status,
        "kvern.request_id": served.request_id,
        "kvern.key": served.key,
        "kvern.moves": served.moves,
    }
    if served.model is not None:
        found[names.REQUEST_MODEL] = served.model
    if served.answer_id is not None:
        found[names.RESPONSE_ID] = served.answer_id
    if served.first_token is not None:
        found[names.FIRST_CHUNK] = served.first_token
    if records:
        found[names.INPUT_TOKENS] = sum(_prompts(records).values())
        found[names.OUTPUT_TOKENS] = sum(record.answer_tokens for record in records)
        found[names.FINISH_REASONS] = [record.finish_reason for record in records]
    began = served.arrived
    lost = [passage for passage in served.passages if passage.until is not None]
    events = [
        Event(
            "moved",
            began + (passage.until or 0.0),
            {"kvern.engine": passage.engine, "kvern.reason": passage.reason or ""},
        )
        for passage in lost
    ]
    error = ""
    if served.status >= 500 or not served.status:
        error = f"HTTP {served.status}" if served.status else "no answer was sent"
        found[names.ERROR_TYPE] = str(served.status)
    name = f"{operation} {served.model}" if served.model else operation
    return Span(name, began, began + (served.ended or 0.0), None, found, events, error)
