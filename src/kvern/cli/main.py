"""The command ``kvern``."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from importlib import import_module
from operator import or_
from typing import Annotated, Any

import tyro

from kvern.cli.arguments import TEXTS, kvern_arguments
from kvern.cli.flag_rules import json_object
from kvern.cli.help import asked_help, print_help
from kvern.cli.options import Defaults, adapters_of, read_defaults
from kvern.errors import INTERRUPTED, KvernError
from kvern.version import __version__

BAD_INPUT = 2
DIVISION = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel")
Rule = Callable[[tyro.constructors.PrimitiveTypeInfo], tyro.constructors.PrimitiveConstructorSpec[Any] | None]
COMMANDS = {
    ("run",): "kvern.cli.run:RunCommand",
    ("chat",): "kvern.cli.chat:ChatCommand",
    ("serve",): "kvern.cli.serve:ServeCommand",
    ("engines",): "kvern.cli.engines:EnginesCommand",
    ("models",): "kvern.cli.models:ModelsCommand",
    ("plan",): "kvern.cli.plan:PlanCommand",
    ("quantize",): "kvern.cli.quantize:QuantizeCommand",
    ("train-eagle",): "kvern.cli.train_eagle:TrainEagleCommand",
    ("bench", "offline"): "kvern.cli.bench:Offline",
    ("bench", "serve"): "kvern.cli.bench_serve:ServeBench",
    ("bench", "kernels"): "kvern.cli.bench:Kernels",
    ("profile",): "kvern.cli.bench:ProfileCommand",
}
"""The commands by their words: a dataclass of options each, imported when a command line has its words."""
BENCH = "Measure speed: of an engine on workloads (offline), of a running server (serve), or of GPU kernels."
DESCRIPTION = "An inference engine for large language models, with a small model inside."


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0, 1 if some work failed, 2 for wrong input, 130 after Ctrl-C."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments in (["--version"], ["-V"]):
        sys.stdout.write(f"kvern {__version__}\n")
        return 0
    try:
        words = words_of(arguments)
        if words and (asked := asked_help(arguments[len(words) :])) is not None:
            return print_help(" ".join(words), kind_of(words), asked)
        command, notes = read_command(arguments, os.environ)
        for note in notes:
            sys.stderr.write(f"kvern: {note}\n")
        return int(command.execute())
    except KvernError as error:
        sys.stderr.write(f"kvern: error: {error}\n")
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def words_of(arguments: Sequence[str]) -> tuple[str, ...]:
    """The words of the command that a command line begins with; none if there is no such command."""
    return next((words for words in COMMANDS if tuple(arguments[: len(words)]) == words), ())


def kind_of(words: tuple[str, ...]) -> type:
    """The class of a command."""
    module, _, name = COMMANDS[words].partition(":")
    kind: type = getattr(import_module(module), name)
    return kind


def read_command(arguments: list[str], environment: Mapping[str, str]) -> tuple[Any, list[str]]:
    """The command that a command line gives, and notes for the user. Raises ConfigError, or SystemExit after help."""
    defaults = read_defaults(arguments, environment)
    words = words_of(arguments)
    notes = list[str]()
    kind = kind_of(words) if words else None
    if kind is not None:
        arguments, notes = kvern_arguments(arguments[len(words) :], " ".join(words), kind)
    divided = any(option in DIVISION for option in [*defaults.given, *options_in(arguments)])
    registry = tyro.constructors.ConstructorRegistry()
    for rule in RULES:
        registry.primitive_rule(rule)
    with registry:
        command = tyro.cli(
            every_command(defaults, divided) if kind is None else kind,
            **({} if kind is None else {"default": with_defaults(kind, defaults, divided)}),
            args=arguments if words else arguments or ["--help"],
            prog=" ".join(["kvern", *words]),
            description=None if words else DESCRIPTION,
            config=(tyro.conf.OmitArgPrefixes,),
        )
    return command, [*defaults.notes, *notes]


def reads(kind: Any, metavar: str, read: Callable[[str], Any], write: Callable[[Any], str]) -> Rule:
    """Returns a rule by which tyro reads options of a kind from one text."""
    wanted = typing.get_origin(kind), typing.get_args(kind)

    def rule(
        option: tyro.constructors.PrimitiveTypeInfo,
    ) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
        if (typing.get_origin(option.type), typing.get_args(option.type)) != wanted:
            return None  # tyro's typing.Tuple[str, ...] is tuple[str, ...], but does not equal it
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar=metavar,
            instance_from_str=lambda texts: read(texts[0]),
            is_instance=lambda value: isinstance(value, typing.get_origin(kind)),
            str_from_instance=lambda value: [write(value)],
        )

    return rule


RULES = (
    reads(TEXTS, "TEXT ...", lambda text: tuple(json.loads(text)), json.dumps),
    reads(Mapping[str, Any], "JSON", json_object, lambda value: json.dumps(dict(value))),
    reads(
        Mapping[str, str],
        "NAME=FOLDER",
        adapters_of,
        lambda value: ",".join(f"{name}={folder}" for name, folder in value.items()),
    ),
)
"""Options of several texts arrive as the JSON list that `kvern_arguments` makes of them."""


def options_in(arguments: Sequence[str]) -> list[str]:
    """Returns the names of the options on a command line."""
    flags = (argument.partition("=")[0] for argument in arguments if argument.startswith("--"))
    return [flag[2:].replace("-", "_") for flag in flags]


def with_defaults(kind: type, defaults: Defaults, divided: bool) -> Any:
    """A command with the values of environment and configuration file.

    `divided`: the user says how a model is divided among GPUs.
    """
    options = {type(part): part for part in (defaults.engine, defaults.server, defaults.sampling)}
    hints, values = typing.get_type_hints(kind), dict[str, Any]()
    for field in dataclasses.fields(kind):
        if hints[field.name] in options:
            values[field.name] = options[hints[field.name]]
        elif field.name == "divided":
            values[field.name] = divided
        elif field.default is field.default_factory is dataclasses.MISSING:
            values[field.name] = tyro.MISSING
    return kind(**values)


def every_command(defaults: Defaults, divided: bool) -> Any:
    """The union of all commands, for the help of `kvern` itself and for words that are no command."""
    groups: dict[str, list[Any]] = {}
    for words in COMMANDS:
        kind = kind_of(words)
        leaf = tyro.conf.subcommand(words[-1], default=with_defaults(kind, defaults, divided))
        groups.setdefault(words[0], []).append(Annotated[kind, leaf])
    found = [
        parts[0] if len(parts) == 1 else Annotated[reduce(or_, parts), tyro.conf.subcommand(word, description=BENCH)]
        for word, parts in groups.items()
    ]
    return reduce(or_, found)


if __name__ == "__main__":
    sys.exit(main())
