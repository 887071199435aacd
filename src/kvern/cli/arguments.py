"""A command line as kvern reads it: flags of vLLM by kvern's names, and unknown ones refused with the nearest known."""

from __future__ import annotations

import difflib
import json
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from kvern.cli.flag_rules import MANY, Idle, Refused, Rule, as_arguments, flag
from kvern.cli.help import knows_vllm, options_of
from kvern.cli.options import ADAPTER, joined_adapters
from kvern.cli.vllm_flags import SHORT, VLLM
from kvern.errors import ConfigError

TEXTS = tuple[str, ...]


def kvern_arguments(arguments: Sequence[str], command: str, kind: type) -> tuple[list[str], list[str]]:
    """The arguments of a command, whose options are the fields of `kind`, by kvern's names; and notes for the user.

    Raises ConfigError for a flag that is unknown or refused.
    """
    options = list(options_of(kind))
    own = {option.name: option.kind for option in options}
    rules: Mapping[str, Rule] = VLLM if knows_vllm(options) else {}
    notes: list[str] = []
    found: list[str] = []
    waiting = deque(arguments)
    while waiting:
        argument = waiting.popleft()
        name, equals, value = spelled_out(argument).partition("=")
        if not name.startswith("--") or " " in name:
            found.append(argument)
            continue
        name = name[2:].replace("-", "_")
        positive = name.removeprefix("no_")
        if equals:
            waiting.appendleft(value)
        if isinstance(rules.get(inner := name.partition(".")[0]), Idle | Refused):
            name = positive = inner  # a key of a JSON object, of which kvern reads nothing
        if name in rules or positive in rules:
            rule, on = rules[name if name in rules else positive], name in rules
            found += _translated(argument.partition("=")[0], rule, on, own, waiting, notes)
        elif name in own or positive in own or flag(name) == ADAPTER:
            found.append(flag(name))
            if equals or own.get(name) == TEXTS:
                found += _taken(waiting, MANY if own.get(name) == TEXTS else 1)
        else:
            raise ConfigError(f"there is no option {flag(name)}: {_hint(name, command, own, rules)}")
    return joined_adapters(found), list(dict.fromkeys(notes))


def spelled_out(argument: str) -> str:
    """The argument, with vLLM's letters for a flag written in full: -tp=2, -O3."""
    letters, equals, value = argument.partition("=")
    if letters in SHORT:
        return f"{flag(SHORT[letters])}{equals}{value}"
    if argument[:2] == "-O" and argument[2:3].isdigit():
        return f"{flag(SHORT['-O'])}={argument[2:]}"
    return argument


def _translated(
    written: str, rule: Rule, on: bool, own: Mapping[str, Any], waiting: deque[str], notes: list[str]
) -> list[str]:
    values = _taken(waiting, rule.takes) if on else []
    if on and rule.takes and not values:
        raise ConfigError(f"{written} needs a value")
    try:
        options = rule.options(values, on)
    except ConfigError as error:
        raise ConfigError(f"{written} {error}") from None
    if any(option not in own and flag(option) != ADAPTER for option, _ in options):
        raise ConfigError(f"{written} is an option of kvern serve alone")
    if on and (note := rule.note()):
        notes.append(f"{written} {note}")
    return [text for option, value in options for text in as_arguments(option, value)]


def _taken(waiting: deque[str], most: int) -> list[str]:
    """The values that follow a flag: one, which may begin with a dash, or all to the next flag, or a JSON list."""
    values: list[str] = []
    while waiting and len(values) < most and not waiting[0].startswith("--" if most == 1 else "-"):
        values.append(waiting.popleft())
    if most == MANY and len(values) == 1 and values[0].startswith("["):
        try:
            listed = json.loads(values[0])
        except ValueError as error:
            raise ConfigError(f"{values[0]!r} is not a JSON list: {error}") from None
        return [item if isinstance(item, str) else json.dumps(item) for item in listed]
    return values


def _hint(name: str, command: str, own: Mapping[str, Any], rules: Mapping[str, Rule]) -> str:
    known = [*own, *(f"no_{option}" for option, kind in own.items() if kind is bool), *rules]
    if near := difflib.get_close_matches(name, known, n=1, cutoff=0.7):
        other = f", which {rules[near[0]].help()}" if near[0] in rules and near[0] not in own else ""
        return f"did you mean {flag(near[0])}{other}?"
    return f"kvern {command} --help lists all"
