"""Finds the invalid setting of a `config.json` by trying other values, so that families need not report it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, islice, product
from typing import Any

from kvern.errors import shown

_IN_ITS_PLACE: tuple[Any, ...] = (None, 1, 2, 64, {})
"""Replacement values, one of which makes a setting valid if its value was the only fault; None: left out."""
MOST_SETTINGS = 300
"""Limit of settings that are tried; no model has as many."""


def bad_setting(
    config: Mapping[str, Any], is_readable: Callable[[Mapping[str, Any]], bool], values: Sequence[Any] = ()
) -> tuple[str, str] | None:
    """The setting whose change or removal makes a configuration readable, and its value as shown to users.

    Settings with one of `values` are tried first, then empty ones, then texts and lists. None: no single setting is at
    fault.
    """

    def rank(path: tuple[str, ...]) -> int:
        value = _value(config, path)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        says_nothing = value in (None, [], {}) or (is_number and value <= 0)
        signs = (any(value == bad for bad in values), says_nothing, isinstance(value, str | list))
        return next((place for place, sign in enumerate(signs) if sign), len(signs))

    for _, paths in groupby(sorted(islice(_paths(config), MOST_SETTINGS), key=rank), key=rank):
        for value, path in product(_IN_ITS_PLACE, list(paths)):
            if is_readable(_changed(config, path, value)):
                return ".".join(path), shown(_value(config, path))
    return None


def _paths(config: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """The paths of all settings; those within an object come before the object."""
    for name, value in config.items():
        if isinstance(value, dict) and name.endswith(("_config", "_parameters", "_scaling", "_attention")):
            yield from ((name, *path) for path in _paths(value))
        yield (name,)


def _value(config: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    return config[path[0]] if len(path) == 1 else _value(config[path[0]], path[1:])


def _changed(config: Mapping[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """The configuration with another value of a setting; None: without it."""
    name, *rest = path
    inner = _changed(config[name], tuple(rest), value) if rest else value
    return {**config, name: inner} if inner is not None else {key: config[key] for key in config if key != name}
