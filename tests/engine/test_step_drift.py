"""The watch on the engine's own steps: slower ones are found, noise and other traffic are not, and it is remembered."""

import logging
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvern.config import EngineConfig
from kvern.engine import step_drift
from kvern.engine.engine import Engine
from kvern.engine.pace import Pace
from kvern.engine.slow_machine import SlowMachine
from kvern.engine.step_baseline import StepTimes, step_times
from kvern.engine.step_drift import LEARNT, WARM, Bucket, StepDrift
from kvern.engine.step_load import load_of
from kvern.observe.exposition import engines_text
from kvern.observe.metrics import Metrics
from kvern.request.events import EngineStatistics, all_together
from kvern.request.request import PromptInput, Request, RequestSpec
from kvern.request.sampling_params import SamplingParams
from kvern.request.step import ScheduledTokens, SchedulerOutput
from tests.support.cache_folder import cache_folder
from tests.support.internals import pace_of, set_pace
from tests.support.simulated_device import Setup
from tests.support.simulated_engine import SimulatedEngine

ENGINE = {"model": "one", "hardware": "card"}
VERSIONS = {"kvern": "1", "driver": "535.1"}
OWN = b'{"engine": {"model": "one", "hardware": "card"}, "kept": [{"versions": {}, "seconds": %s}]}'
LOOKED = "the card is throttled"
Work = tuple[int, int, int]
"""Decodes of a step, the keys before each of them, and the tokens of a prompt beside them."""


class Looked:
    """A look at a machine; it counts how often one was prepared."""

    begun = 0

    def begin(self) -> None:
        self.begun += 1

    def __call__(self) -> str:
        return LOOKED


class Machine:
    """Steps of this duration, with so much noise, and one of a hundred that takes up to twenty times as long."""

    def __init__(self, folder: Path, seed: int = 0, versions: dict[str, str] = VERSIONS, noise: float = 0.05) -> None:
        self.dice = random.Random(seed)
        self.noise = noise
        self.times = StepTimes(folder, ENGINE, versions)
        self.look = Looked()
        self.drift = StepDrift(self.times, self.look)
        self.now = 0.0
        self.slowdown = 1.0

    def step(self, rows: int = 8, keys: int = 100, prompt: int = 0) -> None:
        seconds = 0.010 + 0.0002 * rows + 3e-8 * rows * keys + 0.00005 * prompt + 1e-9 * prompt**2
        seconds *= self.slowdown * self.dice.lognormvariate(0, self.noise)
        if self.dice.random() < 0.01:
            seconds *= self.dice.uniform(2, 20)
        self.now += seconds
        self.drift.took(bucket_of(rows, keys, prompt), seconds, self.now)

    def steps(self, count: int, work: Callable[[random.Random], Work] = lambda _: (8, 100, 0)) -> None:
        for _ in range(count):
            self.step(*work(self.dice))

    def until_warned(self, caplog: pytest.LogCaptureFixture, most: int, what: str = "times as long as usual,") -> int:
        for count in range(most):
            if what in caplog.text:
                return count
            self.step()
        raise AssertionError(f"not found in {most} steps: {caplog.text}")


def plain(**other: Any) -> Request:
    return Request(RequestSpec("0", PromptInput([0]), SamplingParams(**other).resolved(), 1))


PLAIN = plain()


@cache
def bucket_of(rows: int, keys: int, prompt: int) -> Bucket:
    scheduled = [ScheduledTokens(row, keys, 1, 1) for row in range(rows)]
    if prompt:
        scheduled.append(ScheduledTokens(rows, 0, prompt, 0))
    bucket = Bucket.of(load_of(scheduled), [PLAIN] * len(scheduled))
    assert bucket is not None
    return bucket


def few(dice: random.Random) -> Work:
    return dice.randint(1, 8), dice.randint(0, 500), 0


def many(dice: random.Random) -> Work:
    return dice.randint(20, 90), dice.randint(500, 4000), 0


def mixed(dice: random.Random) -> Work:
    return dice.randint(2, 30), dice.randint(200, 1000), dice.choice((0, dice.randint(30, 900)))


@pytest.fixture(autouse=True)
def warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvern")


def test_steps_that_take_a_tenth_longer_are_found_and_so_is_their_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine(tmp_path)
    assert machine.drift.ratio == 0.0
    machine.steps(2000)
    assert machine.drift.ratio == pytest.approx(1.0, abs=0.03) and caplog.text == ""
    machine.slowdown = 1.1
    assert machine.until_warned(caplog, 120) > 20
    assert LOOKED in caplog.text and "decode steps of 8 to 9 rows and from 725 keys" in caplog.text
    machine.steps(500)
    assert machine.drift.ratio == pytest.approx(1.1, abs=0.03)
    assert caplog.text.count("as usual") == 1, "it is said once"
    machine.slowdown = 1.0
    machine.until_warned(caplog, 200, "as long as usual again")
    machine.steps(500)
    assert machine.drift.ratio == pytest.approx(1.0, abs=0.03) and caplog.text.count("as usual") == 2


@pytest.mark.parametrize("seed", range(10))
def test_noise_and_outliers_are_no_drift(seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Machine(tmp_path, seed).steps(20_000)
    assert caplog.text == ""


@pytest.mark.parametrize("noise", [0.2, 0.3])
@pytest.mark.parametrize("seed", range(5))
def test_strong_noise_is_no_drift_and_does_not_change_what_is_usual(
    seed: int, noise: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine(tmp_path, seed, noise=noise)
    machine.steps(1000)
    [learnt] = machine.times.seconds.values()
    machine.steps(19_000)
    assert caplog.text == "" and list(machine.times.seconds.values()) == [learnt]
    assert learnt == pytest.approx(0.0116, rel=0.05)


@pytest.mark.parametrize("noise", [0.05, 0.2])
def test_a_fast_spell_leaves_no_alarm(noise: float, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(tmp_path, noise=noise)
    machine.steps(1000)
    machine.slowdown = 0.88
    machine.steps(400)
    machine.slowdown = 1.0
    machine.steps(400)
    assert machine.drift.ratio == pytest.approx(1.0, abs=0.06) and caplog.text == ""
    machine.slowdown = 1.1
    machine.until_warned(caplog, 120 if noise < 0.1 else 2000)


def test_what_stays_faster_is_usual_at_last(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(tmp_path)
    machine.steps(200)
    machine.slowdown = 0.85
    machine.steps(600)
    assert machine.drift.ratio == pytest.approx(1.0, abs=0.03) and caplog.text == ""


def test_what_was_slow_for_very_long_is_learnt_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_drift, "AGAIN", 100)
    machine = Machine(tmp_path)
    machine.steps(200)
    machine.slowdown = 1.2
    machine.steps(700)
    assert machine.drift.ratio == pytest.approx(1.2, abs=0.03) and "learnt again" not in caplog.text
    machine.steps(600)
    assert machine.drift.ratio == pytest.approx(1.0, abs=0.03)
    assert "learnt again: in the last 800" in caplog.text and "as long as usual again" in caplog.text
    machine.slowdown = 1.35
    machine.steps(200)
    assert machine.drift.ratio == pytest.approx(1.35 / 1.2, abs=0.03) and caplog.text.count(LOOKED) == 2


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(3))
def test_other_traffic_is_no_drift(seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(tmp_path, seed)
    for traffic in (few, many, few, mixed, many, lambda _: (8, 100, 300), lambda _: (8, 100, 360), mixed):
        machine.steps(4000, traffic)
    assert caplog.text == ""
    machine.slowdown = 1.15
    machine.steps(2000, mixed)
    assert "times as long as usual," in caplog.text


def test_a_slow_drift_is_found_though_each_step_is_like_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine(tmp_path)
    for _ in range(20_000):
        machine.slowdown *= 1 + 1e-5
        machine.step()
    assert machine.drift.ratio == pytest.approx(1.22, abs=0.04) and "times as long as usual," in caplog.text


def test_what_is_learnt_from_slow_steps_is_corrected_when_they_are_faster(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine(tmp_path)
    machine.slowdown = 1.5
    machine.steps(200)
    machine.slowdown = 1.0
    machine.steps(300)
    assert machine.drift.ratio == pytest.approx(1.0, abs=0.03) and caplog.text == ""
    machine.slowdown = 1.15
    machine.until_warned(caplog, 120)


def test_sizes_that_come_up_while_steps_are_slow_are_not_usual_as_they_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine(tmp_path)
    machine.steps(1000)
    machine.slowdown = 1.3
    machine.steps(1000)
    machine.steps(1000, lambda _: (40, 1000, 0))
    assert machine.drift.ratio == pytest.approx(1.3, abs=0.04)
    assert caplog.text.count("as usual") == 1


def test_the_next_start_knows_what_is_usual(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Machine(tmp_path).steps(4 * LEARNT)
    again = Machine(tmp_path, 1)
    again.slowdown = 1.2
    again.until_warned(caplog, WARM + 60)
    assert not list(tmp_path.rglob("*.tmp"))


def test_another_driver_is_another_baseline_and_is_compared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    traffic = [lambda _, rows=rows: (rows, 100, 0) for rows in (1, 2, 4, 8)]
    before = Machine(tmp_path)
    after = {**VERSIONS, "driver": "550.2"}
    for work in traffic:
        before.steps(3 * LEARNT, work)
    before.times.save()
    changed = Machine(tmp_path, 1, after)
    changed.slowdown = 1.18
    for work in traffic:
        changed.steps(3 * LEARNT, work)
    [said] = [record for record in caplog.records if record.name == "kvern"]
    assert said.levelno == logging.WARNING
    assert "times as long as with driver 535.1 (now 550.2)" in said.message
    assert float(said.message.split()[2]) == pytest.approx(1.18, abs=0.03)
    assert changed.drift.ratio == pytest.approx(1.0, abs=0.03), "with this driver they are usual"
    changed.times.save()
    assert StepTimes(tmp_path, ENGINE, VERSIONS).seconds.keys() == StepTimes(tmp_path, ENGINE, after).seconds.keys()


def test_engines_of_several_versions_keep_each_others_times(tmp_path: Path) -> None:
    """They run at the same time, and write now and then."""
    new = {**VERSIONS, "driver": "550.2"}
    one, twin, newer = (StepTimes(tmp_path, ENGINE, versions) for versions in (VERSIONS, VERSIONS, new))
    buckets = Bucket("decode", 1, 19), Bucket("decode", 5, 19), Bucket("decode", 9, 19)
    one.seconds |= {buckets[0]: 0.01, buckets[1]: 0.02}
    one.save()
    newer.seconds[buckets[0]] = 0.04
    newer.save()
    twin.seconds |= {buckets[1]: 0.03, buckets[2]: 0.05}
    twin.save()
    assert StepTimes(tmp_path, ENGINE, VERSIONS).seconds == dict(zip(buckets, (0.01, 0.03, 0.05), strict=True))
    assert StepTimes(tmp_path, ENGINE, new).seconds == {buckets[0]: 0.04}
    assert twin.seconds.keys() == {*buckets[1:]}, "what another engine has learnt is for the next start"
    one.path.write_bytes(b"damaged")
    one.save()
    assert StepTimes(tmp_path, ENGINE, VERSIONS).seconds == one.seconds


def test_the_machine_is_looked_at_only_when_steps_may_be_slower(tmp_path: Path) -> None:
    machine = Machine(tmp_path, noise=0.01)
    machine.steps(20_000)
    assert machine.look.begun < 3
    machine.slowdown = 1.1
    machine.steps(40)
    assert machine.look.begun >= 1


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"\x00\xff", "JSON"),
        (b'{"engine": {"model": "other"}, "kept": []}', "another engine's"),
        (
            b'{"engine": {"model": "one", "hardware": "card"}, "kept": [{"versions": {}, "seconds": {"decode 1": 1}}]}',
            "",
        ),
        (
            OWN % b'{"decode 1 2": -1}',
            "times that are no times",
        ),
    ],
    ids=["damaged", "foreign", "bucket", "time"],
)
def test_a_file_that_is_none_is_ignored_and_replaced(
    content: bytes, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = StepTimes(tmp_path, ENGINE, VERSIONS).path
    file.parent.mkdir()
    file.write_bytes(content)
    machine = Machine(tmp_path)
    [said] = [record for record in caplog.records if record.name == "kvern"]
    assert str(file) in said.message and why in said.message and said.levelno == logging.WARNING
    machine.steps(2 * LEARNT + WARM)
    machine.times.save()
    assert len(StepTimes(tmp_path, ENGINE, VERSIONS).seconds) == 1 and len(caplog.records) == 1


def test_a_folder_that_cannot_be_written_is_no_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    machine = Machine(tmp_path / "file")
    machine.steps(3 * LEARNT)
    machine.times.save()
    machine.times.save()
    assert caplog.text.count("is not kept for the next start") == 1
    assert machine.drift.ratio == pytest.approx(1.0, abs=0.05)


def test_buckets_tell_kinds_of_steps_apart() -> None:
    def kind(*items: ScheduledTokens, request: Request | None = None, encoding: float = 0.0) -> str | None:
        bucket = Bucket.of(load_of(items, encoding), [request or PLAIN] * len(items))
        assert bucket is None or Bucket.read(str(bucket)) == bucket
        return bucket and bucket.kind

    decode, drafts, prompt = ScheduledTokens(0, 9, 1, 1), ScheduledTokens(0, 9, 3, 3), ScheduledTokens(0, 0, 9, 1)
    assert (kind(decode), kind(decode, drafts), kind(decode, prompt)) == ("decode", "drafts", "prompt")
    assert kind(decode, request=plain(logprobs=2)) == "decode+logprobs"
    assert kind() is None and kind(decode, encoding=5.0) is None


def test_statistics_of_engines_have_the_largest_ratio() -> None:
    ratios = [EngineStatistics(step_time_ratio=ratio) for ratio in (0.0, 1.2, 1.1)]
    together = all_together(ratios)
    assert together.step_time_ratio == 1.2 and together.at_the_end().step_time_ratio == 0.0
    metrics = Metrics("a")
    metrics.step(together, 0.0)
    assert b'kvern:step_time_ratio{model_name="a"} 1.2\n' in engines_text([metrics])


@pytest.mark.parametrize("depth", [1, 2])
def test_the_core_tells_the_watch(
    depth: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_drift, "SELDOM", 3)
    engine = SimulatedEngine(Setup(depth=depth, slots=1, max_model_len=60))
    drift = StepDrift(StepTimes(tmp_path, ENGINE, VERSIONS), Looked())
    set_pace(engine.core, Pace(clock=lambda: engine.device.clock, drift=drift))
    for number in range(14):
        if number == 7:
            assert engine.core.statistics().step_time_ratio == pytest.approx(1.0) and caplog.text == ""
            engine.device.slowdown = 1.25
        engine.add([number], 50)
        engine.run_requests()
    assert engine.core.statistics().step_time_ratio == pytest.approx(1.25)
    assert LOOKED in caplog.text


def test_an_engine_that_becomes_slower_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig(
        model="kvern-1m", device="cpu", threads=1, cache_dir=cache_folder(tmp_path), max_model_len=256
    )
    engine = Engine(config)
    pace, now, slowdown = pace_of(engine), 0.0, 1.0
    executor, submit = engine.core.executor, engine.core.executor.submit  # type: ignore[attr-defined]

    def slower(output: SchedulerOutput) -> Any:
        nonlocal now
        now += 0.001 * slowdown * len(output.scheduled)
        return submit(output)

    executor.submit = slower
    set_pace(engine.core, Pace(clock=lambda: now, drift=pace.drift))

    def answers(count: int) -> None:
        for number in range(count):
            engine.add(f"{number}", "Once", SamplingParams(max_tokens=240, ignore_eos=True))
            while engine.has_work:
                engine.step()

    answers(14)
    assert engine.statistics().step_time_ratio == pytest.approx(1.0)
    slowdown = 1.2
    answers(12)
    assert engine.statistics().step_time_ratio == pytest.approx(1.2)
    [said] = [record.message for record in caplog.records if "as long as usual" in record.message]
    assert said.startswith("steps take 1.20 times as long as usual, the last of them decode steps of 1 rows")
    assert "1.2 ms instead of 1 ms" in said
    assert list((tmp_path / "step-times").iterdir()), "what is usual is kept"


def test_options_that_change_steps_are_baselines_of_their_own(tmp_path: Path) -> None:
    def path(**options: Any) -> Path:
        engine = Engine(
            EngineConfig(model="kvern-1m", device="cpu", threads=1, cache_dir=cache_folder(tmp_path), **options)
        )
        return step_times(engine.config, engine.layout, {"model_type": "llama"}).path

    assert path() == path(seed=4, served_model_name=("other",)) != path(quantization="int8")


def test_what_a_machine_does_is_said_where_it_can_be_read(tmp_path: Path) -> None:
    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    assert "look at other processes" in SlowMachine([], tmp_path)()
    write("proc/stat", "cpu  100 0 100 800 0 0 0 0 0 0\ncpu0 1 2 3\n")
    machine = SlowMachine([], tmp_path)
    write("proc/stat", "cpu  900 0 100 9000 0 0 0 0 0 0\n")
    machine.begin()
    write("proc/stat", "cpu  950 0 110 9010 0 0 0 30 0 0\n")
    write("proc/pressure/cpu", "some avg10=1.00 avg60=23.50 avg300=9.00 total=1\n")
    write("proc/cpuinfo", "cpu MHz\t\t: 1200.0\ncpu MHz\t\t: 1400.0\n")
    write("sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq", "3600000\n")
    said = machine()
    assert "idle for 10% of its time, and other virtual machines had 30%" in said
    assert "23.50 % of the last minute" in said and "1300 of 3600 MHz" in said
    card = SlowMachine(["GPU-1"], tmp_path)
    card.begin()
    assert "GPU-1" in card(), "a card that cannot be asked is named"
