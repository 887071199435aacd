"""The inputs of some layers of a model, which draft heads begin with."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from kvern.layers.build_options import BuildOptions


class LayerInputs:
    """The inputs of the layers with the indices `entries`, filled by a forward pass.

    The index after the last layer stands for the last layer's result. The forward pass of a pipeline stage fills the
    entries of its own layers and of earlier stages.
    """

    def __init__(self, entries: Sequence[int], build: BuildOptions) -> None:
        self.entries, self._ops = entries, build.ops
        self._inputs: dict[int, Tensor] = {}

    def note(self, place: int, hidden: Tensor, update: Tensor | None) -> None:
        """Keep a copy of the sum of both, which the layer in this place is given."""
        copied = self._ops.beside((hidden,))
        self._inputs[place] = copied if update is None else self._ops.add(copied, update)

    def take(self, earlier: Mapping[int, Tensor]) -> None:
        """Keeps the inputs of layers of earlier stages, by index."""
        self._inputs |= earlier

    def after(self, hidden: Tensor) -> Tensor:
        """The rows `hidden [T, hidden]` of the last pass, and after them, side by side, the inputs kept of it."""
        return self._ops.beside((hidden, *(self._inputs[place] for place in sorted(self._inputs))))

    def rows(self) -> Tensor:
        """The inputs kept of the last pass, side by side, `[T, len(entries) * hidden]`."""
        return self._ops.beside([self._inputs[entry] for entry in self.entries])
