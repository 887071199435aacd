"""Sources of options: flag > environment variable > configuration file > default.

The fields of ``EngineConfig``, ``SamplingOptions`` and ``ServerConfig`` have one name everywhere: ``--max-tokens``,
``KVERN_MAX_TOKENS``, ``max_tokens = 64`` in a TOML file given with ``--config`` (or ``KVERN_CONFIG``), or ``max-tokens:
64`` in a YAML file. Files may use vLLM's names as well (``kvern.options.vllm``).
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvern.config import EngineConfig
from kvern.cpu.processor import VARIABLE as CPU_ISA
from kvern.errors import ConfigError
from kvern.options.values import converted, translated
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
        from kvern.options.vllm import VLLM

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
