"""Notes on stderr, tables and lines that fit the terminal, and checks that commands share."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from kvern.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

UNBOUNDED = 1 << 16
"""Characters of a line where the stream is no terminal."""


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


def refuse(command: Any, kind: Any, names: Iterable[str], why: str) -> None:
    """Raises ConfigError if one of the options `names` has another value than the default of its class `kind`."""
    for name in names:
        value = getattr(command, name)
        if value != kind.__dataclass_fields__[name].default:
            raise ConfigError(f"{name} is {value}: {why}; drop --{name.replace('_', '-')}")


def make_table(*names: str, title: str | None = None, words: Iterable[str] = ("format",)) -> Table:
    """Returns a table with words in the first column and in the columns `words`, and numbers in the others.

    No table is so narrow that a word or number is broken: `print_tables` chooses the widths.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(
        box=SIMPLE_HEAD,
        title=title,
        pad_edge=False,
        collapse_padding=True,
        show_header=any(names),
    )
    for index, name in enumerate(names):
        table.add_column(name, justify="left" if index == 0 or name in words else "right")
    return table


def print_tables(*tables: Table, on_stderr: bool = False) -> None:
    """Prints tables whole. On a terminal that is too narrow for one, each of its rows is printed as lines."""
    console = _console(on_stderr)
    for table in tables:
        if table.title:
            console.print(table.title, style="bold")
            table.title = None
        if _fits(table, console.width):
            console.print(table)
        else:
            print_lines(*_as_lines(table), "", on_stderr=on_stderr)


def print_lines(*lines: str, on_stderr: bool = False) -> None:
    """Prints lines of text. On a terminal they are broken between words; a path that is too long stays whole."""
    console = _console(on_stderr)
    for line in lines:
        broken = textwrap.wrap(line, console.width, break_long_words=False, break_on_hyphens=False)
        console.file.write("\n".join(broken) + "\n")


def print_figures(title: str, figures: Iterable[tuple[str, str]], heading: str = "", on_stderr: bool = False) -> None:
    """Prints a table of two columns: the names of figures, and their values."""
    table = make_table("", heading, title=title)
    for name, value in figures:
        table.add_row(name, value)
    print_tables(table, on_stderr=on_stderr)


def _console(on_stderr: bool) -> Console:
    from rich.console import Console

    stream = sys.stderr if on_stderr else sys.stdout
    width = None if stream.isatty() else UNBOUNDED
    return Console(width=width, file=stream, markup=False, emoji=False, highlight=False)


def _fits(table: Table, width: int) -> bool:
    """Gives the columns widths that add up to `width` at most; False if words or numbers would be broken.

    Headings, and cells of words, are broken between words; columns to the left are given what is left over first.
    """
    from rich.cells import cell_len

    least, most = list[int](), list[int]()
    for column in table.columns:
        heading, cells = str(column.header), list(map(str, column.cells))
        whole = [*heading.split(), *(cells if column.justify == "right" else " ".join(cells).split())]
        least.append(max(map(cell_len, whole), default=0))
        most.append(max(map(cell_len, [heading, *cells])))
    spare = width - sum(least) - 2 * len(least)  # two spaces beside each column
    for column, low, high in zip(table.columns, least, most, strict=True):
        column.width = low + max(min(spare, high - low), 0)
        spare -= column.width - low
    return spare >= 0


def _as_lines(table: Table) -> Iterator[str]:
    """Yields a line for each row, and one for each of its other cells after its heading."""
    names = [str(column.header) for column in table.columns[1:]]
    indent, before = max(map(len, names)), ""
    for first, *cells in zip(*(map(str, column.cells) for column in table.columns), strict=True):
        before = first or before
        if table.show_header:
            yield before
            yield from (f"  {name:{indent}}  {cell}" for name, cell in zip(names, cells, strict=True) if cell)
        else:
            yield f"{before}: {' '.join(cells)}"
