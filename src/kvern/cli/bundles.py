"""Commands whose model is a bundle of ``kvern deploy``: its options count unless others are given."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Set
from pathlib import Path
from typing import Any

from kvern.deploy.description import KERNELS, Bundled, read_bundle
from kvern.deploy.journal import UNFINISHED
from kvern.errors import ConfigError
from kvern.options.arguments import engine_config


def with_bundle(command: Any, given: Set[str]) -> tuple[Any, list[str]]:
    """Returns a command with the options of its bundle, but those that were `given`, and notes for the user.

    Raises ConfigError for a bundle that is unfinished or damaged.
    """
    folder = Path(getattr(command, "name", None) or command.engine.model)
    if (folder / UNFINISHED).is_file():
        raise ConfigError(
            f"{folder} is an unfinished bundle: the kvern deploy command that began it goes on with it, see "
            f"{folder / UNFINISHED}"
        )
    bundled = read_bundle(folder)
    options = {name: value for name, value in bundled.options.items() if name not in given or name == "model"}
    if os.access(folder / KERNELS, os.W_OK) and "cache_dir" not in given:
        options["cache_dir"] = str((folder / KERNELS).absolute())
    config = engine_config(options.pop("model"), options)  # which checks names and values
    changed = {name: getattr(config, name) for name in ("model", *options)}
    engine = dataclasses.replace(command.engine, **changed)
    others = {"name": None, "divided": True}
    others = {name: value for name, value in others.items() if hasattr(command, name)}
    return dataclasses.replace(command, engine=engine, **others), notes_of(bundled)


def notes_of(bundled: Bundled) -> list[str]:
    """Returns what differs between this machine and the one that a bundle was tuned on."""
    apart = bundled.differences()
    return [f"{bundled.folder} was tuned elsewhere ({apart}): its options may not be the fastest here"] if apart else []
