"""The command ``kvern``: its command line, with flags of vLLM under kvern's names, unknown flags refused, and its help.

``kvern COMMAND --help`` shows options in groups or, with a word, those about it, including vLLM's names.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import re
import sys
import typing
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from kvern.cli.fields import options_of, positional, rules_of
from kvern.cli.options import ADAPTER, Defaults, read_defaults
from kvern.config import EngineConfig
from kvern.errors import INTERRUPTED, ConfigError, KvernError
from kvern.options.texts import MANY, Options, as_arguments, flag, json_object
from kvern.options.values import adapters_of, converted
from kvern.plugins import imported
from kvern.version import __version__

if TYPE_CHECKING:
    from kvern.options.rules import Rule


def asked_help(arguments: Sequence[str]) -> str | None:
    """The word that help is asked about, by `--help WORD`; empty: all options; None: no help is asked for."""
    rest = [part for argument in arguments for part in argument.split("=", 1)]
    asked = next((part for part in rest if part in ("--help", "-h")), None)
    return None if asked is None else "".join(rest[rest.index(asked) + 1 :][:1])


TEXTS = tuple[str, ...]
ADAPTERS = "adapters"
NAMED_MODEL = re.compile(r"([\w.:-]+)=")
"""The beginning of a model with a name of its own. A path with a slash before `=` has none."""
LETTERS = re.compile(r"-[A-Za-z]+")
OF_RUN = {"media_dir": "run"}
"""Options under vLLM's names that `kvern serve` has not."""
SHARED = frozenset(
    {
        "attention_backend",
        "dtype",
        "generation_config",
        "kv_cache_dtype",
        "load_format",
        "max_model_len",
        "quantization",
        "reasoning_parser",
    }
)
"""Options of kvern that vLLM has under the same names with other values."""


def kvern_arguments(arguments: Sequence[str], command: str, kind: type) -> tuple[list[str], list[str]]:
    """Returns a command's arguments under kvern's names, and notes for the user. The fields of `kind` are its options.

    Values of options that take several texts are collected at the end. Raises ConfigError for a flag that is unknown,
    refused, or without a value.
    """
    options = list(options_of(kind))
    own = {option.name: option.kind for option in options}
    rules = {} if all(_is_own(argument, own) for argument in arguments) else rules_of(options)
    notes: list[str] = []
    found: list[str] = []
    several: dict[str, list[str]] = {}
    models: list[str] = []
    waiting = deque(arguments)
    while waiting:
        argument = waiting.popleft()
        name, equals, value = spelled_out(argument).partition("=")
        if not name.startswith("--") or " " in name:
            found.append(argument)
            continue
        name = name[2:].replace("-", "_")
        positive = name.removeprefix("no_")
        if (inner := name.partition(".")[0]) in rules and not rules[inner].reads_keys:
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
            if option == "model" and "models" in own:
                models.append(str(setting))
            elif isinstance(setting, str) and (own.get(option) == TEXTS or option in (ADAPTERS, ADAPTER[2:])):
                several.setdefault(option if own.get(option) == TEXTS else ADAPTERS, []).append(setting)
            else:
                if isinstance(setting, str) and setting != "None":
                    converted(option, setting, own, written, strict=False)  # says in a line what is wrong
                found += as_arguments(option, setting)
    found += models_as_arguments(models)
    for option, texts in several.items():
        found += as_arguments(option, ",".join(texts) if option == ADAPTERS else json.dumps(texts))
    return found, list(dict.fromkeys(notes))


def models_as_arguments(models: Sequence[str]) -> list[str]:
    """Returns the values of `--model` as arguments: one model, or several by name, which is that before `=` if there is
    one. Raises ConfigError for a name that is given twice."""
    if not models or (len(models) == 1 and not NAMED_MODEL.match(models[0])):
        return as_arguments("model", models[0]) if models else []
    named: dict[str, str] = {}
    for text in models:
        found = NAMED_MODEL.match(text)
        name = found[1] if found else text
        if name in named:
            raise ConfigError(f"--model gives {name} twice: give each model a name of its own, as NAME=MODEL")
        named[name] = text[found.end() :] if found else text
    return as_arguments("models", json.dumps(named))


def _is_own(argument: str, own: Mapping[str, Any]) -> bool:
    """True if an argument is a value, or one of kvern's options that vLLM's rules say nothing of."""
    if not argument.startswith("-"):
        return True
    name = argument.partition("=")[0][2:].replace("-", "_")
    name = name if name in own else name.removeprefix("no_")
    return argument.startswith("--") and name in own and name not in SHARED


def spelled_out(argument: str) -> str:
    """Returns the argument with vLLM's short flags in full: -tp=2, -O3, -cc.mode=3."""
    letters = LETTERS.match(argument)
    if letters is None:
        return argument
    from kvern.options.vllm import SHORT

    if letters[0] not in SHORT:
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
    foreign = [option for option, _ in options if option not in own and flag(option) != ADAPTER]
    if foreign:
        raise ConfigError(f"{written} is an option of kvern {OF_RUN.get(foreign[0], 'serve')} alone")
    if on and (note := rule.note(values)):
        notes.append(f"{written} {note}")
    return options


def _hint(name: str, command: str, own: Mapping[str, Any], rules: Mapping[str, Rule]) -> str:
    known = [*own, *(f"no_{option}" for option, kind in own.items() if kind is bool), *rules]
    if near := difflib.get_close_matches(name, known, n=1, cutoff=0.7):
        other = f", which {rules[near[0]].help()}" if near[0] in rules and near[0] not in own else ""
        return f"did you mean {flag(near[0])}{other}?"
    return f"kvern {command} --help lists all"


BAD_INPUT = 2
DIVISION = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel")
Reading = Callable[[tyro.constructors.PrimitiveTypeInfo], tyro.constructors.PrimitiveConstructorSpec[Any] | None]
COMMANDS = {
    ("chat",): "kvern.cli.chat:ChatCommand",
    ("serve",): "kvern.cli.serve:ServeCommand",
    ("run",): "kvern.cli.run:RunCommand",
    ("describe",): "kvern.cli.describe:DescribeCommand",
    ("pull",): "kvern.cli.hub:PullCommand",
    ("list",): "kvern.cli.hub:ListCommand",
    ("rm",): "kvern.cli.hub:RemoveCommand",
    ("engines",): "kvern.cli.engines:EnginesCommand",
    ("top",): "kvern.cli.top:TopCommand",
    ("explain",): "kvern.cli.explain:ExplainCommand",
    ("cache", "ls"): "kvern.cli.cache:CacheListCommand",
    ("cache", "stats"): "kvern.cli.cache:CacheStatsCommand",
    ("cache", "clear"): "kvern.cli.cache:CacheClearCommand",
    ("models",): "kvern.cli.models:ModelsCommand",
    ("plan",): "kvern.cli.plan:PlanCommand",
    ("deploy",): "kvern.cli.deploy:DeployCommand",
    ("simulate",): "kvern.cli.simulate:SimulateCommand",
    ("quantize",): "kvern.cli.quantize:QuantizeCommand",
    ("train-eagle",): "kvern.cli.train_eagle:TrainEagleCommand",
    ("triton",): "kvern.cli.triton:TritonCommand",
    ("tpu",): "kvern.cli.tpu:TpuCommand",
    ("bench", "offline"): "kvern.cli.bench:Offline",
    ("bench", "serve"): "kvern.cli.bench_serve:ServeBench",
    ("bench", "steps"): "kvern.cli.bench_steps:StepsCommand",
    ("bench", "kernels"): "kvern.cli.bench:Kernels",
    ("bench", "accuracy"): "kvern.cli.bench_accuracy:AccuracyCommand",
    ("bench", "compare"): "kvern.cli.bench_compare:CompareCommand",
    ("bench", "gate"): "kvern.cli.bench_compare:GateCommand",
    ("completion",): "kvern.cli.completion:CompletionCommand",
    ("profile",): "kvern.cli.bench:ProfileCommand",
}
"""The commands by their words: a dataclass of options each, imported when a command line has its words."""
OTHER_WORDS = {
    "show": "models",
    "info": "models",
    "ps": "engines",
    "download": "pull",
    "delete": "rm",
    "start": "serve",
}
"""Words of other programs, with the commands that come nearest to them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0, 1 if some work failed, 2 for wrong input, 130 after Ctrl-C."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    if arguments in (["--version"], ["-V"], ["version"]):
        sys.stdout.write(f"kvern {__version__}\n")
        return 0
    try:
        words = words_of(arguments)
        if words and (asked := asked_help(arguments[len(words) :])) is not None:
            return int(imported("kvern.cli.help:print_help")(" ".join(words), kind_of(words), asked))
        if not words:
            check_word(arguments)
            imported("kvern.cli.help:print_overview")({words: kind_of(words) for words in COMMANDS}, *arguments[:1])
            return 0
        command, notes = read_command(arguments, os.environ)
        for note in notes:
            sys.stderr.write(f"kvern: {note}\n")
        return int(command.execute())
    except KvernError as error:
        sys.stderr.write(f"{' '.join(('kvern', *words_of(arguments)))}: error: {error}\n")
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def words_of(arguments: Sequence[str]) -> tuple[str, ...]:
    """The words of the command that a command line begins with; none if there is no such command."""
    return next((words for words in COMMANDS if tuple(arguments[: len(words)]) == words), ())


def check_word(arguments: Sequence[str]) -> None:
    """Raises ConfigError if a command line begins with what is no command, with the nearest ones."""
    group = [words[1] for words in COMMANDS if len(words) > 1 and [words[0]] == list(arguments[:1])]
    word = arguments[1:2] if group else arguments[:1]
    known = group or list(dict.fromkeys(words[0] for words in COMMANDS))
    if not word or word[0] in ("-h", "--help"):
        return
    what = " ".join(["kvern", *arguments[:1]] if group else ["kvern"])
    if word[0].startswith("-"):
        raise ConfigError(f"{word[0]} stands before a command: {what} --help lists them")
    near = difflib.get_close_matches(word[0], known, n=1) or [OTHER_WORDS[name] for name in word if name in OTHER_WORDS]
    hint = f"did you mean {what} {near[0]}?" if near else f"there are {', '.join(known)}"
    raise ConfigError(f"{what} {word[0]} is no command: {hint}")


def check_words(arguments: Sequence[str], command: str, kind: type) -> None:
    """Raises ConfigError if a command has too few arguments beside its options, or too many."""
    known = list(positional(kind))
    fields = dataclasses.fields(kind)[: len(known)]
    needed = [field.default for field in fields].count(dataclasses.MISSING)
    takes_many = any(typing.get_origin(typing.get_type_hints(kind)[field.name]) is tuple for field in fields)
    given = [argument for argument in arguments if not argument.startswith("--")]
    takes = " ".join(["kvern", command, *(f"[{name}]" if optional else name for name, _, optional in known)])
    if wrong := [word for word in given if re.fullmatch("-[A-Za-z]+", word)]:
        raise ConfigError(f"there is no option {wrong[0]}: kvern {command} --help lists all")
    if len(given) < needed:
        missing = " and ".join(name for name, _, _ in known[len(given) : needed])
        other = f"; to talk to a model: kvern chat {given[0]}" if command == "run" and given else ""
        raise ConfigError(f"give {missing}: {takes} [options]{other}")
    if len(given) > len(known) and not takes_many:
        quotes = ", and a text with blanks stands in quotes" if command == "chat" else ""
        raise ConfigError(f"{given[len(known)]!r} is too much: the command is {takes} [options]{quotes}")


def kind_of(words: tuple[str, ...]) -> type:
    """The class of a command."""
    kind: type = imported(COMMANDS[words])
    return kind


def read_command(arguments: list[str], environment: Mapping[str, str]) -> tuple[Any, list[str]]:
    """The command that a command line gives, and notes for the user. Raises ConfigError, or SystemExit after help."""
    defaults = read_defaults(arguments, environment)
    words = words_of(arguments)
    kind = kind_of(words)
    arguments, notes = kvern_arguments(arguments[len(words) :], " ".join(words), kind)
    check_words(arguments, " ".join(words), kind)
    divided = any(option in DIVISION for option in [*defaults.given, *options_in(arguments)])
    registry = tyro.constructors.ConstructorRegistry()
    for rule in RULES:
        registry.primitive_rule(rule)
    with registry:
        command = tyro.cli(
            kind,
            default=with_defaults(kind, defaults, divided),
            args=arguments,
            prog=" ".join(["kvern", *words]),
            config=(tyro.conf.OmitArgPrefixes,),
        )
    given = {*defaults.given, *(name.removeprefix("no_") for name in options_in(arguments))}
    command, taken = imported("kvern.cli.bundles:with_bundle")(command, given) if has_bundle(command) else (command, [])
    return command, [*defaults.notes, *notes, *taken]


def has_bundle(command: Any) -> bool:
    """True if the model of a command is the folder of a bundle, which `kvern deploy` has made or has begun to make."""
    engine = getattr(command, "engine", None)
    if not isinstance(engine, EngineConfig):
        return False
    folder = Path(getattr(command, "name", None) or engine.model or "")
    return (folder / "deploy.toml").is_file() or (folder / "UNFINISHED").is_file()


def reads(kind: Any, metavar: str, read: Callable[[str], Any], write: Callable[[Any], str]) -> Reading:
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


if __name__ == "__main__":
    sys.exit(main())
