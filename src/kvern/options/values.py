"""Values of options, checked and converted, whatever they come from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvern.config import choices_of
from kvern.errors import ConfigError, did_you_mean
from kvern.options.texts import json_object


def translated(name: str, value: Any, types: Mapping[str, Any], source: str, notes: list[str]) -> dict[str, Any]:
    """Returns kvern's options for one of vLLM's names in a file, and adds to the notes. Raises ConfigError."""
    from kvern.options.vllm import VLLM

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


def converted(name: str, value: Any, types: Mapping[str, Any], source: str, strict: bool) -> Any:
    if name not in types:
        if isinstance(value, Mapping):
            raise ConfigError(f"{source} is no option but a table: write options without one")
        raise ConfigError(f"{source} is no option{nearest(name, types) or ': kvern run --help lists the options'}")
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


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns `did_you_mean` of an option, kvern's or vLLM's."""
    from kvern.options.vllm import VLLM

    return did_you_mean(name, [*known, *VLLM])


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
