"""Notes on stderr, tables, and checks that commands share."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kvern.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

WIDTH = 140
"""Characters of a line where stdout is no terminal."""


def say(text: str) -> None:
    """Writes a note to stderr."""
    sys.stderr.write(f"kvern: {text}\n")
    sys.stderr.flush()


def check_least(command: Any, *names: str, least: int = 1) -> None:
    """Raises ConfigError if one of a command's numbers is set and below `least`."""
    for name in names:
        value = getattr(command, name)
        if value is not None and value < least:
            raise ConfigError(f"{name} is {value}: it must be at least {least}")


def print_tables(*tables: Table, on_stderr: bool = False) -> None:
    """Prints tables of figures: all columns but the first are aligned to the right."""
    from rich.console import Console

    for table in tables:
        for column in table.columns[1:]:
            column.justify = "right"
        stream = sys.stderr if on_stderr else sys.stdout
        Console(width=None if stream.isatty() else WIDTH, stderr=on_stderr).print(table)


def print_figures(title: str, figures: Iterable[tuple[str, str]], heading: str = "", on_stderr: bool = False) -> None:
    """Prints a table of two columns: the names of figures, and their values."""
    from rich.table import Table

    table = Table("", heading, title=title, title_justify="left", show_header=bool(heading))
    for name, value in figures:
        table.add_row(name, value)
    print_tables(table, on_stderr=on_stderr)


def model_table(*names: str, title: str | None = None) -> Table:
    """Returns a table with words in the first column and in the column `format`, and numbers in the others.

    On a narrow terminal the words are wrapped.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(
        box=SIMPLE_HEAD,
        title=title,
        title_justify="left",
        title_style="bold",
        pad_edge=False,
        collapse_padding=True,
    )
    for index, name in enumerate(names):
        if index == 0 or name == "format":
            table.add_column(name, overflow="fold", min_width=10)
        else:
            table.add_column(name, justify="right", no_wrap=True)
    return table
