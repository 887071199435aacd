"""The arguments of LLM and AsyncLLM: fields of `EngineConfig`, or vLLM's names and values for them."""

import dataclasses
import functools
import inspect
import logging
import os
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, ParamSpec

from kvern.config import EngineConfig
from kvern.errors import ConfigError, shown
from kvern.options.values import converted, nearest, translated
from kvern.options.vllm import VLLM

logger = logging.getLogger("kvern")

Options = ParamSpec("Options")
FLAG = re.compile(r"--([a-z][a-z-]*)")


def takes_options(
    of: Callable[Options, EngineConfig],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, Options], None]]:
    """Returns a decorator that gives `__init__` the signature of a configuration, for type checkers and `help`."""

    def documented(init: Callable[..., None]) -> Callable[Concatenate[Any, Options], None]:
        this = next(iter(inspect.signature(init).parameters.values()))
        signature = inspect.signature(of)
        named = [
            option.replace(kind=option.KEYWORD_ONLY) if option.name != "model" else option
            for option in signature.parameters.values()
        ]
        setattr(init, "__signature__", signature.replace(parameters=[this, *named], return_annotation=None))  # noqa: B010
        return init

    return documented


def engine_config(model: str | os.PathLike[str] | None, options: Mapping[str, Any]) -> EngineConfig:
    """Returns the configuration of a model and options, some of which may have vLLM's names or values.

    What has no effect is a warning in the log. Raises ConfigError.
    """
    types = option_types()
    values: dict[str, Any] = {"model": None if model is None else os.fspath(model)}
    named: dict[str, str] = {}
    for name, value in options.items():
        for ours, converted_value in _option(name, value, types).items():
            if ours in named and values[ours] != converted_value:
                both = f"{named[ours]} says {shown(values[ours])} for {ours}, and {name} {shown(converted_value)}"
                raise ConfigError(f"{both}: give one of them")
            named[ours] = name
            values[ours] = converted_value
    return EngineConfig(**values)


@functools.cache
def option_types() -> Mapping[str, Any]:
    """Returns the types of the options by their names."""
    hints = typing.get_type_hints(EngineConfig)
    return {field.name: hints[field.name] for field in dataclasses.fields(EngineConfig)}


def _option(name: str, value: Any, types: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options for one argument. Raises ConfigError."""
    value = _plain(value)
    if name in types and (type(value) not in (str, int) or name not in VLLM):
        return {name: converted(name, value, types, name, strict=True)}
    rule = VLLM.get(name)
    if rule is None:
        hint = nearest(name, types) or ": the options are the fields of kvern.EngineConfig"
        raise ConfigError(f"there is no option {name}{hint}")
    if getattr(rule, "option", "adapter") not in {*types, "adapter"}:
        if value is None or value is False:
            return {}
        if name == "allowed_local_media_path":
            raise ConfigError(f"{name} is needed by servers: give images as Path objects, or as bytes")
        raise ConfigError(f"{name} is an option of the server, and this is none: give it to kvern serve")
    notes: list[str] = []
    try:
        found = translated(name, value, types, name, notes)
    except ConfigError as error:
        raise ConfigError(_in_python(str(error), types)) from None
    for note in notes:
        logger.warning("%s", _in_python(note, types))
    return found


def _plain(value: Any) -> Any:
    """Returns a value of torch or of the file system, such as torch.bfloat16, as a text."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return str(value).removeprefix("torch.") if type(value).__module__ == "torch" else value


def _in_python(text: str, types: Mapping[str, Any]) -> str:
    """Returns a text about flags in which options have the names that they have in Python."""

    def option(flag: re.Match[str]) -> str:
        name = flag[1].replace("-", "_")
        return name if name in types else flag[0]

    return FLAG.sub(option, text)
