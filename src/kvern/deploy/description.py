"""`deploy.toml`: what a bundle serves and how it was made, for `kvern serve DIR` and `kvern deploy DIR/deploy.toml`.

::

    [bundle]     model, the hub's commit or the folder of weights, digests, what was asked for, the machine
    [engine]     options of `kvern serve`
"""

import dataclasses
import json
import os
import re
import tomllib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from kvern.bench.machine import hardware
from kvern.config import OPTIONAL, EngineConfig
from kvern.errors import ConfigError, shown, without_passwords
from kvern.io.files import READERS, digest_of, open_regular, read_at, reason
from kvern.serving.places import seen_gpus
from kvern.version import __version__

NAME = "deploy.toml"
KERNELS = "kernels"
"""The folder in which bundles of earlier versions hold compiled kernels; nothing is loaded from it."""
ALLOWED = frozenset(
    (
        *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel"),
        *("max_batch_tokens", "max_batch_requests", "target_itl", "kv_cache_tokens", "kv_cache_dtype", "max_model_len"),
        *("proposer", "kv_tier", "served_model_name"),
    )
)
"""The options that a bundle may give, which may come from anyone: no other names files, servers or code."""
PROPOSERS = ("ngram", "suffix")
"""The sources of drafts that a bundle may name: they need nothing but the engine's own text."""
INSIDE = ("weights", "workload", "calibration")
"""Fields that may name files of the bundle, and of no other folder."""
REPORTS = (".html", "_report.json")
"""Ends of the names of files of weights that only people read."""
FORMAT = 1
MOST_BYTES = 1 << 20


class Description(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The section `[bundle]`. `weights`: the folder in the bundle, or None with the commit of the hub or the name of an
    embedded model; `digest`: of quantized weights, `identity`: of the model's files. `workload` and `calibration` may
    name files in the bundle. `files`: "SIZE DIGEST NAME" of each file of the weights in the bundle."""

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
    files: list[str] = []


class Bundled(msgspec.Struct):
    """A bundle: its folder, its description, and the options of its engines without the model."""

    folder: Path
    bundle: Description
    engine: dict[str, Any]

    @property
    def options(self) -> dict[str, Any]:
        """The options of engines, with the model."""
        if self.bundle.weights is not None:
            return {"model": self.model, **self.engine}
        pinned = {} if self.bundle.revision is None else {"revision": self.bundle.revision}
        return {"model": self.model, **pinned, **self.engine}

    @property
    def model(self) -> str:
        """The model whose weights are served: the bundle's folder, or a commit of the hub, or an embedded one.

        Raises ConfigError for all else, or if a folder here has the name of such a model and could be taken for it.
        """
        if self.bundle.weights is not None:
            return str(self.folder / self.bundle.weights)
        found = self.source
        if Path(found).is_absolute() or ("/" in found and self.bundle.revision is None):
            raise ConfigError(
                f"{self.folder / NAME} names {shown(found)} in place of weights, and no folder is taken from a bundle, "
                "nor a model of the hub without its revision: make the bundle again of that model, or kvern serve it"
            )
        return found

    @property
    def source(self) -> str:
        """The model of which the bundle was made. Raises ConfigError as `model` does."""
        found = self.bundle.model
        if not Path(found).is_absolute() and Path(found).expanduser().exists():
            raise ConfigError(
                f"{Path(found).absolute()} has the name of the bundle's model, and is another one: start in another "
                "working directory"
            )
        return found

    def check_sizes(self) -> None:
        """Raises ConfigError if a file of the weights is missing or has another size."""
        for line in self.bundle.files if self.bundle.weights is not None else ():
            size, _, name = line.split(" ", 2)
            path = self.folder / str(self.bundle.weights) / name
            found = path.stat().st_size if path.is_file() else None
            if str(found) != size:
                told = "is missing" if found is None else f"has {found} bytes, and had {size}"
                raise ConfigError(f"{path} {told}: copy the bundle again, or make it again by kvern deploy")

    def check_contents(self) -> None:
        """Raises ConfigError if a file of the weights is not as it was written. Reads all of them."""
        self.check_sizes()
        weights = self.bundle.weights
        if weights is None:
            return
        if not self.bundle.files:
            raise ConfigError(f"{self.folder / NAME} has no digests of the weights: make the bundle again of its model")
        try:
            found = set(contents_of(*(self.folder / weights).iterdir()))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.folder / weights} cannot be read: {reason(error)}") from None
        for line in self.bundle.files:
            if line not in found:
                path = self.folder / weights / line.split(" ", 2)[2]
                raise ConfigError(f"{path} is not what was written: copy the bundle again, or make it again")

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


def contents_of(*paths: Path) -> list[str]:
    """Returns size, digest and name of each file of weights. Raises OSError."""

    def content(path: Path) -> str:
        with open_regular(path) as stream:
            return f"{path.stat().st_size} {digest_of(stream).hex()} {path.name}"

    files = [path for path in sorted(paths) if path.is_file() and not path.name.endswith(REPORTS)]
    with ThreadPoolExecutor(READERS) as threads:
        return list(threads.map(content, files))


def as_toml(bundle: Description, engine: Mapping[str, Any], comments: list[str]) -> bytes:
    """Returns the file's content, which is read back before. Raises ConfigError for what TOML cannot have."""
    sections = {"bundle": msgspec.to_builtins(bundle), "engine": msgspec.to_builtins(engine)}
    lines = ["# " + "".join(sign if sign.isprintable() else " " for sign in line) for line in comments]
    for title, values in sections.items():
        lines += ["", f"[{title}]", *(f"{name} = {_value(value)}" for name, value in values.items())]
    text = "\n".join(lines) + "\n"
    try:
        content = text.encode()
        is_whole = tomllib.loads(text) == sections
    except ValueError as error:
        raise ConfigError(f"{NAME} cannot be written: {reason(error)}; rename the model's folder") from None
    if not is_whole:
        raise ConfigError(f"{NAME} cannot be written: it would be read as something else")
    return content


def _value(value: Any) -> str:
    """Returns a value of JSON in TOML, which has other tables, and no control characters in strings."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_value(name)} = {_value(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def read_bundle(folder: Path) -> Bundled:
    """Reads the bundle in a folder. Raises ConfigError."""
    path = folder / NAME
    try:
        with open_regular(path, MOST_BYTES, folder) as stream:
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
    if wrong := [line for line in bundle.files if not re.fullmatch(r"\d+ [0-9a-f]+ [^/]+", line)]:
        raise ConfigError(f"{path} has {shown(wrong[0])} in files: it must be a size, a digest and a name")
    for name in INSIDE:
        if (told := getattr(bundle, name)) is not None:
            _check_inside(folder, name, told)
    for name, value in engine.items():
        if told := _refusal(name, value):
            raise ConfigError(f"{path} has {shown(name)} in [engine]: {told}; remove that line")
    return Bundled(folder.absolute(), bundle, engine)


def _check_inside(folder: Path, name: str, told: str) -> None:
    """Raises ConfigError if a field names something outside of the bundle, by itself or by a symbolic link."""
    if Path(told).is_absolute() or ".." in Path(told).parts:
        raise ConfigError(f"{folder / NAME} has {shown(told)} as {name}, which is outside of the bundle: copy it there")
    real, path = os.path.realpath(folder), folder / told
    try:
        for found in (path, *(path.rglob("*") if os.path.isdir(path) else ())):
            if not Path(os.path.realpath(found)).is_relative_to(real):
                raise ConfigError(f"{found} is a link that leads out of the bundle: put the file itself there")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / NAME} has {shown(told)} as {name}: {reason(error)}; correct it") from None


def _refusal(name: str, value: Any) -> str:
    """Returns why no bundle may give an option; empty: it may."""
    if name not in ALLOWED:
        known = name in {option.name for option in dataclasses.fields(EngineConfig)}
        return "no bundle may give it, give it as a flag" if known else "there is no such option"
    if name == "proposer" and value not in PROPOSERS:
        return f"it is {shown(value)}, and a bundle may name {' and '.join(PROPOSERS)} alone"
    if name == "kv_tier":
        tiers = value if isinstance(value, list) else [value]
        if wrong := [tier for tier in tiers if str(tier).removesuffix(OPTIONAL).partition(":")[0] != "host"]:
            return f"it has {without_passwords(shown(wrong[0]))}, and a bundle may name host memory alone"
        if tiers is not value:
            return f"it is {shown(value)}, and must be a list"
    return ""
