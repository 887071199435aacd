"""Every way in which a batch job is stopped, and how it goes on: the result is that of a job that nothing disturbed."""

import csv
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from kvern import LLM, SamplingParams
from kvern.batch import journal as journal_module
from kvern.batch.job import BatchJob
from kvern.batch.requests import RowRules
from kvern.errors import BatchFileError
from tests.support.batch_files import GREEDY, prompts, read_rows, run, write_rows
from tests.support.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), max_batch_requests=8) as engine:
        yield engine


def test_a_finished_job_is_not_run_again(llm: LLM, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", prompts(5))
    run(llm, source, tmp_path / "out.jsonl")
    before = (tmp_path / "out.jsonl").read_bytes()
    again = run(llm, source, tmp_path / "out.jsonl")
    assert (again.rows, again.totals.rows) == (0, 5)
    assert (tmp_path / "out.jsonl").read_bytes() == before
    assert run(llm, source, tmp_path / "out.jsonl", overwrite=True).rows == 5
    (tmp_path / "out.jsonl").unlink()
    assert run(llm, source, tmp_path / "out.jsonl").rows == 5
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_another_job_does_not_continue_an_output(llm: LLM, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", prompts(5))
    run(llm, source, tmp_path / "out.jsonl")
    with pytest.raises(BatchFileError, match=r"temperature was 0.* there and is 0.5 now; .*--overwrite"):
        run(llm, source, tmp_path / "out.jsonl", params=GREEDY.replace(temperature=0.5))
    write_rows(source, prompts(6))
    with pytest.raises(BatchFileError, match=r"the content of the input has changed.*--overwrite"):
        run(llm, source, tmp_path / "out.jsonl")
    assert run(llm, source, tmp_path / "out.jsonl", overwrite=True).rows == 6


class Interrupting:
    """The real engine, and a Ctrl-C after some answers."""

    def __init__(self, llm: LLM, after: int) -> None:
        self._llm = llm
        self._after = after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def as_completed(self, inputs: Any) -> Iterator[Any]:
        for count, output in enumerate(self._llm.as_completed(inputs)):
            if count == self._after:
                signal.raise_signal(signal.SIGINT)
            yield output


@pytest.mark.parametrize("output", ["out.jsonl", "out.csv", "out.parquet"])
def test_an_interrupted_job_goes_on_to_the_same_file(llm: LLM, tmp_path: Path, output: str) -> None:
    rows: list[Any] = prompts(20)
    rows[3], rows[15] = "{", {"nothing": 1}
    source = write_rows(tmp_path / "in.jsonl", rows)
    whole = tmp_path / "whole"
    whole.mkdir()
    run(llm, source, whole / output)
    done = 0
    for after in (0, 7, 6):
        result = run(Interrupting(llm, after), source, tmp_path / output)  # type: ignore[arg-type]
        assert result.interrupted
        assert done <= result.totals.rows < 20
        done = result.totals.rows
        assert output == "out.jsonl" or not (tmp_path / output).exists()
    assert done > 0
    result = run(llm, source, tmp_path / output)
    assert (result.totals.rows, result.rows, result.totals.failed) == (20, 20 - done, 2)
    assert (tmp_path / output).read_bytes() == (whole / output).read_bytes()
    assert (tmp_path / "out.errors.jsonl").read_bytes() == (whole / "out.errors.jsonl").read_bytes()


def test_a_half_written_line_is_cut_off(llm: LLM, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", prompts(12))
    run(llm, source, tmp_path / "whole.jsonl")
    run(Interrupting(llm, 8), source, tmp_path / "out.jsonl")  # type: ignore[arg-type]
    with (tmp_path / "out.jsonl").open("a") as file:
        file.write('{"id": 99, "prompt": "' + "x" * 5000)  # longer than all that will be written after it
    run(llm, source, tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_lost_bytes_are_computed_again(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "SYNC_SECONDS", float("inf"))
    source = write_rows(tmp_path / "in.jsonl", prompts(12))
    run(llm, source, tmp_path / "whole.jsonl")
    run(Interrupting(llm, 8), source, tmp_path / "out.jsonl")  # type: ignore[arg-type]
    os.truncate(tmp_path / "out.jsonl", 0)  # what a loss of power does to what was not synced
    run(llm, source, tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_two_processes_cannot_write_one_output(llm: LLM, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", prompts(3))
    first = BatchJob(source, tmp_path / "out.jsonl", RowRules(GREEDY), identity={})
    second = BatchJob(source, tmp_path / "out.jsonl", RowRules(GREEDY), identity={})
    first.journal.open(overwrite=False)
    with pytest.raises(BatchFileError, match="another process"):
        second.run(llm)
    first.journal.close()
    assert second.run(llm).rows == 3


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Start:
    """Start ``kvern run`` in ``tmp_path``, with few requests at a time so that it takes a while."""

    def begin(source: str, output: str, **options: Any) -> "subprocess.Popen[str]":
        flags = ["--model", str(model), "--temperature", "0", "--max-batch-requests", "4", "--threads", "1"]
        return subprocess.Popen(
            [sys.executable, "-m", "kvern", "run", source, output, *flags],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )

    return begin


def wait_for_rows(process: "subprocess.Popen[str]", path: Path, count: int) -> None:
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        try:
            process.wait(0.005)
        except subprocess.TimeoutExpired:
            continue
        raise AssertionError(f"ended too early: {process.communicate()}")


NIGHTLY = pytest.mark.nightly
LONG_ROWS = [{"prompt": f"the fox {index}", "max_tokens": 10 if index < 50 else 120} for index in range(100)]
"""The first are done soon, and a job that has done them has much to do yet."""


@pytest.fixture(scope="module")
def undisturbed(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The answers to ``LONG_ROWS`` by a job that nothing disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run(llm, write_rows(folder / "in.jsonl", LONG_ROWS), folder / "out.jsonl", params=SamplingParams(temperature=0))
    return folder / "out.jsonl"


@pytest.fixture
def whole(undisturbed: Path, tmp_path: Path) -> Path:
    """The same, and its input in ``tmp_path``."""
    write_rows(tmp_path / "in.jsonl", LONG_ROWS)
    return undisturbed


def finish(start: Start, output: str) -> str:
    process = start("in.jsonl", output)
    shown, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return shown


@pytest.mark.parametrize(
    ("output", "rows"),
    [("out.jsonl", [20]), *(pytest.param(f"out.{kind}", [10, 40], marks=NIGHTLY) for kind in ("jsonl", "parquet"))],
)
def test_a_killed_job_goes_on_to_the_same_file(
    start: Start, whole: Path, tmp_path: Path, output: str, rows: list[int]
) -> None:
    for target in rows:
        process = start("in.jsonl", output)
        wait_for_rows(process, tmp_path / (output if output == "out.jsonl" else f".{output}.rows"), target)
        process.kill()
        process.communicate()
    assert "before)" in finish(start, output)
    if output == "out.jsonl":
        assert (tmp_path / output).read_bytes() == whole.read_bytes()
    else:
        assert pyarrow.parquet.read_table(tmp_path / output).to_pylist() == read_rows(whole)


@pytest.mark.nightly
def test_ctrl_c_keeps_what_is_done_and_says_how_to_go_on(start: Start, whole: Path, tmp_path: Path) -> None:
    process = start("in.jsonl", "out.jsonl")
    wait_for_rows(process, tmp_path / "out.jsonl", 20)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 130
    assert len(errors.splitlines()) == 1
    assert "the same command goes on from there" in errors
    done = (tmp_path / "out.jsonl").read_bytes()
    assert whole.read_bytes().startswith(done)
    assert done.endswith(b"\n")
    finish(start, "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == whole.read_bytes()


@pytest.mark.nightly
@pytest.mark.parametrize("output", ["out.jsonl", pytest.param("out.csv", marks=pytest.mark.nightly)])
def test_a_full_disk_keeps_what_was_done(start: Start, whole: Path, tmp_path: Path, output: str) -> None:
    process = start("in.jsonl", output, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000)))
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 2
    assert len(errors.splitlines()) == 1
    assert errors.startswith("kvern run: error: File too large while writing")
    if output == "out.jsonl":
        done = (tmp_path / output).read_bytes()
        assert 0 < done.count(b"\n") < 100
        assert whole.read_bytes().startswith(done)
    finish(start, output)
    if output == "out.jsonl":
        assert (tmp_path / output).read_bytes() == whole.read_bytes()
    else:
        with (tmp_path / output).open(newline="") as file:
            assert [row["answer"] for row in csv.DictReader(file)] == [row["answer"] for row in read_rows(whole)]


@pytest.mark.nightly
def test_a_disk_that_is_really_full(start: Start, whole: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", small], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("a file system can only be mounted by root")
    try:
        process = start("in.jsonl", "small/out.jsonl")
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 2
        assert "No space left on device" in errors
        assert whole.read_bytes().startswith((small / "out.jsonl").read_bytes())
        subprocess.run(["mount", "-o", "remount,size=1m", small], check=True, capture_output=True)
        finish(start, "small/out.jsonl")
        assert (small / "out.jsonl").read_bytes() == whole.read_bytes()
    finally:
        subprocess.run(["umount", small], check=True, capture_output=True)
