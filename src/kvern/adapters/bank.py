"""The weights of adapters: of all that an engine knows in host memory, and of some on the device, for its rows."""

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from pathlib import Path

import torch

from kvern.adapters.peft import Adapter, LowRank, Target, linear_layers, read_adapter, targets_of
from kvern.device.transfer import upload
from kvern.errors import ConfigError
from kvern.layers.adapted_linear import AdaptedLinear, AdaptedRows, Matrices, StackedLinear
from kvern.layers.step_context import NO_ADAPTERS, StepAdapters
from kvern.models.decoder import Decoder
from kvern.spec.model import ModelSpec


class AdapterBank:
    """Replaces the linear layers of a decoder's blocks by adapted ones, whose weights `load` fills.

    `places` adapters of at most `rank` fit. Without `kernels` PyTorch adds them, which a CUDA graph cannot capture.
    Raises ConfigError if the device's memory does not hold them.
    """

    def __init__(self, decoder: Decoder, places: int, rank: int, kernels: bool) -> None:
        self.targets = targets_of(decoder)
        self.captures = kernels
        self.device = decoder.build.device
        self._layers: dict[str, AdaptedLinear[object]] = {}
        layers = list(linear_layers(decoder))
        if kernels:
            self._check_memory(decoder, places, rank)
        for path, linear in layers:
            adapted: AdaptedLinear[object]
            if kernels:
                from kvern.layers.fused_adapters import FusedAdaptedLinear

                adapted = FusedAdaptedLinear(linear, places, rank, decoder.build.deterministic)  # type: ignore[assignment]
            else:
                adapted = StackedLinear(linear)  # type: ignore[assignment]
            self._layers[path] = adapted
            _, place, inner = path.split(".", 2)
            parent, _, name = inner.rpartition(".")
            layer = decoder.layers[int(place) - decoder.build.ranks.stage.first_layer]
            setattr(layer.get_submodule(parent), name, adapted)

    def load(self, adapter_index: int, adapter: Adapter) -> None:
        """Copies an adapter to an index of the bank, after the steps that were already launched."""
        parts: dict[str, dict[str, Matrices]] = {path: {} for path in self._layers}
        for key, low_rank in adapter.parts.items():
            path, _, part = key.partition("/")
            parts[path][part] = (low_rank.down, low_rank.up)
        for path, layer in self._layers.items():
            layer.load(adapter_index, parts[path])

    def select(
        self, adapter_indices: Sequence[int], counts: Sequence[int], sampled: Sequence[int] | None
    ) -> StepAdapters:
        """The adapters of a step's rows: each request has `counts` tokens and an adapter index, -1 for none.

        `sampled`: the indices of the requests that sample, for a last layer that computes only their rows.
        """
        rows = self._rows(list(chain.from_iterable(map(repeat, adapter_indices, counts))))
        if rows is None:
            return NO_ADAPTERS
        return StepAdapters(rows, rows if sampled is None else self._rows(list(sampled)))

    def _rows(self, adapter_indices: list[int]) -> object:
        if max(adapter_indices, default=-1) < 0:
            return None
        if not self.captures:
            return AdaptedRows.of(adapter_indices, self.device)
        return upload(adapter_indices, torch.int32, self.device)

    def _check_memory(self, decoder: Decoder, places: int, rank: int) -> None:
        layers = [linear for _, linear in linear_layers(decoder)]
        numbers = sum(rank * (len(layer.outputs) * layer.inputs + sum(layer.outputs.values())) for layer in layers)
        needed = places * numbers * decoder.build.dtype.itemsize
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            if needed > free:
                raise ConfigError(
                    f"{places} adapters of rank {rank} take {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free: "
                    "lower max_adapters or max_adapter_rank"
                )


class AdapterStore:
    """Adapters by their keys. `read` may run in another thread; all else belongs to the engine's.

    `max_rank` is the highest that fits; `pinned` keeps weights where a GPU can fetch them by itself. `readable`:
    targets of all layers, where of several ranks each keeps its part of an adapter that one of them read.
    """

    def __init__(
        self,
        spec: ModelSpec,
        targets: Mapping[str, tuple[Target, ...]],
        max_rank: int,
        dtype: torch.dtype,
        pinned: bool = False,
        readable: Mapping[str, tuple[Target, ...]] | None = None,
    ) -> None:
        self._spec = spec
        self._targets = targets
        self._max_rank = max_rank
        self._dtype = dtype
        self._pinned, self._shared = pinned, readable is not None
        self._readable = targets if readable is None else readable
        self._adapters: dict[int, Adapter] = {}

    def read(self, path: str) -> Adapter:
        """The adapter in a folder, of the whole model. Raises InvalidAdapter."""
        adapter = read_adapter(Path(path).expanduser(), self._spec, self._readable, self._max_rank, self._dtype)
        return adapter if self._shared else self._kept(adapter)

    def _kept(self, adapter: Adapter) -> Adapter:
        if not self._pinned:
            return adapter
        parts = {key: LowRank(item.down.pin_memory(), item.up.pin_memory()) for key, item in adapter.parts.items()}
        return dataclasses.replace(adapter, parts=parts)

    def __contains__(self, key: int) -> bool:
        return key in self._adapters

    def __getitem__(self, key: int) -> Adapter:
        return self._adapters[key]

    def add(self, key: int, adapter: Adapter) -> None:
        """Adds an adapter."""
        if self._shared:
            targets = {target.key: target for parts in self._targets.values() for target in parts}
            shares = {name: part.share(targets[name]) for name, part in adapter.parts.items() if name in targets}
            adapter = self._kept(dataclasses.replace(adapter, parts=shares))
        self._adapters[key] = adapter

    def drop(self, key: int) -> None:
        """Removes an adapter."""
        self._adapters.pop(key, None)
