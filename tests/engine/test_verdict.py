"""Each cause of lost time is provoked, and named, and no other."""

import re
from collections.abc import Callable
from concurrent.futures import Future
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvern import LLM, EngineConfig, SamplingParams
from kvern.cli.fields import options_of
from kvern.cli.main import COMMANDS, kind_of
from kvern.observe.engine_time import EngineTime
from kvern.observe.verdict import LEAST, SAYS, SAYS_AGAIN, WINDOW, VerdictWatch, judge
from kvern.planning import hardware
from kvern.planning.estimate import StepFactors
from kvern.planning.hardware import Card
from kvern.request.events import CAUSES, EngineStatistics
from kvern.request.request import Progress
from tests.support.internals import engine_of
from tests.support.simulated_device import Setup
from tests.support.simulated_engine import FACTORS, SimulatedEngine
from tests.support.simulated_images import ImageEngine, ImageSetup

PAGE = Path(__file__).parents[2] / "docs/observability.md"
ROOMY = Setup(slots=4, max_model_len=60, spare_blocks=60, spare_budget=60)
PROMPT = [0] * 18


def crowd(setup: Setup, factors: StepFactors | None = FACTORS, count: int = 6) -> SimulatedEngine:
    """Requests that decode for long, as many at a time as there is room for."""
    engine = SimulatedEngine(setup, factors)
    for number in range(count):
        engine.add([number % 3], 20)
    return engine


def prompts() -> SimulatedEngine:
    engine = SimulatedEngine(ROOMY)
    for number in range(8):
        engine.add([number % 3, number // 3] + [1] * 50, 1)
    return engine


def late_host() -> SimulatedEngine:
    """The host takes long to plan a step."""
    engine = crowd(ROOMY)
    schedule = engine.scheduler.schedule

    def late(*arguments: Any) -> Any:
        engine.host_seconds += 50
        return schedule(*arguments)

    engine.scheduler.schedule = late  # type: ignore[assignment, method-assign]
    return engine


def adapters() -> SimulatedEngine:
    engine = SimulatedEngine(replace(ROOMY, adapter_places=1))
    for number in range(6):
        engine.add([number % 3], 20, adapter=number)
    return engine


def from_a_tier() -> SimulatedEngine:
    engine = SimulatedEngine(Setup(tier_pages=20, tier_delay=4))
    prompt = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    engine.add(prompt, 1)
    engine.run()
    engine.cache.tree.evict(20)
    engine.longer_rests = 100.0
    engine.add(prompt, 1)
    return engine


def images() -> SimulatedEngine:
    engine = ImageEngine(ImageSetup(max_model_len=24, places=24))
    engine.longer_rests = 100.0
    engine.see([0, 1, 1, 0], [(1, 3)], 2)
    return engine


def grammars() -> SimulatedEngine:
    """A request whose grammar is ready when the core has looked for it twice."""
    engine, looks = SimulatedEngine(ROOMY), list[None]()
    request = engine.add(PROMPT, 1)[0]
    engine.scheduler.remove(request)
    engine.scheduler.forget(request)

    class Preparing(Future[None]):
        def done(self) -> bool:
            looks.append(None)
            engine.host_seconds += 50
            return len(looks) > 4

    engine.core._held[request.request_id] = request, Preparing()
    return engine


def nobody() -> SimulatedEngine:
    engine = SimulatedEngine(ROOMY)
    engine.host_seconds += 100
    return engine


PROVOKED: dict[str, Callable[[], SimulatedEngine]] = {
    "weights": lambda: crowd(replace(ROOMY, slots=6)),
    "keys": lambda: crowd(replace(ROOMY, slots=6), replace(FACTORS, keys=[(0, 1.0)])),
    "products": prompts,
    "collectives": lambda: crowd(replace(ROOMY, slots=6), replace(FACTORS, sums=30.0)),
    "step": lambda: crowd(replace(ROOMY, slots=6), None),
    "host": late_host,
    "blocks": lambda: crowd(replace(ROOMY, max_model_len=24, spare_blocks=0, prefix_cache=False)),
    "rows": lambda: crowd(replace(ROOMY, slots=1)),
    "adapter": adapters,
    "batch": lambda: crowd(replace(ROOMY, continuous=False, slots=2)),
    "tier": from_a_tier,
    "images": images,
    "grammar": grammars,
    "idle": nobody,
}


@pytest.mark.parametrize("cause", CAUSES)
def test_what_was_provoked_is_named_and_nothing_else(cause: str) -> None:
    engine = PROVOKED[cause]()
    before = copy(engine.core.statistics()) if cause != "idle" else EngineStatistics()
    for _ in range(300):
        if not engine.core.has_work:
            break
        engine.step()
        after = copy(engine.core.statistics())
        if after.waiting == 0 and cause in ("rows", "blocks", "adapter", "batch"):
            break
    found = judge(before, engine.core.statistics())
    assert found is not None and found.cause == cause
    assert found.share > 0.5


def test_tokens_that_are_computed_again_after_preemptions_are_counted() -> None:
    engine = crowd(replace(ROOMY, max_model_len=24, spare_blocks=0, prefix_cache=False))
    engine.run()
    found = engine.core.statistics()
    assert found.preemptions > 0 and found.recomputed_tokens > 0
    assert found.computed_tokens == 6 * 20 + found.recomputed_tokens


def test_so_are_those_of_requests_that_another_engine_had() -> None:
    engine = SimulatedEngine(replace(ROOMY, prefix_cache=False))
    spec = engine.add([0, 1, 2], 8)[0].spec
    engine.run()
    assert engine.core.statistics().recomputed_tokens == 0
    engine.core.add(spec, [Progress(0, [1, 2, 0, 1], 0)])
    while engine.core.has_work:
        engine.core.step()
    assert engine.core.statistics().recomputed_tokens == 6


def test_products_of_tokens_that_were_computed_before_are_not_told_as_useful() -> None:
    figures = {"steps": 10, "computed_tokens": 1000, "prefill_tokens": 1000}
    for again, is_told in ((400, True), (50, False)):
        found = judge(EngineStatistics(), after({"products": 1.0}, recomputed_tokens=again, **figures))
        assert found is not None
        assert ("40% of them computed before" in found.evidence, "--kv-tier" in found.action) == (is_told, is_told)


def texts() -> list[str]:
    """What operators are told to do: the actions of verdicts, and the page."""
    return [SAYS_AGAIN[1], *(action for _, action in SAYS.values()), PAGE.read_text()]


def test_the_page_has_a_remedy_for_each_verdict() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| ([^|]{3,}) \|$", PAGE.read_text(), re.MULTILINE))
    assert rows.keys() >= set(CAUSES) == SAYS.keys()


def test_options_and_commands_of_remedies_exist() -> None:
    kinds = {words: kind_of(words) for words in COMMANDS}
    known = {option.name for kind in kinds.values() for option in options_of(kind)}
    named = {name for text in texts() for name in re.findall(r"(?<![\w-])--(?:no-)?([a-z][a-z0-9-]*)", text)}
    assert len(named) > 15 and {name for name in named if name.replace("-", "_") not in known} == set()
    commands = {name for text in texts() for name in re.findall(r"(?<!kvern: )\bkvern ([a-z]+)(?=[ `])", text)}
    assert {"top", "profile", "plan"} <= commands & {words[0] for words in kinds}


@pytest.mark.parametrize("option", ["kv_cache_dtype", "batching", "kv_tier"])
def test_values_of_options_that_remedies_name_are_taken(option: str) -> None:
    found = {
        value for text in texts() for value in re.findall(f"--{option.replace('_', '-')} ([a-z]+[a-z0-9:SIZE]*)", text)
    }
    assert found
    for value in found:
        setting: Any = (value.replace("SIZE", "1GB"),) if option == "kv_tier" else value
        assert getattr(EngineConfig("kvern-1m", **{option: setting}), option) == setting


def after(seconds: dict[str, float], **figures: Any) -> EngineStatistics:
    return EngineStatistics(seconds=tuple(seconds.get(cause, 0.0) for cause in CAUSES), **figures)


def test_evidence_has_numbers_and_one_action() -> None:
    figures = {"steps": 100, "scheduled": 250, "reading": (7.36, 8.0), "bandwidth": 4.1e12}
    found = judge(EngineStatistics(), after({"weights": 8.0, "idle": 2.0}, **figures))
    assert found is not None and str(found) == (
        "decode reads weights at 92% of 4.1 TB/s, for 2.5 requests a step (80% of the time): only more requests a "
        "step, fewer bits or a second card make it faster"
    )
    found = judge(EngineStatistics(), after({"blocks": 7.1, "weights": 2.9}, kv_cache_usage=0.98))
    assert found is not None and str(found).startswith(
        "requests wait for blocks of the KV cache, of which 98% are in use (71% of the time): "
    )


def test_every_cause_can_be_told_on_a_machine_of_unknown_speed() -> None:
    assert set(SAYS) == set(CAUSES)
    for cause in CAUSES:
        found = judge(EngineStatistics(), after({cause: 1.0}))
        assert found is not None and found.cause == cause and "{" not in str(found)
    assert judge(EngineStatistics(), EngineStatistics()) is None, "an encoder's seconds are not counted"


class Spending:
    """An engine that spends seconds on causes."""

    def __init__(self) -> None:
        self.spent = dict.fromkeys(CAUSES, 0.0)

    def spend(self, seconds: float, **shares: float) -> EngineStatistics:
        for cause, share in shares.items():
            self.spent[cause] += seconds * share
        return after(self.spent)


def test_causes_of_like_size_do_not_alternate() -> None:
    watch, engine, changes = VerdictWatch(), Spending(), 0
    for second in range(200):
        more = 0.5 + (0.04 if second // 30 % 2 else -0.04)
        changes += watch.hear(engine.spend(1.0, weights=more, products=1 - more))
    assert changes == 1


def test_a_new_cause_is_named_within_a_minute() -> None:
    watch, engine = VerdictWatch(), Spending()
    for _ in range(100):
        watch.hear(engine.spend(1.0, weights=0.9, idle=0.1))
    assert watch.verdict is not None and watch.verdict.cause == "weights"
    seconds = 0
    while watch.verdict.cause != "blocks":
        watch.hear(engine.spend(1.0, blocks=0.6, weights=0.4))
        seconds += 1
    assert seconds <= WINDOW


def test_there_is_no_verdict_at_once() -> None:
    watch, engine = VerdictWatch(), Spending()
    for _ in range(int(LEAST)):
        assert not watch.hear(engine.spend(1.0, weights=1.0))
    assert watch.hear(engine.spend(1.0, weights=1.0))
    watch.forget()
    assert watch.verdict is None


def test_an_idle_hour_that_is_told_at_once_does_not_hide_the_load_after_it() -> None:
    watch, engine = VerdictWatch(), Spending()
    for _ in range(30):
        watch.hear(engine.spend(1.0, step=1.0))
    watch.hear(engine.spend(3600.0, idle=1.0))
    for _ in range(int(LEAST) + 1):
        watch.hear(engine.spend(1.0, step=1.0))
    assert watch.verdict is not None and (watch.verdict.cause, watch.verdict.share) == ("step", 1.0)
    assert "card" not in str(watch.verdict), "ranks in DP attention have one that is known"


def test_steps_that_are_longer_than_the_window_have_a_verdict() -> None:
    watch, engine = VerdictWatch(), Spending()
    for _ in range(3):
        watch.hear(engine.spend(3 * WINDOW, products=1.0))
    assert watch.verdict is not None and watch.verdict.cause == "products"


def test_the_log_is_told_once_and_no_more_than_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    time, engine = EngineTime({"model_name": "m"}), Spending()
    with caplog.at_level("INFO", "kvern.verdict"):
        for second in range(600):
            cause = ("idle", "weights", "blocks")[second // 25 % 3]
            time.hear(engine.spend(1.0, **{cause: 1.0}), "1")
    told = [record.getMessage() for record in caplog.records]
    assert all(line.startswith("engine 1: ") for line in told) and "no requests" not in "".join(told)
    assert 2 <= len(told) <= 11


def test_few_blocks_are_named_on_a_real_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a CPU of known speed; what the engine's process waits for processors on a busy machine is left out."""
    card = Card("CPU", 1e9, 1e9, 1e12, 1e12, host=True)
    monkeypatch.setattr(hardware, "quickly_measured_host", lambda build: card)
    llm = LLM("kvern-12m", kv_cache_tokens=160, max_model_len=160, threads=1)
    engine = engine_of(llm)
    before = copy(engine.statistics())
    llm.generate(["Once upon a time"] * 8, SamplingParams(max_tokens=120, ignore_eos=True))
    after = copy(engine.statistics())
    host = CAUSES.index("host")
    after.seconds = (*after.seconds[:host], before.seconds[host], *after.seconds[host + 1 :])
    found = judge(before, after)
    assert found is not None and found.cause == "blocks", after.seconds


def test_a_model_that_is_not_described_is_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "engine_card", lambda *given: None)
    llm = LLM("kvern-1m", threads=1)
    before = copy(engine_of(llm).statistics())
    llm.generate("Once upon a time", SamplingParams(max_tokens=100, ignore_eos=True))
    after = engine_of(llm).statistics()
    found = dict(zip(CAUSES, after.seconds, strict=True))
    assert found["step"] > 0 and not found["weights"] and before.bandwidth == 0
