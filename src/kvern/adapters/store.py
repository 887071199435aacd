"""The adapters that an engine knows, in host memory."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch

from kvern.adapters.peft import Adapter, LowRank, read_adapter
from kvern.adapters.targets import Target
from kvern.spec.model import ModelSpec


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
