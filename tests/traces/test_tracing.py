"""Which requests become traces, when, and what is said of several prompts."""

import asyncio
from typing import Any

from kvern.request.record import RequestRecord
from kvern.server.late_records import LateRecords
from kvern.server.tracing import Tracing, trace_of
from kvern.serving.served import ServedRequest
from kvern.traces.spans import Trace


class Offered:
    """Takes traces instead of a process that sends them."""

    def __init__(self) -> None:
        self.traces: list[Trace] = []

    def offer(self, trace: Trace) -> None:
        self.traces.append(trace)


def request(path: str = "/v1/completions", status: int = 200, model: str | None = "m") -> ServedRequest:
    return ServedRequest("one", path, "ann", None, model=model, status=status, ended=1.0)


def record(name: str, tokens: int) -> RequestRecord:
    return RequestRecord(name, 1000.0, tokens, 5, "length", 2.4)


def offered(served: ServedRequest, *later: RequestRecord, ends: bool = False) -> int:
    """The number of traces that are sent at the end of a request and with records that come later, or at the end."""
    traces: Any = Offered()

    async def end() -> None:
        late = LateRecords()
        Tracing(traces, 1.0).ended(served, late)
        for one in later:
            served.recorded("0", one)
        if ends:
            late.end()

    asyncio.run(end())
    return len(traces.traces)


def test_probes_are_not_traced_also_while_no_engine_is_ready() -> None:
    assert offered(request("/health", 503, None)) == offered(request("/v1/models", 200, None)) == 0
    assert offered(request("/v1/models", 500, None)) == offered(request()) == 1


def test_the_tokens_of_each_prompt_count_once() -> None:
    served = request()
    for name, tokens in (("7-0#0", 9), ("7-0#1", 9), ("7-1#0", 4)):
        served.recorded("0", record(name, tokens))
    whole = trace_of(served, bytes(16), 0).spans[0]
    assert whole.attributes["gen_ai.usage.input_tokens"] == 13
    assert whole.attributes["gen_ai.usage.output_tokens"] == 15


def test_a_trace_waits_for_the_record_of_each_prompt() -> None:
    served = request()
    served.lost(served.given("0"), "it died")
    served.given("1", 0)
    served.given("1")
    served.recorded("1", record("7-0#0", 9))
    assert offered(served) == 0
    assert offered(served, record("7-1#0", 4)) == 1


def test_a_trace_waits_for_the_record_of_each_answer() -> None:
    served = request()
    served.given("0", 2)
    served.recorded("0", record("7-0#1", 9))
    assert offered(served) == 0
    assert offered(served, record("7-0#0", 9)) == 1
    assert offered(served) == 1


def test_a_trace_whose_record_never_came_is_sent_when_the_server_ends() -> None:
    served = request()
    served.given("0")
    assert offered(served, ends=True) == 1
