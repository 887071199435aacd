"""``kvern plan --workload``: the fewest engines that keep to limits, and why not fewer."""

import json
from pathlib import Path

import pytest

from kvern.cli.main import main
from kvern.loads.source import read_load
from kvern.simulate.sizing import least, size
from kvern.simulate.study import Condition
from tests.support.simulation import SIZES, EvenPrice


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


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--slo", "ttft=0.001ms", "--seeds", "1"], "the limits cannot be met"),
        ([], "workload needs limits"),
        (["--slo", "ttft=1s", "--good", "1.5"], "good is 1.5"),
        (["--slo", "ttft=1s", "--record", "steps.jsonl"], "give one"),
    ],
)
def test_wrong_input_is_refused_in_a_line(
    more: list[str], told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([*COMMAND, *more]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1
