"""A `ModelSpec` as plain data: what `kvern describe` writes beside a model's config.json, and how it is read."""

import hashlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from kvern.errors import KvernError, UnsupportedModel
from kvern.formats.choice import checked
from kvern.io.files import read_object, reason
from kvern.models.limits import MOST_LAYERS, check_spec
from kvern.models.registry import KEY, is_described
from kvern.spec import mixers, model, rope_scaling, rope_stretching
from kvern.spec.model import ModelSpec, Rename

logger = logging.getLogger("kvern")

FILE = "kvern_model.json"
CONFIG = "config"
"""The key of the file under which the digest of the configuration is for which it was made."""
DTYPES = (None, "bfloat16", "float16", "float32")
_CLASSES: Mapping[str, type] = {
    name: item
    for module in (model, mixers, rope_scaling, rope_stretching)
    for name, item in vars(module).items()
    if isinstance(item, type) and is_dataclass(item)
}
_UNREADABLE = (TypeError, ValueError, AttributeError, LookupError, RecursionError, ArithmeticError)
_REPLACEMENT = re.compile(r"(?:[\w.]|\\[1-9])*")


def with_file(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """A configuration with the description that lies beside it, if one does, and no family describes it.

    Raises CorruptCheckpoint, or UnsupportedModel if the description was made for another configuration.
    """
    path = folder / FILE
    if not path.is_file():
        return config
    if is_described(config):
        _tell_once(f"{path} is ignored: a family of kvern describes this model")
        return config
    data = read_object(path)
    if data.pop(CONFIG, None) != digest_of(config):
        raise UnsupportedModel(
            f"{path} was made for another config.json, before an edit or without --hf-overrides: describe the model "
            "again with kvern describe, or remove that file"
        )
    return config | {KEY: data}


def is_current(folder: Path) -> bool:
    """True if a description lies in the folder that was made for the config.json there. Raises CorruptCheckpoint."""
    path = folder / FILE
    return path.is_file() and read_object(path).get(CONFIG) == digest_of(read_object(folder / "config.json"))


@cache
def _tell_once(line: str) -> None:
    logger.warning(line)


def digest_of(config: Mapping[str, Any]) -> str:
    """The digest of what a config.json says, but for the format of weights."""
    config = {name: value for name, value in config.items() if name not in (KEY, "quantization_config")}
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def to_data(spec: ModelSpec) -> dict[str, Any]:
    """The specification as data; runs of equal layers are `[count, layer]`. Its renames have no `transform`."""
    data = _data(spec)
    data["layers"] = [[len(list(run)), _data(layer)] for layer, run in groupby(spec.layers)]
    assert isinstance(data, dict)
    return data


def to_text(spec: ModelSpec, config: Mapping[str, Any]) -> str:
    """The contents of the file for the model of a config.json."""
    return json.dumps({CONFIG: digest_of(config), **to_data(spec)}, indent=1) + "\n"


def from_data(data: Any) -> ModelSpec:
    """The specification in a file's contents, which may be anybody's. Raises UnsupportedModel."""
    try:
        counts = [count for count, _ in data["layers"]]
        if not all(type(count) is int and count > 0 for count in counts) or sum(counts) > MOST_LAYERS:
            raise UnsupportedModel(f"the numbers of layers are {counts!r:.60}: at most {MOST_LAYERS} are possible")
        layers = [layer for count, layer in data["layers"] for layer in [_value(layer)] * count]
        spec = _value({**data, "layers": []} | {"layers": tuple(layers)})
        if not isinstance(spec, ModelSpec):
            raise UnsupportedModel(f"it describes a {type(spec).__name__}, and no ModelSpec")
        check_spec(spec)
        if spec.dtype not in DTYPES:
            raise UnsupportedModel(f"dtype is {spec.dtype!r:.60}: it must be bfloat16, float16 or float32")
        for rename in spec.renames:
            _check_rename(rename)
        re.compile("|".join(("^$", *map(checked, spec.ignored))))  # as one, as the loader joins them
    except KvernError as error:
        raise UnsupportedModel(f"{FILE}: {error}") from None
    except (*_UNREADABLE, re.error, MemoryError) as error:
        raise UnsupportedModel(f"{FILE} cannot be read: {reason(error)}") from error
    return spec


def _data(value: Any) -> Any:
    if is_dataclass(value):
        given = {field.name: getattr(value, field.name) for field in fields(value) if not _is_default(value, field)}
        return {"is": type(value).__name__, **{name: _data(item) for name, item in given.items()}}
    if isinstance(value, tuple | list):
        return [_data(item) for item in value]
    return {name: _data(item) for name, item in value.items()} if isinstance(value, Mapping) else value


def _is_default(value: Any, field: Any) -> bool:
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return bool(default is not MISSING and getattr(value, field.name) == default)


def _value(data: Any) -> Any:
    if isinstance(data, Mapping):
        given = {name: _value(item) for name, item in data.items() if name != "is"}
        return _CLASSES[data["is"]](**given) if "is" in data else given
    return tuple(map(_value, data)) if isinstance(data, Sequence) and not isinstance(data, str) else data


def _check_rename(rename: Rename) -> None:
    """Checks that a rename is fast and possible."""
    groups = re.compile(checked(rename.pattern)).groups
    used = [int(number) for number in re.findall(r"\\(\d)", rename.replacement)]
    if rename.transform is not None or not _REPLACEMENT.fullmatch(rename.replacement) or max(used, default=0) > groups:
        raise UnsupportedModel(f"the rename {rename.pattern!r:.60} to {rename.replacement!r:.60} is not possible")
