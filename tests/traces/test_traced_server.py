"""A server whose requests are traced, and a collector that gets them."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvern.traces import request_spans
from tests.support.collector import Collector, attributes, collecting
from tests.support.served import QUESTION, SMALL, STORY, Served, children_of, command_of, eventually, serving

PARENT = "b7ad6b7169203331"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


@pytest.fixture(scope="module")
def served(collector: Collector) -> Iterator[Served]:
    with serving(*SMALL, "--otlp-traces-endpoint", collector.url, "--trace-share", "1") as served:
        yield served


def spans_of(collector: Collector, request_id: str) -> dict[str, Any]:
    """The spans of a request's trace by name, once they have come."""

    def whole() -> list[Any]:
        return [span for span in list(collector.spans) if attributes(span).get("kvern.request_id") == request_id]

    eventually(lambda: any(not span.name.startswith("engine") for span in whole()))
    trace = next(span.trace_id for span in whole())
    return {span.name: span for span in collector.spans if span.trace_id == trace}


def test_a_chat_becomes_a_trace(served: Served, collector: Collector) -> None:
    options: dict[str, Any] = {"messages": QUESTION, "max_tokens": 20, "temperature": 0}
    asked = served.client().chat.completions.with_raw_response.create(model="kvern-1m", **options)
    spans = spans_of(collector, asked.headers["x-request-id"])
    assert set(spans) == {"chat kvern-1m", "engine", "queue", "prefill", "prefill chunk", "decode", "detokenize"}
    whole, answer = attributes(spans["chat kvern-1m"]), asked.parse()
    assert whole["gen_ai.operation.name"] == "chat"
    assert whole["gen_ai.request.model"] == "kvern-1m"
    assert whole["gen_ai.response.id"] == answer.id
    assert answer.usage is not None
    assert whole["gen_ai.usage.input_tokens"] == answer.usage.prompt_tokens
    assert whole["gen_ai.usage.output_tokens"] == answer.usage.completion_tokens
    assert whole["gen_ai.response.finish_reasons"] == [answer.choices[0].finish_reason]
    assert whole["http.response.status_code"] == 200
    assert spans["engine"].parent_span_id == spans["chat kvern-1m"].span_id
    assert 0 < attributes(spans["detokenize"])["kvern.busy_seconds"] < 1
    outers = ("engine", "chat kvern-1m"), ("decode", "engine"), ("prefill", "engine"), ("detokenize", "chat kvern-1m")
    for inner, outer in outers:
        assert spans[outer].start_time_unix_nano <= spans[inner].start_time_unix_nano
        assert spans[inner].end_time_unix_nano <= spans[outer].end_time_unix_nano
    values = [str(value) for span in spans.values() for value in attributes(span).values()]
    assert answer.choices[0].message.content not in values, "no text is sent"
    assert not any("17 + 25" in value for value in values)
    eventually(lambda: served.figure("trace_spans_total", result="sent") > 1)


@pytest.mark.parametrize("sampled", [True, False])
def test_the_client_s_trace_goes_on(served: Served, collector: Collector, sampled: bool) -> None:
    trace = f"0af7651916cd43dd8448eb211c80319{int(sampled)}"
    header = {"traceparent": f"00-{trace}-{PARENT}-0{int(sampled)}"}
    before = len(collector.named("text_completion kvern-1m"))
    ask = served.client().completions.with_raw_response.create
    ask(prompt="I", extra_headers=header, **(STORY | {"max_tokens": 3}))
    later = ask(prompt="I", **(STORY | {"max_tokens": 3}))
    spans_of(collector, later.headers["x-request-id"])
    found = [span for span in collector.named("text_completion kvern-1m") if span.trace_id.hex() == trace]
    assert len(collector.named("text_completion kvern-1m")) == before + 1 + sampled
    assert [span.parent_span_id.hex() for span in found] == [PARENT] * sampled


def test_embeddings_and_requests_without_a_model(served: Served, collector: Collector) -> None:
    before = collector.requests
    assert served.raw("GET", "/v1/models")[0] == 200
    assert served.raw("POST", "/v1/chat/completions", b"{}")[0] == 400
    asked = served.client().completions.with_raw_response.create(prompt="I", **(STORY | {"max_tokens": 3}))
    spans_of(collector, asked.headers["x-request-id"])
    paths = {attributes(span).get("url.path") for span in collector.spans}
    assert "/v1/models" not in paths
    assert collector.requests > before


def tree(spans: dict[str, Any]) -> set[tuple[str, str]]:
    """The names of spans, each with its parent's."""
    names = {span.span_id: name for name, span in spans.items()}
    return {(name, names.get(span.parent_span_id, "")) for name, span in spans.items()}


def test_a_request_that_two_engines_had_is_one_trace(served: Served, collector: Collector) -> None:
    quiet = served.client().completions.with_raw_response.create(prompt="Once", **STORY)
    expected = tree(spans_of(collector, quiet.headers["x-request-id"]))
    stream = served.client().completions.with_raw_response.create(prompt="Once", stream=True, **STORY)
    request_id = stream.headers["x-request-id"]
    chunks = iter(stream.parse())
    next(chunks)
    served.kill_engine()
    assert sum(1 for _ in chunks) > 0
    spans = spans_of(collector, request_id)
    assert tree(spans) == expected and len(expected) == 7
    whole = spans["text_completion kvern-1m"]
    assert attributes(whole)["kvern.moves"] == 1
    assert [event.name for event in whole.events] == ["moved"]


@pytest.mark.nightly
def test_a_request_that_moves_to_another_engine_is_one_trace(collector: Collector) -> None:
    traced = ("--otlp-traces-endpoint", collector.url, "--trace-share", "1")
    with serving(*SMALL, "--data-parallel-size", "2", *traced) as served:
        quiet = served.client().completions.with_raw_response.create(prompt="Once", **STORY)
        expected = tree(spans_of(collector, quiet.headers["x-request-id"]))
        stream = served.client().completions.with_raw_response.create(prompt="Once", stream=True, **STORY)
        chunks = iter(stream.parse())
        next(chunks)
        engines = served.raw("GET", "/v1/engines")[2]["data"]
        [(name, steps)] = [(one["engine"], one["steps_file"]) for one in engines if one["oldest_requests"]]
        folder = "kvern-" + steps.rpartition("-")[2]
        [busy] = [child for child in children_of(served.process.pid) if f"/{folder}/" in command_of(child)]
        os.kill(busy, signal.SIGKILL)
        assert sum(1 for _ in chunks) > 0
        spans = spans_of(collector, stream.headers["x-request-id"])
    assert tree(spans) == expected and len(expected) == 7
    whole = spans["text_completion kvern-1m"]
    assert attributes(whole)["kvern.moves"] == 1
    [moved] = whole.events
    assert moved.name == "moved" and name in {str(value) for value in attributes(moved).values()}


def test_a_client_that_leaves_in_a_long_step_has_the_spans_of_its_engine(served: Served, collector: Collector) -> None:
    stream = served.client().completions.with_raw_response.create(prompt="Once", stream=True, **STORY)
    chunks = stream.parse()
    next(iter(chunks))
    answered = served.figure("http_requests_total", status="200")
    with served.held():
        chunks.close()
        eventually(lambda: served.figure("http_requests_total", status="200") > answered)
    assert {"engine", "decode"} <= spans_of(collector, stream.headers["x-request-id"]).keys()


def test_a_load_from_a_tier_is_a_span(collector: Collector, tmp_path: Path) -> None:
    small = ("--kv-cache-tokens", "512", "--kv-tier", f"disk:{tmp_path}:64MB")
    traced = ("--otlp-traces-endpoint", collector.url, "--trace-share", "1")
    with serving(*SMALL, *small, *traced) as served:
        for story in ("a bird ", "a stone ", "a bird "):
            for _ in range(2):
                ask = served.client().completions.with_raw_response.create
                last = ask(**{**STORY, "prompt": story * 120, "max_tokens": 4})
                if story == "a stone ":
                    continue
                spans = spans_of(collector, last.headers["x-request-id"])
                if "load" in spans:
                    break
        assert ("load", "queue") in tree(spans)
        assert attributes(spans["load"])["kvern.cached_tokens.disk"] >= 64


def test_nothing_is_felt_of_a_collector_that_is_away(served: Served, collector: Collector) -> None:
    child = served.child("kvern.traces.exporter")
    os.kill(child, signal.SIGSTOP)
    try:
        for _ in range(3):
            served.client().completions.create(prompt="I", **(STORY | {"max_tokens": 3}))
    finally:
        os.kill(child, signal.SIGCONT)


def test_the_conventions_names_are_those_of_the_package() -> None:
    import opentelemetry.semconv._incubating.attributes.gen_ai_attributes as known

    names = {value for value in vars(known).values() if isinstance(value, str) and value.startswith("gen_ai.")}
    own = {value for name, value in vars(request_spans).items() if name.isupper() and re.match("gen_ai", str(value))}
    assert own <= names and len(own) >= 7
