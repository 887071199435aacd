"""The command ``kvern``: its command line, with flags of vLLM under kvern's names, unknown flags refused, and its help.

``kvern COMMAND --help`` shows options in groups or, with a word, those about it, including vLLM's names.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import os
import re
import shutil
import sys
import textwrap
import typing
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from kvern.cli.options import ADAPTER, Defaults, SamplingOptions, read_defaults
from kvern.config import EngineConfig
from kvern.documentation import field_documents
from kvern.errors import INTERRUPTED, ConfigError, KvernError
from kvern.options.texts import MANY, Options, as_arguments, flag, json_object
from kvern.options.values import adapters_of, converted
from kvern.plugins import imported
from kvern.server.config import ServerConfig
from kvern.version import __version__

if TYPE_CHECKING:
    from kvern.options.rules import Rule

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
        shown = "" if self.default in (None, (), "", dataclasses.MISSING) else f" [{as_typed(self.default)}]"
        return in_columns(written(self.name, self.kind), self.text + shown, width)


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
    notes = (f"  {flag(name)}, of vLLM, {rule.help()}" for name, rule in rules.items())
    found = [textwrap.fill(note, width, subsequent_indent=" " * 6, break_on_hyphens=False) for note in notes]
    found += [item.lines(width) for item in about]
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
        yield item.lines(width)
    names = ", vLLM's names among them." if rules_of(options) else "."
    yield "\n" + textwrap.fill(f"kvern {command} --help WORD shows the options about a word{names}", width)


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
    from kvern.options.vllm import VLLM, VLLM_BENCH

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


TEXTS = tuple[str, ...]
ADAPTERS = "adapters"
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
            if isinstance(setting, str) and (own.get(option) == TEXTS or option in (ADAPTERS, ADAPTER[2:])):
                several.setdefault(option if own.get(option) == TEXTS else ADAPTERS, []).append(setting)
            else:
                if isinstance(setting, str) and setting != "None":
                    converted(option, setting, own, written, strict=False)  # says in a line what is wrong
                found += as_arguments(option, setting)
    for option, texts in several.items():
        found += as_arguments(option, ",".join(texts) if option == ADAPTERS else json.dumps(texts))
    return found, list(dict.fromkeys(notes))


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
    ("pull",): "kvern.cli.hub:PullCommand",
    ("list",): "kvern.cli.hub:ListCommand",
    ("rm",): "kvern.cli.hub:RemoveCommand",
    ("engines",): "kvern.cli.engines:EnginesCommand",
    ("cache", "ls"): "kvern.cli.cache:CacheListCommand",
    ("cache", "stats"): "kvern.cli.cache:CacheStatsCommand",
    ("cache", "clear"): "kvern.cli.cache:CacheClearCommand",
    ("models",): "kvern.cli.models:ModelsCommand",
    ("plan",): "kvern.cli.plan:PlanCommand",
    ("quantize",): "kvern.cli.quantize:QuantizeCommand",
    ("train-eagle",): "kvern.cli.train_eagle:TrainEagleCommand",
    ("bench", "offline"): "kvern.cli.bench:Offline",
    ("bench", "serve"): "kvern.cli.bench_serve:ServeBench",
    ("bench", "kernels"): "kvern.cli.bench:Kernels",
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
OVERVIEW = """\
usage: kvern COMMAND [options]

Runs and serves large language models. A small one ships inside."""
EXAMPLES = {
    "kvern chat": "talk to the model inside",
    "kvern chat ./model-Q4_K_M.gguf": "or to a GGUF file, a folder, or a model of the Hugging Face hub",
    "kvern serve Qwen/Qwen3-0.6B": "APIs and a chat page, on http://127.0.0.1:8000",
}
EXAMPLE_WIDTH = 36


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
            return print_help(" ".join(words), kind_of(words), asked)
        if not words:
            check_word(arguments)
            sys.stdout.write(overview(min(WIDEST, shutil.get_terminal_size().columns), *arguments[:1]))
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


def overview(width: int, group: str = "") -> str:
    """Returns the help of kvern, or of a group of commands: the first sentence of each command."""
    commands = {words: kind_of(words) for words in COMMANDS if group in ("", "-h", "--help", words[0])}
    column = max(len(" ".join(words)) for words in commands) + 4
    lines = [f"usage: kvern {group} COMMAND [options]\n"]
    if group not in {words[0] for words in commands}:
        examples = (in_columns(command, what, width, EXAMPLE_WIDTH) for command, what in EXAMPLES.items())
        lines = [paragraphs(OVERVIEW, width), "", *examples, ""]
    for words, kind in commands.items():
        sentence = re.split(r"[.:]\s", inspect.cleandoc(kind.__doc__ or "") + "\n")[0]
        lines.append(in_columns(" ".join(words), sentence, width, column))
    return "\n".join([*lines, "\n" + paragraphs("kvern COMMAND --help shows the options of a command.", width) + "\n"])


def check_words(arguments: Sequence[str], command: str, kind: type) -> None:
    """Raises ConfigError if a command has too few arguments beside its options, or too many."""
    known = list(positional(kind))
    needed = [field.default for field in dataclasses.fields(kind)][: len(known)].count(dataclasses.MISSING)
    given = [argument for argument in arguments if not argument.startswith("--")]
    takes = " ".join(["kvern", command, *(f"[{name}]" if optional else name for name, _, optional in known)])
    if wrong := [word for word in given if re.fullmatch("-[A-Za-z]+", word)]:
        raise ConfigError(f"there is no option {wrong[0]}: kvern {command} --help lists all")
    if len(given) < needed:
        missing = " and ".join(name for name, _, _ in known[len(given) : needed])
        other = f"; to talk to a model: kvern chat {given[0]}" if command == "run" and given else ""
        raise ConfigError(f"give {missing}: {takes} [options]{other}")
    if len(given) > len(known):
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
    return command, [*defaults.notes, *notes]


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
