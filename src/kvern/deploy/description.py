"""`deploy.toml`: what a bundle serves and how it was made, for `kvern serve DIR` and `kvern deploy DIR/deploy.toml`.

::

    [bundle]     model, the hub's commit or the folder of weights, digests, what was asked for, the machine
    [engine]     options of `kvern serve`
"""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvern.bench.machine import hardware
from kvern.config import EngineConfig
from kvern.errors import ConfigError
from kvern.io.files import open_regular, read_at, reason
from kvern.serving.places import seen_gpus
from kvern.version import __version__

NAME = "deploy.toml"
KERNELS = "kernels"
"""The folder of a bundle with the kernels that were built and measured on a GPU."""
FORMAT = 1
MOST_BYTES = 1 << 20


class Description(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The section `[bundle]`. `weights`: the folder in the bundle, or None with the commit of the hub or the name of an
    embedded model; `digest`: of quantized weights, `identity`: of the model's files. `workload` and `calibration` may
    name files in the bundle."""

    format: int
    model: str
    kvern: str
    torch: str
    devices: list[str]
    weights: str | None = None
    revision: str | None = None
    digest: str | None = None
    identity: str = ""
    is_quantized: bool = False
    max_loss: float | None = None
    target: str | None = None
    workload: str | None = None
    calibration: str | None = None
    memory: int | None = None


class Bundled(msgspec.Struct):
    """A bundle: its folder, its description, and the options of its engines without the model."""

    folder: Path
    bundle: Description
    engine: dict[str, Any]

    @property
    def options(self) -> dict[str, Any]:
        """The options of engines, with the model."""
        if self.bundle.weights is not None:
            return {"model": str(self.folder / self.bundle.weights), **self.engine}
        pinned = {} if self.bundle.revision is None else {"revision": self.bundle.revision}
        return {"model": self.bundle.model, **pinned, **self.engine}

    def differences(self) -> str:
        """Returns in which devices and version this machine differs from the one that tuned; empty: in none."""
        here = {"kvern": __version__, "devices": device_names()}
        apart = {name: (getattr(self.bundle, name), value) for name, value in here.items()}
        return "; ".join(f"{name} {_told(one)}, here {_told(two)}" for name, (one, two) in apart.items() if one != two)


def _told(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else str(value)


def device_names() -> list[str]:
    """Returns the devices of this machine that a bundle is tuned for: the GPUs that may be used, or the processor."""
    found = hardware()
    gpus = len(seen_gpus(EngineConfig()))
    return found.gpus[:gpus] if gpus else [f"{found.processor}, {found.cores} cores"]


def as_toml(bundle: Description, engine: Mapping[str, Any], comments: list[str]) -> str:
    """Returns the file's text."""
    lines = [f"# {line}" for line in comments]
    for title, values in (("bundle", msgspec.to_builtins(bundle)), ("engine", engine)):
        lines += ["", f"[{title}]", *(f"{name} = {json.dumps(value)}" for name, value in values.items())]
    return "\n".join(lines) + "\n"


def read_bundle(folder: Path) -> Bundled:
    """Reads the bundle in a folder. Raises ConfigError."""
    path = folder / NAME
    try:
        with open_regular(path, MOST_BYTES) as stream:
            text = bytes(read_at(stream, 0, path.stat().st_size)).decode()
        read = tomllib.loads(text)
        bundle = msgspec.convert(read.get("bundle"), Description)
        engine = msgspec.convert(read.get("engine", {}), dict[str, Any])
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} is no description of a bundle: {reason(error)}; make it again by kvern deploy"
        ) from None
    if bundle.format != FORMAT:
        raise ConfigError(f"{path} has format {bundle.format}, and this version of kvern reads {FORMAT}")
    return Bundled(folder.absolute(), bundle, engine)
