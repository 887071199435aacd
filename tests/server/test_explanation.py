"""What an explanation says of a request, and which requests are remembered."""

import gc
import weakref
from typing import Any

from kvern.request.record import MOST_CHUNKS, Chunk, Gap, RequestRecord
from kvern.server.explanation import MOST_EVENTS, explained
from kvern.serving.served import BASE_BYTES, MOST_RECORDS, PART_BYTES, Ledger, ServedRequest


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


def test_the_time_before_the_first_token_is_the_prompt_s() -> None:
    def computed(**fields: Any) -> dict[str, float]:
        served = request(status=200, ended=2.4)
        served.recorded("0", record(first_step=0.5, waits={"queue": 0.5, "blocks": 0.7}, **fields))
        causes = {part["cause"]: part["seconds"] for part in explained(served)["causes"]}
        return {cause: causes[cause] for cause in ("prompt", "answer", "computing") if cause in causes}

    assert computed(first_token=1.5, preemptions=(2.0,), preemption_count=1) == {"prompt": 1.0, "answer": 0.2}
    assert computed(first_token=1.5, preemptions=(0.6,), preemption_count=1) == {"prompt": 0.3, "answer": 0.9}
    assert computed(first_token=1.5, preemptions=(0.6, 2.0), preemption_count=2) == {"computing": 1.2}
    assert computed(first_token=1.5, undone=1) == {"computing": 1.2}
    assert computed(undone=1) == {"prompt": 1.2}


def test_a_prompt_that_another_engine_computed_has_its_record() -> None:
    served = request(status=200, ended=2.5)
    passage = served.given("0")
    size = served.size
    chunks = Chunk(0.1, 0.4, 0, 6), Chunk(0.4, 0.6, 6, 3)
    computed = record(first_step=0.1, chunks=chunks, ended=0.6)
    served.handed_over(passage, computed, "no store has 64 of its tokens")
    assert served.size > size and served.prompts == [("0", computed)]
    assert not served.records and not served.answers and not served.moves, "it is no answer"
    served.given("1", 0)
    served.recorded("1", record(first_step=0.7))
    told = explained(served)
    assert [(one["engine"], one["prompt_tokens"]) for one in told["prompts"]] == [("0", 9)]
    assert [one["engine"] for one in told["records"]] == ["1"]
    assert "prefill" in {one["cause"] for one in told["causes"]}
    assert "its prompt was computed for another engine; no store has 64 of its tokens" in told["summary"]
    events = [(one["seconds"], one["text"]) for one in told["timeline"]]
    assert (0.1, "its prompt gets a row in engine 0") in events
    assert (0.4, "its prompt: tokens 6 to 8 are computed in 200.0 ms") in events
    assert (0.6, "its prompt is computed") in events


def test_an_engine_that_tells_nothing_of_a_request_is_named() -> None:
    served = request(status=200, ended=2.5)
    served.given("1")
    served.passages[0].given = 0.1
    told = explained(served)
    assert told["summary"] == "It spent 2.40 s of 2.50 s in its engine, which has told nothing of it."
    assert [part["cause"] for part in told["causes"]] == ["engine", "server"]
    served.lost(served.passages[0], "it died")
    assert {part["cause"] for part in explained(served)["causes"]} == {"lost", "server"}


def test_a_long_timeline_has_its_middle_left_out() -> None:
    served = request(status=200, ended=2.5)
    for _ in range(MOST_RECORDS):
        served.recorded("0", record(preemptions=(0.1,) * MOST_CHUNKS, preemption_count=MOST_CHUNKS))
    timeline = explained(served)["timeline"]
    assert len(timeline) == MOST_EVENTS + 1
    assert timeline[0]["text"].endswith("arrives") and timeline[-1]["text"].endswith("status 200")
    left_out = MOST_RECORDS * (MOST_CHUNKS + 1) + 2 - MOST_EVENTS
    assert timeline[MOST_EVENTS // 2]["text"] == f"{left_out:,} events are left out"


def test_a_copy_stays_as_it_is() -> None:
    served = request()
    passage = served.given("0")
    copy = served.copy()
    served.lost(passage, "it died")
    served.recorded("0", record())
    assert copy.passages[0].until is None and not copy.records and copy.request_id == "one"


def test_those_that_run_and_the_last_that_ended_are_remembered() -> None:
    ledger = Ledger(most=2)
    kept = [request(str(number)) for number in range(4)]
    for served in kept:
        ledger.begin(served)
    assert len(ledger) == 4
    for number in (1, 2, 3, 0):
        ledger.end(kept[number])
    assert [ledger.find("ann", str(number)) is not None for number in range(4)] == [True, False, False, True]
    forgotten = weakref.ref(kept[1])
    del kept, served
    gc.collect()
    assert forgotten() is None


def test_bytes_are_bounded_with_records_that_come_late() -> None:
    large = request("large")
    for _ in range(3 * MOST_RECORDS):
        large.recorded("0", record(preemptions=(0.1,) * MOST_CHUNKS))
        large.given("0")
    assert large.answers == 3 * MOST_RECORDS and len(large.records) == MOST_RECORDS
    assert large.size - request().size > 2 * MOST_RECORDS * PART_BYTES
    ledger = Ledger(most_bytes=large.size + BASE_BYTES)
    for served in (request("first"), request("second"), large):
        ledger.begin(served)
        served.ended = 1.0
        ledger.end(served)
    assert ledger.find("ann", "first") is None and ledger.find("ann", "second") is not None
    late = request("late")
    ledger = Ledger(most_bytes=large.size)
    for served in (request("first"), late):
        ledger.begin(served)
        served.ended = 1.0
        ledger.end(served)
    assert len(ledger) == 2
    for _ in range(MOST_RECORDS):
        late.recorded("0", record(preemptions=(0.1,) * MOST_CHUNKS))
        late.given("0")
    assert len(ledger) == 1 and ledger.find("ann", "late") is late


def test_an_answer_is_found_by_its_id_by_its_own_key() -> None:
    ledger = Ledger()
    served = request(answer_id="chatcmpl-1")
    ledger.begin(served)
    assert ledger.find("ann", "chatcmpl-1") is served and ledger.find("bob", "chatcmpl-1") is None
    ledger.begin(request())
    assert ledger.find("ann", "chatcmpl-1") is None
