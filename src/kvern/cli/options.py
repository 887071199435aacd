"""Sources of options: flag > environment variable > configuration file > default.

The fields of ``EngineConfig``, ``SamplingOptions`` and ``ServerConfig`` have one name everywhere: ``--max-tokens``,
``KVERN_MAX_TOKENS``, ``max_tokens = 64`` in a TOML file given with ``--config`` (or ``KVERN_CONFIG``), or ``max-tokens:
64`` in a YAML file. Files may use vLLM's names as well (``vllm_flags.py``).
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import tomllib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvern.cli.texts import json_object
from kvern.config import EngineConfig, choices_of
from kvern.cpu.processor import VARIABLE as CPU_ISA
from kvern.errors import ConfigError
from kvern.request.sampling_params import SamplingParams
from kvern.server.config import ServerConfig

PREFIX = "KVERN_"
CONFIG_VARIABLE = "KVERN_CONFIG"
NO_OPTIONS = {CONFIG_VARIABLE, CPU_ISA}
"""Variables of kvern that are read elsewhere."""
OTHER_VARIABLES = {"VLLM_API_KEY": "api_key"}
"""Variables of vLLM that are read if kvern's own are not set."""
KUBERNETES = re.compile(r"KVERN_(SERVICE_(HOST|PORT\w*)|PORT_\d+_(TCP|UDP)\w*)=.*|KVERN_PORT=(tcp|udp)://.*")
"""Variables that Kubernetes sets in all containers next to a service named kvern; they are no options."""


@dataclass(frozen=True)
class SamplingOptions:
    """Sampling parameters for requests that do not set them."""

    max_tokens: int | None = None
    """Most tokens of one answer. None: to the end of the context."""
    temperature: float | None = None
    """Sampling temperature; 0 takes the most probable token each time. None: the model's recommendation, else 1."""
    top_k: int | None = None
    """Sample from the k most probable tokens; 0 keeps all."""
    top_p: float | None = None
    """Sample from the smallest set of tokens with this probability in all."""
    min_p: float | None = None
    """Sample from tokens at least this probable, relative to the most probable one."""
    repetition_penalty: float | None = None
    """Divide the logits of tokens that occur in the prompt or the answer."""
    presence_penalty: float = 0.0
    """Subtract this from the logits of tokens already generated."""
    frequency_penalty: float = 0.0
    """Subtract this from them once for each occurrence."""
    min_tokens: int = 0
    """Least tokens of an answer."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer."""
    ignore_eos: bool = False
    """Do not stop at the model's end token."""

    def params(self) -> SamplingParams:
        """Returns the options as sampling parameters. Raises InvalidParameter."""
        values = dataclasses.asdict(self)
        return SamplingParams(**{**values, "stop": list(self.stop) or None})


ADAPTER = "--adapter"
"""The flag for one entry of `adapters`: NAME=FOLDER."""

KINDS: tuple[type, ...] = (EngineConfig, SamplingOptions, ServerConfig)


@dataclass(frozen=True)
class Defaults:
    """Options from the environment and the configuration file; flags override them."""

    engine: EngineConfig
    sampling: SamplingOptions
    server: ServerConfig
    notes: tuple[str, ...] = ()
    """Notes for the user about these options."""
    given: frozenset[str] = frozenset()
    """The names of the options that are set."""


def read_defaults(arguments: Sequence[str], environment: Mapping[str, str]) -> Defaults:
    """Returns the defaults for this command line.

    Raises:
        ConfigError: a key is unknown, a value has the wrong type, or the file cannot be read.
    """
    types = {name: kind for options in KINDS for name, kind in typing.get_type_hints(options).items()}
    values: dict[str, Any] = {}
    notes: list[str] = []
    path = config_file(arguments, environment)
    if path is not None:
        from kvern.cli.vllm_flags import VLLM

        for key, value in read_file(path).items():
            name, source = key.replace("-", "_"), f"{path}: {key}"
            if name.removeprefix("no_") in VLLM:
                values |= translated(name, value, types, source, notes)
            else:
                values[name] = converted(name, value, types, source, strict=True)
    for variable, name in OTHER_VARIABLES.items():
        if environment.get(variable):
            values[name] = converted(name, environment[variable], types, variable, strict=False)
    for variable, text in environment.items():
        ours = variable.startswith(PREFIX) and variable not in NO_OPTIONS
        if ours and not KUBERNETES.fullmatch(f"{variable}={text}"):
            name = variable.removeprefix(PREFIX).lower()
            values[name] = converted(name, text.removeprefix("\ufeff"), types, variable, strict=False)
    engine, sampling, server = (
        {field.name: values[field.name] for field in dataclasses.fields(kind) if field.name in values} for kind in KINDS
    )
    return Defaults(
        EngineConfig(**engine), SamplingOptions(**sampling), ServerConfig(**server), tuple(notes), frozenset(values)
    )


def translated(name: str, value: Any, types: Mapping[str, Any], source: str, notes: list[str]) -> dict[str, Any]:
    """Returns kvern's options for one of vLLM's names in a file, and adds to the notes. Raises ConfigError."""
    from kvern.cli.vllm_flags import VLLM

    rule = VLLM[name.removeprefix("no_")]
    if value is None:
        return {}
    if not rule.takes and not isinstance(value, bool):
        raise ConfigError(f"{source} is {value!r}: it must be true or false")
    on = (value is not False) is not name.startswith("no_")
    several = value if isinstance(value, list) else [value]
    texts = [item if isinstance(item, str) else json.dumps(item) for item in several if not isinstance(item, bool)]
    try:
        options = rule.options(texts, on)
    except ConfigError as error:
        raise ConfigError(f"{source} {error}") from None
    if on and (note := rule.note(texts)):
        notes.append(f"{source} {note}")
    adapters = [str(text) for option, text in options if option == "adapter"]
    found: dict[str, Any] = {"adapters": adapters_of(",".join(adapters))} if adapters else {}
    for option, text in options:
        if option != "adapter" and text != "None":
            found[option] = text if isinstance(text, bool) else converted(option, text, types, source, strict=False)
    return found


def config_file(arguments: Sequence[str], environment: Mapping[str, str]) -> Path | None:
    """Returns the file named by ``--config FILE``, ``--config=FILE`` or the environment."""
    for place, argument in reversed([*enumerate(arguments)]):
        if argument == "--config" and place + 1 < len(arguments):
            return Path(arguments[place + 1])
        if argument.startswith("--config="):
            return Path(argument.removeprefix("--config="))
    return Path(environment[CONFIG_VARIABLE]) if environment.get(CONFIG_VARIABLE) else None


def read_file(path: Path) -> dict[str, Any]:
    kind = "YAML" if path.suffix in (".yaml", ".yml") else "TOML"
    try:
        text = path.read_text(encoding="utf-8-sig")
        values = read_yaml(text) if kind == "YAML" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"configuration file {path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"configuration file {path} is not valid {kind}: {' '.join(str(error).split())}") from error
    return values


def read_yaml(text: str) -> dict[str, Any]:
    """Returns the mapping in a YAML text. Raises ValueError."""
    import yaml

    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ValueError("it must be a mapping of options to values")
    return values


def converted(name: str, value: Any, types: Mapping[str, Any], source: str, strict: bool) -> Any:
    if name not in types:
        from kvern.cli.vllm_flags import VLLM

        near = difflib.get_close_matches(name, [*types, *VLLM], n=1)
        hint = f"did you mean {near[0]}?" if near else "kvern run --help lists the options"
        raise ConfigError(f"{source} is no option: {hint}")
    if isinstance(value, str) and types[name] == tuple[str, ...]:
        return (value,)
    if not strict and types[name] == Mapping[str, str]:
        return adapters_of(value)
    if isinstance(value, str) and types[name] == Mapping[str, Any]:
        return json_object(value)
    try:
        return msgspec.convert(value, types[name], strict=strict, dec_hook=as_path)
    except msgspec.ValidationError as error:
        choices = tuple(filter(None, choices_of(types[name])))
        reason = f"{str(error)[:1].lower()}{str(error)[1:].replace('`', '').replace(' | null', '')}"
        reason = reason if strict else reason.removesuffix(", got str")  # every value of a flag is a text
        raise ConfigError(
            f"{source} is {value!r}: {'it must be one of ' + ', '.join(choices) if choices else reason}"
        ) from error


def as_path(kind: type, value: Any) -> Path:
    """Converts a text to a path for msgspec. Raises ValidationError."""
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise msgspec.ValidationError(f"Expected `str`, got `{type(value).__name__}`")


def adapters_of(text: str) -> dict[str, str]:
    """Reads adapters from NAME=FOLDER,NAME=FOLDER. Raises ConfigError."""
    pairs = [entry.partition("=") for entry in text.split(",")]
    for name, equals, folder in pairs:
        if not (name and equals and folder):
            raise ConfigError(f"adapter {name + equals + folder!r} is not of the form NAME=FOLDER")
    if len({name for name, _, _ in pairs}) < len(pairs):
        raise ConfigError(f"two adapters of {text} have the same name: give each its own")
    return {name: folder for name, _, folder in pairs}
