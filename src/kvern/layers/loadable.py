"""The contract between modules that own weights and the reader of checkpoints."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

from kvern.layers.module import Module


class Loadable(Module, ABC):
    """A module that takes its weights from named parts of a checkpoint.

    Names are relative to the module's parent ("q_proj.weight"), because one module may hold several checkpoint tensors.
    """

    @abstractmethod
    def parts(self) -> Mapping[str, tuple[int, ...]]:
        """The tensors this module needs, with their shapes in the checkpoint."""

    def fused_parts(self) -> Mapping[str, tuple[int, ...]]:
        """An alternative set of tensors that holds the same weights; empty if there is none."""
        return {}

    @abstractmethod
    def load(self, part: str, tensor: Tensor, first_row: int = 0) -> None:
        """Copy `tensor`, the rows of `part` from `first_row` on, into place; any dtype, any device.

        A part arrives in one call or as consecutive runs of rows, so that large ones need not be held twice.
        """


def copy_rows(target: Tensor, tensor: Tensor, first_row: int) -> None:
    """Write `tensor` to the rows of `target` from `first_row` on."""
    target.narrow(0, first_row, tensor.shape[0]).copy_(tensor)
