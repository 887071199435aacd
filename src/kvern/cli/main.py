"""The command ``kvern``."""

from __future__ import annotations

import json
import os
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import tyro

from kvern.cli.arguments import TEXTS, kvern_arguments
from kvern.cli.bench import Kernels, Offline, ProfileCommand
from kvern.cli.bench_serve import ServeBench
from kvern.cli.chat import ChatCommand
from kvern.cli.engines import EnginesCommand
from kvern.cli.flag_rules import json_object
from kvern.cli.help import asked_help, print_help
from kvern.cli.models import ModelsCommand
from kvern.cli.options import Defaults, adapters_of, read_defaults
from kvern.cli.plan import PlanCommand
from kvern.cli.quantize import QuantizeCommand
from kvern.cli.run import INTERRUPTED, RunCommand
from kvern.cli.serve import ServeCommand
from kvern.cli.train_eagle import TrainEagleCommand
from kvern.errors import KvernError
from kvern.version import __version__

BAD_INPUT = 2
DIVISION = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel")
Rule = Callable[[tyro.constructors.PrimitiveTypeInfo], tyro.constructors.PrimitiveConstructorSpec[Any] | None]
KINDS: dict[tuple[str, ...], type] = {
    ("run",): RunCommand,
    ("chat",): ChatCommand,
    ("serve",): ServeCommand,
    ("engines",): EnginesCommand,
    ("models",): ModelsCommand,
    ("plan",): PlanCommand,
    ("quantize",): QuantizeCommand,
    ("train-eagle",): TrainEagleCommand,
    ("bench", "offline"): Offline,
    ("bench", "serve"): ServeBench,
    ("bench", "kernels"): Kernels,
    ("profile",): ProfileCommand,
}
BENCH = "Measure speed: of an engine on workloads (offline), of a running server (serve), or of GPU kernels."
DESCRIPTION = "An inference engine for large language models, with a small model inside."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code: 0, 1 where some of the work failed, 2 for wrong input, 130 after Ctrl-C."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments in (["--version"], ["-V"]):
        sys.stdout.write(f"kvern {__version__}\n")
        return 0
    try:
        asked = asked_help(arguments, KINDS)
        if asked is not None:
            return print_help(*asked)
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


def read_command(arguments: list[str], environment: Mapping[str, str]) -> tuple[Any, list[str]]:
    """The command that a command line gives, and notes for the user. Raises ConfigError, or SystemExit after help."""
    defaults = read_defaults(arguments, environment)
    arguments, notes = own_arguments(arguments)
    registry = tyro.constructors.ConstructorRegistry()
    for rule in RULES:
        registry.primitive_rule(rule)
    with registry:
        command = tyro.cli(
            commands(defaults, divided=any(option in DIVISION for option in [*defaults.given, *options_in(arguments)])),
            args=arguments or ["--help"],
            prog="kvern",
            description=DESCRIPTION,
            config=(tyro.conf.OmitArgPrefixes,),
        )
    return command, [*defaults.notes, *notes]


def own_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The command line by kvern's names, and notes for the user. Raises ConfigError."""
    for words, kind in KINDS.items():
        if tuple(arguments[: len(words)]) == words:
            found, notes = kvern_arguments(arguments[len(words) :], " ".join(words), kind)
            return [*words, *found], notes
    return arguments, []


def reads(kind: Any, metavar: str, read: Callable[[str], Any], write: Callable[[Any], str]) -> Rule:
    """How tyro reads options of a kind that are one text on a command line."""
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
"""Several texts come as the JSON list that `kvern_arguments` makes of them, whatever they begin with."""


def options_in(arguments: Sequence[str]) -> list[str]:
    """The names of the options that a command line gives."""
    flags = (argument.partition("=")[0] for argument in arguments if argument.startswith("--"))
    return [flag[2:].replace("-", "_") for flag in flags]


def commands(defaults: Defaults, divided: bool) -> Any:
    """Return the union of the commands, with the values of environment and configuration file as defaults.

    `divided`: somebody has said how a model is divided among GPUs.
    """
    missing: Any = tyro.MISSING
    serve = ServeCommand(divided=divided, server=defaults.server, engine=defaults.engine)
    run = RunCommand(missing, missing, sampling=defaults.sampling, engine=defaults.engine)
    chat = ChatCommand(sampling=defaults.sampling, engine=defaults.engine)
    benches = (
        Annotated[Offline, tyro.conf.subcommand("offline", default=Offline(engine=defaults.engine))]
        | Annotated[ServeBench, tyro.conf.subcommand("serve", default=ServeBench())]
        | Annotated[Kernels, tyro.conf.subcommand("kernels", default=Kernels(engine=defaults.engine))]
    )
    profile = ProfileCommand(engine=defaults.engine)
    quantize, train = QuantizeCommand(missing), TrainEagleCommand(missing, missing, missing)
    return (
        Annotated[RunCommand, tyro.conf.subcommand("run", default=run)]
        | Annotated[ChatCommand, tyro.conf.subcommand("chat", default=chat)]
        | Annotated[ServeCommand, tyro.conf.subcommand("serve", default=serve)]
        | Annotated[EnginesCommand, tyro.conf.subcommand("engines", default=EnginesCommand())]
        | Annotated[ModelsCommand, tyro.conf.subcommand("models", default=ModelsCommand())]
        | Annotated[PlanCommand, tyro.conf.subcommand("plan", default=PlanCommand(missing))]
        | Annotated[QuantizeCommand, tyro.conf.subcommand("quantize", default=quantize)]
        | Annotated[TrainEagleCommand, tyro.conf.subcommand("train-eagle", default=train)]
        | Annotated[benches, tyro.conf.subcommand("bench", description=BENCH)]
        | Annotated[ProfileCommand, tyro.conf.subcommand("profile", default=profile)]
    )


if __name__ == "__main__":
    sys.exit(main())
