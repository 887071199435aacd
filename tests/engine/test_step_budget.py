"""How long steps should take: costs that are learnt, budgets that keep to them, and what users wait for then."""

import random
from typing import Any

import pytest
from benchmarks.tails import AUTO, simulate
from hypothesis import example, given
from hypothesis import strategies as st

from kvern.bench.percentile import percentile
from kvern.bench.serving import arrival_times
from kvern.config import EngineConfig
from kvern.engine.engine import Engine
from kvern.engine.pace import Pace
from kvern.engine.step_budget import FILLED, LEAST_TILES, OVERTIME, StepBudget, StepTime
from kvern.engine.step_costs import StepCosts
from kvern.engine.step_load import StepLoad, load_of
from kvern.errors import ConfigError
from kvern.llm import LLM
from kvern.observe.exposition import engines_text
from kvern.observe.metrics import Metrics
from kvern.request.events import EngineStatistics
from kvern.request.request import PromptInput, Request, RequestSpec
from kvern.request.sampling_params import SamplingParams
from kvern.request.step import ScheduledTokens, SchedulerOutput

TILE = 64


def costs(scale: float = 1.0, per_key: float = 1e-8, per_pair: float = 1e-9) -> StepCosts:
    rows, seconds = [64, 256, 1024], [0.005, 0.008, 0.025]
    return StepCosts(rows, [scale * value for value in seconds], scale * per_key, scale * per_pair, TILE)


def decodes(count: int, context: int = 500) -> list[ScheduledTokens]:
    return [ScheduledTokens(slot, context, 1, 1) for slot in range(count)]


def prompt(start: int, count: int, sampled: int = 0) -> ScheduledTokens:
    return ScheduledTokens(99, start, count, sampled)


# Costs


def test_load_counts_rows_keys_and_pairs() -> None:
    drafts = ScheduledTokens(7, 10, 3, 3)
    load = load_of([*decodes(2, 9), drafts, prompt(100, 50), prompt(0, 10, 1)])
    assert load == StepLoad(rows=2 + 3 + 60, keys=2 * 10 + 13, pairs=50 * 125 + 10 * 5, prompt=60, reach=150)
    assert load == load_of([*decodes(2, 9), drafts]).with_prompt(100, 50).with_prompt(0, 10)


@given(st.integers(1, 5000), st.integers(0, 500), st.integers(0, 100_000))
def test_more_rows_never_cost_less(rows: int, more: int, keys: int) -> None:
    found = costs()
    assert found.seconds(StepLoad(rows, keys)) <= found.seconds(StepLoad(rows + more, keys + more, more))


def test_rows_between_those_measured_are_interpolated_and_those_beyond_go_at_the_last_rate() -> None:
    found = costs()
    values = [found.seconds(StepLoad(rows)) for rows in (1, 64, 160, 256, 640, 2048)]
    assert values == pytest.approx([0.005, 0.005, 0.0065, 0.008, 0.0165, 0.05])


@pytest.mark.parametrize("scale", [0.4, 2.5])
def test_costs_are_learnt_from_steps(scale: float) -> None:
    dice = random.Random(1)
    truth, learning = costs(), costs(scale)
    for _ in range(400):
        load = load_of([*decodes(dice.randrange(1, 200), 2000), prompt(dice.randrange(3000), dice.randrange(2, 1200))])
        learning.learn(load, truth.seconds(load) * dice.uniform(0.97, 1.03))
    for count in (100, 300, 600, 1000):
        load = load_of([*decodes(64), prompt(0, count)])
        assert learning.seconds(load) == pytest.approx(truth.seconds(load), rel=0.1)


def test_a_step_that_compiles_teaches_little() -> None:
    found, load = costs(), StepLoad(300)
    before = found.seconds(load)
    found.learn(load, 30.0)
    assert found.seconds(load) < 1.1 * before


# Budgets


def budget(seconds: float, decoding: int = 16, tokens: int = 8192, chunked: bool = True) -> StepBudget:
    made = StepBudget(tokens, chunked)
    made.limit(StepTime(costs(), seconds), load_of(decodes(decoding)))
    return made


def test_without_decodes_there_is_no_limit() -> None:
    made = StepBudget(8192, True)
    assert made.chunk(0, 100_000) == 8192


def test_a_chunk_fills_the_time_and_ends_with_a_tile() -> None:
    made = budget(0.015)
    count = made.chunk(0, 4000)
    assert (16 + count) % TILE == 0
    assert costs().seconds(load_of([*decodes(16), prompt(0, count)])) <= 0.015
    assert costs().seconds(load_of([*decodes(16), prompt(0, count + TILE)])) > 0.015
    made.take(0, count)
    assert made.chunk(0, 500) == 0 and made.spent


def test_the_end_of_a_prompt_may_take_a_little_longer() -> None:
    fitting = budget(0.015).chunk(0, 4000)
    assert budget(0.015).chunk(0, fitting + 30) == fitting + 30
    assert budget(0.015).chunk(0, fitting + 200) == fitting


def test_prompts_that_come_together_are_spread() -> None:
    made = budget(0.015)
    made.take(0, made.chunk(0, 500))
    assert not made.holds(500)


def test_nobody_starves_beside_decodes_that_take_too_long_alone() -> None:
    assert budget(0.001).chunk(50_000, 4000) == LEAST_TILES * TILE
    assert LEAST_TILES * TILE < budget(0.001).chunk(0, 4000) < 4 * LEAST_TILES * TILE
    whole = budget(0.001, chunked=False)
    assert whole.holds(4000) and whole.chunk(0, 4000) == 4000
    whole.take(0, 4000)
    assert not whole.holds(10)


@example(0.01, 250, 4096, False, [(0, 100), (50_000, 176)])
@given(
    seconds=st.floats(0.0005, 0.5),
    decoding=st.integers(1, 512),
    tokens=st.integers(0, 4096),
    chunked=st.booleans(),
    asked=st.lists(st.tuples(st.integers(0, 50_000), st.integers(1, 5000)), max_size=6),
)
def test_budgets_keep_their_limits(
    seconds: float, decoding: int, tokens: int, chunked: bool, asked: list[tuple[int, int]]
) -> None:
    made, model = budget(seconds, decoding, tokens, chunked), costs()
    load, left, first = load_of(decodes(decoding)), tokens, True
    for cached, remaining in asked:
        start = cached if chunked else 0  # whether a whole prompt fits is asked before it is known what is cached of it
        holds = made.holds(remaining)
        count = made.chunk(start, remaining)
        assert bool(count) == holds and count <= min(left, remaining)
        assert chunked or count in (0, remaining)
        if first and (chunked or remaining <= left):
            assert count >= min(remaining, left, LEAST_TILES * TILE)
        load = load.with_prompt(start, count) if count else load
        least = remaining if not chunked and first else (LEAST_TILES if first else 1) * TILE
        shortest = model.seconds(load_of(decodes(decoding)).with_prompt(0, LEAST_TILES * TILE))
        allowed = max(seconds, FILLED * shortest) * (1 + OVERTIME) + 1e-12
        assert count <= least or model.seconds(load) <= allowed
        made.take(start, count)
        left, first = left - count, first and not count


# The clock


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def step(*items: ScheduledTokens) -> SchedulerOutput:
    return SchedulerOutput(1, scheduled=list(items))


def waiting(arrived: float, begun: float = 0.0) -> Request:
    request = Request(RequestSpec("0", PromptInput([0]), SamplingParams().resolved(), 1))
    request.queue.arrived_at, request.queue.begun_at = arrived, begun
    return request


def seconds_of(pace: Pace, head: Request | None = None) -> float:
    time = pace.time(head)
    assert time is not None
    return time.seconds


def test_steps_grow_with_the_wait_of_the_first_in_the_queue_unless_the_target_is_the_users() -> None:
    clock = Clock()
    clock.now = 10.0
    patient, strict = (Pace(costs(), 0.015, yields, clock) for yields in (True, False))
    assert seconds_of(patient) == seconds_of(patient, waiting(9.95)) == seconds_of(strict, waiting(1.0)) == 0.015
    assert seconds_of(patient, waiting(8.0)) == pytest.approx(0.2)
    assert seconds_of(patient, waiting(1.0, begun=2.0)) == 0.015, "it was preempted: it has had its turn"
    assert Pace().time(waiting(0.0)) is None


def test_stages_have_their_part_of_the_time_between_tokens() -> None:
    pace = Pace(costs(), 0.015, stages=3)
    assert seconds_of(pace) == pytest.approx(0.005)
    assert pace.target == 0.015


def run(pace: Pace, clock: Clock, seconds: float, *items: ScheduledTokens) -> None:
    """A step that is waited for; seconds of 0: its result was there."""
    pace.time(None)
    pace.began(load_of(items))
    pace.awaits()
    clock.now += seconds
    pace.ended()


def test_of_steps_that_overlap_each_is_timed_from_the_end_of_the_one_before() -> None:
    clock = Clock()
    pace = Pace(costs(), 0.015, False, clock)
    mixed = step(*decodes(8), prompt(0, 500))
    before = costs().seconds(load_of(mixed.scheduled))
    pace.time(None)
    pace.began(load_of(decodes(8)))
    clock.now = 0.001
    pace.began(load_of(mixed.scheduled))
    pace.awaits()
    clock.now = 0.005
    pace.ended()
    pace.awaits()
    clock.now = 0.005 + before
    pace.ended()
    assert pace.costs is not None
    assert pace.costs.seconds(load_of(mixed.scheduled)) == pytest.approx(before), "there was nothing to learn"
    run(pace, clock, 2 * before, *mixed.scheduled)
    assert pace.costs.seconds(load_of(mixed.scheduled)) > 1.02 * before
    learnt = pace.costs.seconds(load_of(mixed.scheduled))
    pace.began(load_of(mixed.scheduled))
    pace.began(load_of(mixed.scheduled))
    clock.now += 1.0
    pace.awaits()
    pace.ended()
    assert pace.costs.seconds(load_of(mixed.scheduled)) == learnt, "the host was late: who knows what the step took"


def test_the_next_step_is_planned_shortly_before_the_one_on_its_way_ends() -> None:
    clock = Clock()
    pace = Pace(costs(), 0.015, False, clock)
    for seconds in (0.3, 0.005, 0.006, 0.005):
        assert pace.spare_seconds() == 0.0
        run(pace, clock, seconds, *decodes(8))
    pace.time(None)
    pace.began(load_of(decodes(8)))
    assert 0.003 < pace.spare_seconds() < 0.005
    clock.now += 0.004
    assert pace.spare_seconds() == 0.0
    pace.forget()
    assert pace.spare_seconds() == 0.0


def test_no_rest_is_so_long_that_a_result_waits_for_a_slow_launch() -> None:
    clock = Clock()
    pace = Pace(costs(), 0.015, False, clock)
    for _ in range(4):
        run(pace, clock, 0.005, *decodes(8))
    pace.began(load_of(decodes(8)))
    pace.began(load_of([*decodes(8), prompt(0, 500)]))
    clock.now += 0.013  # of launching
    pace.awaits()
    pace.ended()
    pace.time(None)
    pace.began(load_of(decodes(8)))
    pace.awaits()
    clock.now += 0.002
    pace.ended()
    assert pace.spare_seconds() == pytest.approx(0.002)


def test_a_rest_that_was_too_long_becomes_shorter() -> None:
    clock = Clock()
    pace = Pace(costs(), 0.015, False, clock)
    for _ in range(4):
        run(pace, clock, 0.012, *decodes(8))
    pace.time(None)
    pace.began(load_of(decodes(8)))
    for _ in range(8):  # they take 3 ms now
        ends, rest = clock.now + 0.003, pace.spare_seconds()
        clock.now += rest
        pace.time(None)
        pace.began(load_of(decodes(8)))
        pace.awaits()
        clock.now = max(clock.now, ends)
        pace.ended()
    assert rest < 0.003


# What users wait for: the real core and scheduler, on a GPU whose clock is simulated


def poisson(rate: float, count: int = 160) -> tuple[list[float], list[int], list[int]]:
    return arrival_times(count, rate, 1.0, random.Random(1)), [512] * count, [64] * count


@pytest.mark.sample(1)
@pytest.mark.parametrize("error", [1.0, 0.6, 1.6])
def test_tails_keep_to_the_target_though_the_costs_begin_wrong(error: float) -> None:
    free, held = (simulate(*poisson(30.0), target, True, error) for target in (None, AUTO))
    assert percentile(free["itl"], 99) > 1.5 * AUTO, "this load needs no target: no test at all"
    assert percentile(held["itl"], 99) < (1 + 2 * OVERTIME) * AUTO
    assert percentile(held["ttft"], 99) < 1.2 * percentile(free["ttft"], 99)


def test_a_host_that_launches_slowly_keeps_nobody_waiting_for_results() -> None:
    free, held = (simulate(*poisson(16.0), target, True, launch=0.0125) for target in (None, AUTO))
    assert percentile(held["itl"], 99) < (1 + OVERTIME) * AUTO
    assert percentile(held["ttft"], 50) < percentile(free["ttft"], 50)


def test_a_crowd_is_served_as_fast_as_without_a_target() -> None:
    crowd = [0.0] * 256, [512] * 256, [64] * 256
    free, held = (simulate(*crowd, target, True) for target in (None, AUTO))
    assert held["rate"] > 0.98 * free["rate"]


def test_an_impossible_target_starves_nobody() -> None:
    found: dict[str, Any] = simulate([0.0] * 40, [700] * 40, [40] * 40, 1e-4, False)
    assert len(found["ttft"]) == 40 and len(found["itl"]) == 40 * 39


# A real model


@pytest.mark.parametrize(("text", "seconds"), [("15ms", 0.015), ("0.25s", 0.25), ("0", 0.0), ("none", 0.0)])
def test_targets_are_times(text: str, seconds: float) -> None:
    assert EngineConfig(target_itl=text).target_itl_seconds == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["15", "-1ms", "fast", "ms", "nan s", "", 0.015])
def test_other_targets_are_refused(text: Any) -> None:
    with pytest.raises(ConfigError, match="target_itl is"):
        EngineConfig(target_itl=text)


def test_answers_are_the_same_under_a_target_that_steps_are_timed_for() -> None:
    prompts = [[300 + index] * (40 * index) for index in (1, 9, 4)]
    answers = []
    for target in ("none", "0.1ms"):
        options: dict[str, Any] = {"threads": 1, "dtype": "float32", "max_model_len": 512, "target_itl": target}
        llm = LLM("kvern-1m", max_batch_tokens=256, max_batch_requests=8, kv_cache_tokens=8192, **options)
        outputs = llm.generate(prompts, SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))
        answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "change", [{"max_batch_requests": 1}, {"max_batch_tokens": 2, "max_batch_requests": 2}, {"max_model_len": 4}]
)
def test_without_room_for_prompts_beside_decodes_nothing_is_timed(change: dict[str, int]) -> None:
    options: dict[str, Any] = {"threads": 1, "max_model_len": 64, "target_itl": "5ms", "kv_cache_tokens": 512, **change}
    config = EngineConfig("kvern-1m", **options)
    core = Engine(config).core
    assert core.statistics().target_itl == 0.0


def test_metrics_show_the_target() -> None:
    metrics = Metrics("m")
    metrics.step(EngineStatistics(target_itl=0.015), 0.01)
    assert b'kvern:target_itl_seconds{model_name="m"} 0.015' in engines_text([metrics])
