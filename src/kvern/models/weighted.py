"""What all models have in common: modules that take their weights from a checkpoint of Llama's names."""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from kvern.errors import CorruptCheckpoint
from kvern.layers.attention import Sinks
from kvern.layers.build import Build
from kvern.layers.loadable import Loadable
from kvern.spec.model import ModelSpec


@dataclass(frozen=True)
class TensorTarget:
    """Where one checkpoint tensor goes: its shape there, and `load(tensor, first_row)`, see `Loadable.load`.

    `needed`: a checkpoint has to have it. `dtype`: what it is read as; None: any numbers.
    """

    shape: tuple[int, ...]
    load: Callable[[Tensor, int], None]
    needed: bool = True
    dtype: torch.dtype | None = None


def targets_of(modules: Iterable[Loadable], stored: Collection[str] = ()) -> dict[str, TensorTarget]:
    """Map the names of a Llama-style checkpoint to where these modules take each tensor, fused as `stored`."""
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

    def tensor_targets(self, stored: Collection[str] = ()) -> dict[str, TensorTarget]:
        """Map the names of a Llama-style checkpoint to where each tensor goes.

        Modules that a checkpoint may store fused, or stacked, are listed so if those names are among `stored`.
        """
        return targets_of(self.loadables(), stored)

    def loadables(self) -> Iterator[Loadable]:
        """The modules that take weights from a checkpoint."""
        return (module for module in self.modules() if isinstance(module, Loadable))

    def finish(self) -> None:
        """All weights are loaded: store them as their products want them.

        Raises CorruptCheckpoint where what was loaded does not make a weight.
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
        return {module.index: module.logits for module in self.modules() if isinstance(module, Sinks)}

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights as they are loaded."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.parameters())
