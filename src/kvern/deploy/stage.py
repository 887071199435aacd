"""A stage of a deployment, what was asked for, and the results so far."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from kvern.config import read_seconds
from kvern.deploy.journal import Journal
from kvern.errors import ConfigError, shown

TARGETS = {"ttft": "first tokens", "itl": "time between tokens"}
"""The figures that a target may limit; both are of 99 of 100."""

Kind = TypeVar("Kind", bound=msgspec.Struct)


class Part(NamedTuple):
    """A stage's part of the report: figures by name, and HTML behind them."""

    rows: Sequence[tuple[str, str]]
    html: str = ""


@dataclass(frozen=True)
class Asked:
    """The options of a deployment.

    `target` limits in seconds, by the names of `TARGETS`. `memory`: bytes of each device that may be used. The others
    are for a bundle that is made again: `options` of its engine, with which nothing is tuned; `fixed` ones, which
    tuning keeps; `mixture`, the report of its quantized weights; `expected`, the digest of its weights; `refers`: its
    weights stay where they are.
    """

    model: str
    out: Path
    revision: str | None = None
    max_loss: float | None = None
    target: Mapping[str, float] = field(default_factory=dict)
    workload: str | None = None
    memory: int | None = None
    calibration: Path | None = None
    tune_seconds: float = 480.0
    repetitions: int = 7
    options: Mapping[str, Any] | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    mixture: Path | None = None
    expected: str | None = None
    refers: bool = False

    @property
    def identity(self) -> dict[str, Any]:
        """The options that a run which goes on must share, as JSON; where it is, and how long it may take, do not
        count."""
        loose = {"out", "tune_seconds", "repetitions"}
        named = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in loose}
        return {
            name: dict(value) if isinstance(value, Mapping) else str(value) if isinstance(value, Path) else value
            for name, value in named.items()
        }


@dataclass
class Work:
    """A deployment under way: what was asked for, the results by their types, and where lines for the user go."""

    asked: Asked
    journal: Journal
    say: Callable[[str], None]
    results: dict[type[msgspec.Struct], msgspec.Struct] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """The folder that is worked in: `asked.out`, or one beside it while that holds a whole bundle."""
        return self.journal.out

    def of(self, kind: type[Kind]) -> Kind:
        """Returns the result of the stage whose results have this type."""
        found = self.results[kind]
        assert isinstance(found, kind)
        return found


class Stage(Protocol):
    """One stage. Its result is plain data, and files in the bundle's folder that appear as a whole."""

    name: str

    @property
    def result(self) -> type[msgspec.Struct]:
        """The type of its results. A result may have `failed`, lines that say which number missed its limit; the
        deployment then ends."""

    def inputs(self, work: Work) -> Mapping[str, Any]:
        """Returns what the result depends on beside earlier results, as JSON. Raises KvernError."""

    def run(self, work: Work) -> msgspec.Struct:
        """Does the work. Raises KvernError."""

    def stands(self, work: Work, result: Any) -> bool:
        """True if the files that belong to an earlier result are there."""

    def report(self, result: Any) -> Part:
        """Returns the stage's part of the report."""


def read_target(text: str | None) -> dict[str, float]:
    """Reads "ttft 500ms, itl 30ms" in seconds. Raises ConfigError."""
    found = dict[str, float]()
    for part in (text or "").split(","):
        name, *value = re.split(r"[\s=]+", part.strip(), maxsplit=1)
        if not part.strip():
            continue
        if name not in TARGETS or name in found or not value:
            raise ConfigError(f"target is {shown(text)}: it must be limits of {' and '.join(TARGETS)}, as 'itl 30ms'")
        found[name] = read_seconds(f"target {name}", value[0].strip())
        if not found[name]:
            raise ConfigError(f"target {name} is {value[0]!r}: no token takes no time; give a limit like 30ms")
    return found


def as_target(target: Mapping[str, float]) -> str:
    """Returns limits as `read_target` reads them."""
    return ", ".join(f"{name} {1000 * seconds:g}ms" for name, seconds in target.items())
