"""The base of all models: modules that load weights from a checkpoint with Llama's names."""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from kvern.errors import CorruptCheckpoint
from kvern.layers.attention import Sinks
from kvern.layers.build import Build
from kvern.layers.loadable import Loadable
from kvern.layers.rope import RopeTable, Rotation, positions_alone
from kvern.spec.model import ModelSpec


@dataclass(frozen=True)
class TensorTarget:
    """The destination of one checkpoint tensor: its shape there, and `load(tensor, first_row)`, see `Loadable.load`.

    `needed`: a checkpoint must have it. `dtype`: the type it is read as; None: any numbers.
    """

    shape: tuple[int, ...]
    load: Callable[[Tensor, int], None]
    needed: bool = True
    dtype: torch.dtype | None = None


def targets_of(modules: Iterable[Loadable], stored: Collection[str] = ()) -> dict[str, TensorTarget]:
    """The destination of each tensor of these modules by its name, fused as in `stored`."""
    targets: dict[str, TensorTarget] = {}
    for module in modules:
        prefix = f"{module.path}." if module.path else ""
        sets = (module.parts(), module.fused_parts(), module.stacked_parts())
        parts = max(sets, key=lambda names: sum(prefix + name in stored for name in names))
        optional, dtypes = module.optional_parts(), module.part_dtypes()
        targets |= {
            prefix + name: TensorTarget(shape, partial(module.load, name), name not in optional, dtypes.get(name))
            for name, shape in parts.items()
        }
    return targets


class WeightedModel(nn.Module):
    """A model with uninitialised weights; `kvern.models.loader` fills them."""

    def __init__(self, spec: ModelSpec, build: Build) -> None:
        super().__init__()
        self.spec, self.build = spec, build

    def make_ropes(self) -> tuple[int, ...]:
        """Builds a table for each of the layers' rotary embeddings; returns each layer's table, 0 if it has none."""
        ropes = list(dict.fromkeys(layer.rope for layer in self.spec.layers if layer.rope is not None))
        self.rope_tables = nn.ModuleList(RopeTable(rope, self.build) for rope in ropes)
        return tuple(0 if layer.rope is None else ropes.index(layer.rope) for layer in self.spec.layers)

    def rotations(self, positions: Tensor) -> list[Rotation]:
        """The rotation of `positions [T]` int64 by each table."""
        return [table(positions) for table in self.rope_tables] or [positions_alone(positions)]

    def tensor_targets(self, stored: Collection[str] = ()) -> dict[str, TensorTarget]:
        """The destination of each tensor by its name in a Llama-style checkpoint.

        Modules that a checkpoint may store fused or stacked are listed in that form if the names are among `stored`.
        """
        return targets_of(self.loadables(), stored)

    def loadables(self) -> Iterator[Loadable]:
        """The modules that take weights from a checkpoint."""
        return (module for module in self.modules() if isinstance(module, Loadable))

    def finish(self) -> None:
        """Converts all loaded weights to the form that products use.

        Raises CorruptCheckpoint if the loaded tensors do not form a weight.
        """
        for module in self.loadables():
            try:
                module.finish()
            except ValueError as error:
                parts = ", ".join(dict.fromkeys(name.split(".")[0] for name in module.parts()))
                raise CorruptCheckpoint(f"{module.path or 'the model'} ({parts}): {error}") from None

    @property
    def sinks(self) -> dict[int, Tensor]:
        """`[heads]` float32 of each layer with attention sinks, by its place among the layers that attend."""
        return {module.index: module.weight for module in self.modules() if isinstance(module, Sinks)}

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights as they are loaded."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.parameters())
