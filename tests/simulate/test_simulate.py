"""``kvern simulate``: a server's core over a virtual clock gives steps their price, and answers end as they should."""

import itertools
import json
import random
import statistics
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from kvern.cli.main import main
from kvern.cli.simulate import doubts
from kvern.engine.step_load import StepLoad
from kvern.errors import ConfigError
from kvern.loads.file import as_line
from kvern.loads.request import LoadRequest
from kvern.loads.source import read_load
from kvern.simulate.costs import (
    HELD_OUT,
    KEYS,
    PAIRS,
    RUN_STEPS,
    WINDOW,
    FittedPrice,
    Residuals,
    fit_steps,
)
from kvern.simulate.engine import OWN, DrivenEngine, EngineSizes, Prompts, simulated_engine
from kvern.simulate.launches import StepSample, StepWork
from kvern.simulate.prediction import predicted
from kvern.simulate.records import RecordedRequest, RecordedStep, RecordHeader, StepRecord, read_steps, write_steps
from kvern.simulate.report import figures, read_slo
from kvern.simulate.timeline import weighted_percentiles
from kvern.version import __version__
from tests.support.families import make_checkpoint
from tests.support.simulation import SIZES, EvenPrice


def run(load: list[LoadRequest], sizes: EngineSizes = SIZES) -> DrivenEngine:
    engine = simulated_engine(sizes, EvenPrice())
    engine.run(load, Prompts())
    engine.scheduler.check_integrity()
    return engine


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_alone_takes_the_seconds_of_its_steps(depth: int) -> None:
    engine = run([LoadRequest(5.0, 100, 3)], msgspec.structs.replace(SIZES, depth=depth))
    answer = engine.timeline.answers["0#0"]
    assert answer.ended and answer.ttft == pytest.approx(1.64 + 1.36)  # 64 tokens of the prompt, then 36
    assert answer.e2e == pytest.approx(3.0 + 2 * 1.01) and answer.itl == pytest.approx(1.01)
    assert engine.timeline.gaps.total() == 2


def test_who_arrives_in_a_step_waits_for_its_end() -> None:
    engine = run([LoadRequest(0.0, 50, 2), LoadRequest(0.5, 10, 1)])
    first, second = engine.timeline.answers.values()
    assert first.first == pytest.approx(1.5)
    assert second.ttft == pytest.approx(1.5 + 1.11 - 0.5)  # with the decode of the other


def test_equal_hashes_are_computed_once_and_other_tokens_never_match() -> None:
    sizes = msgspec.structs.replace(SIZES, blocks=512, max_model_len=2048)
    load = [LoadRequest(100.0 * place, 1000, 1, (7, 8 + place % 2)) for place in range(4)]
    engine = run(load, sizes)
    assert engine.hit_tokens == 512 + 2 * 999  # the others have all but their last token in the cache
    assert run([LoadRequest(100.0 * place, 1000, 1) for place in range(4)], sizes).hit_tokens == 0


def test_requests_are_preempted_where_blocks_run_out_and_all_end() -> None:
    load = [LoadRequest(0.0, 60, 200) for _ in range(6)]
    engine = run(load, msgspec.structs.replace(SIZES, blocks=40))
    assert engine.scheduler.preemption_count > 0
    assert all(answer.ended for answer in engine.timeline.answers.values())
    assert engine.timeline.gaps.total() == 6 * 199


def test_figures_tell_good_answers_and_the_use_of_the_engine() -> None:
    engine = run([LoadRequest(0.0, 64, 2), LoadRequest(10.0, 64, 2), LoadRequest(10.1, 64, 2)])
    found = figures([engine.timeline], read_slo("ttft=2s"), engine.hit_tokens, [engine.executor.busy])
    assert found["requests"] == 3 and found["generated_tokens"] == 6
    assert found["good_share"] == pytest.approx(2 / 3)  # the third waits for the second's prompt
    assert found["use"] == pytest.approx(engine.executor.busy / found["seconds"])


def test_a_load_above_what_engines_answer_and_runs_that_differ_are_told() -> None:
    busy, crowded = (
        figures([engine.timeline], {}, 0, [engine.executor.busy])
        for engine in (run(list(read_load(f"rate={rate},requests=200,input=40,output=20"))) for rate in (0.1, 2))
    )
    assert list(doubts([busy])) == []
    assert "requests come faster than engines answer them" in "".join(doubts([busy, crowded, crowded]))
    assert "requests come faster than engines answer them" not in "".join(doubts([busy, busy, crowded]))
    slow = busy | {"p99_ttft_ms": 1.8 * busy["p99_ttft_ms"]}
    assert [line[:40] for line in doubts([busy, slow])] == ["p99 ttft is an interval, not a number: r"]


def test_unlike_prompts_of_engines_with_time_to_spare_are_no_overload() -> None:
    runs = []
    for seed in range(20):
        engine = run(list(read_load(f"rate=0.02,requests=10,input=lognormal:80:1:400,output=2,seed={seed}")))
        runs.append(figures([engine.timeline], {}, 0, [engine.executor.busy]))
    longer = [each for each in runs if each["ttft_growth"] > 2]
    assert longer and max(each["use"] for each in runs) < 0.5
    told = list(doubts(longer))
    assert told and not any("come faster" in line for line in told)


def test_answers_of_one_token_have_no_time_between_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["simulate", "kvern-1m", "--roofline", "--hardware", "l4", "--seeds", "6", "--load"]
    assert main([*command, "rate=1,requests=2,input=100,output=uniform:1:2"]) == 0
    told = capsys.readouterr()
    assert "p99 itl ms" in told.out and "0.0 to" not in told.out.split("p50 itl")[1].split("p50 e2e")[0]
    assert main([*command, "rate=1,requests=2,input=100,output=1", "--report", str(tmp_path / "page.html")]) == 0
    assert "itl" not in capsys.readouterr().out
    assert "Time between tokens" not in (tmp_path / "page.html").read_text()
    asked = ["plan", "kvern-1m", "--roofline", "--hardware", "l4", "--slo", "ttft=1s", "--seeds", "1"]
    assert main([*asked, "--workload", "rate=1,requests=2,input=100,output=1"]) == 0
    assert "–" in capsys.readouterr().out


def test_percentiles_of_counted_values_are_those_of_all() -> None:
    found = weighted_percentiles(Counter({1: 2, 3: 1, 2: 1}), [0, 50, 90, 100])
    assert found == [1.0, 1.5, pytest.approx(2.7), 3.0]


def samples(count: int, noise: float = 0.0) -> list[StepSample]:
    """Steps of known costs, every seventh with a prompt."""
    found = []
    for place in range(count):
        requests, keys = 1 + place * 7 % 41, 100 * (place % 13)
        prompt = 64 if place % 7 == 0 else 0
        load = StepLoad(requests + prompt, keys, 2048.0 * bool(prompt), 0.0, prompt, 0)
        seconds = 0.002 + 1e-4 * load.rows + 1e-7 * keys + 1e-7 * load.pairs
        found.append(StepSample(StepWork(load, requests + bool(prompt), 0), seconds * (1 + noise * (place % 3 - 1))))
    return found


def test_costs_are_fitted_and_the_error_on_steps_left_out_is_told() -> None:
    exact = fit_steps(samples(500))
    assert exact.errors.single < 0.02 and abs(exact.errors.bias) < 0.01
    noisy = fit_steps(samples(4000, noise=0.3))
    assert 0.1 < noisy.errors.single < 0.3 and 0.1 < noisy.errors.spread < 0.3
    assert max(noisy.errors.like, noisy.errors.windows) < 0.1
    work = samples(1)[0].work
    drawn = {FittedPrice(noisy, 1).seconds(*work) for _ in range(3)} | {FittedPrice(noisy, 2).seconds(*work)}
    assert len(drawn) > 1 and FittedPrice(noisy, 1).seconds(*work) == FittedPrice(noisy, 1).seconds(*work)
    with pytest.raises(ConfigError, match="has 5 steps: at least 100"):
        fit_steps(samples(5))


def test_errors_on_steps_left_out_do_not_know_their_times() -> None:
    """Steps of each fifth window take twice as long as all others."""
    doubled = [
        each if place // WINDOW % HELD_OUT else each._replace(seconds=2 * each.seconds)
        for place, each in enumerate(samples(3000))
    ]
    assert fit_steps(doubled).errors.bias == pytest.approx(-0.5, abs=0.01)


def test_without_a_seed_nothing_is_drawn_so_that_predicted_costs_are_those_that_were_fitted() -> None:
    fit = fit_steps(samples(2000, noise=0.3))
    steady = FittedPrice(fit, None)
    work = samples(1)[0].work
    assert len({steady.seconds(*work) for _ in range(2 * RUN_STEPS)}) == 1
    found = predicted(steady, has_target=False)
    for told, cost, left in ((found.per_pair, PAIRS, fit.prompts), (found.per_key, KEYS, fit.decodes)):
        assert told == pytest.approx(fit.others[cost] * statistics.mean(left.ratios[-1]), rel=0.02)


def test_pauses_of_the_host_are_as_long_in_long_steps_as_in_short_ones() -> None:
    """Every fifth step waits 10 ms, of 1 ms or of 40: it takes eleven times as long, or a quarter longer."""
    dice = random.Random(4)
    found = []
    for _ in range(3000):
        rows = dice.choice((1, 2, 3, 40))
        seconds = 0.001 * rows + (0.01 if dice.random() < 0.2 else 0.0)
        found.append(StepSample(StepWork(StepLoad(rows, 10 * rows), rows, 0), seconds))
    fit = fit_steps(found)
    for rows in (1, 40):
        taken = [each.seconds for each in found if each.work.requests == rows]
        work = StepWork(StepLoad(rows, 10 * rows), rows, 0)
        price = FittedPrice(fit, 1)
        drawn = [price.seconds(*work) for _ in range(4000)]
        assert statistics.mean(drawn) == pytest.approx(statistics.mean(taken), rel=0.1)
        assert FittedPrice(fit, None).seconds(*work) == pytest.approx(statistics.mean(taken), rel=0.05)
        assert max(drawn) < 1.1 * max(taken)


def test_ends_of_steps_that_are_seen_late_make_costs_neither_less_nor_more() -> None:
    """The end of every third step is seen when the next one has nearly ended, which then seems to take little."""
    dice = random.Random(7)
    found = []
    for _ in range(1500):
        prompt = dice.choice((100, 200, 400, 700))
        load = StepLoad(4 + prompt, 0, 0.0, 0.0, prompt)
        found.append(StepSample(StepWork(load, 5, 1), 0.01 + 2e-5 * prompt))
    for place in range(0, len(found) - 1, 3):
        late = 0.9 * found[place + 1].seconds
        found[place] = found[place]._replace(seconds=found[place].seconds + late)
        found[place + 1] = found[place + 1]._replace(seconds=found[place + 1].seconds - late)
    fit = fit_steps(found)
    for prompt in (100, 200, 400, 700):
        work = StepWork(StepLoad(4 + prompt, 0, 0.0, 0.0, prompt), 5, 1)
        assert fit.seconds(work) == pytest.approx(0.01 + 2e-5 * prompt, rel=0.1)


def test_prompts_add_to_what_the_decodes_of_a_mixture_of_experts_take() -> None:
    """Few tokens read most experts: costs rise steeply, then hardly, and steps that were not seen are on the curves."""
    curve = {rows: 0.003 + 0.015 * (1 - (1 - 1 / 16) ** rows) for rows in range(1, 129)}
    found = []
    dice = random.Random(5)
    for place in range(4000):
        rows, prompt = int(128 ** dice.random()), dice.choice((64, 128, 256)) if place % 3 == 0 else 0
        load = StepLoad(rows + prompt, 0, 0.0, 0.0, prompt)
        seconds = curve[rows] + (0.002 + 1e-5 * prompt) * bool(prompt)
        found.append(StepSample(StepWork(load, rows + bool(prompt), 0), seconds))
    fit = fit_steps([each for each in found if each.work.requests > 5 or not each.work.load.prompt])
    for rows, prompt in itertools.product((1, 4, 16, 100), (0, 64, 256)):
        expected = curve[rows] + (0.002 + 1e-5 * prompt) * bool(prompt)
        work = StepWork(StepLoad(rows + prompt, 0, 0.0, 0.0, prompt), rows + bool(prompt), 0)
        assert fit.seconds(work) == pytest.approx(expected, rel=0.06)


def test_more_rows_than_were_seen_take_as_much_more_as_the_last_of_those_that_were() -> None:
    """A mixture of experts reads all of them for 60 rows, and takes hardly longer for twice as many."""
    found = [
        StepSample(StepWork(StepLoad(rows), rows, 0), 0.003 + 0.015 * (1 - 0.94**rows) + 1e-5 * rows)
        for rows in range(1, 121)
        for _ in range(3)
    ]
    for rows in (150, 240):
        assert fit_steps(found).seconds(StepWork(StepLoad(rows), rows, 0)) == pytest.approx(
            0.018 + 1e-5 * rows, rel=0.04
        )
    alone = [StepSample(StepWork(StepLoad(4), 4, 0), 0.002)] * 100
    assert fit_steps(alone).seconds(StepWork(StepLoad(8), 8, 0)) == pytest.approx(0.004)


def test_more_rows_never_take_less_however_the_keys_that_they_read_grow_with_them() -> None:
    dice = random.Random(6)
    found = []
    for _ in range(3000):
        rows = int(200 ** dice.random())
        keys = int(rows * dice.uniform(450, 550))
        seconds = (0.004 + 4e-5 * rows + 2e-8 * keys) * dice.uniform(0.95, 1.05)
        found.append(StepSample(StepWork(StepLoad(rows, keys), rows, 0), seconds))
    decodes, prompts = fit_steps(found).curves
    assert decodes.seconds == tuple(sorted(decodes.seconds)) and min(decodes.seconds) > 0
    assert decodes.at(0) == 0.0 == prompts.at(0) == prompts.at(64)  # there were no prompts


def test_decodes_draw_together_what_they_draw_one_by_one() -> None:
    fit = fit_steps(samples(1500, noise=0.3))
    for seed in (None, 1, 2):
        together, single = FittedPrice(fit, seed), FittedPrice(fit, seed)
        for steps, keys in ((7, 100), (RUN_STEPS, 3), (900, 50)):
            mark = together.mark()
            together.decodes(StepLoad(5, 1), 11)
            together.back(mark)
            expected = [single.seconds(StepLoad(5, keys + 5 * step), 5, 0) for step in range(steps)]
            assert together.decodes(StepLoad(5, keys), steps).tolist() == expected
            load = StepLoad(40, 9, 50.0, 0.0, 30)
            assert together.seconds(load, 12, 1) == single.seconds(load, 12, 1)


def test_slow_steps_follow_each_other_as_they_were_recorded() -> None:
    left = Residuals((), ((1.0, 2.0),), (0.25,) * 5000 + (0.75,) * 5000)
    fit = msgspec.structs.replace(fit_steps(samples(500)), decodes=left, prompts=left)
    price, work = FittedPrice(fit, 3), samples(2)[1].work
    drawn = [price.seconds(*work) for _ in range(20 * RUN_STEPS)]
    changes = sum(one != other for one, other in itertools.pairwise(drawn))
    assert len(set(drawn)) == 2 and 1 <= changes <= 20 + 1
    assert fit.seconds(work) == pytest.approx(min(drawn))


def test_the_cache_serves_earlier_answers_of_a_conversation() -> None:
    """The second turn begins with the first's prompt and answer, the third with both: only what is new is computed."""
    turns = [
        LoadRequest(0.0, 40, 60, (7,), "", "one"),
        LoadRequest(500.0, 120, 40, (7,), "", "one"),
        LoadRequest(900.0, 200, 8, (7,), "", "one"),
    ]
    for session, hits in (("one", 99 + 159), ("", 40 + 120)):
        engine = simulated_engine(SIZES, EvenPrice())
        engine.run([msgspec.structs.replace(turn, session=session) for turn in turns], Prompts())
        assert engine.hit_tokens == hits


def test_blocks_of_a_conversation_are_those_of_others_up_to_the_answer() -> None:
    prompts = Prompts()
    first = prompts.spec(0, LoadRequest(0.0, 500, 600, (1,), "", "a")).prompt.token_ids
    second = prompts.spec(1, LoadRequest(1.0, 1200, 5, (1, 2, 3), "", "a")).prompt.token_ids
    other = prompts.spec(2, LoadRequest(2.0, 1200, 5, (1, 2, 3))).prompt.token_ids
    assert second[:500] == first and set(second[500:1100]) == {OWN} and OWN not in second[1100:]
    assert other == second and len(second) == 1200


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A load and a record of steps."""
    load = [LoadRequest(0.05 * place, 40, 20, (), "ab"[place % 2]) for place in range(40)]
    (tmp_path / "load.jsonl").write_bytes(b"".join(map(as_line, load)))
    header = RecordHeader(version=__version__, model="m", hardware="h", vocabulary=100, sizes=SIZES)
    steps = [RecordedStep(0.0, each.seconds, *each.work, 0) for each in samples(300, noise=0.1)]
    write_steps(StepRecord(header, [RecordedRequest(load[0], [1])], steps), tmp_path / "steps.jsonl")
    return tmp_path / "load.jsonl", tmp_path / "steps.jsonl"


def test_a_record_is_read_as_it_was_written(files: tuple[Path, Path]) -> None:
    record = read_steps(files[1])
    assert record.header.sizes == SIZES and len(record.steps) == 300 and record.requests[0].answer == [1]


def test_the_command_compares_policies_with_the_same_seeds(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    load, record = map(str, files)
    command = ["simulate", "--record", record, "--load", load, "--slo", "ttft=100ms", "--seeds", "2", "--json"]
    assert main([*command, "--compare", "policy=fcfs,sjf"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told["runs"]) == {"policy=fcfs", "policy=sjf"} and "300 recorded steps" in told["basis"]
    first, second = told["runs"]["policy=fcfs"]
    assert first["requests"] == 40 and first["p50_ttft_ms"] != second["p50_ttft_ms"]
    assert set(first["tenants"]) == {"a", "b"}
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["runs"][""] == [first, second]
    assert main([*command[:-1]]) == 0
    assert " to " in capsys.readouterr().out


def test_a_load_that_is_drawn_is_another_for_each_seed_and_the_same_for_all_conditions(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["simulate", "--record", str(files[1]), "--load", "rate=2,requests=9,input=uniform:9:99", "--json"]
    assert main([*command, "--seeds", "2", "--compare", "block_size=16,32"]) == 0
    told = json.loads(capsys.readouterr().out)["runs"]
    small, large = ([run["prompt_tokens"] for run in told[f"block_size={size}"]] for size in (16, 32))
    assert small == large and small[0] != small[1]


@pytest.mark.parametrize(
    ("family", "told"),
    [
        ("gemma3", "left out: a server frees the blocks behind its windows"),
        ("lfm2", "left out: a server finds prefixes only where it kept a state"),
    ],
)
def test_estimates_say_what_they_leave_out(
    family: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(make_checkpoint(family, tmp_path))
    command = ["--roofline", "--hardware", "l4", "--seeds", "1"]
    assert main(["simulate", folder, *command, "--load", "rate=9,requests=5,input=9,output=3"]) == 0
    assert told in " ".join(capsys.readouterr().out.split())
    more = ["--workload", "rate=9,requests=5,input=9,output=3", "--slo", "ttft=1s"]
    assert main(["plan", folder, *command, *more]) == 0
    assert told in " ".join(capsys.readouterr().out.split())


def test_estimates_are_marked(files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "kvern-1m", "--roofline", "--hardware", "h200", "--load", str(files[0])]) == 0
    assert "an estimate: kvern-1m on 1 x h200" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--load", "LOAD"], "nothing says what steps cost"),
        (["--record", "RECORD"], "nothing to simulate"),
        (["--record", "RECORD", "--roofline", "--load", "LOAD"], "exclude each other"),
        (["--record", "LOAD", "--load", "LOAD"], "format none, and this kvern reads 1"),
        (["--record", "RECORD", "--load", "RECORD"], "line 1"),
        (["--record", "RECORD", "--load", "LOAD", "--hardware", "h200"], "is of h, not of h200"),
        (["other", "--record", "RECORD", "--load", "LOAD"], "of the model m, not of other"),
        (["--record", "RECORD", "--load", "LOAD", "--slo", "ttft=0"], "give a limit like 500ms"),
        (["--record", "RECORD", "--load", "LOAD", "--slo", "tpot=3ms"], "it must be limits like"),
        (["--record", "RECORD", "--load", "LOAD", "--compare", "policy=fcfs"], "at least two values"),
        (["--record", "RECORD", "--load", "LOAD", "--compare", "policy=fcfs,lifo"], "there are fcfs"),
        (["--record", "RECORD", "--load", "LOAD", "--compare", "block_size=0,3"], "at least 1"),
    ],
)
def test_wrong_input_is_refused_in_a_line(
    files: tuple[Path, Path], arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"LOAD": str(files[0]), "RECORD": str(files[1])}
    assert main(["simulate", *(given.get(word, word) for word in arguments)]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1


def test_records_of_another_version_and_requests_that_never_fit_are_refused(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = read_steps(files[1])
    old = msgspec.structs.replace(record, header=msgspec.structs.replace(record.header, version="0.0.1"))
    write_steps(old, tmp_path / "old.jsonl")
    assert main(["simulate", "--record", str(tmp_path / "old.jsonl"), "--load", str(files[0])]) == 2
    assert "is of kvern 0.0.1" in capsys.readouterr().err
    (tmp_path / "long.jsonl").write_bytes(as_line(LoadRequest(0.0, 600, 1)))
    assert main(["simulate", "--record", str(files[1]), "--load", str(tmp_path / "long.jsonl")]) == 2
    assert "has 601 tokens" in capsys.readouterr().err


def test_a_folder_is_refused_before_steps_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "steps", "--load", "rate=1,requests=1,input=9,output=1", "--model", "kvern-1m"]
    assert main([*command, "--output", str(tmp_path)]) == 2
    assert f"output is {tmp_path}, a folder: name a file in it" in capsys.readouterr().err


def test_the_report_is_one_page_with_all_conditions(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load, record = map(str, files)
    command = ["simulate", "--record", record, "--load", load, "--seeds", "2", "--compare", "policy=fcfs,sjf", "--json"]
    assert main([*command, "--report", str(tmp_path / "report.html")]) == 0
    series = json.loads(capsys.readouterr().out)["runs"]["policy=sjf"][0]["series"]
    width = series["edges"][1]
    assert sum(series["arrived"]) * width == pytest.approx(40) == sum(series["ended"]) * width
    assert sum(series["tokens"]) * width == pytest.approx(40 * 20)
    text = (tmp_path / "report.html").read_text()
    ElementTree.fromstring(
        text.replace("<!doctype html>", "").replace('<meta charset="utf-8">', "").replace("<br>", "")
    )
    assert "policy=fcfs" in text and "policy=sjf" in text and text.count("<svg") == 3 + 2 * 3 + 2
    assert "http" not in text and "src=" not in text
    assert main([*command, "--report", str(tmp_path)]) == 2
    assert f"report is {tmp_path}, a folder" in capsys.readouterr().err
