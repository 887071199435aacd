"""How a described model becomes modules: the precision, the device, and how each linear layer holds its weight."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from kvern.cpu import elementwise
from kvern.layers.experts import Experts, names_of
from kvern.layers.linear import Linear, SummandLinear, SummedLinear
from kvern.layers.linear_format import LinearFormat, LinearMethods
from kvern.layers.linear_method import LinearMethod, LinearShape
from kvern.layers.parted import PartedMethod
from kvern.layers.row_experts import make_experts
from kvern.layers.unquantized import Unquantized
from kvern.ranks.ranks import ALONE, Ranks, Share
from kvern.spec.model import MoeSpec


class RowFunctions(NamedTuple):
    """What is done with rows `[T, width]` between products."""

    add: Callable[[Tensor, Tensor], Tensor]
    """The first factor's contents may be gone afterwards, here and in `scale`."""
    scale: Callable[[Tensor, float], Tensor]
    beside: Callable[[Sequence[Tensor]], Tensor]


class Section(NamedTuple):
    """So many neighbouring outputs of a layer, or entries of a vector, are a rank's share of what a checkpoint has.

    `copies` neighbouring ranks have the same.
    """

    size: int
    copies: int = 1


@dataclass(frozen=True)
class Build:
    """`dtype` and `device` of weights and activations, and the longest sequence, in tokens, that positions cover.

    `kernels` names the modules of `kvern.kernels` that parts may be made of; without them PyTorch does the work.
    `linear` says how weights are stored and multiplied. `deterministic` forbids whatever makes a token's result depend
    on the other tokens of a step. `path` is where in the model the build is: it precedes the names of the parts built.
    With several `ranks` sizes are those of one rank's share, but those of rows `[T, width]` and of vocabularies; `row`
    layers give what all ranks have added up, if it `sums`, else a rank's summand. With `late_sums` layers hand
    summands on, and the norms that add them to the residual add them up.
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
    late_sums: bool = False

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

    def whole_method(self, parts: Mapping[str, int], inputs: int) -> LinearMethod:
        """The weight of parts that no ranks share, without memory: what it has to say of a checkpoint's tensors."""
        alone = replace(self, device=torch.device("meta"), kernels=frozenset(), ranks=ALONE)
        return alone.linear_method(parts, inputs)

    def column(
        self,
        inputs: int,
        parts: Mapping[str, int | Sequence[Section]],
        *,
        bias: bool = False,
        fused: str | None = None,
    ) -> Linear:
        """A linear layer whose outputs are computed independently; `parts` maps checkpoint names to output sizes.

        A part of which ranks do not share all outputs alike has sections, one behind the other. `fused` is the name
        under which some checkpoints store all parts as one tensor.
        """
        sections = {name: [Section(part)] if isinstance(part, int) else part for name, part in parts.items()}
        outputs = {name: sum(section.size for section in each) for name, each in sections.items()}
        shares = {name: self.shares(each) for name, each in sections.items()}
        return Linear(inputs, outputs, self, bias=bias, fused=fused, shares=shares)

    def shares(self, sections: Iterable[Section]) -> Sequence[Share]:
        """What this rank holds of sections that lie one behind the other."""
        return [self.ranks.share(*section) for section in sections]

    def row(self, inputs: int, part: str, outputs: int, *, bias: bool = False) -> Linear:
        """A linear layer that sums over inputs which `column` layers produced."""
        if self.ranks.size == 1:
            return Linear(inputs, {part: outputs}, self, bias=bias)
        return (SummedLinear if self.sums else SummandLinear)(inputs, {part: outputs}, self, bias=bias)

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
