"""Rows of a batch job's input, read lazily; the file's ending determines the format.

A row that cannot be read is returned with an ``error``. Only errors of the whole file (no such file, no such column,
not Parquet) are raised.
"""

from __future__ import annotations

import csv
import hashlib
import importlib
import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from kvern.errors import BatchFileError
from kvern.io.files import reason
from kvern.io.json_lines import BYTE_ORDER_MARK, read_json, wide_encoding

ENDINGS = (".jsonl", ".ndjson", ".csv", ".parquet")
PARQUET_BATCH = 1024  # rows held in memory at a time
LARGEST_CSV_FIELD = 2**31 - 1


@dataclass(frozen=True)
class Row:
    """One row of the input.

    ``number`` counts from 1: lines of JSONL (as in editors), records of CSV (without the header) and of Parquet.
    """

    number: int
    values: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


class Reader(Protocol):
    """A file of rows. ``columns`` is None if each row names its own (JSONL)."""

    @property
    def columns(self) -> list[str] | None: ...

    def count(self) -> int: ...

    def __iter__(self) -> Iterator[Row]: ...


def open_reader(path: Path) -> Reader:
    """Returns the reader for a file's ending.

    Raises:
        BatchFileError: no such file, not readable, an unknown ending, or not a file of that format.
    """
    ending = checked_ending(path, "input")
    if not path.exists():
        raise BatchFileError(f"input {path} does not exist")
    if not path.is_file():
        raise BatchFileError(f"input {path} is not a file")
    try:
        if ending == ".parquet":
            return ParquetReader(path)
        with path.open("rb") as file:
            problem = wide_encoding(file.read(4))
        if problem is not None:
            raise BatchFileError(f"input {path} cannot be read: {problem}")
        return CsvReader(path) if ending == ".csv" else JsonLinesReader(path)
    except OSError as error:
        raise BatchFileError(f"input {path} cannot be read: {error.strerror or error}") from error


def checked_ending(path: Path, role: str) -> str:
    ending = path.suffix.lower()
    if ending not in ENDINGS:
        raise BatchFileError(f"{role} {path} ends in {ending or 'nothing'!r}: it must end in {', '.join(ENDINGS)}")
    return ending


def content_digest(path: Path) -> str:
    """Returns the SHA-256 of a file, by which a resumed job recognizes its input."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class JsonLinesReader:
    """JSON objects, one a line; blank lines are skipped."""

    columns: list[str] | None = None

    def __init__(self, path: Path) -> None:
        self._path = path

    def count(self) -> int:
        with self._path.open("rb") as file:
            return sum(1 for _ in self._lines(file))

    def __iter__(self) -> Iterator[Row]:
        with self._path.open("rb") as file:
            for number, line in self._lines(file):
                yield self._row(number, line)

    @staticmethod
    def _row(number: int, line: bytes) -> Row:
        try:
            values = read_json(line)
        except ValueError as error:
            return Row(number, error=f"not valid JSON: {error}")
        if not isinstance(values, dict):
            return Row(number, error=f"not a JSON object but {type(values).__name__}: {values!r:.60}")
        return Row(number, values)

    @staticmethod
    def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
        """Yields the lines that are not blank, with their numbers and without a byte order mark."""
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(BYTE_ORDER_MARK)
            if line.strip():
                yield number, line


class CsvReader:
    """Comma-separated values in UTF-8 with a header; every value is text."""

    columns: list[str]

    def __init__(self, path: Path) -> None:
        self._path = path
        csv.field_size_limit(LARGEST_CSV_FIELD)
        with self._open() as file:
            try:
                header = next(csv.reader(file), None)
            except csv.Error as error:
                raise BatchFileError(f"input {path} has no readable header: {error}") from error
        if not header:
            raise BatchFileError(f"input {path} is empty: its first line must name the columns")
        if len(set(header)) < len(header):
            twice = next(name for name in header if header.count(name) > 1)
            raise BatchFileError(f"input {path} has the column {twice!r} twice: rename one")
        self.columns = header

    def count(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[Row]:
        with self._open() as file:
            records = csv.reader(file, strict=True)
            next(records)
            number = 0
            while True:
                try:
                    record = next(records)
                except StopIteration:
                    return
                except csv.Error as error:
                    number += 1
                    yield Row(number, error=f"not valid CSV at line {records.line_num}: {error}")
                    continue
                if record:
                    number += 1
                    yield self._row(number, record)

    def _row(self, number: int, record: list[str]) -> Row:
        if len(record) != len(self.columns):
            return Row(number, error=f"the row has {len(record)} values and the header {len(self.columns)}")
        if any("\udc80" <= character <= "\udcff" for value in record if not value.isascii() for character in value):
            return Row(number, error="not valid UTF-8")
        return Row(number, dict(zip(self.columns, record, strict=True)))

    def _open(self) -> io.TextIOWrapper:
        return self._path.open(encoding="utf-8-sig", errors="surrogateescape", newline="")


class ParquetReader:
    """Apache Parquet, read in batches; values keep their types."""

    columns: list[str]

    def __init__(self, path: Path) -> None:
        self._parquet = import_pyarrow("pyarrow.parquet")
        arrow = import_pyarrow("pyarrow")
        try:
            self._file = self._parquet.ParquetFile(path)
        except (arrow.ArrowException, OSError) as error:
            raise BatchFileError(f"input {path} cannot be read as Parquet: {reason(error)}") from error
        self._path = path
        self._failures = (arrow.ArrowException, OSError, ValueError)
        self.schema = self._file.schema_arrow
        self.columns = list(self.schema.names)

    def count(self) -> int:
        return int(self._file.metadata.num_rows)

    def __iter__(self) -> Iterator[Row]:
        number = 0
        try:
            for batch in self._file.iter_batches(batch_size=PARQUET_BATCH):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(number, values)
        except self._failures as error:
            raise BatchFileError(f"input {self._path} breaks off after row {number}: {reason(error)}") from error


def import_pyarrow(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise BatchFileError("Parquet files need pyarrow: pip install 'kvern[parquet]'") from error
