"""Several models as a user names them: in options, in a configuration file, or in a folder."""

import dataclasses
import math
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvern.config import EngineConfig
from kvern.errors import ConfigError, did_you_mean, shown
from kvern.io.files import read_object
from kvern.models.hub import WEIGHTS, local_model
from kvern.options.values import converted
from kvern.plugins import imported
from kvern.residency.gpus import LATER_BYTES, LATER_SHARE, GpuMemory, gpu_memory, share_alone, shares
from kvern.residency.policy import Footprint, Terms
from kvern.serving.places import seen_gpus

GPU_FILE = Path("/dev/nvidiactl")
"""A file that NVIDIA's driver makes where there is a GPU."""
OF_ONE_MODEL = (
    "model",
    "revision",
    "tokenizer",
    "chat_template",
    "chat_template_kwargs",
    "hf_overrides",
    "draft_model",
    "adapters",
    "kv_events_config",
    "kv_tier_listen",
    "prefill_server",
    "role",
    "served_model_name",
)
"""Engine options that say something of one model; all others hold for each model that has no value of its own."""
OWN = {"aliases": tuple[str, ...], "pin": bool, "keep_alive": str | float, "weight": float}
"""Options of a model that no engine has, and their types."""
UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
LONGEST_STAY = 366 * 86400.0
"""The seconds of a `keep_alive` above which there is no end that a calendar knows."""
PROCESS_BYTES = 400_000_000
"""An estimate of what an engine's process takes beside weights and KV cache."""
CACHE_BYTES = 1 << 30
"""An estimate of a KV cache, unless its number of tokens is given and makes it smaller."""
START_SECONDS = 3.0
BYTES_PER_SECOND = 1e9
"""Estimates of a process's start, and of loading weights; both are replaced by what the first wake takes."""


@dataclass(frozen=True)
class ServedModel:
    """One of several models of a server."""

    engine: EngineConfig
    terms: Terms = Terms()
    gpu: GpuMemory | None = None
    """The GPUs that it shares with other models; None: it runs on the CPU."""
    is_guess: bool = False
    """Its share of a GPU was chosen before its files were here."""

    @property
    def name(self) -> str:
        """The name in lists and metrics."""
        return self.engine.model_names[0]

    @property
    def names(self) -> list[str]:
        """The values of `model` for this model and its adapters, as far as they are known before it is loaded."""
        return [*self.engine.model_names, *self.engine.adapters]

    @property
    def files(self) -> list[Path]:
        """The files of its weights; none if they are not on this machine yet. Raises ModelNotFound."""
        found = local_model(self.engine.model or "") if self.engine.model is not None else None
        if found is None:
            return []
        if found.is_file():
            return list(_parts(found))
        return [*found.glob(WEIGHTS)]

    @property
    def gpu_bytes(self) -> int | None:
        """The bytes that it takes of each GPU while it is awake; None: it runs on the CPU."""
        return None if self.gpu is None else int((self.engine.gpu_memory_share or 1.0) * self.gpu.total)

    def sized(self, folder: Path) -> "ServedModel":
        """Returns it with a share of the GPU that fits its files, once these are in a folder."""
        if not self.is_guess or self.gpu is None:
            return self
        share = share_alone(_size(_weights_in(folder)) // self.engine.ranks, self.gpu)
        return dataclasses.replace(
            self, engine=dataclasses.replace(self.engine, gpu_memory_share=share), is_guess=False
        )

    def estimate(self, folder: Path | None = None) -> Footprint:
        """Returns what it probably takes. `folder`: that of its files, once it is known. Raises ModelNotFound."""
        files = self.files or ([] if folder is None else _weights_in(folder))
        weights = _size(files)
        seconds = START_SECONDS + weights / BYTES_PER_SECOND
        if self.gpu_bytes is not None:
            later = min(self.gpu_bytes, LATER_BYTES + int(LATER_SHARE * self.gpu_bytes))
            return Footprint(self.gpu_bytes, seconds, cache=later)
        cache = self._cache_bytes(files)
        return Footprint(PROCESS_BYTES + int(1.1 * weights) + cache, seconds, cache=cache)

    def _cache_bytes(self, files: Sequence[Path]) -> int:
        tokens = self.engine.kv_cache_tokens
        if tokens is None or not files or not (path := files[0].with_name("config.json")).is_file():
            return CACHE_BYTES
        config = read_object(path)
        config = config.get("text_config", config)
        layers, width = (config.get(name) for name in ("num_hidden_layers", "hidden_size"))
        most = tokens * layers * width * 8 if isinstance(layers, int) and isinstance(width, int) else CACHE_BYTES
        return min(CACHE_BYTES, most)  # keys and values in 32 bits, of as many heads as there are queries


def one_or_several(
    engine: EngineConfig, models: Mapping[str, Any], folder: Path | None
) -> tuple[EngineConfig, list[ServedModel]]:
    """Returns what `served_models` finds; a single model that may always stay awake is an engine's options alone."""
    found = served_models(engine, models, folder)
    return (found[0].engine, []) if is_alone(found) else (engine, found)


def is_alone(models: Sequence[ServedModel]) -> bool:
    """True for one model that may always stay awake."""
    return len(models) == 1 and models[0].terms == Terms()


def served_models(
    engine: EngineConfig, models: Mapping[str, Any], folder: Path | None, source: str = "models"
) -> list[ServedModel]:
    """Returns the models of a server: that of `engine` if it names one, those by name, and those in a folder.

    `models` maps names to options, or to the model alone. The first one answers requests that name none.

    Raises ConfigError if there is none, if two have one name, or for a wrong option; ModelNotFound.
    """
    found = [] if engine.model is None else [ServedModel(engine)]
    plain = EngineConfig()
    own = {name: getattr(plain, name) for name in OF_ONE_MODEL if getattr(engine, name) != getattr(plain, name)}
    if own and not found:
        raise ConfigError(f"{next(iter(own))} is for one model: write it below that model in {source}")
    common = dataclasses.replace(engine, **own)
    found += [_model(name, options, common, f"{source}.{name}") for name, options in models.items()]
    if folder is not None:
        named = {name for one in found for name in one.names}
        found += [one for one in in_folder(folder, common) if one.name not in named]
    if not found:
        raise ConfigError(f"models_dir {folder} has no model: put folders with config.json there, or GGUF files")
    names = [name for one in found for name in one.names]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"{twice} names two models or adapters: give each a name of its own")
    weights = [_size(one.files) for one in found]  # a model that is nowhere is refused
    return found if is_alone(found) else _placed(found, weights)


def _placed(models: list[ServedModel], weights: Sequence[int]) -> list[ServedModel]:
    """Returns models that share the memory of this machine, or of its GPUs. Raises ConfigError."""
    if ray := next((one for one in models if one.engine.executor == "ray"), None):
        raise ConfigError(f"model {ray.name}: several models in one server run on one machine: leave executor ray out")
    gpus = seen_gpus(models[0].engine) if has_gpu() else []
    on_gpu = [one.engine.device == "cuda" or (one.engine.device == "auto" and bool(gpus)) for one in models]
    if not any(on_gpu):
        return [
            dataclasses.replace(one, engine=dataclasses.replace(one.engine, elastic_kv_cache=True)) for one in models
        ]
    if not all(on_gpu):
        names = [models[on_gpu.index(is_so)].name for is_so in (True, False)]
        raise ConfigError(
            f"model {names[0]} runs on a GPU and {names[1]} on the CPU: the models of a server share one memory, so "
            "give all the same device"
        )
    if alone := next((one for one in models if one.engine.enable_dp_attention), None):
        raise ConfigError(f"model {alone.name}: with enable_dp_attention a model on GPUs is the only one of a server")
    if not gpus:
        raise ConfigError("device is cuda, and this process sees no GPU: set CUDA_VISIBLE_DEVICES, or device cpu")
    used = gpus[: max(one.engine.ranks * one.engine.data_parallel_size for one in models)]
    given = [one.engine.gpu_memory_share for one in models]
    memory = gpu_memory(used, is_shared_out=None not in given)
    found = shares([size // one.engine.ranks for one, size in zip(models, weights, strict=True)], given, memory)
    placed = []
    for one, share, size in zip(models, found, weights, strict=True):
        chosen = one.engine.gpu_memory_share is None
        elastic = one.engine.elastic_kv_cache or chosen
        engine = dataclasses.replace(one.engine, enable_sleep=True, gpu_memory_share=share, elastic_kv_cache=elastic)
        is_guess = chosen and not size
        placed.append(dataclasses.replace(one, engine=engine, gpu=memory, is_guess=is_guess))
    return placed


def has_gpu() -> bool:
    """True if `device auto` may be an NVIDIA GPU. PyTorch, which knows, takes seconds to import."""
    return GPU_FILE.exists()


def in_folder(folder: Path, common: EngineConfig) -> list[ServedModel]:
    """Returns the models in a folder: folders of checkpoints, also of organisation/name, and GGUF files."""
    if not folder.is_dir():
        raise ConfigError(f"models_dir is {folder}: there is no such folder")
    found: dict[str, Path] = {}
    for config in sorted([*folder.glob("*/config.json"), *folder.glob("*/*/config.json")]):
        if any(config.parent.glob(WEIGHTS)):
            found[config.parent.relative_to(folder).as_posix()] = config.parent
    files = [path for pattern in ("*.gguf", "*/*.gguf", "*/*/*.gguf") for path in folder.glob(pattern)]
    models_of = imported("kvern.formats.gguf.files:models_of")
    for parts in models_of(path.relative_to(folder).as_posix() for path in files).values():
        stem = re.sub(r"-\d{5}-of-\d{5}$", "", Path(parts[0]).stem)
        found.setdefault(stem if stem not in found else Path(parts[0]).with_suffix("").as_posix(), folder / parts[0])
    return [
        ServedModel(dataclasses.replace(common, model=str(path), served_model_name=(name,)))
        for name, path in found.items()
    ]


def _model(name: str, given: Any, common: EngineConfig, source: str) -> ServedModel:
    """Returns a model of these options. Raises ConfigError."""
    options = {"model": given} if isinstance(given, str) else given
    if not isinstance(options, Mapping):
        raise ConfigError(f"{source} is {shown(given)}: it must be a model, or a table of options with a model")
    types = {**typing.get_type_hints(EngineConfig), **OWN}
    values: dict[str, Any] = {}
    for key, value in options.items():
        option = key.replace("-", "_")
        if option not in types:
            raise ConfigError(f"{source}.{key} is no option of a model{did_you_mean(option, types)}")
        values[option] = converted(option, value, types, f"{source}.{key}", strict=True)
    if values.get("model") is None:
        raise ConfigError(f"{source} has no model: give the folder, GGUF file, hub id, or name of an embedded model")
    aliases, pin = values.pop("aliases", ()), values.pop("pin", False)
    weight = values.pop("weight", 1.0)
    if not 0 < weight < math.inf:
        raise ConfigError(f"{source}.weight is {weight}: it must be above 0")
    terms = Terms(weight, pin, keep_alive_of(values.pop("keep_alive", -1), f"{source}.keep_alive"))
    values["served_model_name"] = (name, *aliases, *values.get("served_model_name", ()))
    return ServedModel(dataclasses.replace(common, **values), terms)


def keep_alive_of(value: object, source: str) -> float | None:
    """Returns the seconds that a model stays awake without requests, from seconds or a time such as 5m or 1h30m; None
    for a negative one, or more than a year: until others need the memory. Raises ConfigError."""
    text = str(value).strip()
    sign, text = (-1.0, text[1:]) if text.startswith("-") else (1.0, text)
    parts = re.findall(r"(\d+(?:\.\d+)?)([a-z]*)", text)
    if "".join(number + unit for number, unit in parts) != text or not parts:
        parts = [("", "?")]
    if not all(unit in UNITS for _, unit in parts):
        raise ConfigError(f"{source} is {shown(value)}: it must be seconds, or a time such as 90s, 5m or 1h30m")
    seconds = sum(float(number) * UNITS[unit] for number, unit in parts)
    return None if sign < 0 or seconds > LONGEST_STAY else seconds


def _parts(file: Path) -> Iterator[Path]:
    """Yields the files of a GGUF model, which may be split."""
    found = re.fullmatch(r"(.*-)\d{5}(-of-\d{5}\.gguf)", file.name)
    yield from file.parent.glob(f"{found[1]}*{found[2]}") if found else (file,)


def _weights_in(folder: Path) -> list[Path]:
    """Returns the files of weights that were downloaded to a folder."""
    return [*folder.glob(WEIGHTS), *folder.glob("*.gguf")]


def _size(files: Sequence[Path]) -> int:
    return sum(file.stat().st_size for file in files)
