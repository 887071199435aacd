"""Spans are made of records, and which requests are traced."""

import random

import msgspec
import pytest

from kvern.request.record import Chunk, Gap, OwnWait, RequestRecord
from kvern.traces.request_spans import REMEMBERED, Sampling, request_spans
from kvern.traces.spans import Context, Span

RECORD = RequestRecord(
    "r#0",
    1000.0,
    30,
    9,
    "stop",
    5.0,
    first_step=1.0,
    first_token=2.5,
    waits={"blocks": 0.75, "queue": 0.25},
    cached={"device": 16},
    chunks=(Chunk(1.0, 1.5, 16, 8), Chunk(1.5, 2.5, 24, 6)),
    chunk_count=2,
    preemptions=(3.0,),
    preemption_count=1,
    steps=11,
    longest_gap=Gap(0.5, 3.0, "preempted"),
)
WHOLE = Span("chat kvern-1m", 999.5, 1005.5)


def test_a_record_becomes_spans_within_each_other() -> None:
    spans = request_spans(WHOLE, [RECORD])
    shown = [(span.name, span.began, span.ended, span.parent) for span in spans]
    assert shown == [
        ("chat kvern-1m", 999.5, 1005.5, None),
        ("engine", 1000.0, 1005.0, 0),
        ("queue", 1000.0, 1001.0, 1),
        ("prefill", 1001.0, 1002.5, 1),
        ("prefill chunk", 1001.0, 1001.5, 3),
        ("prefill chunk", 1001.5, 1002.5, 3),
        ("decode", 1002.5, 1005.0, 1),
    ]
    engine = spans[1].attributes
    assert engine["kvern.wait.blocks"] == 0.75
    assert engine["kvern.cached_tokens.device"] == 16
    assert engine["gen_ai.usage.input_tokens"] == 30
    assert [(event.name, event.at) for event in spans[1].events] == [("preempted", 1003.0), ("longest gap", 1003.0)]


def test_engines_follow_each_other() -> None:
    spans = request_spans(WHOLE, [RECORD, RECORD])
    engines = [place for place, span in enumerate(spans) if span.name == "engine"]
    assert engines == [1, 7]
    assert [span.parent for span in spans[7:]] == [0, 7, 7, 9, 9, 7]


def test_a_prompt_that_another_engine_computed_has_spans_of_its_own() -> None:
    spans = request_spans(WHOLE, [RECORD], prompts=[RECORD])
    assert [span.name for span in spans] == [
        WHOLE.name,
        *("prefill engine", "queue", "prefill", "prefill chunk", "prefill chunk"),
        *("engine", "queue", "prefill", "prefill chunk", "prefill chunk", "decode"),
    ]
    assert [span.parent for span in spans[1:7]] == [0, 1, 1, 3, 3, 0]


def test_what_a_request_waits_for_alone_has_spans_before_its_first_step_and_after_a_preemption() -> None:
    waits = OwnWait("grammar", 0.0, 0.25), OwnWait("load", 0.25, 1.0), OwnWait("load", 3.0, 3.5)
    record = msgspec.structs.replace(RECORD, own_waits=waits, cached={"device": 8, "disk": 8})
    spans = request_spans(WHOLE, [record], Span("detokenize", 1002.5, 1005.0, 0))
    shown = [(span.name, span.began, span.ended, span.parent) for span in spans]
    assert shown[2:6] == [
        ("queue", 1000.0, 1001.0, 1),
        ("grammar", 1000.0, 1000.25, 2),
        ("load", 1000.25, 1001.0, 2),
        ("load", 1003.0, 1003.5, 1),
    ]
    assert spans[4].attributes == {"kvern.cached_tokens.disk": 8} and not spans[3].attributes
    chunks = [span.parent for span in spans if span.name == "prefill chunk"]
    assert [spans[place].name for place in chunks if place is not None] == ["prefill", "prefill"]
    assert (spans[-1].name, spans[-1].parent) == ("detokenize", 0)


def test_a_request_that_never_began_has_its_wait_alone() -> None:
    record = RequestRecord("r#0", 1000.0, 30, 0, "abort", 5.0, waits={"rows": 5.0})
    assert [(span.name, span.ended) for span in request_spans(WHOLE, [record])[1:]] == [
        ("engine", 1005.0),
        ("queue", 1005.0),
    ]


@pytest.mark.parametrize("sampled", [True, False])
def test_the_client_decides_if_it_did(sampled: bool) -> None:
    context = Context(bytes(16), 5, sampled)
    for share in (0.0, 1.0):
        assert Sampling(share).takes(context, 1.0, failed=True) is sampled


def test_a_share_and_all_that_failed_are_traced() -> None:
    sampling = Sampling(0.05, random.Random(1).random)
    taken = sum(sampling.takes(None, 1.0, failed=False) for _ in range(99))
    assert 1 <= taken <= 12
    assert all(Sampling(0.0).takes(None, 1.0, failed=True) for _ in range(50))


def test_the_slowest_are_traced() -> None:
    sampling, dice = Sampling(0.0), random.Random(2)
    took = [dice.expovariate(1.0) for _ in range(5000)]
    taken = [seconds for seconds in took if sampling.takes(None, seconds, failed=False)]
    assert 30 <= len(taken) <= 80
    assert min(taken) > 3
    assert len(sampling._ordered) == REMEMBERED


def test_equal_times_are_not_all_slow() -> None:
    sampling = Sampling(0.0)
    assert sum(sampling.takes(None, 1.0, failed=False) for _ in range(2000)) == 0
