"""`kvern bench compare` and `kvern bench gate`: what they say of runs whose noise and loss are known."""

import random
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvern.bench.compare import Side, comparisons, differences, interval
from kvern.bench.gate import code_of, judge_all
from kvern.bench.record import Case, Record, figure, make_record, write_record
from kvern.cli.main import main


@cache
def here() -> Record:
    """A record of this machine."""
    return make_record("offline", "kvern-1m", [], options={"threads": 1}, conditions={"threads": 1})


def record(seconds: list[float], at: int = 0, **changed: Any) -> Record:
    figures = {
        "seconds": figure(seconds, "s", main=True),
        "rate": figure([8 / each for each in seconds], "1/s", "higher"),
    }
    case = Case("decode8", figures, {"requests": 8})
    return msgspec.structs.replace(here(), cases=[case], when=f"2026-01-01T00:{at:02}:00.000000+00:00", **changed)


def rounds(rng: random.Random, count: int, sigma: float, loss: float = 0.0) -> tuple[Side, Side]:
    """Two sides of records in turns, each of three runs, with a loss planted in the second."""
    sides = [], []
    for number in range(2 * count):
        b = number % 2
        start = rng.gauss(1.0, sigma)
        sides[b].append(record([start * (1 + b * loss)] * 3, number))
    return Side("A", sides[0]), Side("B", sides[1])


@pytest.mark.sample(3)
@pytest.mark.parametrize("sigma", [0.002, 0.01, 0.03, 0.1])
@pytest.mark.parametrize("count", [5, 10])
def test_ten_clean_runs_raise_nothing(sigma: float, count: int) -> None:
    rng = random.Random(f"clean {sigma} {count}")
    codes = [code_of(judge_all(*rounds(rng, count, sigma), 0.03)) for _ in range(10)]
    assert 1 not in codes
    if sigma < 0.01:
        assert codes == [0] * 10
    if sigma == 0.1:
        assert codes == [2] * 10  # such noise says nothing of 3 %


def test_a_loss_of_five_percent_is_caught_in_ten_of_ten_runs() -> None:
    rng = random.Random("planted")
    assert [code_of(judge_all(*rounds(rng, 5, 0.01, 0.05), 0.03)) for _ in range(10)] == [1] * 10


def test_a_gain_and_a_loss_within_the_tolerance_pass() -> None:
    rng = random.Random("passing")
    for loss in (-0.2, -0.02, 0.02):
        assert [code_of(judge_all(*rounds(rng, 5, 0.002, loss), 0.03)) for _ in range(10)] == [0] * 10


def test_pairs_cancel_what_slows_both_sides() -> None:
    drift = [1.0, 1.3, 1.1, 1.6, 1.2]
    in_turns = (
        Side("A", [record([value], 2 * at) for at, value in enumerate(drift)]),
        Side("B", [record([1.01 * value], 2 * at + 1) for at, value in enumerate(drift)]),
    )
    found = comparisons(*in_turns)[0]
    assert found.pairs and (found.low, found.high) == pytest.approx((1.01, 1.01))
    after = in_turns[0], Side("B", [record([1.01 * value], 30 + at) for at, value in enumerate(drift)])
    found = comparisons(*after)[0]
    assert not found.pairs and found.low < 0.8 and found.high > 1.2


def test_which_way_is_better_decides_what_is_a_loss() -> None:
    a, b = Side("A", [record([1.0] * 5)]), Side("B", [record([1.1] * 5)])
    seconds, rate = comparisons(a, b)
    assert seconds.verdict == rate.verdict == "worse"
    assert seconds.loss == pytest.approx((0.1, 0.1, 0.1)) and rate.loss == pytest.approx((0.1, 0.1, 0.1))
    assert [item.verdict for item in comparisons(b, a)] == ["better", "better"]


def test_intervals_are_the_same_each_time_and_hold_the_ratio() -> None:
    a, b = [1.0, 1.1, 0.9, 1.0, 1.05], [2.0, 2.1, 1.9, 2.0, 2.2]
    low, high = interval(a, b, False)
    assert (low, high) == interval(a, b, False) and low < 2.0 < high
    covered = 0
    rng = random.Random(1)
    for _ in range(100):
        low, high = interval(*([rng.gauss(1, 0.05) for _ in range(15)] for _ in range(2)), False)
        covered += low <= 1 <= high
    assert covered >= 95


def test_other_hardware_software_models_options_and_work_are_named() -> None:
    one = record([1.0] * 5)
    hardware = msgspec.structs.replace(one.hardware, processor="other")
    software = msgspec.structs.replace(one.software, torch="0", commit="other")
    case = msgspec.structs.replace(one.cases[0], workload={"requests": 9})
    other = msgspec.structs.replace(
        one, hardware=hardware, software=software, model="big", options={"threads": 2, "new": 1}, cases=[case]
    )
    apart = {item.field: item for item in differences(Side("A", [one]), Side("B", [other]))}
    assert list(apart) == [
        "hardware.processor", "software.commit", "software.torch", "model", "options.threads", "decode8.requests"
    ]  # fmt: skip
    assert {name for name, item in apart.items() if not item.is_barrier} == {"software.commit", "options.threads"}
    judged = judge_all(Side("A", [one]), Side("B", [other]), 0.03)
    assert code_of(judged) == 2 and len(judged) == 5
    allowed = ["hardware", "software.torch", "model", "options", "decode8"]
    assert code_of(judge_all(Side("A", [one]), Side("B", [other]), 0.03, allowed=allowed)) == 0


def test_other_work_in_any_record_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The work of a case is that of its first record, which need not be the first of its benchmark."""

    def long(at: int, digest: str) -> Record:
        (case,) = record([2.0] * 5).cases
        case = msgspec.structs.replace(case, name="long", workload={"lengths": len(digest), "digest": digest})
        return msgspec.structs.replace(record([1.0], at), cases=[case])

    a, b = tmp_path / "a", tmp_path / "b"
    for folder, digest in ((a, "one"), (b, "other")):
        folder.mkdir()
        write_record(record([1.0] * 5, 0), folder)
        write_record(long(1, digest), folder)
    assert main(["bench", "gate", "--baseline", str(a), str(b)]) == 2
    assert capsys.readouterr().out.splitlines() == [
        "cannot tell: not comparable: long.lengths: 3 / 5",
        "cannot tell: not comparable: long.digest: one / other",
    ]
    assert main(["bench", "gate", "--baseline", str(a), str(b), "--allow", "long"]) == 0
    write_record(long(2, "other"), a)
    assert main(["bench", "gate", "--baseline", str(a), str(b)]) == 2
    assert "are of different things: long.lengths: 3 / 5" in capsys.readouterr().err


def test_a_figure_that_is_misspelt_is_refused_with_those_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.json"
    write_record(record([1.0] * 5), path)
    gate = ["bench", "gate", "--baseline", str(path), str(path), "--figures", "seconds"]
    assert main([*gate, "rate"]) == 0
    assert main([*gate, "secondz"]) == 2
    assert f"figures has 'secondz': those of {path} are rate, seconds" in capsys.readouterr().err


def test_the_gate_tells_by_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random("files")
    for name in ("baseline", "same", "slow"):
        (tmp_path / name).mkdir()
    for number in range(15):
        name = ("baseline", "same", "slow")[number % 3]
        value = rng.gauss(1.0, 0.005) * (1.08 if name == "slow" else 1)
        write_record(record([value], number), tmp_path / name)
    gate = ["bench", "gate", "--baseline", str(tmp_path / "baseline")]
    assert main([*gate, str(tmp_path / "same")]) == 0
    assert capsys.readouterr().out.startswith("fine: offline, decode8, seconds: ")
    slow = sorted((tmp_path / "slow").iterdir())
    assert main([*gate, *map(str, slow)]) == 1
    assert "loss: offline, decode8, seconds: +" in capsys.readouterr().out
    assert main([*gate, "--tolerance", "20", *map(str, slow)]) == 0
    assert main([*gate, *map(str, slow[:3])]) == 2
    assert "cannot tell: offline, decode8, seconds: 3 runs, and at least 5" in capsys.readouterr().out
    assert main([*gate, str(tmp_path / "same"), "--figures", "absent"]) == 2
    write_record(record([1.0], 20, model="other"), tmp_path / "same")
    assert main([*gate, str(tmp_path / "same")]) == 2
    assert "are of different things: model: kvern-1m / other" in capsys.readouterr().err
    assert main(["bench", "gate", str(tmp_path / "same")]) == 2
    assert "give --baseline" in capsys.readouterr().err
    assert main([*gate, "--tolerance", "0", str(tmp_path / "slow")]) == 2


def test_a_case_that_the_candidate_lacks_cannot_be_told() -> None:
    one, other = record([1.0] * 5), record([1.0] * 5)
    other = msgspec.structs.replace(other, cases=[msgspec.structs.replace(other.cases[0], name="decode1")])
    (judged,) = judge_all(Side("A", [one]), Side("B", [other]), 0.03)
    assert (judged.code, judged.line) == (2, "cannot tell: offline, decode8, seconds: not on both sides")


def test_servers_with_other_options_are_compared_only_if_asked() -> None:
    def served(options: dict[str, Any] | None) -> Side:
        made = record([1.0] * 5)
        return Side("", [msgspec.structs.replace(made, benchmark="serve", conditions={"engine_options": options})])

    plain, more = served({"threads": 2}), served({"threads": 2, "max_batch_requests": 8})
    assert [str(item) for item in differences(plain, more)] == ["options.max_batch_requests: its default / 8"]
    (judged,) = judge_all(plain, more, 0.03)
    assert judged.code == 2 and "not comparable: options.max_batch_requests" in judged.line
    assert [item.code for item in judge_all(plain, more, 0.03, allowed=["options.max_batch"])] == [0]
    assert not differences(plain, served({"threads": 2})) and not differences(plain, served(None))


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_compare_prints_a_table_and_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, target = tmp_path / "a.json", tmp_path / "b<i>.json", tmp_path / "page.html"
    write_record(record([1.0, 1.01, 0.99, 1.0, 1.02]), a)
    write_record(record([1.1, 1.11, 1.09, 1.1, 1.12], options={"threads": 2}), b)
    assert main(["bench", "compare", str(a), str(b), "--html", str(target)]) == 0
    out = capsys.readouterr().out
    assert "differs: options.threads: 1 / 2" in out and "not comparable" not in out
    (line,) = (line for line in out.splitlines() if "seconds" in line)
    assert line.split()[:5] == ["decode8", "seconds,", "s", "1", "1.1"] and "+10.0%" in line and "worse" in line
    text = target.read_text()
    parser = Elements()
    parser.feed(text)
    tags = [tag for tag, _ in parser.found]
    assert tags.count("svg") == 2 and tags.count("tr") == 3 and "i" not in tags
    assert tags.count("circle") == 2 + 10  # changes of two figures, runs of the main one
    assert not any("src" in given or "href" in given for _, given in parser.found)
    assert main(["bench", "compare", str(a), str(tmp_path / "absent.json")]) == 2
    assert main(["bench", "compare", str(a), str(b), "--html", str(tmp_path / "absent" / "x.html")]) == 2
    write_record(msgspec.structs.replace(record([1.0]), benchmark="serve"), b)
    assert main(["bench", "compare", str(a), str(b)]) == 2
    assert "have no figure in common" in capsys.readouterr().err
