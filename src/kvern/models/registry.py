"""Finds the family that describes a `config.json`.

kvern's own families are listed in `kvern.models.families`. Others register without touching kvern: by the
decorator `register_family`, or by an entry point of the group `kvern.model_families` whose name is a model type or
architecture and whose object is the function; it is imported only when a configuration names it.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from kvern.errors import KvernError, UnsupportedModel
from kvern.io.files import reason
from kvern.models.defaults import completed, with_both, without
from kvern.models.families import own_families
from kvern.models.limits import Unfit, check_config, check_spec
from kvern.plugins import Plugins, imported
from kvern.spec.model import ModelSpec

Config = Mapping[str, Any]
Family = Callable[[Config], ModelSpec]

KEY = "kvern_model"
"""The key of a configuration under which a description is that `kvern describe` wrote (`models/spec_file.py`)."""
_UNREADABLE = (TypeError, ValueError, ArithmeticError, AttributeError, LookupError, RecursionError)

OWN = own_families()
FAMILIES: Plugins[Family] = Plugins("model family", "kvern.model_families", OWN)
"""The families by model type and by architecture."""
_TYPES: dict[Family | str, str] = {where: name for name, where in reversed(OWN.items())}
"""The model type of each family: of kvern's own by `module:function`, of others by the function itself."""


def register_family(*names: str) -> Callable[[Family], Family]:
    """Register the decorated function, `config.json -> ModelSpec`, under model types and architectures.

    Raises ConfigError if another family holds one of the names.
    """

    def register(family: Family) -> Family:
        for name in names:
            FAMILIES.register(name)(family)
        _TYPES[family] = names[0]
        return family

    return register


def spec_from_config(config: Config) -> ModelSpec:
    """Describe the model of a `config.json`, found by its `architectures`, then by its `model_type`.

    A description that `kvern describe` wrote, which is part of the configuration, comes first. Raises UnsupportedModel
    if no family is registered for it, or if the family cannot describe one of its settings.
    """
    names = _names(config)
    if KEY in config:
        described: ModelSpec = imported("kvern.models.spec_file:from_data")(config[KEY])
        return described
    family = _family(names)
    if family is None:
        raise UnsupportedModel(_unknown(names))
    try:
        return _checked(family, config)
    except KvernError:
        raise
    except KeyError as error:
        raise UnsupportedModel(
            f"{names[0]}: config.json lacks {error.args[0]!r:.60}; add it or re-download the model"
        ) from None
    except _UNREADABLE as error:
        raise UnsupportedModel(
            f"{names[0]}: config.json cannot be read as this architecture: {_fault(family, config, error)}"
        ) from error


def _fault(family: Family, config: Config, error: Exception) -> str:
    """A message for an invalid configuration whose reading raised `error`."""
    from kvern.models.bad_setting import bad_setting

    values, text = error.values if isinstance(error, Unfit) else None, reason(error)
    left_out = without(_completed(family, config), config)
    found = bad_setting(left_out, lambda other: _is_readable(family, with_both(config, other)), values or ())
    default = "" if found is None else ", as config.json leaves it out"
    found = found or bad_setting(config, partial(_is_readable, family), values or ())
    if found is None or text.startswith(f"{found[0]} "):
        return text
    return f"{found[0]} is {found[1]}{default}" + ("" if values is None else f": {text}")


def _checked(family: Family, config: Config) -> ModelSpec:
    whole = _completed(family, config)
    check_config(whole)
    spec = family(whole)
    check_spec(spec)
    return spec


def _completed(family: Family, config: Config) -> Config:
    model_type = _TYPES.get(family) or _TYPES.get(f"{family.__module__}:{family.__name__}")
    return completed(config, config.get("model_type"), model_type)


def _is_readable(family: Family, config: Config) -> bool:
    try:
        _checked(family, config)
    except (KvernError, *_UNREADABLE):
        return False
    return True


def is_described(config: Config) -> bool:
    """True if a family, or a file beside it, describes the model of a `config.json`.

    Raises UnsupportedModel for invalid names.
    """
    return KEY in config or _family(_names(config)) is not None


def _names(config: Config) -> list[str]:
    architectures = config.get("architectures") or []
    names = [*(architectures if isinstance(architectures, list) else [architectures]), config.get("model_type") or ""]
    if not all(isinstance(name, str) for name in names):
        raise UnsupportedModel(f"config.json: architectures and model_type are {names!r:.100}: they must be names")
    return [name[:100] for name in names if name]


def _family(names: list[str]) -> Family | None:
    return next((family for family in map(FAMILIES.get, names) if family is not None), None)


def _unknown(names: list[str]) -> str:
    what = f"architecture {' / '.join(names)[:200]} is unknown" if names else "config.json names no architecture"
    model_types = ", ".join(name for name in FAMILIES.names if name.islower())
    return (
        f"{what}; known model types: {model_types}; to add one, decorate a function config -> ModelSpec with "
        f"kvern.models.registry.register_family(name), or expose it as an entry point of group {FAMILIES.group!r}"
    )
