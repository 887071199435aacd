"""Every second of an engine has one cause; that all of them do is checked wherever a simulated engine becomes idle."""

from dataclasses import replace

import pytest

from kvern.engine.step_load import StepLoad
from kvern.engine.step_seconds import StepSeconds
from kvern.observe.metrics import Metrics
from kvern.planning.estimate import StepFactors
from kvern.request.events import CAUSES, EngineStatistics, all_together
from kvern.request.record import Lack
from kvern.request.store_figures import StoreFigures
from tests.support.random_lives import random_life
from tests.support.simulated_device import Setup
from tests.support.simulated_engine import FACTORS


class Clocked:
    """Seconds on a clock that is set."""

    def __init__(self, factors: StepFactors | None = FACTORS, overlaps: bool = False) -> None:
        self.now = 0.0
        self.seconds = StepSeconds(overlaps, lambda: self.now)
        self.seconds.divide(factors)

    @property
    def spent(self) -> dict[str, float]:
        statistics = EngineStatistics()
        self.seconds.report(statistics)
        return {cause: spent for cause, spent in zip(CAUSES, statistics.seconds, strict=True) if spent}

    def step(self, load: StepLoad, seconds: float) -> None:
        self.began(load)
        self.seconds.awaits()
        self.now += seconds
        self.ended()

    def began(self, load: StepLoad, lack: Lack | None = None) -> None:
        self.seconds.began(load, self.now, lack)

    def ended(self) -> None:
        self.seconds.ended(self.now)


def test_a_step_is_divided_as_the_estimates_are() -> None:
    clocked = Clocked()
    clocked.step(StepLoad(rows=2, keys=100), 14.54)
    parts = {"weights": 6.0, "keys": 1.0, "collectives": 0.27}
    assert clocked.spent == pytest.approx({cause: 2 * seconds for cause, seconds in parts.items()})
    clocked.step(StepLoad(rows=100, pairs=1000.0, prompt=100), 102.25)
    assert clocked.spent["products"] == pytest.approx(101), "which take longer than the weights, and hide them"


def test_a_part_of_the_shorter_of_weights_and_products_is_not_hidden() -> None:
    clocked = Clocked(replace(FACTORS, late=0.25, head=1.0, keys=[], sums=0.0, sum_row=0.0))
    clocked.step(StepLoad(rows=2), 7.0)
    assert clocked.spent == pytest.approx({"weights": 6.0, "products": 0.25 * (2 + 2)}), "both sampled"
    clocked.step(StepLoad(rows=100, prompt=100), 101.5)
    assert clocked.spent == pytest.approx({"weights": 6.0 + 0.25 * 6, "products": 1.0 + 100}), "none sampled"


def test_what_is_reached_of_the_card_is_known() -> None:
    clocked, statistics = Clocked(replace(FACTORS, read=[0.1, 0.1, 0.9], keys_read=0.6)), EngineStatistics()
    clocked.step(StepLoad(rows=2, keys=100), 14.54)
    clocked.seconds.report(statistics)
    expected, took = statistics.reading
    assert expected / took == pytest.approx((0.9 * 6 + 0.6 * 1) / 7 / 2)
    assert (statistics.bandwidth, statistics.rate) == (FACTORS.card.bandwidth, FACTORS.card.rate)


def test_decodes_read_no_more_than_the_window() -> None:
    clocked = Clocked(replace(FACTORS, keys=[(10, 0.01)], sums=0.0, sum_row=0.0))
    clocked.step(StepLoad(rows=2, keys=500), 6.2)
    assert clocked.spent == pytest.approx({"weights": 6.0, "keys": 0.2})


def test_nothing_is_divided_on_a_machine_of_unknown_speed() -> None:
    clocked = Clocked(None)
    clocked.step(StepLoad(rows=2, keys=100), 3.0)
    assert clocked.spent == {"step": 3.0}


@pytest.mark.parametrize("lack", ["rows", "blocks", "adapter", "batch"])
@pytest.mark.parametrize("factors", [FACTORS, None])
def test_weights_that_are_read_for_few_while_others_wait_are_the_fault_of_what_these_lack(
    lack: Lack, factors: StepFactors | None
) -> None:
    clocked = Clocked(factors)
    clocked.began(StepLoad(rows=2, keys=100), lack)
    clocked.now = 7.27
    clocked.ended()
    assert clocked.spent[lack] == pytest.approx(6.0 if factors else 7.27)
    assert "weights" not in clocked.spent


def test_time_between_steps_is_that_of_the_host_or_of_what_was_waited_for() -> None:
    clocked = Clocked()
    clocked.now = 5.0
    clocked.seconds.rests("idle")
    clocked.now = 6.0
    clocked.step(StepLoad(rows=1), 2.0)
    clocked.now = 8.5
    clocked.seconds.rests("grammar")
    clocked.now = 9.0
    clocked.step(StepLoad(), 4.0)
    found = clocked.spent
    waits = {cause: found[cause] for cause in ("idle", "host", "grammar", "tier")}
    assert waits == pytest.approx({"idle": 5.0, "host": 1.0, "grammar": 0.5, "tier": 4.5})
    assert sum(found.values()) == pytest.approx(13.0)


def test_time_between_steps_that_only_look_for_what_a_tier_loads_is_the_tier_s() -> None:
    clocked = Clocked()
    for _ in range(3):
        clocked.now += 0.5
        clocked.step(StepLoad(), 0.1)
        clocked.now += 1.0
        clocked.seconds.rests("tier")
    assert clocked.spent == pytest.approx({"tier": 4.8})


def test_a_step_that_had_ended_before_it_was_awaited_took_what_is_estimated() -> None:
    clocked, load = Clocked(overlaps=True), StepLoad(rows=1)
    whole = 6.0 + FACTORS.sums + FACTORS.sum_row
    clocked.began(load)
    clocked.now = 10.0
    clocked.began(load)
    clocked.seconds.awaits()
    clocked.ended()
    assert clocked.spent["host"] == pytest.approx(10.0 - whole), "the next one was late"
    clocked.seconds.awaits()
    clocked.now = 20.0
    clocked.ended()
    found = clocked.spent
    assert found["host"] == pytest.approx(10.0 - whole) and sum(found.values()) == pytest.approx(20.0)


def test_estimates_are_corrected_by_what_steps_take() -> None:
    clocked, load = Clocked(overlaps=True), StepLoad(rows=1)
    for _ in range(100):
        clocked.step(load, 9.39)
    before = clocked.spent.get("host", 0.0)
    clocked.began(load)
    clocked.now += 20.0
    clocked.seconds.awaits()
    clocked.ended()
    assert clocked.spent["host"] - before == pytest.approx(20.0 - 9.39, rel=0.01)


@pytest.mark.sample(3)
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("tier_pages", [0, 20])
def test_whatever_happens_no_second_is_lost(depth: int, tier_pages: int) -> None:
    """`random_life` ends with that check; here most causes have been there."""
    engine = random_life(Setup(depth=depth, tier_pages=tier_pages, tier_delay=3, drafts=2), seed=depth)
    found = {cause for cause, spent in zip(CAUSES, engine.core.statistics().seconds, strict=True) if spent}
    assert found >= {"keys", "products", "collectives", "host", "idle", "blocks"}
    assert ("tier" in found) is bool(tier_pages)


def test_seconds_of_several_engines_are_added() -> None:
    one = EngineStatistics(seconds=(1.0, 2.0), reading=(1.0, 4.0), bandwidth=5.0)
    both = all_together([one, EngineStatistics(), one])
    assert (both.seconds, both.reading, both.bandwidth) == ((2.0, 4.0), (2.0, 8.0), 5.0)


def test_metrics_count_on_when_the_engine_is_replaced() -> None:
    metrics = Metrics("m")
    metrics.step(EngineStatistics(seconds=(1.0, *[0.0] * 12, 2.0)), 0.0)
    metrics.restarted()
    metrics.step(EngineStatistics(seconds=(0.5, *[0.0] * 12, 0.0)), 0.0)
    found = {
        cause: metrics.registry.get_sample_value("kvern:engine_seconds_total", {"model_name": "m", "cause": cause})
        for cause in CAUSES
    }
    assert {cause: spent for cause, spent in found.items() if spent} == {"weights": 1.5, "idle": 2.0}


def test_metrics_count_once_what_an_engine_did_before_it_slept_and_go_on() -> None:
    metrics = Metrics("m")

    def figures() -> list[float | None]:
        idle = {"model_name": "m", "cause": "idle"}
        names = ("generation_tokens_total", "step_time_ratio", "tier_read_bytes_total")
        labels = {"model_name": "m"}
        found = [metrics.registry.get_sample_value(f"kvern:{name}", labels) for name in names[:2]]
        found.append(metrics.registry.get_sample_value(f"kvern:{names[2]}", labels | {"store": "host"}))
        return [*found, metrics.registry.get_sample_value("kvern:engine_seconds_total", idle)]

    def hear(tokens: int) -> None:
        seconds = (*[0.0] * 13, float(tokens))
        stores = {"host": StoreFigures(read_bytes=tokens)}
        metrics.experts.count([[tokens]])
        metrics.step(
            EngineStatistics(
                steps=tokens, generation_tokens=tokens, seconds=seconds, stores=stores, step_time_ratio=1.2
            ),
            0.0,
        )

    hear(10)
    metrics.sleeps()
    assert figures() == [10, 0, 10, 10], "it may sleep for long"
    hear(15)
    assert figures() == [15, 1.2, 15, 15] and metrics.experts.sums() == [[15]]
    metrics.engine(ready=False)
    assert figures()[1] == 0
    metrics.rests()
    hear(4)
    assert figures() == [19, 1.2, 19, 19] and metrics.experts.sums() == [[19]]


def test_an_engine_that_works_does_not_report_after_each_step() -> None:
    clocked, statistics = Clocked(), EngineStatistics()
    for step in range(100):
        clocked.step(StepLoad(rows=1), 0.03)
        clocked.seconds.report(statistics, works=True)
        assert clocked.now - sum(statistics.seconds) < 0.1
        assert step or not statistics.seconds
    clocked.seconds.report(statistics)
    assert sum(statistics.seconds) == pytest.approx(clocked.now)
