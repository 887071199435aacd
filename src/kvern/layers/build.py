"""How a described model becomes modules: the precision, the device, and how each linear layer holds its weight."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from kvern.cpu import elementwise
from kvern.device.ranks import ALONE, Ranks
from kvern.layers.experts import Experts, names_of
from kvern.layers.linear import Linear, SummedLinear
from kvern.layers.linear_format import LinearFormat, LinearMethods
from kvern.layers.linear_method import LinearMethod, LinearShape
from kvern.layers.parted import PartedMethod
from kvern.layers.row_experts import make_experts
from kvern.layers.unquantized import Unquantized
from kvern.model_spec import MoeSpec


class RowFunctions(NamedTuple):
    """What is done with rows `[T, width]` between products."""

    add: Callable[[Tensor, Tensor], Tensor]
    """The first factor's contents may be gone afterwards, here and in `scale`."""
    scale: Callable[[Tensor, float], Tensor]
    beside: Callable[[Sequence[Tensor]], Tensor]


@dataclass(frozen=True)
class Build:
    """`dtype` and `device` of weights and activations, and the longest sequence, in tokens, that positions cover.

    `kernels` names the modules of `kvern.kernels` that parts may be made of; without them PyTorch does the work.
    `linear` says how weights are stored and multiplied. `deterministic` forbids whatever makes a token's result depend
    on the other tokens of a step. `path` is where in the model the build is: it precedes the names of the parts built.
    With several `ranks` sizes are those of one rank's share, but those of rows `[T, width]` and of vocabularies; `row`
    layers give what all ranks have added up, if it `sums`, else a rank's summand.
    """

    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    kernels: frozenset[str] = frozenset()
    linear: LinearMethods = LinearMethods(Unquantized())
    deterministic: bool = False
    path: str = "model"
    ranks: Ranks = ALONE
    sums: bool = True

    def at(self, name: str) -> "Build":
        """The same, one level deeper in the model."""
        return replace(self, path=self.name(name))

    def name(self, part: str) -> str:
        """What a Llama-style checkpoint calls a part that is built here."""
        return f"{self.path}.{part}" if self.path else part

    def linear_format(self, part: str) -> LinearFormat:
        """How a part that is built here is stored."""
        return self.linear.of(self.name(part))

    def linear_method(self, parts: Mapping[str, int], inputs: int, dtype: torch.dtype | None = None) -> LinearMethod:
        """The weight of parts with these numbers of outputs; `dtype`, if not the model's, of what it multiplies."""
        shape = LinearShape(sum(parts.values()), inputs, dtype or self.dtype, self.device)
        formats = {part: self.linear_format(part) for part in parts}
        first = next(iter(formats.values()))
        if len(parts) == 1 or (first.joins and all(item is first for item in formats.values())):
            whole = first.linear(shape, self)
            if all(begin % whole.cuts()[0] == 0 for begin in accumulate(list(parts.values())[:-1])):
                return whole
        return PartedMethod(
            shape,
            [formats[part].linear(shape._replace(outputs=size), self) for part, size in parts.items()],
            self.on_rows.beside,
        )

    def column(
        self,
        inputs: int,
        parts: Mapping[str, int],
        *,
        bias: bool = False,
        fused: str | None = None,
        copies: Mapping[str, int] | None = None,
    ) -> Linear:
        """A linear layer whose outputs are computed independently; `parts` maps checkpoint names to output sizes.

        `fused` is the name under which some checkpoints store all parts as one tensor. `copies`: how many neighbouring
        ranks hold the same outputs of a part, if it is not one.
        """
        shares = {part: self.ranks.share(size, (copies or {}).get(part, 1)) for part, size in parts.items()}
        return Linear(inputs, parts, self, bias=bias, fused=fused, shares=shares)

    def row(self, inputs: int, part: str, outputs: int, *, bias: bool = False) -> Linear:
        """A linear layer that sums over inputs which `column` layers produced."""
        if self.ranks.size > 1 and self.sums:
            return SummedLinear(inputs, {part: outputs}, self, bias=bias)
        assert self.sums or not bias, "each rank would add it"
        return Linear(inputs, {part: outputs}, self, bias=bias, inputs_share=self.ranks.share(inputs))

    @property
    def whole(self) -> "Build":
        """For what every rank has all of."""
        return replace(self, ranks=ALONE)

    def experts(self, hidden_size: int, spec: MoeSpec) -> Experts:
        """The experts of a mixture, whose gate, up and down may be stored in different ways."""
        formats = {name: self.linear_format(f"experts.{name}_proj") for name in names_of(spec)}
        first = formats["up"]
        if all(item is first for item in formats.values()):
            return first.experts(hidden_size, spec, self)
        return make_experts(hidden_size, spec, self, formats)

    @property
    def on_rows(self) -> "RowFunctions":
        """Kernels for CPUs, or PyTorch's functions."""
        if "cpu_layers" in self.kernels:
            return RowFunctions(elementwise.add, elementwise.scale, elementwise.beside)
        return RowFunctions(torch.add, torch.mul, partial(torch.cat, dim=-1))

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.nn.Parameter:
        """An uninitialised parameter; reading a checkpoint fills it."""
        data = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return torch.nn.Parameter(data, requires_grad=False)
