"""``kvern bench compare`` and ``kvern bench gate``: records of two sides beside each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from kvern.cli.output import make_table, print_lines, print_tables, say
from kvern.errors import ConfigError


@dataclass(frozen=True)
class CompareCommand:
    """Show by how much the figures of two sides differ, with intervals that the spread of their runs bears out.

    A side is a record, or a folder with those of repeated starts, best made in turns: A B A B. docs/benchmarking.md
    says more.
    """

    a: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="A")]
    """Record, or folder of records, that is compared with."""
    b: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="B")]
    """Record, or folder of records, whose change is shown."""
    html: Path | None = None
    """File for a page with the table and plots."""

    def execute(self) -> int:
        """Print differences and the table and return the exit code. Raises ConfigError."""
        from kvern.bench.compare import LEVEL, comparisons, differences, read_sides
        from kvern.bench.compare_page import cells_of, page

        a, b = read_sides([self.a], [self.b])
        apart, found = differences(a, b), comparisons(a, b)
        for field in apart:
            print_lines(f"{'not comparable' if field.is_barrier else 'differs'}: {field}")
        if not found:
            raise ConfigError(f"{self.a} and {self.b} have no figure in common: give records of the same cases")
        table = make_table(
            "case", "figure", "A", "B", "change", f"interval, {LEVEL:.0%}", "runs", "", words=("figure", "")
        )
        for item in found:
            table.add_row(*cells_of(item), item.verdict)
        print_tables(table)
        if self.html is not None:
            try:
                self.html.write_text(page(a, b, apart, found), encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"html {self.html} cannot be written: {error.strerror or error}") from error
            say(f"page: {self.html}")
        return 0


@dataclass(frozen=True)
class GateCommand:
    """Tell by the exit code whether records have lost speed beside a baseline.

    0: no loss. 1: a loss above the tolerance that the spread of the runs bears out. 2: the records cannot tell: other
    hardware, software, options or work, fewer than five runs, or too much spread. See docs/benchmarking.md.
    """

    candidate: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="CANDIDATE")]
    """Records, or folders of records, that are judged."""
    baseline: Path | None = None
    """Record, or folder of records, that they are judged by."""
    tolerance: float = 3.0
    """Loss in percent that is let pass."""
    figures: tuple[str, ...] = ()
    """Names of the figures to judge. None: the main ones, such as seconds."""
    allow: tuple[str, ...] = ()
    """Fields that may differ, such as software.torch or options.threads."""

    def execute(self) -> int:
        """Print a line for each figure and return the exit code. Raises ConfigError."""
        from kvern.bench.compare import read_sides
        from kvern.bench.gate import code_of, judge_all

        if self.baseline is None:
            raise ConfigError("give --baseline, a record or a folder of records")
        if not 0 < self.tolerance < 100:
            raise ConfigError(f"tolerance is {self.tolerance:g}: it must be above 0 and below 100 percent")
        sides = read_sides([self.baseline], self.candidate)
        judgements = judge_all(*sides, self.tolerance / 100, self.figures, self.allow)
        print_lines(*(item.line for item in judgements))
        return code_of(judgements)
