"""What the engine core does with requests that wait for something outside of the scheduler."""

import asyncio
from concurrent.futures import Future
from typing import Any

import pytest

from kvern.engine.core import EngineCore
from kvern.request.events import TokenEvent
from kvern.request.outputs import CompletionOutput, RequestOutput
from kvern.request.request import TOLD_AT_ONCE, PromptInput, Request, RequestSpec, State
from kvern.request.sampling_params import SamplingParams
from kvern.serving.workload import Generation
from tests.support.simulated_device import Setup
from tests.support.simulated_engine import SimulatedEngine


class PreparingEngine(SimulatedEngine):
    """Its executor has to be prepared for a grammar, and knows adapters."""

    def __init__(self) -> None:
        super().__init__(Setup())
        self.core = EngineCore(self.scheduler, self, prepares=True)
        self.prepared: Future[None] = Future()
        self.dropped: list[int] = []

    def prepare(self, grammar: str) -> "Future[None]":
        return self.prepared

    def drop_adapter(self, key: int) -> None:
        self.dropped.append(key)

    def ask(self, n: int = 1, **options: Any) -> list[Request]:
        params = SamplingParams(n=n).resolved()
        spec = RequestSpec("0", PromptInput([0, 1]), params, 3, grammar="form", **options)
        self.core.add(spec)
        requests = [self.core._held[name][0] for name in spec.answer_ids]
        self.requests |= {request.request_id: request for request in requests}
        return requests

    def work(self) -> None:
        for _ in range(100):
            if self.core.has_work:
                self.core.step()
        assert not self.core.has_work, "a request waits for ever"


def test_samples_go_on_when_the_first_is_aborted_before_it_was_queued() -> None:
    engine = PreparingEngine()
    first, second, third = engine.ask(n=3)
    engine.core.finish([first.request_id])
    engine.prepared.set_result(None)
    engine.work()
    assert first.answer.finish_reason == "abort" and not first.output_length
    assert (second.output_length, third.output_length) == (3, 3)


def test_an_adapter_stays_for_a_request_whose_grammar_is_being_prepared() -> None:
    engine = PreparingEngine()
    (request,) = engine.ask(adapter=1)
    engine.core.unload_adapter(1)
    assert not engine.dropped
    engine.prepared.set_result(None)
    engine.work()
    assert request.output_length == 3 and engine.dropped == [1]


def test_the_core_rests_while_blocks_are_on_their_way() -> None:
    engine = SimulatedEngine(Setup(tier_pages=20, tier_delay=4))
    prompt = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    for _ in range(2):
        (request,) = engine.add(prompt, 1)
        states = []
        while engine.core.has_work:
            engine.step()
            states.append(request.state)
        engine.cache.tree.evict(20)
    assert len(engine.rests) == states.count(State.LOADING)
    assert states.count(State.LOADING) > 2


def told(engine: SimulatedEngine) -> list[int]:
    """How many tokens each event brought, of requests that run to their end, whose answers are checked."""
    counts: list[int] = []
    hear = engine._hear

    def heard(event: TokenEvent) -> None:
        counts.append(len(event.token_ids))
        hear(event)

    engine._hear = heard  # type: ignore[method-assign]
    engine.run()
    return counts


@pytest.mark.parametrize("depth", [1, 2])
def test_an_answer_that_is_wanted_whole_is_told_many_tokens_at_a_time(depth: int) -> None:
    """The first says that it has begun, and the last comes at once; who wants single ones hears of each."""
    length = TOLD_AT_ONCE + 7
    engine = SimulatedEngine(Setup(depth=depth, max_model_len=64))
    engine.add([0, 1], length, whole=True)
    assert told(engine) == [1, TOLD_AT_ONCE, 6]
    engine = SimulatedEngine(Setup(depth=depth, max_model_len=64))
    engine.add([0, 1], length)
    assert told(engine) == [1] * length


def test_what_has_to_be_seen_token_by_token_is_told_so() -> None:
    for asked in ({"stop": ["a"]}, {"beam_width": 2}):
        spec = RequestSpec("0", PromptInput([0]), SamplingParams(**asked).resolved(), 9, whole=True)
        assert not Request(spec).answer.gathers


def test_one_that_fails_keeps_its_tokens() -> None:
    engine = SimulatedEngine(Setup(max_model_len=64))
    (request,) = engine.add([0, 1], 40, whole=True, fault=20)
    assert told(engine)[0] == 1
    assert engine.heard[request.request_id].tokens == request.token_ids[2:] and request.output_length > 9


def test_one_that_may_end_engines_tells_of_each_token() -> None:
    """So that the next engine's death shows how far it came."""
    spec = RequestSpec("0", PromptInput([0]), SamplingParams().resolved(), 9, whole=True)
    output = RequestOutput("0", None, [0], [CompletionOutput(0)])
    generation = Generation(output, spec, asyncio.Event(), 0.0, patient=False)
    assert generation.message().spec.whole
    generation.begun_at = 1.0
    generation.lose("its engine is gone")
    assert not generation.message().spec.whole
