"""The one form in which every benchmark keeps what it found: a JSON file that says what was measured, where and with
what, and the figures of each run.

::

    Record        one start of a benchmark: when, software, hardware, model, options, plan
      cases       one for each workload, kernel or configuration, by name
        figures   by name: the value of each run, their median and spread, which way is better

A file holds one record. A folder holds the records of repeated starts, which `kvern bench compare` reads together.
"""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from kvern.bench.machine import Hardware, Software, hardware, software
from kvern.errors import ConfigError
from kvern.io.files import reason

FORMAT, VERSION = "kvern-bench", 1
Better = Literal["lower", "higher"]


class Figure(msgspec.Struct, frozen=True, omit_defaults=True):
    """A figure of repeated runs. `runs` is empty where only their median is known; a gate checks `main` ones."""

    median: float
    unit: str
    better: Better = "lower"
    main: bool = False
    runs: list[float] = []
    spread: tuple[float, float] | None = None
    """The least and the greatest of the runs."""


def figure(runs: Sequence[float], unit: str, better: Better = "lower", main: bool = False) -> Figure:
    """Returns the figure of at least one run."""
    return Figure(statistics.median(runs), unit, better, main, list(runs), (min(runs), max(runs)))


class Case(msgspec.Struct, frozen=True, omit_defaults=True):
    """One workload, kernel or configuration. `workload` says what was asked, so that two cases can be told to be
    alike; `details` are figures that are not compared."""

    name: str
    figures: dict[str, Figure]
    workload: dict[str, Any] = {}
    details: dict[str, Any] = {}


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """The findings of a benchmark. A field that is not known is null.

    `hardware` is that of the machine on which the command ran: for `serve` the client's. `when` is the end of the
    measurement, in UTC.
    """

    format: str = FORMAT
    version: int = VERSION
    benchmark: str
    when: str | None
    software: Software
    hardware: Hardware
    model: str | None
    options: dict[str, Any] | None = None
    plan: dict[str, Any] | None = None
    conditions: dict[str, Any] = {}
    """Other circumstances of the measurement, such as the seconds of a start, or a server's URL."""
    cases: list[Case]
    findings: dict[str, Any] = {}
    """A benchmark's own figures that are no runs of a workload: counts of a soak, a table of kernels' times."""

    @property
    def name(self) -> str:
        """A file's name that no other record of this machine has."""
        model = Path(self.model or "unknown").name.replace(":", "-")
        moment = (self.when or "unknown").replace("-", "").replace(":", "").replace(".", "-").replace("+0000", "")
        return f"{self.benchmark}-{model}-{moment}.json"


def make_record(benchmark: str, model: str | None, cases: Sequence[Case], **known: Any) -> Record:
    """Returns a record of what was just measured on this machine; `known` are its other fields."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
    return Record(
        benchmark=benchmark,
        when=now,
        software=software(),
        hardware=hardware(),
        model=model,
        cases=list(cases),
        **known,
    )


def check_target(path: Path, option: str = "json") -> None:
    """Raises ConfigError if no record can be written to a path: before something is measured for minutes."""
    if not path.is_dir() and not path.parent.is_dir():
        raise ConfigError(f"{option} {path} cannot be written: it must be a folder, or a file in a folder that exists")


def write_record(record: Record, path: Path, beside: Mapping[str, Any] | None = None, option: str = "json") -> Path:
    """Writes a record to a file, or to a new file in a folder, and returns the file.

    `beside` has entries that are no part of the form, for other readers. Raises ConfigError.
    """
    target = path / record.name if path.is_dir() else path
    built = msgspec.to_builtins(record, enc_hook=str) | msgspec.to_builtins(dict(beside or {}), enc_hook=str)
    try:
        target.write_bytes(msgspec.json.format(msgspec.json.encode(built), indent=1) + b"\n")
    except OSError as error:
        raise ConfigError(f"{option} {target} cannot be written: {error.strerror or error}") from error
    return target


def keep(
    path: Path | None,
    benchmark: str,
    model: str | None,
    given: Mapping[str, Any],
    cases: Sequence[Case] = (),
    findings: Mapping[str, Any] | None = None,
) -> None:
    """Writes the record of a script in `benchmarks/`, if its user named a file; `given` are its arguments."""
    if path is not None:
        options = {name: value for name, value in given.items() if value is not path}
        write_record(make_record(benchmark, model, cases, options=options, findings=dict(findings or {})), path)


def read_record(path: Path) -> Record:
    """Reads a record from a file. Raises ConfigError."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Record)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {reason(error)}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is no record of kvern bench: {reason(error)}") from None
    if (found.format, found.version) != (FORMAT, VERSION):
        raise ConfigError(
            f"{path} has format {found.format} {found.version}, and this version of kvern reads {FORMAT} {VERSION}"
        )
    return found


def read_records(path: Path) -> list[Record]:
    """Reads the record in a file, or all of a folder in the order in which they were made. Raises ConfigError."""
    if not path.is_dir():
        return [read_record(path)]
    found = [read_record(file) for file in sorted(path.glob("*.json"))]
    if not found:
        raise ConfigError(f"{path} has no records: a folder of records has files that end in .json")
    return sorted(found, key=lambda record: record.when or "")
