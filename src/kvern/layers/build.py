"""The options that a model's layers are built with, and the format of each linear layer's weight."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from kvern.layers.build_options import BuildOptions
from kvern.layers.linear_format import LinearFormat, LinearMethods
from kvern.layers.linear_method import LinearMethod, LinearShape
from kvern.layers.unquantized import Unquantized
from kvern.ranks.ranks import ALONE


@dataclass(frozen=True)
class Build(BuildOptions):
    """The options of a model's layers; `linear` tells how the weights of each are stored and multiplied."""

    linear: LinearMethods = LinearMethods(Unquantized())

    def linear_format(self, part: str) -> LinearFormat:
        """The format of a part that is built here."""
        return self.linear.of(self.name(part))

    def linear_method(self, parts: Mapping[str, int], inputs: int, dtype: torch.dtype | None = None) -> LinearMethod:
        """The weight of parts with these numbers of outputs.

        It multiplies rows of `dtype`, or of the model's dtype if that is None.
        """
        shape = LinearShape(sum(parts.values()), inputs, dtype or self.dtype, self.device)
        formats = {part: self.linear_format(part) for part in parts}
        first = next(iter(formats.values()))
        if len(parts) == 1 or (first.joins and all(item is first for item in formats.values())):
            whole = first.linear(shape, self)
            if all(begin % whole.cuts()[0] == 0 for begin in accumulate(list(parts.values())[:-1])):
                return whole
        from kvern.layers.parted import PartedMethod

        return PartedMethod(
            shape,
            [formats[part].linear(shape._replace(outputs=size), self) for part, size in parts.items()],
            self.ops.beside,
        )

    def whole_method(self, parts: Mapping[str, int], inputs: int) -> LinearMethod:
        """The weight of parts as a single rank would have it, without memory.

        It describes a checkpoint's tensors.
        """
        alone = replace(self, device=torch.device("meta"), kernels=frozenset(), ranks=ALONE)
        return alone.linear_method(parts, inputs)
