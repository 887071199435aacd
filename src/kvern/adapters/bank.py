"""The adapters on the device: their weights in slots of every linear layer, and the rows that use them."""

from collections.abc import Sequence
from itertools import chain, repeat
from typing import cast

import torch
from torch import Tensor

from kvern.adapters.peft import Adapter
from kvern.adapters.targets import linear_layers, targets_of
from kvern.device.transfer import upload
from kvern.errors import ConfigError
from kvern.layers.adapted_linear import AdaptedLinear, AdaptedRows, Matrices, Selection, StackedLinear
from kvern.layers.block import SequentialLayer
from kvern.models.decoder import Decoder


class AdapterBank:
    """Replaces the linear layers of a decoder's blocks by adapted ones, whose slots `load` fills.

    `slots` adapters of at most `rank` fit. Without `kernels` PyTorch adds them, which no CUDA graph can hold. Raises
    ConfigError if the device's memory does not hold them.
    """

    def __init__(self, decoder: Decoder, slots: int, rank: int, kernels: bool) -> None:
        self.targets = targets_of(decoder)
        self.captures = kernels
        self.device = decoder.build.device
        self._selection: Selection[object] = Selection()
        self._layers: dict[str, AdaptedLinear[object]] = {}
        layers = list(linear_layers(decoder))
        if kernels:
            self._check_memory(decoder, slots, rank)
        for path, linear in layers:
            parent, _, name = path.rpartition(".")
            adapted: AdaptedLinear[object]
            if kernels:
                from kvern.layers.fused_adapters import FusedAdaptedLinear

                adapted = FusedAdaptedLinear(linear, self._selection, slots, rank, decoder.build.deterministic)  # type: ignore[arg-type,assignment]
            else:
                adapted = StackedLinear(linear, self._selection, decoder.build.dtype)  # type: ignore[arg-type,assignment]
            self._layers[path] = adapted
            setattr(decoder.get_submodule(parent), name, adapted)
        for layer in decoder.layers:
            cast("SequentialLayer", layer).selection = self._selection

    def load(self, slot: int, adapter: Adapter) -> None:
        """Put an adapter into a slot, behind the steps that were started."""
        parts: dict[str, dict[str, Matrices]] = {path: {} for path in self._layers}
        for key, low_rank in adapter.parts.items():
            path, _, part = key.partition("/")
            parts[path][part] = (low_rank.down, low_rank.up)
        for path, layer in self._layers.items():
            layer.load(slot, parts[path])

    def select(self, slots: Sequence[int], counts: Sequence[int], sampled: Sequence[int] | None) -> None:
        """The next step's rows: `counts` tokens of a request each that uses the adapter in `slots`, -1 for none.

        `sampled`: the slots of the requests that sample, if a last layer computes theirs alone.
        """
        by_count = self._selection.by_count
        by_count.clear()
        if max(slots, default=-1) < 0:
            return
        rows = list(chain.from_iterable(map(repeat, slots, counts)))
        for some in (rows, *(() if sampled is None else (sampled,))):
            if any(slot >= 0 for slot in some):
                by_count[len(some)] = self._rows(list(some))

    def select_decodes(self, slots: Tensor | None) -> None:
        """The next step's rows, whose adapters are read on the device: `slots [R]`; None: no row uses one."""
        self._selection.by_count.clear()
        if slots is not None:
            self._selection.by_count[slots.shape[0]] = slots

    def _rows(self, slots: list[int]) -> object:
        if not self.captures:
            return AdaptedRows.of(slots, self.device)
        return upload(slots, torch.int32, self.device)

    def _check_memory(self, decoder: Decoder, slots: int, rank: int) -> None:
        layers = [linear for _, linear in linear_layers(decoder)]
        numbers = sum(rank * (len(layer.outputs) * layer.inputs + sum(layer.outputs.values())) for layer in layers)
        needed = slots * numbers * decoder.build.dtype.itemsize
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            if needed > free:
                raise ConfigError(
                    f"{slots} adapters of rank {rank} take {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free: "
                    "lower max_adapters or max_adapter_rank"
                )
