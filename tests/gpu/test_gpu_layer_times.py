"""The time of layers on a GPU: events in second captures of graphs. Run with `pytest -m gpu`."""

from typing import Any

import pytest
import torch

from kvern import LLM, SamplingParams
from kvern.runner.memory import GRAPH_BYTES
from kvern.runner.timed_graphs import MOST_GRAPHS, DeviceClock, new_event
from tests.support.gpu_engines import HALVES, SMALL, held_out
from tests.support.internals import core_of, runner_of, worker_of
from tests.support.outputs import token_ids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
PARAMS = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
REPLAYS = 50
MOST_OF_AN_EVENT = 0.006
"""Milliseconds: 0.003 to 0.004 on an H200."""
SLEEP = 60_000_000
"""Cycles for which the device waits: longer than the launches of all replays take."""


@pytest.mark.parametrize(
    "options", [SMALL, HALVES, SMALL | {"cuda_graphs": False}, SMALL | {"proposer": "ngram"}], ids=str
)
def test_answers_are_the_same_and_all_parts_are_there(options: dict[str, Any]) -> None:
    questions = held_out()[:64]
    prompts = [[20 + number, *range(30, 70)] for number in range(12)]  # of one size, so that one graph reads them

    def answers(llm: LLM) -> list[Any]:
        found = [token_ids(llm.chat(questions[:count], PARAMS)) for count in (1, 64, 64)]
        for prompt in prompts:
            found.append(token_ids(llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1))))
            while runner_of(llm).idle():  # second captures
                pass
        return found

    expected = answers(LLM(device="cuda", **options))
    llm = LLM(device="cuda", **options, trace_layers=3)
    assert answers(llm) == expected
    core = core_of(llm)
    core._layers.ended(core.executor.measured())
    times = core.layer_times()
    assert times["decode"].steps > 0 and times["prompt"].steps > 0
    for kind in times.values():
        assert {"embedding", "attention", "mlp", "head", "sampling"} <= kind.parts.keys()
        assert all(seconds > 0 for seconds in kind.layers)


def milliseconds(replay: Any) -> float:
    """The time of one replay on the device, of several that wait there until all are launched."""
    begun, ended = new_event(external=False), new_event(external=False)
    replay()
    torch.cuda._sleep(SLEEP)  # type: ignore[no-untyped-call]
    begun.record()
    for _ in range(REPLAYS):
        replay()
    ended.record()
    ended.synchronize()
    return float(begun.elapsed_time(ended)) / REPLAYS


@pytest.mark.alone
def test_parts_add_up_to_the_step_and_the_memory_is_that_of_two_graphs() -> None:
    llm = LLM(device="cuda", **HALVES, trace_layers=3)
    llm.chat(held_out()[:64], PARAMS)
    clock = worker_of(llm).times
    assert isinstance(clock, DeviceClock) and len(clock._timed) == MOST_GRAPHS
    for (graphs, shape), timed in clock._timed.items():
        plain, with_events = (milliseconds(graph.replay) for graph in (graphs.captured[shape], timed.graph))
        within = 1000 * sum(timed.marks.seconds().values())
        # Between two replays the device waits for some microseconds.
        assert 0.9 * with_events < within < 1.02 * with_events, (shape, within, with_events)
        events = len(timed.marks._events)
        assert 0.98 * plain <= with_events <= plain + MOST_OF_AN_EVENT * events, (shape, plain, with_events)
    runner, (place, *_) = runner_of(llm), [*clock._timed]
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    for _ in range(10):
        clock.missing.append(place)
        while runner.idle():
            pass
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() - before <= MOST_GRAPHS * GRAPH_BYTES
    assert len(clock._timed) <= MOST_GRAPHS
