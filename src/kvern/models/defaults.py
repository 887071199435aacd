"""Defaults of each model type for settings that `config.json` omits, in defaults.json.

They are those of transformers' configuration classes. `python -m tests.support.model_defaults` writes the file, with a
line for each type, and `tests/models/test_model_defaults.py` compares it with the installed transformers.
"""

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

TEXT = "text_config"
"""The language model's part of a configuration."""


@cache
def _table() -> dict[str, dict[str, Any]]:
    return dict(json.loads(files("kvern.models").joinpath("defaults.json").read_bytes()))


def completed(config: Mapping[str, Any], *model_types: object) -> dict[str, Any]:
    """The configuration completed with the defaults of the first of these types that has any."""
    row = next((_table()[name] for name in model_types if isinstance(name, str) and name in _table()), {})
    said = {name: value for name, value in config.items() if name != "rope_parameters" or value is not None}
    if isinstance(text := config.get(TEXT), dict):
        said[TEXT] = completed(text, text.get("model_type"), f"{config.get('model_type')}_text")
    return row | said


def without(config: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a configuration that another does not have."""
    rest = {name: value for name, value in config.items() if name not in other}
    return rest | {TEXT: without(config[TEXT], other[TEXT])} if isinstance(other.get(TEXT), dict) else rest


def with_both(config: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of both; `other` takes precedence."""
    texts = [each[TEXT] for each in (config, other) if isinstance(each.get(TEXT), dict)]
    return {**config, **other} | ({TEXT: texts[0] | texts[1]} if len(texts) > 1 else {})
