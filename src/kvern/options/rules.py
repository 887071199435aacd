"""Rules for other engines' flags: the kinds of rows in their table, and the readers of their values."""

from __future__ import annotations

import re
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvern.config import OPTIONAL, EngineConfig, choices_of
from kvern.errors import ConfigError
from kvern.options.texts import Options, as_arguments, flag, json_object

HUMAN_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG])")
UNITS = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}


NOTHING = ("none", "null")


class Rule(ABC):
    """The rule of one flag. `takes` is the number of values after it, MANY for any number."""

    takes: int
    reads_keys: ClassVar[bool] = True
    """False if keys of the flag's JSON object, as in --FLAG.KEY, are what the flag is."""

    @abstractmethod
    def options(self, values: Sequence[str], on: bool) -> Options:
        """Returns kvern's options for the flag; `on` is False for --no-FLAG. Raises ConfigError if it is refused."""

    def note(self, values: Sequence[str]) -> str | None:
        """Returns a note for the user; None if the flag has its usual effect."""
        return None

    @abstractmethod
    def help(self) -> str:
        """Returns the rule in a line of help."""


@dataclass(frozen=True)
class Named(Rule):
    """A flag that kvern names differently, or whose values differ."""

    option: str
    read: Callable[[str], str] = str
    takes: int = 1

    def options(self, values: Sequence[str], on: bool) -> Options:
        return [(self.option, self.read(value)) for value in values]

    def help(self) -> str:
        return f"is kvern's {flag(self.option)}"


@dataclass(frozen=True)
class Partly(Rule):
    """A flag whose values are passed on to an option, except `idle` ones, which have no effect for the reason `why`,
    and those that the option does not know, which are refused."""

    option: str
    idle: tuple[str, ...]
    why: str
    takes: int = 1

    def options(self, values: Sequence[str], on: bool) -> Options:
        read = one_of(self.option, dict.fromkeys((*self.idle, *NOTHING), "None"), self.why)
        return [(self.option, read(value)) for value in values]

    def note(self, values: Sequence[str]) -> str | None:
        return f"has no effect: {self.why}" if any(value.lower() in self.idle for value in values) else None

    def help(self) -> str:
        return f"is kvern's {flag(self.option)}; {', '.join(self.idle)} have no effect: {self.why}"


@dataclass(frozen=True)
class Switch(Rule):
    """A flag without value that sets an option, to another value for --no-FLAG."""

    option: str
    yes: str | bool = True
    no: str | bool = False
    takes: int = 0

    def options(self, values: Sequence[str], on: bool) -> Options:
        return [(self.option, self.yes if on else self.no)]

    def help(self) -> str:
        return f"is kvern's {' '.join(as_arguments(self.option, self.yes))}"


@dataclass(frozen=True)
class HostMemory(Rule):
    """A flag that gives the KV cache host memory: so many units, 0 for none, or without a value as much as fits.

    Other engines take it with any model, so it is optional.
    """

    unit: str = ""
    takes: int = 1

    def options(self, values: Sequence[str], on: bool) -> Options:
        if not self.takes:
            return [("kv_tier", f"host{OPTIONAL}")] if on else []
        if not re.fullmatch(r"\d+(\.\d*)?", values[0]):
            raise ConfigError(f"is {values[0]!r}: it must be a number of {self.unit}")
        return [("kv_tier", f"host:{values[0]}{self.unit}{OPTIONAL}")] if float(values[0]) else []

    def help(self) -> str:
        return f"is kvern's {flag('kv_tier')} host{f':SIZE, in {self.unit}' * bool(self.takes)}"


@dataclass(frozen=True)
class Idle(Rule):
    """A flag without effect, for the reason `why`. With `only`, it has no effect for these values and others are
    refused."""

    why: str
    takes: int = 0
    only: tuple[str, ...] = ()
    reads_keys: ClassVar[bool] = False
    silent: bool = False
    """The flag's request holds anyway, so there is no note."""

    def options(self, values: Sequence[str], on: bool) -> Options:
        wrong = [value for value in values if self.only and value.lower() not in self.only]
        if wrong:
            raise ConfigError(f"{wrong[0]} is refused: {self.why}")
        return []

    def note(self, values: Sequence[str]) -> str | None:
        return None if self.silent or self.only else f"has no effect: {self.why}"

    def help(self) -> str:
        return f"takes {' or '.join(self.only)} alone: {self.why}" if self.only else f"has no effect: {self.why}"


@dataclass(frozen=True)
class Refused(Rule):
    """A flag that kvern cannot obey, for the reason `why`."""

    why: str
    takes: int = 1
    reads_keys: ClassVar[bool] = False

    def options(self, values: Sequence[str], on: bool) -> Options:
        if on:
            raise ConfigError(f"is refused: {self.why}")
        return []

    def help(self) -> str:
        return f"is refused: {self.why}"


@dataclass(frozen=True)
class Backend(Rule):
    """A flag with a JSON object of which kvern reads one key, `backend`."""

    named: Rule
    takes: int = 1

    def options(self, values: Sequence[str], on: bool) -> Options:
        given = json_object("".join(values))
        for key, value in given.items():
            if key != "backend" and value:
                raise ConfigError(f"{key} is refused: kvern reads the backend there and nothing else")
        return self.named.options([str(given["backend"])], on) if "backend" in given else []

    def help(self) -> str:
        return f"{self.named.help()}, by its key backend"


@dataclass(frozen=True)
class Speculation(Refused):
    """A flag with a JSON object about speculation; methods that kvern does not have are refused."""

    def options(self, values: Sequence[str], on: bool) -> Options:
        text = "".join(values)
        given = json_object(text) if text.lstrip().startswith("{") else {}
        method, model = str(given.get("method") or ""), str(given.get("model") or "")
        if method == "ngram":
            return [("proposer", method)]
        if method.endswith("mtp"):
            return [("draft_model", "mtp")]
        if model and method in ("", "draft_model", "eagle", "eagle3", "medusa"):
            return [("draft_model", model)]
        return super().options(values, on)

    def note(self, values: Sequence[str]) -> str | None:
        return "as many drafts are verified as pay, whatever it says of their number"

    def help(self) -> str:
        return f"is kvern's {flag('draft_model')} or {flag('proposer')}, by its keys method and model"


def human_number(text: str) -> str:
    """Returns a number that may end in k, m, g (thousands) or K, M, G (of 1024)."""
    found = HUMAN_NUMBER.fullmatch(text)
    return str(int(float(found[1]) * UNITS[found[2]])) if found else text


def length(text: str) -> str:
    """Returns the longest sequence; -1 and auto are as long as model and memory allow."""
    return "None" if text.lower() in ("-1", "auto") else human_number(text)


def one_of(option: str, names: Mapping[str, str], otherwise: str) -> Callable[[str], str]:
    """Returns a reader of values that kvern may name differently; kvern's own names are accepted as well."""
    own = tuple(filter(None, choices_of(typing.get_type_hints(EngineConfig)[option])))

    def read(text: str) -> str:
        value = names.get(text.lower(), text.lower())
        if value != "None" and value not in own:
            raise ConfigError(f"{text} is refused: {otherwise}; {option} is one of {', '.join(own)}")
        return value

    return read


def adapter(text: str) -> str:
    """Returns NAME=FOLDER, which may be given as a JSON object with name and path."""
    if not text.lstrip().startswith("{"):
        return text
    given = json_object(text)
    if not (isinstance(given.get("name"), str) and isinstance(given.get("path"), str)):
        raise ConfigError(f"{text} is refused: it must have a name and a path")
    return f"{given['name']}={given['path']}"
