"""The contract between modules that own weights and the reader of checkpoints."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from kvern.layers.build_options import BuildOptions
from kvern.layers.linear_method import fill_random
from kvern.layers.module import Module
from kvern.ranks.ranks import Share, places


class Loadable(Module, ABC):
    """A module that takes its weights from named parts of a checkpoint.

    Names are relative to `path`, that of the module's parent in a Llama-style checkpoint ("model.layers.0.self_attn"),
    because one module may hold several checkpoint tensors ("q_proj.weight").
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    @abstractmethod
    def parts(self) -> Mapping[str, tuple[int, ...]]:
        """The tensors this module needs, with their shapes in the checkpoint."""

    def fused_parts(self) -> Mapping[str, tuple[int, ...]]:
        """An alternative set of tensors that holds the same weights; empty if there is none."""
        return {}

    def stacked_parts(self) -> Mapping[str, tuple[int, ...]]:
        """Another set, of parts that a checkpoint stacks over experts; empty if there is none."""
        return {}

    def optional_parts(self) -> Collection[str]:
        """The tensors that a checkpoint need not have."""
        return ()

    def part_dtypes(self) -> Mapping[str, torch.dtype]:
        """The dtypes that tensors are read as; a tensor that is not listed may have any dtype."""
        return {}

    @abstractmethod
    def load(self, part: str, tensor: Tensor, first_row: int = 0) -> None:
        """Copy `tensor`, the rows of `part` from `first_row` on, into place; any dtype, any device.

        A part arrives in one call or as consecutive runs of rows, so that large ones need not be held twice.
        """

    def fill_random(self, generator: torch.Generator) -> None:
        """Weights of small spread, instead of `load`."""
        for parameter in self.parameters():
            fill_random(parameter, generator)

    def finish(self) -> None:
        """All parts are loaded; weights may be stored in another way from here on."""


def copy_rows(target: Tensor, tensor: Tensor, first_row: int) -> None:
    """Write `tensor` to the rows of `target` from `first_row` on."""
    target.narrow(0, first_row, tensor.shape[0]).copy_(tensor)


def copy_shares(target: Tensor, tensor: Tensor, first_row: int, shares: Sequence[Share]) -> list[slice]:
    """Write what a rank's `shares` of the rows have of `tensor`, those from `first_row` on, to `target`, which has
    nothing but these shares. Returns which rows of `target` were written."""
    written = []
    for place, rows in places(shares):
        begin, end = max(rows.start, first_row), min(rows.stop, first_row + len(tensor))
        if begin < end:
            first = place + begin - rows.start
            copy_rows(target, tensor[begin - first_row : end - first_row], first)
            written.append(slice(first, first + end - begin))
    return written


class Vector(Loadable):
    """`weight [size]` float32, of which this is a rank's share; the checkpoint calls it `name`."""

    def __init__(self, size: int, name: str, build: BuildOptions) -> None:
        super().__init__(build.path)
        self.name = name
        self.weight = build.empty(size, dtype=torch.float32)
        self._share = build.ranks.share(size)

    def parts(self) -> dict[str, tuple[int, ...]]:
        return {self.name: (self._share.whole,)}

    def load(self, part: str, tensor: Tensor, first_row: int = 0) -> None:
        copy_shares(self.weight, tensor, first_row, [self._share])
