"""What an explanation says of a request, and which requests are remembered."""

import gc
import weakref
from typing import Any

from kvern.request.record import MOST_CHUNKS, Gap, RequestRecord
from kvern.server.explanation import explained
from kvern.serving.served import BASE_BYTES, MOST_RECORDS, Ledger, ServedRequest


def request(name: str = "one", key: str = "ann", **fields: Any) -> ServedRequest:
    return ServedRequest(name, "/v1/completions", key, None, began=0.0, arrived=1000.0, **fields)


def record(**fields: Any) -> RequestRecord:
    told: dict[str, Any] = {"prompt_tokens": 9, "answer_tokens": 5, "finish_reason": "length", "ended": 2.4}
    return RequestRecord("7-0#0", 1000.0, **{**told, **fields})


def test_the_largest_cause_is_named_first() -> None:
    served = request(status=200, ended=2.5, first_token=2.1)
    served.passages[:] = []
    waits = {"blocks": 1.9, "queue": 0.05}
    gap = Gap(1.5, 0.4, "preempted")
    served.recorded(
        "0",
        record(first_step=0.05, first_token=0.3, waits=waits, preemptions=(0.4,), preemption_count=1, longest_gap=gap),
    )
    told = explained(served)
    assert told["summary"].startswith(
        "It spent 1.90 s of 2.50 s waiting for blocks of the KV cache (preempted once). The longest time between two "
        "tokens was 1.50 s: it lost its row to others."
    )
    assert [(part["cause"], part["seconds"]) for part in told["causes"]][:4] == [
        ("blocks", 1.9),
        ("prompt", 0.25),
        ("answer", 0.2),
        ("sending", 0.1),
    ]
    assert told["causes"][0]["share"] == 0.76


def test_one_that_runs_says_where_it_is() -> None:
    served = request()
    assert explained(served)["running"] and explained(served)["causes"][0]["cause"] == "server"
    served.given("1")
    assert {part["cause"] for part in explained(served)["causes"]} == {"server", "engine"}


def test_one_that_was_refused_has_its_status() -> None:
    told = explained(request(status=429, ended=0.01))
    assert told["status"] == 429 and told["records"] == [] and told["timeline"][-1]["text"].endswith("status 429")


def test_few_requests_are_remembered_and_the_last_to_end_the_longest() -> None:
    ledger = Ledger(most=3)
    kept = [request(str(number)) for number in range(4)]
    for served in kept[:3]:
        ledger.begin(served)
    ledger.end(kept[0])
    ledger.begin(kept[3])
    assert [ledger.find("ann", str(number)) is not None for number in range(4)] == [True, False, True, True]
    forgotten = weakref.ref(kept[1])
    del kept, served
    gc.collect()
    assert forgotten() is None


def test_bytes_are_bounded() -> None:
    large = request("large")
    for _ in range(3 * MOST_RECORDS):
        large.recorded("0", record(preemptions=(0.1,) * MOST_CHUNKS))
    assert large.answers == 3 * MOST_RECORDS and len(large.records) == MOST_RECORDS
    ledger = Ledger(most_bytes=large.size + BASE_BYTES)
    for served in (request("first"), request("second"), large):
        ledger.begin(served)
    assert ledger.find("ann", "first") is None and ledger.find("ann", "second") is not None
    ledger.end(large)
    assert len(ledger) == 2


def test_an_answer_is_found_by_its_id_by_its_own_key() -> None:
    ledger = Ledger()
    served = request(answer_id="chatcmpl-1")
    ledger.begin(served)
    assert ledger.find("ann", "chatcmpl-1") is served and ledger.find("bob", "chatcmpl-1") is None
    ledger.begin(request())
    assert ledger.find("ann", "chatcmpl-1") is None
