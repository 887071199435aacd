"""Work of a step and bytes of a token, counted: a change of the code shows on any machine, and noise does not."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.support.counts import BASELINE, ROOT, Counts, split, version

MOST = 1.03
"""Of the baseline's count. Whoever has a reason for more makes a new one: python -m tests.support.counts --write."""


def counted(*arguments: str, seed: str = "0") -> Any:
    """What a process of its own counts."""
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, "-m", "tests.support.counts", *arguments]
    return json.loads(subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE).stdout)


def grown(found: dict[str, Counts], baseline: dict[str, Counts]) -> dict[str, str]:
    """The counts that are above their baseline, with both."""
    return {
        f"{case}, {name}": f"{found[case][name]:g}, and the baseline has {kept:g}"
        for case, counts in baseline.items()
        for name, kept in counts.items()
        if found[case][name] > MOST * kept
    }


@pytest.fixture(scope="module")
def found() -> dict[str, Counts]:
    measured: dict[str, Counts] = counted()
    return measured


@pytest.fixture(scope="module")
def baseline() -> dict[str, dict[str, Counts]]:
    kept: dict[str, dict[str, Counts]] = json.loads(BASELINE.read_text())
    return kept


def test_calls_of_a_step_and_bytes_of_a_token_have_not_grown(
    found: dict[str, Counts], baseline: dict[str, dict[str, Counts]]
) -> None:
    assert grown(split(found)[0], baseline["all"]) == {}


def test_bytecodes_and_memory_of_a_step_have_not_grown(
    found: dict[str, Counts], baseline: dict[str, dict[str, Counts]]
) -> None:
    if version() not in baseline:
        pytest.skip(f"no baseline for Python {version()}: python -m tests.support.counts --write makes one")
    assert grown(split(found)[1], baseline[version()]) == {}


def test_five_percent_more_work_in_the_scheduler_is_caught_and_ten_clean_runs_raise_nothing() -> None:
    runs = counted("--check", seed="1")
    first, *others = ({"decodes": counts} for counts in runs["clean"])
    assert len(others) == 9 and [grown(each, first) for each in others] == [{}] * 9
    caught = grown({"decodes": runs["planted"][0]}, first)
    assert set(caught) == {"decodes, calls", "decodes, bytecodes"}
    more = {name: runs["planted"][0][name] / first["decodes"][name] for name in ("calls", "bytecodes")}
    assert all(1.03 < share < 1.07 for share in more.values())
