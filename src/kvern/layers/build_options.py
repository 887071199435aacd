"""The options that all layers of a model are built with, whatever the format of their weights."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Self

import torch

from kvern.layers.ops import Ops, ops_of
from kvern.ranks.ranks import ALONE, Ranks, Share


class Section(NamedTuple):
    """The size of one rank's share of neighbouring outputs of a layer, or of entries of a vector.

    `copies` neighbouring ranks have the same entries.
    """

    size: int
    copies: int = 1


@dataclass(frozen=True)
class BuildOptions:
    """The precision, the device, the kernels and the ranks that layers are made for.

    `dtype` and `device` are those of weights and activations; `max_model_len` is the longest sequence, in tokens, that
    positions cover. `kernels` names the modules of `kvern.kernels` that layers may call; without them PyTorch does the
    work. `deterministic` forbids whatever makes a token's result depend on the other tokens of a step. `path` is the
    place in the model, which precedes the names of the parts that are built there. With several `ranks` sizes are those
    of one rank's share, except those of rows `[T, width]` and of vocabularies. `row` layers return the sum of all ranks
    if `sums`, else a rank's summand. With `late_sums` layers return summands, and the norms that add them to the
    residual compute the sums.
    """

    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    kernels: frozenset[str] = frozenset()
    deterministic: bool = False
    path: str = "model"
    ranks: Ranks = ALONE
    sums: bool = True
    late_sums: bool = False

    def at(self, name: str) -> Self:
        """Options for a part one level deeper in the model."""
        return replace(self, path=self.name(name))

    def name(self, part: str) -> str:
        """The name that a Llama-style checkpoint gives a part that is built here."""
        return f"{self.path}.{part}" if self.path else part

    def shares(self, sections: Iterable[Section]) -> Sequence[Share]:
        """This rank's shares of sections that follow one another."""
        return [self.ranks.share(*section) for section in sections]

    @property
    def whole(self) -> Self:
        """Options for a layer that every rank has all of."""
        return replace(self, ranks=ALONE)

    @cached_property
    def ops(self) -> Ops:
        """The operations that layers call, by `kernels`."""
        return ops_of(self.kernels)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.nn.Parameter:
        """An uninitialised parameter; reading a checkpoint fills it."""
        data = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return torch.nn.Parameter(data, requires_grad=False)
