"""``kvern plan --workload``: the fewest engines that keep to limits, and why not fewer."""

import json
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
import torch

from kvern.bench.steps import hardware_name
from kvern.cli.main import main
from kvern.engine.step_load import StepLoad
from kvern.errors import ConfigError
from kvern.loads.request import LoadRequest
from kvern.loads.source import read_load
from kvern.planning.estimate import Estimate, Model, Workload
from kvern.planning.hardware import Card, same_hardware
from kvern.runner.plan import Layout
from kvern.simulate import roofline
from kvern.simulate.records import RecordedRequest, RecordedStep, RecordHeader, StepRecord, write_steps
from kvern.simulate.sizing import least, size
from kvern.simulate.study import Condition, resolved
from kvern.version import __version__
from tests.support.simulation import SIZES, EvenPrice

WITH_TOKENS = msgspec.structs.replace(SIZES, token_bytes=1024)


@pytest.mark.parametrize(("needed", "most"), [(1, 1), (1, 9), (2, 2), (5, 64), (8, 8), (9, 8), (64, 64)])
def test_the_least_number_is_found_with_few_runs(needed: int, most: int) -> None:
    asked: list[int] = []

    def suffices(count: int) -> bool:
        asked.append(count)
        return count >= needed

    assert least(suffices, most) == (needed if needed <= most else None)
    assert len(asked) == len(set(asked)) <= 13 and max(asked) <= most


def test_one_engine_fewer_would_not_do() -> None:
    load = list(read_load("rate=0.5,requests=60,input=40,output=20"))
    engines = {"engine": (Condition(SIZES, lambda seed: EvenPrice()), 2, 32)}
    found = size(engines, [(0, load)], {"ttft": 3.0}, 0.95)
    assert found.chosen.good_share >= 0.95 and found.fewer is not None and found.fewer.good_share < 0.95
    assert found.fewer.replicas == found.chosen.replicas - 1 > 0 and found.chosen.cards == 2 * found.chosen.replicas
    assert "the first token comes too late" in " ".join(found.verdict(0.95))


COMMAND = ["plan", "kvern-1m", "--roofline", "--hardware", "4x l4", "--workload", "rate=3000,requests=400"]


def test_the_command_prints_the_choice_as_an_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--slo", "ttft=100ms", "--seeds", "2"]) == 0
    told = capsys.readouterr().out
    assert "Chosen: " in told and "no step of it was measured" in told
    assert main([*COMMAND, "--slo", "ttft=100ms", "--seeds", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["chosen"]["cards"] >= 1


def test_tiers_and_splits_are_alternatives(capsys: pytest.CaptureFixture[str]) -> None:
    compared = ["--compare", "tier=none,host:1GB", "--compare", "split=none,1+3"]
    load = ["--workload", "rate=40,requests=60,input=300,output=8,prefix=512:2:0", "--slo", "ttft=1s", "--seeds", "1"]
    assert main([*COMMAND[:5], *load, *compared, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    sized = [found["chosen"], *found["others"], *found["short"]]
    assert len(sized) == 2 * 4  # engines of one card and of two, with each combination
    assert {each["replicas"] for each in sized if "split 1+3" in each["engine"]} == {2}
    assert sum("tier host:1GB" in each["engine"] for each in sized) == 4
    assert all(("tier_hit_share" in each["runs"][0]) == (", " in each["engine"]) for each in sized)
    assert main([*COMMAND[:5], *load, *compared]) == 0
    assert "The next best: " in (told := " ".join(capsys.readouterr().out.split())) and "a margin of" in told


@pytest.mark.parametrize(
    ("ratio", "engines", "divided"),
    [
        ("1+3", 2, (1, 1)),
        ("1+3", 3, (1, 2)),
        ("1+3", 4, (1, 3)),
        ("1+3", 5, (1, 4)),
        ("1+3", 8, (2, 6)),
        ("3+1", 2, (1, 1)),
        ("2+1", 9, (6, 3)),
    ],
)
def test_a_split_keeps_its_ratio_with_other_numbers_of_engines(
    ratio: str, engines: int, divided: tuple[int, int]
) -> None:
    condition = Condition(WITH_TOKENS, lambda seed: EvenPrice())
    load = [LoadRequest(0.0, 40, 20)] * 40
    several = {"all": (condition, 0, 40), "split": (resolved(condition, {"split": ratio}), 2, engines)}
    found = size(several, [(0, load)], {"e2e": 30.0}, 0.99)
    assert [each.split for each in found.short] == [divided] and found.chosen.split is None
    told = " ".join(found.verdict(0.99))
    assert f"Not even {engines} x split ({divided[0]}+{divided[1]}) on {2 * engines} cards suffice" in told


def test_alternatives_that_are_not_possible_are_named() -> None:
    condition = Condition(WITH_TOKENS, lambda seed: EvenPrice())
    divided = resolved(condition, {"split": "1+1"})
    load = list(read_load("rate=2,requests=9,input=40,output=20"))
    found = size({"one": (condition, 0, 32), "divided": (divided, 0, 1)}, [(0, load)], {"e2e": 60.0}, 0.99)
    assert found.left_out == ["divided: a split needs at least two engines"]
    assert "Left out: divided: a split needs at least two engines." in found.verdict(0.99)
    with pytest.raises(ConfigError, match="a split needs at least two engines: allow more"):
        size({"divided": (divided, 0, 1)}, [(0, load)], {"e2e": 60.0}, 0.99)


def test_the_command_says_what_does_not_fit_and_what_stores_it_assumed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    estimated = roofline.estimated_condition

    def lacking(model: Model, cards: Sequence[Card], workload: Workload) -> tuple[Condition, Estimate]:
        if len(cards) == 1:
            raise ConfigError("the model does not fit")
        return estimated(model, cards, workload)

    monkeypatch.setattr(roofline, "estimated_condition", lacking)
    load = ["--workload", "rate=40,requests=9", "--slo", "ttft=1s", "--seeds", "1", "--compare", "tier=none,host:1GB"]
    command = [*COMMAND[:5], *load]
    assert main(command) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "Left out: engines of 1 card: the model does not fit." in told
    assert "host moves 47 GB/s after 1 ms, as it was measured on an H200" in told
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["left_out"][0] == "engines of 1 card: the model does not fit"
    assert "host moves 47 GB/s" in found["basis"]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--slo", "ttft=1s", "--compare", "policy=fcfs,sjf"], "compare is 'policy=fcfs,sjf': it must be tier="),
        (["--slo", "ttft=1s", "--compare", "split=1+3", "--compare", "split=1+1"], "each at most once"),
        (["--slo", "ttft=0.001ms", "--seeds", "1"], "the limits cannot be met"),
        ([], "workload needs limits"),
        (["--slo", "ttft=1s", "--good", "1.5"], "good is 1.5"),
        (["--slo", "ttft=1s", "--record", "steps.jsonl"], "give one"),
        (["--slo", "ttft=1s", "--requests", "8"], "requests is 8: --workload has its own requests"),
        (["--slo", "ttft=1s", "--write", "plan.toml"], "write is plan.toml"),
        (["--slo", "ttft=1s", "--most-replicas", "2"], "most_replicas is 2: with --roofline the cards of --hardware"),
    ],
)
def test_wrong_input_is_refused_in_a_line(
    more: list[str], told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([*COMMAND, *more]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1


def test_the_format_of_weights_counts(capsys: pytest.CaptureFixture[str]) -> None:
    """In 32 bits the weights are twice as large, and the same cards take longer for the same steps."""
    rates = []
    for more in ([], ["--dtype", "float32"]):
        assert main([*COMMAND, "--slo", "ttft=10s", "--seeds", "1", "--json", *more]) == 0
        rates.append(json.loads(capsys.readouterr().out)["chosen"]["runs"])
    assert rates[0] != rates[1]


@pytest.mark.parametrize(
    "more", [["--slo", "ttft=1s"], ["--good", "0.9"], ["--roofline"], ["--seeds", "3"], ["--record", "steps.jsonl"]]
)
def test_options_of_loads_are_refused_without_one(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "kvern-1m", "--hardware", "l4", *more]) == 2
    assert f"{more[0][2:]} is " in (error := capsys.readouterr().err) and "counts with --workload alone" in error


def write_record(file: Path, hardware: str) -> None:
    header = RecordHeader(version=__version__, model="m", hardware=hardware, vocabulary=100, sizes=SIZES)
    loads = [StepLoad(1 + place * 7 % 41, 100 * (place % 13)) for place in range(300)]
    steps = [RecordedStep(0.0, 0.01 + 1e-4 * each.rows + 1e-7 * each.keys, each, each.rows, 0, 0) for each in loads]
    write_steps(StepRecord(header, [RecordedRequest(LoadRequest(0.0, 4, 1), [1])], steps), file)


def test_a_record_says_how_many_cards_an_engine_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_record(tmp_path / "steps.jsonl", "2x h200")
    command = ["plan", "m", "--record", str(tmp_path / "steps.jsonl"), "--workload", "rate=1,requests=9,input=9"]
    more = ["--slo", "ttft=10s", "--seeds", "1"]
    assert main([*command, *more, "--hardware", "2xH200", "--json"]) == 0
    chosen = json.loads(capsys.readouterr().out)["chosen"]
    assert chosen["cards"] == 2 * chosen["replicas"]
    for other in ("h200", "2x h100"):
        assert main([*command, *more, "--hardware", other]) == 2
        assert f"is of 2x h200, not of {other}" in capsys.readouterr().err
    assert main([*command, *more, "--quantization", "fp8"]) == 2
    assert "quantization is fp8: --record says" in capsys.readouterr().err


def test_an_engine_is_named_by_its_own_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Mock(spec=Layout, gpus=("GPU-1", "GPU-2"))
    for name, told in (("NVIDIA H200", "2x h200"), ("NVIDIA Other 9", "2x NVIDIA Other 9")):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        assert hardware_name(layout) == told and same_hardware(told, hardware_name(layout))
    assert hardware_name(Mock(spec=Layout, gpus=())).endswith(" cores")
    assert same_hardware("h200", "1x h200") and not same_hardware("2x h200", "1x h200")
