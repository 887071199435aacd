"""``kvern COMMAND --help``: options in groups or, with a word, those about it, including vLLM's names."""

from __future__ import annotations

import dataclasses
import inspect
import shutil
import sys
import textwrap
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from kvern.cli.flag_rules import Rule, flag
from kvern.cli.options import ADAPTER, SamplingOptions
from kvern.cli.vllm_flags import VLLM, VLLM_BENCH
from kvern.config import EngineConfig
from kvern.documentation import field_documents
from kvern.errors import ConfigError
from kvern.server.config import ServerConfig

GROUPS: dict[type, dict[str, str]] = {
    EngineConfig: {
        "model": "The model",
        "kv_cache": "The KV cache",
        "batching": "Scheduling",
        "attention_backend": "Kernels of a GPU",
        "proposer": "Plugins",
        "overlap": "Steps and caches",
        "tool_parser": "Tools and thinking",
        "adapters": "Adapters",
        "seed": "The engine",
    },
    ServerConfig: {
        "host": "Where the server listens",
        "api_key": "Who may ask",
        "max_queue": "How much they may ask",
        "stream_interval": "Answers",
        "grace_seconds": "The server",
    },
    SamplingOptions: {"max_tokens": "Sampling"},
}
"""Headings of the help, each before the option that is named first."""
INDENT = 32
WIDEST = 120


@dataclass(frozen=True)
class Option:
    """One option of a command, as help shows it."""

    group: str
    name: str
    kind: Any
    default: Any
    text: str

    def lines(self, width: int) -> str:
        """Returns the flag with its kind of value, and in a second column its text with the default."""
        head = f"  {written(self.name, self.kind)}"
        shown = "" if self.default in (None, (), "", dataclasses.MISSING) else f" [{as_typed(self.default)}]"
        text = textwrap.wrap(" ".join(self.text.split()) + shown, width - INDENT, break_on_hyphens=False)
        lines = [f"{'':{INDENT}}{line}" for line in text]
        if len(head) < INDENT and lines:
            return "\n".join([head + lines[0][len(head) :], *lines[1:]])
        return "\n".join([head, *lines])


def asked_help(arguments: Sequence[str]) -> str | None:
    """The word that help is asked about, by `--help WORD`; empty: all options; None: no help is asked for."""
    rest = [part for argument in arguments for part in argument.split("=", 1)]
    asked = next((part for part in rest if part in ("--help", "-h")), None)
    return None if asked is None else "".join(rest[rest.index(asked) + 1 :][:1])


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
    found = [f"  {flag(name)}, of vLLM, {rule.help()}" for name, rule in rules.items()]
    found += [item.lines(width) for item in about]
    if not found:
        raise ConfigError(f"no option of kvern {command} is about {word!r}: kvern {command} --help lists all")
    sys.stdout.write("\n".join(found) + "\n")
    return 0


def usage(command: str, kind: type, options: Sequence[Option], width: int) -> Iterator[str]:
    """Yields the help of a whole command."""
    words = [f"[{name}]" if optional else name for name, _, optional in positional(kind)]
    yield " ".join(["usage: kvern", command, *words, "[options]"])
    yield "\n" + inspect.cleandoc(kind.__doc__ or "") + "\n"
    for name, text, _ in positional(kind):
        yield f"  {name:{INDENT - 2}}{text}"
    group = None
    for item in options:
        if item.group != group:
            group = item.group
            yield f"\n{group}:"
        yield item.lines(width)
    yield f"\nkvern {command} --help WORD shows the options about a word" + (
        ", vLLM's names among them." if rules_of(options) else "."
    )


def options_of(kind: type, group: str = "Options") -> Iterator[Option]:
    """Yields the options of a command: its fields, and the fields of those that hold options."""
    hints = typing.get_type_hints(kind, include_extras=True)
    documents = field_documents(kind)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        group = GROUPS.get(kind, {}).get(field.name, group)
        if dataclasses.is_dataclass(hint):
            yield from options_of(typing.cast("type", hint), group)
        elif typing.get_origin(hint) is not Annotated:  # positional arguments
            yield Option(group, field.name, hint, field.default, documents[field.name])


def rules_of(options: Sequence[Option]) -> Mapping[str, Rule]:
    """Returns the rules for vLLM's flags that a command with these options takes."""
    names = {option.name for option in options}
    return VLLM if "max_batch_requests" in names else VLLM_BENCH if "burstiness" in names else {}


def positional(kind: type) -> Iterator[tuple[str, str, bool]]:
    """Yields the positional arguments of a command: name, help, and whether it is optional."""
    documents = field_documents(kind)
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        hidden = typing.get_origin(hint) is Annotated and "Suppress" in map(repr, hint.__metadata__)  # tyro's mark
        if typing.get_origin(hint) is Annotated and not hidden:
            names = [found for item in hint.__metadata__ if (found := getattr(item, "metavar", None))]
            yield names[0] if names else name.upper(), documents[name], type(None) in typing.get_args(hint.__origin__)


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
