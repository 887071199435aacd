"""The state of a batch job on disk; a job survives being killed at any time.

Two files grow by a line for each row: the answers and the errors. A third, the record, is replaced atomically at each
commit. It has the number of rows, and the lengths of both files that belong to them:

  write lines -> (now and then: fsync) -> replace the record

A resumed job truncates both files to the lengths in the record, which removes incomplete lines, and continues with the
next row. The record keeps the lengths at the last fsync as well: they count after a loss of power. It also holds the
job's identity (input, model, parameters), so that no other job continues its files.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvern.errors import BatchFileError

COMMIT_SECONDS = 0.05
SYNC_SECONDS = 1.0
START_AGAIN = "choose another output, or add --overwrite to begin again"


class Totals(msgspec.Struct, frozen=True):
    """Counts of the whole job with its resumed parts; ``rows`` are input rows that are answered or failed."""

    rows: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    answer_bytes: int = 0
    error_bytes: int = 0


class Record(msgspec.Struct):
    """The contents of the record file; ``started`` is in seconds since 1970."""

    identity: dict[str, Any]
    started: int
    finished: bool = False
    done: Totals = Totals()
    synced: Totals = Totals()


@dataclass
class FinishedRow:
    """A row that can be written: the line of its answer or of its error."""

    line: bytes
    failed: bool = False
    prompt_tokens: int = 0
    generated_tokens: int = 0


class Journal:
    """The files of one job.

    Args:
        output: path of the job's result.
        append: write answers to ``output`` itself (JSONL), else to a hidden file in its folder, for a table at the end.
        identity: values that must be the same when the job is resumed, under names for messages.
    """

    def __init__(self, output: Path, append: bool, identity: Mapping[str, Any]) -> None:
        self.output = output
        self.answers_path = output if append else output.with_name(f".{output.name}.rows")
        self.errors_path = output.with_name(f"{output.stem}.errors.jsonl")
        self.record_path = output.with_name(f".{output.name}.progress")
        self.table_path = output.with_name(f".{output.name}.partial")
        self._identity = msgspec.to_builtins(dict(identity))
        self._lines: list[bytes] = []
        self._error_lines: list[bytes] = []
        self._answers = self._errors = -1
        self._last_commit = self._last_sync = time.monotonic()
        self.record = Record(self._identity, started=int(time.time()))

    def check(self, overwrite: bool) -> None:
        """Checks that the job can be started or resumed, without changing anything.

        Raises:
            BatchFileError: the output's folder cannot be written, or the output belongs to another job.
        """
        folder = self.output.parent
        if not folder.is_dir():
            raise BatchFileError(f"output {self.output} cannot be written: there is no folder {folder}")
        if not os.access(folder, os.W_OK) or self.output.is_dir():
            raise BatchFileError(f"output {self.output} cannot be written: permission denied, or it is a folder")
        if self.output.exists() and not os.access(self.output, os.W_OK):
            raise BatchFileError(f"output {self.output} cannot be written: the file is read-only")
        if overwrite:
            return
        record = self._existing()
        if record is None and not self.record_path.exists():
            for path in (self.output, self.errors_path):
                if path.exists() and path.stat().st_size > 0:
                    raise BatchFileError(f"{path} exists and no unfinished job belongs to it: {START_AGAIN}")
        elif record is not None and record.identity != self._identity:
            raise BatchFileError(
                f"output {self.output} belongs to another job: {self._difference(record)}{START_AGAIN}"
            )

    def open(self, overwrite: bool) -> None:
        """Starts or resumes the job: afterwards ``record.done`` counts the rows that are done.

        Raises:
            BatchFileError: a file cannot be opened, or another process runs the same job.
        """
        with self._disk_errors():
            existing = None if overwrite else self._existing()
            if existing is not None and existing.finished:
                self.record = existing
                return
            self._answers = os.open(self.answers_path, os.O_RDWR | os.O_CREAT, 0o666)
            self._lock()
            if existing is not None:  # another process may have continued the job before it released the lock
                existing = self._existing()
            if existing is None or existing.finished:
                self._replace_record()
            else:
                self.record = existing
            if self.record.done.error_bytes or self.errors_path.exists():
                self._errors = os.open(self.errors_path, os.O_RDWR | os.O_CREAT, 0o666)
            self.record.done = self._intact()
            os.ftruncate(self._answers, self.record.done.answer_bytes)
            if self._errors >= 0:
                os.ftruncate(self._errors, self.record.done.error_bytes)
                if self.record.done.error_bytes == 0:
                    self._drop_errors()

    def add(self, row: FinishedRow) -> None:
        """Adds the next row; it is on disk after ``commit``."""
        lines = self._error_lines if row.failed else self._lines
        lines.append(row.line + b"\n")
        done, size = self.record.done, len(lines[-1])
        self.record.done = Totals(
            rows=done.rows + 1,
            failed=done.failed + row.failed,
            prompt_tokens=done.prompt_tokens + row.prompt_tokens,
            generated_tokens=done.generated_tokens + row.generated_tokens,
            answer_bytes=done.answer_bytes + size * (not row.failed),
            error_bytes=done.error_bytes + size * row.failed,
        )

    def commit_when_due(self) -> None:
        """Commits unless the last commit was a moment ago: thousands of short rows a second need few commits."""
        if time.monotonic() - self._last_commit >= COMMIT_SECONDS:
            self.commit()

    def commit(self, sync: bool = False) -> None:
        """Writes what was added. Writing twice after an interruption is harmless: the offsets in the files are fixed.

        Raises:
            BatchFileError: the disk is full or fails; earlier commits are kept.
        """
        with self._disk_errors():
            done = self.record.done
            lines, errors = b"".join(self._lines), b"".join(self._error_lines)
            if errors and self._errors < 0:
                self._errors = os.open(self.errors_path, os.O_RDWR | os.O_CREAT, 0o666)
            write_at(self._errors, errors, done.error_bytes - len(errors))
            write_at(self._answers, lines, done.answer_bytes - len(lines))
            now = time.monotonic()
            if sync or now - self._last_sync > SYNC_SECONDS:
                for file in (self._answers, self._errors):
                    if file >= 0:
                        os.fsync(file)
                self._last_sync = now
                self.record.synced = done
            self._replace_record()
            self._lines, self._error_lines = [], []
            self._last_commit = now

    def finish(self) -> None:
        """Marks the job as done; the same command then finds nothing to do."""
        self.commit(sync=True)
        with self._disk_errors():
            self.record.finished = True
            self._replace_record()
            if self.answers_path != self.output:
                self.answers_path.unlink(missing_ok=True)

    def close(self) -> None:
        """Closes the files and truncates what was written after the last commit."""
        record = self._read_record()
        done = record.done if record is not None else Totals()
        for file, length in ((self._answers, done.answer_bytes), (self._errors, done.error_bytes)):
            if file >= 0:
                if os.fstat(file).st_size > length:
                    os.ftruncate(file, length)
                os.close(file)
        self._answers = self._errors = -1

    def _intact(self) -> Totals:
        """Returns the newest totals whose bytes are in the files."""
        answers = os.fstat(self._answers).st_size
        errors = os.fstat(self._errors).st_size if self._errors >= 0 else 0
        for totals in (self.record.done, self.record.synced):
            if totals.answer_bytes <= answers and totals.error_bytes <= errors:
                return totals
        raise BatchFileError(f"{self.answers_path} or {self.errors_path} was cut short by someone else: {START_AGAIN}")

    def _drop_errors(self) -> None:
        os.close(self._errors)
        self._errors = -1
        self.errors_path.unlink(missing_ok=True)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._answers, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BatchFileError(f"output {self.output} is being written by another process: wait for it") from error

    def _existing(self) -> Record | None:
        """Returns the record of a job that can be resumed or is finished; None if its files are gone."""
        record = self._read_record()
        if record is not None and (self.output if record.finished else self.answers_path).exists():
            return record
        return None

    def _read_record(self) -> Record | None:
        try:
            return msgspec.json.decode(self.record_path.read_bytes(), type=Record)
        except FileNotFoundError:
            return None
        except (msgspec.DecodeError, OSError) as error:
            raise BatchFileError(f"{self.record_path} cannot be read ({error}): {START_AGAIN}") from error

    def _replace_record(self) -> None:
        temporary = self.record_path.with_name(f"{self.record_path.name}.new")
        temporary.write_bytes(msgspec.json.encode(self.record))
        temporary.replace(self.record_path)

    def _difference(self, record: Record) -> str:
        for name, value in self._identity.items():
            before = record.identity.get(name)
            if name == "input" and before != value:
                return "the content of the input has changed since; "
            if before != value:
                return f"{name} was {before!r} there and is {value!r} now; "
        return ""

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise BatchFileError(
                f"{error.strerror or error} while writing {self.output}: {self.record.done.rows - self._uncommitted} "
                "rows are kept; make room or correct the cause, and the same command goes on from there"
            ) from error

    @property
    def _uncommitted(self) -> int:
        return len(self._lines) + len(self._error_lines)


def write_at(file: int, data: bytes, offset: int) -> None:
    """Writes all of ``data``; a full disk may take a part first and then fail."""
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written
