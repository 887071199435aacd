"""Command lines: flags of vLLM under kvern's names, and unknown flags refused with the nearest known one."""

from __future__ import annotations

import difflib
import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from kvern.cli.flag_rules import MANY, Idle, Options, Refused, Rule, as_arguments, flag
from kvern.cli.help import options_of, rules_of
from kvern.cli.options import ADAPTER, converted
from kvern.cli.vllm_flags import SHORT
from kvern.errors import ConfigError

TEXTS = tuple[str, ...]
ADAPTERS = "adapters"
LETTERS = re.compile(r"-[A-Za-z]+")


def kvern_arguments(arguments: Sequence[str], command: str, kind: type) -> tuple[list[str], list[str]]:
    """Returns a command's arguments under kvern's names, and notes for the user. The fields of `kind` are its options.

    Values of options that take several texts are collected at the end. Raises ConfigError for a flag that is unknown,
    refused, or without a value.
    """
    options = list(options_of(kind))
    own = {option.name: option.kind for option in options}
    rules = rules_of(options)
    notes: list[str] = []
    found: list[str] = []
    several: dict[str, list[str]] = {}
    waiting = deque(arguments)
    while waiting:
        argument = waiting.popleft()
        name, equals, value = spelled_out(argument).partition("=")
        if not name.startswith("--") or " " in name:
            found.append(argument)
            continue
        name = name[2:].replace("-", "_")
        positive = name.removeprefix("no_")
        if isinstance(rules.get(inner := name.partition(".")[0]), Idle | Refused):
            name = positive = inner  # a key of a JSON object that kvern does not read
        written = argument.partition("=")[0]
        if name in rules or positive in rules:
            rule, on = rules[name if name in rules else positive], name in rules
            values = _values(written, rule.takes if on else 0, value if equals else None, waiting)
            settings = _translated(written, rule, on, values, own, notes)
        elif name in own or own.get(positive) is bool or flag(name) == ADAPTER:
            takes = 0 if own.get(positive) is bool else MANY if own.get(name) == TEXTS else 1
            values = _values(written, takes, value if equals else None, waiting)
            settings = [(name, text) for text in values] if takes else [(positive, name in own)]
        else:
            raise ConfigError(f"there is no option {flag(name)}: {_hint(name, command, own, rules)}")
        for option, setting in settings:
            if isinstance(setting, str) and (own.get(option) == TEXTS or option in (ADAPTERS, ADAPTER[2:])):
                several.setdefault(option if own.get(option) == TEXTS else ADAPTERS, []).append(setting)
            else:
                if isinstance(setting, str) and setting != "None":
                    converted(option, setting, own, written, strict=False)  # says in a line what is wrong
                found += as_arguments(option, setting)
    for option, texts in several.items():
        found += as_arguments(option, ",".join(texts) if option == ADAPTERS else json.dumps(texts))
    return found, list(dict.fromkeys(notes))


def spelled_out(argument: str) -> str:
    """Returns the argument with vLLM's short flags in full: -tp=2, -O3, -cc.mode=3."""
    letters = LETTERS.match(argument)
    if letters is None or letters[0] not in SHORT:
        return argument
    rest = argument[letters.end() :]
    return f"{flag(SHORT[letters[0]])}{'=' if rest[:1].isdigit() else ''}{rest}"


def _values(written: str, takes: int, given: str | None, waiting: deque[str]) -> list[str]:
    """Returns the values of a flag: after its equals sign, or in the next arguments."""
    if given is not None and not takes:
        raise ConfigError(f"{written} takes no value: there are the flag and its --no- form")
    values = _taken(waiting, takes) if given is None else [given]
    if takes and not values:
        raise ConfigError(f"{written} needs a value")
    return values


def _taken(waiting: deque[str], most: int) -> list[str]:
    """Takes the values that follow a flag: one, which may begin with a dash, or all up to the next flag."""
    values: list[str] = []
    while waiting and len(values) < most and not waiting[0].startswith("--" if most == 1 else "-"):
        values.append(waiting.popleft())
    return values


def _translated(
    written: str, rule: Rule, on: bool, values: Sequence[str], own: Mapping[str, Any], notes: list[str]
) -> Options:
    try:
        options = rule.options(values, on)
    except ConfigError as error:
        raise ConfigError(f"{written} {error}") from None
    if any(option not in own and flag(option) != ADAPTER for option, _ in options):
        raise ConfigError(f"{written} is an option of kvern serve alone")
    if on and (note := rule.note(values)):
        notes.append(f"{written} {note}")
    return options


def _hint(name: str, command: str, own: Mapping[str, Any], rules: Mapping[str, Rule]) -> str:
    known = [*own, *(f"no_{option}" for option, kind in own.items() if kind is bool), *rules]
    if near := difflib.get_close_matches(name, known, n=1, cutoff=0.7):
        other = f", which {rules[near[0]].help()}" if near[0] in rules and near[0] not in own else ""
        return f"did you mean {flag(near[0])}{other}?"
    return f"kvern {command} --help lists all"
