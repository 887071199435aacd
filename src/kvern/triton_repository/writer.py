"""The folders and files of a model repository."""

import json
from collections.abc import Mapping
from pathlib import Path

from kvern.errors import ConfigError
from kvern.io.files import reason

HERE = Path(__file__).parent


def config(parameters: Mapping[str, str]) -> str:
    """Returns a config.pbtxt; `auto_complete_config` of the model adds inputs, outputs and the policy to it."""
    lines = ['backend: "python"', "instance_group [{ kind: KIND_MODEL count: 1 }]"]
    for name, value in parameters.items():
        text = json.dumps(value, ensure_ascii=False)
        lines.append(f'parameters {{ key: "{name}" value {{ string_value: {text} }} }}')
    return "\n".join(lines) + "\n"


def write_model(repository: Path, name: str, parameters: Mapping[str, str], overwrite: bool = False) -> Path:
    """Writes a model and returns its folder. Raises ConfigError."""
    folder = repository / name
    if folder.exists() and not overwrite:
        raise ConfigError(f"{folder} exists: choose another --name, or replace its files by --overwrite")
    try:
        (folder / "1").mkdir(parents=True, exist_ok=True)
        (folder / "config.pbtxt").write_text(config(parameters), encoding="utf-8")
        (folder / "1" / "model.py").write_bytes((HERE / "model.py").read_bytes())
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {reason(error)}") from error
    return folder
