"""``kvern completion SHELL``: the Tab key completes commands and options."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from kvern.errors import ConfigError
from kvern.io.files import reason

Shell = Literal["bash", "zsh"]


@dataclass(frozen=True)
class CompletionCommand:
    """Print a script that lets a shell complete commands and options of kvern, or install it for this user."""

    shell: Annotated[tyro.conf.Positional[Shell], tyro.conf.arg(metavar="SHELL")]
    """bash or zsh."""
    install: bool = False
    """Write the script to where the shell looks for it."""

    def execute(self) -> int:
        """Prints or writes the script and returns the exit code. Raises ConfigError if it cannot be written."""
        text = script(self.shell)
        if not self.install:
            sys.stdout.write(text)
            return 0
        path = place(self.shell)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {reason(error)}") from None
        sys.stdout.write(f"{path} is written: it is used from the next {self.shell} on\n")
        if self.shell == "zsh":
            sys.stdout.write(f"~/.zshrc needs this line before compinit: fpath+=({path.parent})\n")
        return 0


def script(shell: Shell) -> str:
    """Returns the script for a shell."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        tyro.cli(
            every_command(),
            args=["--tyro-print-completion", shell],
            prog="kvern",
            config=(tyro.conf.OmitArgPrefixes,),
        )
    return printed.getvalue()


def every_command() -> Any:
    """The union of all commands."""
    from kvern.cli.main import COMMANDS, kind_of, with_defaults
    from kvern.cli.options import read_defaults

    defaults = read_defaults([], {})
    groups: dict[str, list[Any]] = {}
    for words in COMMANDS:
        kind = kind_of(words)
        leaf = tyro.conf.subcommand(words[-1], default=with_defaults(kind, defaults, divided=False))
        groups.setdefault(words[0], []).append(Annotated[kind, leaf])
    found = [
        parts[0] if len(parts) == 1 else Annotated[reduce(or_, parts), tyro.conf.subcommand(word)]
        for word, parts in groups.items()
    ]
    return reduce(or_, found)


def place(shell: Shell) -> Path:
    """Returns where a shell looks for the script of this user."""
    if shell == "zsh":
        return Path("~/.zfunc/_kvern").expanduser()
    data = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(data).expanduser() / "bash-completion" / "completions" / "kvern"
