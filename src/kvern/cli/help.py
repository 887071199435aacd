"""The help of `kvern`: of a command, in groups or about a word, and of all commands."""

from __future__ import annotations

import dataclasses
import inspect
import re
import shutil
import sys
import textwrap
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from kvern.cli.fields import Option, options_of, positional, rules_of
from kvern.cli.options import ADAPTER
from kvern.errors import ConfigError
from kvern.options.texts import flag

INDENT = 32
WIDEST = 120


def in_columns(head: str, text: str, width: int, column: int = INDENT) -> str:
    """Returns a name, broken after the bars between its choices, and a text that begins at `column`, or before it on a
    narrow terminal."""
    column = min(column, width // 2)
    bars = textwrap.wrap(head.replace("|", "| "), width, initial_indent="  ", subsequent_indent=" " * 6)
    names = [line.replace("| ", "|") for line in bars]
    words = textwrap.wrap(" ".join(text.split()), max(width - column, 1), break_on_hyphens=False)
    lines = [f"{'':{column}}{line}" for line in words]
    if len(names) == 1 and len(names[0]) < column and lines:
        return "\n".join([names[0] + lines[0][len(names[0]) :], *lines[1:]])
    return "\n".join([*names, *lines])


def paragraphs(text: str, width: int) -> str:
    """Returns a text with the lines of each paragraph broken anew."""
    return "\n\n".join(textwrap.fill(" ".join(part.split()), width) for part in text.split("\n\n"))


def print_help(command: str, kind: type, word: str) -> int:
    """Print a command's options: all, or those whose name or text has the word. Raises ConfigError if none has."""
    width = min(WIDEST, shutil.get_terminal_size().columns)
    options = list(options_of(kind))
    if not word:
        sys.stdout.write("\n".join(usage(command, kind, options, width)) + "\n")
        return 0
    wanted = word.lower().strip("-").replace("-", "_")
    rules = {name: rule for name, rule in rules_of(options).items() if wanted in name}
    own = {getattr(rule, "option", None) for rule in rules.values()}
    about = [
        item
        for item in options
        if wanted in item.name or item.name in own or wanted.replace("_", " ") in item.text.lower()
    ]
    notes = (f"  {flag(name)}, of vLLM, {rule.help()}" for name, rule in rules.items())
    found = [textwrap.fill(note, width, subsequent_indent=" " * 6, break_on_hyphens=False) for note in notes]
    found += [lines_of(item, width) for item in about]
    if not found:
        raise ConfigError(f"no option of kvern {command} is about {word!r}: kvern {command} --help lists all")
    sys.stdout.write("\n".join(found) + "\n")
    return 0


def usage(command: str, kind: type, options: Sequence[Option], width: int) -> Iterator[str]:
    """Yields the help of a whole command."""
    words = [f"[{name}]" if optional else name for name, _, optional in positional(kind)]
    yield textwrap.fill(" ".join(["usage: kvern", command, *words, "[options]"]), width)
    yield "\n" + paragraphs(inspect.cleandoc(kind.__doc__ or ""), width) + "\n"
    for name, text, _ in positional(kind):
        yield in_columns(name, text, width)
    group = None
    for item in options:
        if item.group != group:
            group = item.group
            yield f"\n{group}:"
        yield lines_of(item, width)
    names = ", vLLM's names among them." if rules_of(options) else "."
    yield "\n" + textwrap.fill(f"kvern {command} --help WORD shows the options about a word{names}", width)


def lines_of(option: Option, width: int) -> str:
    """Returns the flag with its kind of value, and in a second column its text with the default."""
    shown = "" if option.default in (None, (), "", dataclasses.MISSING) else f" [{as_typed(option.default)}]"
    return in_columns(written(option.name, option.kind), option.text + shown, width)


def written(name: str, kind: Any) -> str:
    """Returns an option with the kind of its value, as on a command line."""
    if kind is bool:
        return f"--[no-]{flag(name)[2:]}"
    if kind == Mapping[str, str]:
        return f"{ADAPTER} NAME=FOLDER"
    return f"{flag(name)} {_value(kind)}"


def _value(kind: Any) -> str:
    if type(None) in typing.get_args(kind):
        kind = next(item for item in typing.get_args(kind) if item is not type(None))
    if typing.get_origin(kind) is Literal:
        return "|".join(map(str, typing.get_args(kind)))
    if typing.get_origin(kind) is tuple:
        return "TEXT ..."
    return {int: "N", float: "X", Path: "PATH"}.get(kind, "JSON" if kind == Mapping[str, Any] else "TEXT")


def as_typed(value: Any) -> str:
    """Returns a default as a user would type it."""
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


OVERVIEW = """\
usage: kvern COMMAND [options]

Runs and serves large language models. A small one ships inside."""
EXAMPLES = {
    "kvern chat": "talk to the model inside",
    "kvern chat ./model-Q4_K_M.gguf": "or to a GGUF file, a folder, or a model of the Hugging Face hub",
    "kvern serve Qwen/Qwen3-0.6B": "APIs and a chat page, on http://127.0.0.1:8000",
}
EXAMPLE_WIDTH = 36


def print_overview(kinds: Mapping[tuple[str, ...], type], group: str = "") -> None:
    """Print the help of kvern, or of a group of commands, by their words: the first sentence of each command."""
    width = min(WIDEST, shutil.get_terminal_size().columns)
    commands = {words: kind for words, kind in kinds.items() if group in ("", "-h", "--help", words[0])}
    column = max(len(" ".join(words)) for words in commands) + 4
    lines = [f"usage: kvern {group} COMMAND [options]\n"]
    if group not in {words[0] for words in commands}:
        examples = (in_columns(command, what, width, EXAMPLE_WIDTH) for command, what in EXAMPLES.items())
        lines = [paragraphs(OVERVIEW, width), "", *examples, ""]
    for words, kind in commands.items():
        sentence = re.split(r"[.:]\s", inspect.cleandoc(kind.__doc__ or "") + "\n")[0]
        lines.append(in_columns(" ".join(words), sentence, width, column))
    lines.append("\n" + paragraphs("kvern COMMAND --help shows the options of a command.", width) + "\n")
    sys.stdout.write("\n".join(lines))
