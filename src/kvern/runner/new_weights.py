"""Weights that take the place of others between two steps.

files --checked--> a second model, loaded in a thread by the ordinary loader --take--> copied over the first

Steps keep the first model: what was captured, recorded or made from it knows its tensors by their addresses.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvern.config import EngineConfig
from kvern.cpu.cores import available_memory, processes_here
from kvern.drafting.models.choice import OWN_LAYER
from kvern.errors import ConfigError, InvalidWeights, KvernError, in_a_line
from kvern.layers.adapted_linear import AdaptedLinear
from kvern.models.checkpoint import StoredTensor, gguf_file
from kvern.models.loader import HARMLESS, read_config
from kvern.models.registry import spec_from_config
from kvern.models.updates import UpdatedTensors, stamp_of, updated_tensors
from kvern.models.weighted import WeightedModel
from kvern.request.weights import WeightsFound, WeightSource
from kvern.runner.memory import DeviceMemory
from kvern.runner.plan import EIGHT_BIT
from kvern.runner.tensors import parts_of, tensors_in
from kvern.spec.model import ModelSpec

if TYPE_CHECKING:
    from kvern.runner.loaded_model import LoadedModel

SPARE_BYTES = 512 << 20
"""Memory of a GPU that stays for steps."""
OF_STEPS = {"expert_counts", "earlier", "_inputs"}
"""Attributes of models that steps fill."""
TABLES_OF_PARTS = {"_modules", "_parameters", "_buffers"}
"""Attributes of PyTorch's modules, which messages leave out."""
TIED_HEAD = r"^(.*\.)?lm_head\.(?!bias$)"
LoadBeside = Callable[[Sequence[StoredTensor]], Iterable[tuple[WeightedModel, WeightedModel]]]


def check_changeable(config: EngineConfig, spec: ModelSpec, loaded: "LoadedModel") -> None:
    """Raise ConfigError if the weights of an engine with these options cannot change while it runs."""
    reasons = {
        f"{spec.model_type} is computed by transformers": not isinstance(loaded.decoder, WeightedModel),
        "load_format is dummy, and there are no files": config.load_format == "dummy",
        f"kv_cache_dtype is {config.kv_cache_dtype}, whose scales are those of the first weights": (
            config.kv_cache_dtype in EIGHT_BIT
        ),
        "rebalance_experts is on, which moves weights between ranks": bool(config.rebalance_seconds),
        f"draft_model is {OWN_LAYER}, a part of the model that keeps its weights": config.draft_model == OWN_LAYER,
        "executor is ray, whose ranks are on other machines": config.executor == "ray",
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise ConfigError(f"this engine cannot change its weights while it runs: {reason}; restart it with them")


class NewWeights:
    """Loaded weights, and the tensors of the model of steps that they are to be copied over."""

    def __init__(self, found: WeightsFound) -> None:
        self.found = found
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._replaced: list[tuple[object, str, Tensor]] = []
        """Tensors in a library's own format, which is not copied into: by the object that has each, and its name."""
        self._known: dict[int, object] = {}
        self._storages: set[int] = set()
        """The memory of tensors that are copied over: views of it have new numbers, too."""
        self._alone: list[tuple[str, object]] = []

    def pair(self, old: WeightedModel, new: WeightedModel) -> None:
        """Find the places of a model's tensors in another that is made alike.

        Raises InvalidWeights if weights of both are stored differently.
        """
        self._pair(old, new, type(old).__name__)
        for place, value in self._alone:
            if any(not self._is_made_anew(tensor) for tensor in tensors_in(value)):
                raise InvalidWeights(
                    f"{place} keeps numbers of the weights that cannot be made anew beside it: restart"
                )
        self._alone.clear()

    def _is_made_anew(self, tensor: Tensor) -> bool:
        if id(tensor) in self._known:
            return True
        return tensor.layout == torch.strided and tensor.untyped_storage().data_ptr() in self._storages

    @torch.inference_mode()
    def take(self) -> list[Tensor]:
        """Let steps compute with these weights from now on; returns the tensors that are used no longer."""
        for old, new in self._copies:
            old.copy_(new, non_blocking=True)
        gone = [getattr(owner, name) for owner, name, _ in self._replaced]
        for owner, name, new in self._replaced:
            setattr(owner, name, new)
        return gone

    def _pair(self, old: Any, new: Any, place: str) -> None:
        if old is new or id(old) in self._known:
            return
        if isinstance(old, AdaptedLinear):
            old = old.base
        if isinstance(old, float) and old != new:
            raise InvalidWeights(f"{place} is {old:g}, and with these weights {new:g}: restart with them")
        if old is None:
            self._check_empty(new, place)
        elif isinstance(old, Tensor):
            self._pair_tensors(old, new, place)
        elif type(old) is not type(new):
            self._alone.append((place, old))
        else:
            self._known[id(old)] = old
            parts, others = dict(parts_of(old)), dict(parts_of(new))  # steps may add to the former meanwhile
            for name in others.keys() - parts.keys() - OF_STEPS:
                self._check_empty(others[name], f"{place}.{name}")
            for name, value in parts.items():
                if name in OF_STEPS:
                    continue
                within = place if name in TABLES_OF_PARTS else f"{place}.{name}"
                if name not in others:
                    self._alone.append((within, value))
                elif isinstance(value, Tensor) and value.layout != torch.strided and hasattr(old, "__dict__"):
                    self._known[id(value)] = value
                    self._replaced.append((old, name, others[name]))
                else:
                    self._pair(value, others[name], within)

    @staticmethod
    def _check_empty(new: Any, place: str) -> None:
        """Raise InvalidWeights for tensors in a place where the model of steps has none."""
        if any(True for _ in tensors_in(new)):
            raise InvalidWeights(f"{place} is not there in the served model, and with these weights it is: restart")

    def _pair_tensors(self, old: Tensor, new: Any, place: str) -> None:
        forms = [(one.shape, one.dtype, one.layout) if isinstance(one, Tensor) else None for one in (old, new)]
        if forms[0] != forms[1] or old.layout != torch.strided:
            raise InvalidWeights(f"{place} is stored in another form than these weights: restart with them")
        if any(not step and size > 1 for step, size in zip(old.stride(), old.shape, strict=True)):
            raise InvalidWeights(f"{place} has the same memory in several places, which is not copied into: restart")
        self._known[id(old)] = old
        self._storages.add(old.untyped_storage().data_ptr())
        self._copies.append((old, new))


def check_fitting(
    folder: Path, spec: ModelSpec, sources: Sequence[WeightSource], *, has_come: bool = True
) -> UpdatedTensors:
    """Returns the tensors of a model in a folder, with newer ones. Raises InvalidWeights for those that do not fit.

    Without `has_come` the newest have names, shapes and dtypes, and no contents yet.
    """
    harmless = "|".join((*HARMLESS, *((TIED_HEAD,) if spec.tie_word_embeddings else ())))
    return updated_tensors(folder, sources, re.compile(harmless), spec, has_come=has_come)


def read_weights(
    folder: Path,
    spec: ModelSpec,
    sources: Sequence[WeightSource],
    load: LoadBeside,
    check_memory: Callable[[Path], None],
) -> NewWeights:
    """Check new weights of the model in a folder, and load them beside the ones that steps use.

    `check_memory` raises InvalidWeights if there is none for those at a path.
    Raises InvalidWeights, or ConfigError if this model cannot change its weights.
    """
    if gguf_file(folder) is not None:
        raise ConfigError("a model of a GGUF file cannot change its weights while it runs: restart it with them")
    newest = Path(sources[-1].path)
    updated = check_fitting(folder, spec, sources)
    if newest.is_dir() and (newest / "config.json").exists():
        _check_config(newest, folder)
    check_memory(newest)
    found = NewWeights(WeightsFound(is_whole=updated.is_whole, stamp=updated.stamp, names=updated.names))
    try:
        for old, new in load(updated.stored):
            found.pair(old, new)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise InvalidWeights(
            f"there is no memory for {newest} beside the weights of steps: {in_a_line(error)}"
        ) from None
    except KvernError as error:
        raise error if isinstance(error, InvalidWeights) else InvalidWeights(f"{newest}: {error}") from None
    if stamp_of(newest) != updated.stamp:
        raise InvalidWeights(f"{newest} was changed while it was read: write the files before, then try again")
    return found


def _check_config(path: Path, folder: Path) -> None:
    """Raise InvalidWeights if `config.json` beside new weights describes another model than that of the folder."""
    try:
        configs = [read_config(place) for place in (path, folder)]
        found, served = map(spec_from_config, configs)
    except KvernError as error:
        raise InvalidWeights(str(error)) from None
    names = [name for name in vars(served) if name != "dtype" and getattr(found, name) != getattr(served, name)]
    stored = [config.get("quantization_config") for config in configs]
    names += [] if stored[0] == stored[1] else ["quantization_config"]
    if names:
        raise InvalidWeights(
            f"{path / 'config.json'} describes another model than is served: {', '.join(names)} differ"
        )


def check_memory(models: Sequence[object], memory: DeviceMemory, engines: int, path: Path) -> None:
    """Raise InvalidWeights if there is no memory for the weights of a path beside those of `models`, which are alike.

    `engines`: processes of this machine that read as many at the same time, in the host's memory.
    """
    weight_bytes = sum(model.weight_bytes for model in models if isinstance(model, WeightedModel))
    if (device := memory.device).type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = memory.free_and_total()[0] + reserved - SPARE_BYTES
        advice = "lower kv_cache_tokens" if memory.share else "lower gpu_memory_share"
    else:
        weight_bytes *= processes_here(engines)
        free, advice = available_memory(), "end other programs"
    if weight_bytes > free:
        raise InvalidWeights(
            f"the weights of {path} take {weight_bytes / 1e9:.1f} GB beside those of steps, and "
            f"{max(free, 0) / 1e9:.1f} GB are free: {advice}, or restart with them"
        )
