"""Records of benchmarks: the one form of all results, and their files."""

import json
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvern.bench import machine
from kvern.bench.record import Case, Record, figure, keep, make_record, read_record, read_records, write_record
from kvern.errors import ConfigError

RESULTS = Path(__file__).parents[2] / "benchmarks/results"


def record_of(*seconds: float) -> Record:
    case = Case("decode1", {"seconds": figure(seconds, "s", main=True)}, {"requests": 1})
    return make_record("offline", "folder/kvern-1m", [case], options={"threads": 1}, conditions={"at": Path("x")})


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = record_of(2.0, 1.0, 4.0)
    path = write_record(record, tmp_path / "one.json", {"more": 1})
    assert json.loads(path.read_text())["more"] == 1
    read = read_record(path)
    assert read == msgspec.structs.replace(record, conditions={"at": "x"})
    seconds = read.cases[0].figures["seconds"]
    assert (seconds.median, seconds.spread, seconds.runs) == (2.0, (1.0, 4.0), [2.0, 1.0, 4.0])
    assert read.software.kvern and read.software.python and read.hardware.processor and read.hardware.cores


def test_a_folder_gets_a_new_file_for_each_record_and_is_read_in_order(tmp_path: Path) -> None:
    records = [record_of(float(number)) for number in (3, 1, 2)]
    names = {write_record(record, tmp_path).name for record in records}
    assert len(names) == 3 and all(name.startswith("offline-kvern-1m-2") for name in names)
    assert [record.cases[0].figures["seconds"].runs for record in read_records(tmp_path)] == [[3.0], [1.0], [2.0]]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("nonsense", "is no record of kvern bench"),
        ('{"results": []}', "missing required field `benchmark`"),
        (None, "cannot be read"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str | None, reason: str) -> None:
    path = tmp_path / "file.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        read_record(path)


def test_records_of_another_version_and_empty_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no records"):
        read_records(tmp_path)
    write_record(msgspec.structs.replace(record_of(1.0), version=2), tmp_path / "later.json")
    with pytest.raises(ConfigError, match="has format kvern-bench 2, and this version of kvern reads kvern-bench 1"):
        read_records(tmp_path)


def test_the_commit_of_a_checkout_is_named_and_whether_it_has_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    assert machine.software().commit is None
    git: Any = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "file").write_text("1")
    for command in (["init", "-q"], ["add", "file"], ["commit", "-qm", "one"], ["tag", "-am", "one", "v1"]):
        subprocess.run([*git, *command], check=True)
    clean = machine.software().commit
    assert clean and len(clean) == 40
    (tmp_path / "file").write_text("2")
    assert machine.software().commit == f"{clean}-dirty"


@pytest.mark.parametrize("path", sorted(RESULTS.rglob("*.json")), ids=lambda path: path.stem)
def test_a_result_in_the_checkout_is_a_record_with_figures_of_its_runs(path: Path) -> None:
    unknown = json.loads(path.read_text()).keys() - {field.name for field in msgspec.structs.fields(Record)}
    assert not unknown, f"{path.name} has entries that no record has: {', '.join(sorted(unknown))}; see Record.findings"
    record = read_record(path)
    assert record.cases or record.findings, f"{path.name} says nothing that was measured"
    for case in record.cases:
        for name, found in case.figures.items():
            if found.runs:
                wanted, where = figure(found.runs, found.unit), f"{path.name}, {case.name}, {name}"
                assert found.median == pytest.approx(wanted.median), f"{where}: the median is not that of the runs"
                assert found.spread == wanted.spread, f"{where}: the spread is not that of the runs"


def test_a_script_keeps_its_arguments_without_the_file_and_nothing_unasked(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    keep(path, "soak", "kvern-1m", {"seconds": 2, "output": path}, findings={"wrong": []})
    record = read_record(path)
    assert (record.options, record.findings, record.cases) == ({"seconds": 2}, {"wrong": []}, [])
    keep(None, "soak", "kvern-1m", {})
    assert list(tmp_path.iterdir()) == [path]
