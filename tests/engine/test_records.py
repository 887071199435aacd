"""The records that an engine makes of its requests, in cases where they must name a cause."""

import pytest

from kvern.engine.core import EngineCore
from kvern.engine.core_timing import CoreTiming
from kvern.engine.queues import POLICIES
from kvern.engine.scheduler import Scheduler
from kvern.request.record import MOST_CHUNKS, RequestRecord, Wait
from kvern.request.request import PromptInput, RequestSpec
from kvern.request.sampling_params import SamplingParams
from tests.support.simulated_device import Setup
from tests.support.simulated_engine import SimulatedEngine

ROOMY = Setup(slots=4, max_model_len=60, spare_blocks=60, spare_budget=60)
TIERED = Setup(slots=2, max_model_len=24, spare_blocks=0, spare_budget=60, tier_pages=30, tier_delay=2)
SHORT: dict[Wait, Setup] = {
    "rows": Setup(slots=1, max_model_len=60, spare_blocks=60, spare_budget=60),
    "blocks": Setup(slots=4, max_model_len=24, spare_blocks=0, spare_budget=60),
    "budget": Setup(slots=4, max_model_len=60, spare_blocks=60, spare_budget=0, chunked=False),
    "batch": Setup(slots=4, max_model_len=60, spare_blocks=60, spare_budget=60, continuous=False),
    "adapter": Setup(slots=4, max_model_len=60, spare_blocks=60, spare_budget=60, adapter_places=1),
}


def record_of(engine: SimulatedEngine, number: int, sample: int = 0) -> RequestRecord:
    """The record of a request, once all have ended."""
    return engine.records.records[f"{number}#{sample}"]


@pytest.mark.parametrize("cause", SHORT)
def test_a_request_has_waited_for_what_was_short(cause: Wait) -> None:
    engine = SimulatedEngine(SHORT[cause])
    length = 50 if cause == "budget" else 18
    adapter = 1 if cause == "adapter" else None
    engine.add([0] * length, 5, adapter=adapter)
    if cause != "budget":
        engine.step()
    engine.add([1] * length, 5, adapter=None if adapter is None else 2)
    engine.run()
    assert record_of(engine, 0).waits == {}
    assert set(record_of(engine, 1).waits) == {cause}


def test_one_that_finds_a_place_waits_for_nothing() -> None:
    engine = SimulatedEngine(ROOMY)
    engine.add([0] * 9, 5)
    engine.run()
    record = record_of(engine, 0)
    assert (record.waits, record.first_step, record.first_token, record.ended) == ({}, 0.0, 9.0, 13.0)
    assert (record.prompt_tokens, record.answer_tokens, record.finish_reason) == (9, 5, "length")
    assert (record.steps, record.company, record.chunk_count) == (5, 0.0, 1)
    assert record.longest_gap is not None and (record.longest_gap.seconds, record.longest_gap.cause) == (1.0, "step")


def test_others_prompts_are_the_cause_of_a_gap() -> None:
    engine = SimulatedEngine(ROOMY)
    engine.add([0] * 2, 9)
    engine.step()
    engine.add([1] * 30, 1)
    engine.run()
    record = record_of(engine, 0)
    assert record.longest_gap is not None and record.longest_gap.cause == "prefill"
    assert record.longest_gap.seconds == 31.0 and record.company == 1 / 9


def test_a_loss_of_blocks_is_a_preemption_and_a_wait_for_them() -> None:
    engine = SimulatedEngine(Setup(block_size=1, max_model_len=24, spare_blocks=0, slots=3, spare_budget=24))
    engine.add([0] * 2, 20)
    engine.add([1] * 2, 20)
    engine.run()
    record = record_of(engine, 1)
    assert record.preemption_count == 1 and record.undone == 0
    assert record.waits["blocks"] > 0 and record.chunk_count == 2
    assert record.longest_gap is not None and record.longest_gap.cause == "preempted"


def test_samples_wait_for_the_first_which_loads_their_prompt() -> None:
    engine = SimulatedEngine(TIERED)
    for prompt in ([0, 1] * 8, [2] * 20):
        engine.add(prompt, 2)
        engine.run_requests()
    engine.add([0, 1] * 8, 2, n=2)
    engine.run_requests()
    assert set(record_of(engine, 2).waits) == {"load"}
    assert record_of(engine, 2, 1).waits["turn"] > 0 and record_of(engine, 2, 1).cached


def test_others_wait_while_the_one_at_fault_is_looked_for() -> None:
    engine = SimulatedEngine(ROOMY)
    for token in range(4):
        engine.add([token] * 4, 6, fault=8 if token == 2 else None)
    engine.run()
    failed = record_of(engine, 2)
    assert failed.finish_reason == "abort" and failed.undone >= 2 and failed.preemption_count == 0
    spared = record_of(engine, 3)
    assert spared.undone and spared.waits["trial"] > 0
    assert spared.longest_gap is not None and spared.longest_gap.cause == "undone"


def test_cached_tokens_are_told_by_source() -> None:
    engine = SimulatedEngine(TIERED)
    for prompt in ([0, 1] * 8, [2] * 20, [0, 1] * 8):
        engine.add(prompt, 2)
        engine.run_requests()
    record = record_of(engine, 2)
    (store,) = set(record.cached) - {"device"}
    assert record.cached[store] == 12 and record.waits["load"] > 0


def test_a_search_has_one_record() -> None:
    engine = SimulatedEngine(ROOMY)
    engine.add([0, 1], 5, beams=3, n=2)
    engine.run()
    (record,) = engine.records.records.values()
    assert record.request_id == "0#0" and record.steps == 5
    assert record.answer_tokens == sum(len(heard.tokens) for heard in engine.heard.values())


def test_one_that_is_ended_from_outside_has_a_record_at_once() -> None:
    engine = SimulatedEngine(SHORT["rows"])
    (running,), (waiting,) = engine.add([0] * 4, 9), engine.add([1] * 4, 9)
    engine.step()
    engine.finish(running, "stop")
    engine.finish(waiting)
    assert (record_of(engine, 0).finish_reason, record_of(engine, 0).answer_tokens) == ("stop", 1)
    assert record_of(engine, 1).first_step is None and record_of(engine, 1).waits == {"rows": 4.0}


def test_a_long_prompt_has_few_chunks_in_its_record() -> None:
    engine = SimulatedEngine(Setup(slots=1, max_model_len=60, spare_budget=0))
    engine.add([0] * 50, 1)
    engine.run()
    record = record_of(engine, 0)
    assert record.chunk_count == 50 and len(record.chunks) == MOST_CHUNKS


def test_drafts_are_counted() -> None:
    engine = SimulatedEngine(Setup(depth=2, max_model_len=64, drafts=3, accuracy=1.0, spare_budget=20))
    engine.add([0, 1], 40)
    engine.run()
    record = record_of(engine, 0)
    assert 8 < record.drafts.accepted == record.drafts.verified and record.steps < 40


def test_a_change_of_weights_is_not_taken_for_others_that_need_blocks() -> None:
    engine = SimulatedEngine(ROOMY)
    engine.add([0] * 4, 9)
    engine.step()
    engine.step()
    engine.scheduler.renew(keep=False)
    engine._rest(3.0)
    engine.run()
    record = record_of(engine, 0)
    assert (record.preemption_count, record.undone) == (0, 1)
    assert record.longest_gap is not None and record.longest_gap.cause == "weights"


def test_what_was_short_before_an_idle_time_is_not_what_the_next_request_waits_for() -> None:
    engine = SimulatedEngine(SHORT["rows"])
    requests = [*engine.add([0] * 4, 9), *engine.add([1] * 4, 9)]
    engine.step()
    for request in requests:
        engine.finish(request)
    engine.add([2] * 4, 2)
    engine._rest(3.0)
    engine.run()
    assert record_of(engine, 2).waits == {"queue": 3.0}


def test_records_can_be_left_out() -> None:
    engine = SimulatedEngine(ROOMY)
    scheduler = Scheduler(ROOMY.limits, ROOMY.cache(None), POLICIES["fcfs"])
    core = EngineCore(scheduler, engine, timing=CoreTiming())  # type: ignore[arg-type]
    engine.scheduler = scheduler
    core.add(RequestSpec("0", PromptInput([1, 2]), SamplingParams().resolved(), 2))
    request = engine.requests["0#0"] = scheduler.by_id["0#0"]
    core.step()
    core.step()
    assert request.answer.finish_reason == "length" and request.answer.record is None
