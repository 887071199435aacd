"""Traces go to a collector by a process of their own; whatever the collector does, nothing waits for it."""

import os
import signal
from collections.abc import Iterator
from functools import partial

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

from kvern.errors import ConfigError
from kvern.traces import sending
from kvern.traces.exporter import Sender
from kvern.traces.sending import Traces, traces_url, wanted_url
from kvern.traces.spans import Context, Event, Span, Trace, read_context
from tests.support.collector import Collector, attributes, collecting
from tests.support.served import eventually

PARENT = 0x0123456789ABCDEF
TRACE = Trace(
    bytes(range(16)),
    PARENT,
    [
        Span("chat", 100.0, 103.0, attributes={"gen_ai.usage.input_tokens": 5, "reasons": ["stop"]}),
        Span("queue", 100.25, 101.0, 0, events=[Event("preempted", 100.5, {"step": 3})]),
        Span("prefill", 101.0, 102.5, 0, error="its step failed"),
    ],
)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def way(collector: Collector, said: list[str]) -> Iterator[Traces]:
    found = Traces(traces_url(collector.url), said.append)
    try:
        yield found
    finally:
        found.close()


def count(way: Traces, name: str) -> float:
    value: float = getattr(way.figures, name)._value.get()
    return value


def grown(way: Traces, lost: float) -> bool:
    return count(way, "lost") > lost


def test_spans_arrive_as_they_were(collector: Collector, way: Traces, said: list[str]) -> None:
    way.offer(TRACE)
    eventually(lambda: len(collector.spans) == 4)
    [start] = collector.named("kvern start")
    chat, queue, prefill = (collector.named(name)[0] for name in ("chat", "queue", "prefill"))
    assert {span.trace_id for span in (chat, queue, prefill)} == {TRACE.trace_id}
    assert int.from_bytes(chat.parent_span_id, "big") == PARENT
    assert queue.parent_span_id == prefill.parent_span_id == chat.span_id
    assert (queue.start_time_unix_nano, queue.end_time_unix_nano) == (100_250_000_000, 101_000_000_000)
    assert attributes(chat) == {"gen_ai.usage.input_tokens": 5, "reasons": ["stop"]}
    assert [(event.name, attributes(event)) for event in queue.events] == [("preempted", {"step": 3})]
    assert (prefill.status.code, prefill.status.message) == (2, "its step failed")
    assert chat.kind == 2 and queue.kind == 1 and not chat.status.code
    assert start.trace_id != chat.trace_id
    assert collector.resources[0]["service.name"] == "kvern"
    eventually(lambda: count(way, "sent") == 4)
    assert said == [f"traces go to {collector.url}/v1/traces"], "the fate of the first is told"


def test_what_waits_is_sent_at_the_end(collector: Collector, said: list[str]) -> None:
    way = Traces(traces_url(collector.url), said.append)
    for _ in range(100):
        way.offer(TRACE)
    way.close()
    assert len(collector.spans) == 301
    assert count(way, "sent") == 301


@pytest.mark.nightly
def test_a_collector_that_refuses(collector: Collector, way: Traces, caplog: pytest.LogCaptureFixture) -> None:
    eventually(lambda: count(way, "sent") == 1)
    collector.status = 403
    for _ in range(3):
        way.offer(TRACE)
        eventually(partial(grown, way, count(way, "lost")))
    assert caplog.text.count("are not taken by") == 1, "one warning, not one an export"
    assert "403" in caplog.text or "Forbidden" in caplog.text
    collector.status = 200
    way.offer(TRACE)
    eventually(lambda: count(way, "sent") == 4)


@pytest.mark.nightly
def test_nothing_waits_for_a_collector_that_hangs(
    collector: Collector, way: Traces, monkeypatch: pytest.MonkeyPatch
) -> None:
    eventually(lambda: count(way, "sent") == 1)
    monkeypatch.setattr(sending, "MOST_QUEUED", 50_000)
    collector.free.clear()
    for _ in range(20_000):
        way.offer(TRACE)
    assert count(way, "dropped") > 1000
    collector.free.set()
    eventually(lambda: count(way, "sent") + count(way, "lost") + count(way, "dropped") == 60_001)
    assert count(way, "sent") > 1


def test_the_end_does_not_wait_for_a_collector_that_hangs(
    collector: Collector, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "ENDING_SECONDS", 0.2)
    collector.free.clear()
    way = Traces(traces_url(collector.url), said.append)
    eventually(lambda: collector.requests > 0)
    process = way._process
    assert process is not None
    way.close()
    assert process.returncode == -signal.SIGKILL


def test_a_killed_process_is_replaced(collector: Collector, way: Traces) -> None:
    eventually(lambda: count(way, "sent") == 1)
    first = way._process
    assert first is not None
    os.kill(first.pid, signal.SIGKILL)
    eventually(lambda: way._process is not first)
    way.offer(TRACE)
    eventually(lambda: len(collector.named("chat")) == 1)


@pytest.mark.nightly
def test_nobody_listens(said: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    way = Traces("http://127.0.0.1:9/v1/traces", said.append)
    eventually(lambda: "are not taken by http://127.0.0.1:9/v1/traces" in caplog.text)
    way.close()
    assert not said


def test_of_answers_without_end_little_is_read(collector: Collector, way: Traces) -> None:
    collector.floods = True
    way.offer(TRACE)
    eventually(lambda: count(way, "sent") == 4)


def test_an_export_ends_in_any_case(collector: Collector) -> None:
    collector.free.clear()
    found = Sender(OTLPSpanExporter(f"{collector.url}/v1/traces", timeout=60), 0.5).send([TRACE])
    assert found.lost == 3
    assert "has not answered in time" in found.reason


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://localhost:4318", "http://localhost:4318/v1/traces"),
        ("http://localhost:4318/", "http://localhost:4318/v1/traces"),
        ("https://c.example/otlp/v1/traces", "https://c.example/otlp/v1/traces"),
    ],
)
def test_a_url_may_be_the_collector_s(endpoint: str, url: str) -> None:
    assert traces_url(endpoint) == url


@pytest.mark.parametrize("endpoint", ["localhost:4318", "grpc://localhost:4317", "", "http://"])
def test_what_is_no_url_of_http_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="is no URL of HTTP"):
        traces_url(endpoint)


BOTH = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4318/x", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://b/y"}


@pytest.mark.parametrize(
    ("option", "environment", "url"),
    [
        (None, {}, None),
        ("http://c:4318", BOTH, "http://c:4318/v1/traces"),
        (None, BOTH, "http://b/y"),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4318/x"}, "http://a:4318/x/v1/traces"),
        (None, BOTH | {"OTEL_SDK_DISABLED": "true"}, None),
        (None, BOTH | {"OTEL_TRACES_EXPORTER": "none"}, None),
    ],
)
def test_the_option_comes_before_the_environment(option: str | None, environment: dict[str, str], url: str) -> None:
    assert wanted_url(option, environment) == url


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        (BOTH | {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "its protocol is grpc"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "a:4317"}, "is no URL of HTTP"),
    ],
)
def test_variables_that_cannot_be_obeyed_are_ignored_with_a_warning(
    environment: dict[str, str], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert wanted_url(None, environment) is None
    assert reason in caplog.text


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(sending, "EXTRA", "kvern_no_such_package.exporter")
    assert wanted_url(None, {}) is None
    assert not caplog.text
    assert wanted_url(None, BOTH) is None
    assert "pip install 'kvern[traces]'" in caplog.text
    with pytest.raises(ConfigError, match="pip install"):
        wanted_url("http://c:4318", {})


GOOD = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_contexts_are_read_as_w3c_says() -> None:
    trace, parent = bytes.fromhex("0af7651916cd43dd8448eb211c80319c"), 0xB7AD6B7169203331
    assert read_context(GOOD) == Context(trace, parent, True)
    assert read_context(GOOD[:-1] + "2") == Context(trace, parent, False)
    assert read_context("cc" + GOOD[2:] + "-what-later-versions-add") == Context(trace, parent, True)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        GOOD + "-more",
        "ff" + GOOD[2:],
        GOOD.upper(),
        GOOD.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32),
        GOOD.replace("b7ad6b7169203331", "0" * 16),
        GOOD[:-2] + "1",
        GOOD.replace("-", "_"),
    ],
)
def test_what_is_no_context_is_none(header: str) -> None:
    assert read_context(header) is None
