"""The output of a job as CSV or Parquet: rows of the input and answers of the journal become one file.

Both are read once more in parallel, so that memory is bounded and Parquet columns keep their types. The file gets its
name only when it is complete.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from kvern.batch.readers import ParquetReader, Reader, import_pyarrow
from kvern.batch.requests import ANSWER_COLUMNS, input_names, merged
from kvern.errors import BatchFileError

ROWS_AT_ONCE = 4096


def write_table(reader: Reader, answers: Path, partial: Path, output: Path) -> None:
    """Writes ``output`` from the rows of ``reader`` and the lines ``{"row": number, ...}`` of ``answers``.

    Raises:
        BatchFileError: the disk is full or cannot be written; another run repeats only this step.
    """
    try:
        if output.suffix.lower() == ".csv":
            write_csv(reader, answers, partial)
        else:
            write_parquet(reader, answers, partial)
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(output)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise BatchFileError(
            f"{error.strerror or error} while writing {output}: all answers are kept; make room, and the same command "
            "writes the file"
        ) from error


def answered_rows(reader: Reader, answers: Path) -> Iterator[dict[str, Any]]:
    """Yields the answered rows in order, each with its answer."""
    with answers.open("rb") as file:
        lines = iter(file)
        line = next(lines, None)
        for row in reader:
            if line is None:
                return
            answer = msgspec.json.decode(line)
            if answer.pop("row") == row.number:
                yield merged(row.values, answer)
                line = next(lines, None)


def all_columns(reader: Reader, answers: Path) -> list[str]:
    """Returns the output's columns; for JSONL input, whose rows differ, the columns of all rows."""
    if reader.columns is not None:
        return [*input_names(reader.columns, ANSWER_COLUMNS).values(), *ANSWER_COLUMNS]
    names: dict[str, None] = {}
    for row in answered_rows(reader, answers):
        names.update(dict.fromkeys(row))
    added = [name for name in names if name in ANSWER_COLUMNS]
    return [name for name in names if name not in ANSWER_COLUMNS] + added


def write_csv(reader: Reader, answers: Path, partial: Path) -> None:
    columns = all_columns(reader, answers)
    with partial.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows([cell(row.get(name)) for name in columns] for row in answered_rows(reader, answers))


def cell(value: Any) -> Any:
    """Returns a value for a cell: CSV has text and numbers, so lists and objects become JSON."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list | dict):
        return msgspec.json.encode(value).decode()
    return str(value)


def write_parquet(reader: Reader, answers: Path, partial: Path) -> None:
    arrow, parquet = import_pyarrow("pyarrow"), import_pyarrow("pyarrow.parquet")
    schema = table_schema(arrow, reader, answers)
    as_json = [field.name for field in schema if field.metadata and field.metadata.get(b"encoding") == b"json"]
    with parquet.ParquetWriter(partial, schema) as writer:
        for rows in batches(answered_rows(reader, answers)):
            for row in rows:
                row.update({name: msgspec.json.encode(row[name]).decode() for name in as_json if name in row})
            writer.write_table(arrow.Table.from_pylist(rows, schema=schema))


def table_schema(arrow: Any, reader: Reader, answers: Path) -> Any:
    """Returns the Parquet schema: the input's own if it has one, else the common type of each column's values.

    A column whose values have no common type becomes JSON text.
    """
    answer_fields = [
        arrow.field(name, arrow.string() if name in ANSWER_COLUMNS[:2] else arrow.int64()) for name in ANSWER_COLUMNS
    ]
    if isinstance(reader, ParquetReader):
        renamed = input_names(reader.columns, ANSWER_COLUMNS)
        return arrow.schema([field.with_name(renamed[field.name]) for field in reader.schema] + answer_fields)
    if reader.columns is not None:
        names = input_names(reader.columns, ANSWER_COLUMNS).values()
        return arrow.schema([arrow.field(name, arrow.string()) for name in names] + answer_fields)
    json_field = arrow.field("", arrow.string(), metadata={"encoding": "json"})
    types: dict[str, Any] = {}
    for rows in batches(answered_rows(reader, answers)):
        for name in dict.fromkeys(name for row in rows for name in row):
            try:
                found = arrow.field(name, arrow.array([row.get(name) for row in rows]).type)
                unified = arrow.unify_schemas(
                    [arrow.schema([types.get(name, found)]), arrow.schema([found])], promote_options="permissive"
                )
                types.setdefault(name, unified.field(0))
                if types[name].metadata is None:
                    types[name] = unified.field(0)
            except (arrow.ArrowException, TypeError, OverflowError):
                types[name] = json_field.with_name(name)
    fields = [field for name, field in types.items() if name not in ANSWER_COLUMNS]
    return arrow.schema(fields + answer_fields)


def batches(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    iterator = iter(rows)
    while batch := list(islice(iterator, ROWS_AT_ONCE)):
        yield batch
