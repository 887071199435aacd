"""Commands whose model is a bundle of ``kvern deploy``: its options count unless others are given."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Set
from pathlib import Path
from typing import Any

from kvern.cli.output import say
from kvern.deploy.description import KERNELS, NAME, Bundled, device_names, read_bundle
from kvern.deploy.journal import UNFINISHED, key_of
from kvern.errors import ConfigError
from kvern.io.bytecode import cache_home
from kvern.options.arguments import engine_config
from kvern.version import __version__


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
    bundled.check_sizes()
    apart = bundled.differences()
    notes = [f"{folder} was tuned elsewhere ({apart}): its options may not be the fastest here"] if apart else []
    if apart and type(command).__name__ == "ServeCommand":
        bundled, notes = tuned_here(bundled, apart)
    options = {name: value for name, value in bundled.options.items() if name not in given or name == "model"}
    if (bundled.folder / KERNELS).exists():
        notes = [*notes, f"{bundled.folder / KERNELS} is not used: code is loaded from kvern's own cache folder alone"]
    config = engine_config(options.pop("model"), options)  # which checks names and values
    changed = {name: getattr(config, name) for name in ("model", *options)}
    engine = dataclasses.replace(command.engine, **changed)
    others = {"name": None, "divided": True}
    others = {name: value for name, value in others.items() if hasattr(command, name)}
    return dataclasses.replace(command, engine=engine, **others), notes


def tuned_here(bundled: Bundled, apart: str) -> tuple[Bundled, list[str]]:
    """Returns a bundle with options that are tuned for this machine, once for each, and what came of it.

    Its weights stay those of the folder that was named, which may have been moved since it was tuned.
    """
    key = key_of((bundled.folder / NAME).read_text(), device_names(), __version__)
    out = Path(os.environ.get("KVERN_CACHE_DIR") or cache_home()) / "deploy" / key
    if not (out / NAME).is_file() or (out / UNFINISHED).is_file():
        say(f"{bundled.folder} was tuned elsewhere ({apart}): it is tuned again, in {out}")
        if tune(bundled.folder, out):
            return bundled, ["it could not be tuned, and is served with the options of the other machine"]
    found = Bundled(bundled.folder, bundled.bundle, read_bundle(out).engine)
    return found, [f"options are those that were tuned for this machine, in {out}"]


def tune(folder: Path, out: Path) -> int:
    """Tunes a bundle in a process of its own, and returns its exit code."""
    command = [sys.executable, "-m", "kvern.deploy.again", str(folder), str(out)]
    return subprocess.run(command, check=False).returncode  # noqa: S603
