"""A `ModelSpec` as plain data: what `kvern describe` writes beside a model's config.json, and how it is read."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from kvern.errors import KvernError, UnsupportedModel
from kvern.formats.choice import checked
from kvern.io.files import read_object, reason
from kvern.models.limits import MOST_LAYERS, check_spec
from kvern.models.registry import KEY
from kvern.spec import mixers, model, rope_scaling, rope_stretching
from kvern.spec.model import ModelSpec, Rename

FILE = "kvern_model.json"
_CLASSES: Mapping[str, type] = {
    name: item
    for module in (model, mixers, rope_scaling, rope_stretching)
    for name, item in vars(module).items()
    if isinstance(item, type) and is_dataclass(item)
}
_REPLACEMENT = re.compile(r"(?:[\w.]|\\[1-9])*")


def with_file(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """A configuration with the description that lies beside it, if one does. Raises CorruptCheckpoint."""
    path = folder / FILE
    return config | {KEY: read_object(path)} if path.is_file() else config


def to_data(spec: ModelSpec) -> dict[str, Any]:
    """The specification as data; runs of equal layers are `[count, layer]`. Its renames have no `transform`."""
    data = _data(spec)
    data["layers"] = [[len(list(run)), _data(layer)] for layer, run in groupby(spec.layers)]
    assert isinstance(data, dict)
    return data


def to_text(spec: ModelSpec) -> str:
    """The contents of the file."""
    return json.dumps(to_data(spec), indent=1) + "\n"


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
        for rename in spec.renames:
            _check_rename(rename)
    except KvernError as error:
        raise UnsupportedModel(f"{FILE}: {error}") from None
    except (TypeError, ValueError, AttributeError, LookupError, RecursionError, ArithmeticError, re.error) as error:
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
