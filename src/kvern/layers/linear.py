"""A linear layer made of one or more checkpoint tensors, stacked along its outputs."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from kvern.errors import ConfigError
from kvern.layers.build import Build
from kvern.layers.build_options import BuildOptions, Section
from kvern.layers.linear_method import OUTPUTS, LinearMethod, Part, TensorLayout, copy_part, fill_random, taken
from kvern.layers.loadable import Loadable
from kvern.ranks.ranks import PaddedShare, Share, places

if TYPE_CHECKING:
    from kvern.kernels.quantize_rows import RowCodes


def check_cut(
    build: BuildOptions,
    part: str,
    whole: LinearMethod,
    axis: Literal["outputs", "inputs"],
    share: Share,
    *,
    instead: str = "",
) -> None:
    """Raise ConfigError where a rank's share of a part's outputs or inputs begins or ends among such numbers.

    `whole` is the weight of which `part` is one; `instead` is what else could be done, for people.
    """
    (held, count), size = share, build.ranks.size
    together = whole.cuts()[axis == "inputs"]
    if not any(end % together and end != count for end in (held.start, held.stop)):
        return
    stored = ", ".join(dict.fromkeys(method.name for method in whole.methods()))
    fits = next((other for other in range(size - 1, 1, -1) if count % (other * together) == 0), 1)
    raise ConfigError(
        f"tensor_parallel_size is {size}, and {build.name(part)} is stored as {stored}: {together} of its {count} "
        f"{axis} stay together, and a share has {len(held)}; {instead}choose tensor_parallel_size {fits}, or a model "
        "whose groups divide the shares"
    )


class Weighted(Loadable):
    """One weight matrix `[sum of outputs, inputs]` and what a checkpoint calls its parts.

    `fused` is the name under which some checkpoints store all parts as one tensor. A module that is given the `method`
    of another module shares its weight: it loads its own bias and nothing else. `dtype`, if it is not the model's, is
    that of the rows that are multiplied.

    `inputs` and the `outputs` of each part are numbers, or the shares that this rank has of those in the checkpoint.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        inputs: int | Share,
        outputs: Mapping[str, int | PaddedShare | Sequence[Share]],
        build: Build,
        *,
        bias: bool = False,
        fused: str | None = None,
        method: LinearMethod | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(build.path)
        self._held: Mapping[str, Sequence[Share]] = {
            name: [_all(part)] if isinstance(part, int) else [part.share] if isinstance(part, PaddedShare) else part
            for name, part in outputs.items()
        }
        self._inputs_held = _all(inputs) if isinstance(inputs, int) else inputs
        self.inputs = len(self._inputs_held.held)
        self.outputs = {
            name: part.size if isinstance(part, PaddedShare) else sum(len(share.held) for share in self._held[name])
            for name, part in outputs.items()
        }
        self.fused = fused
        self.dtype = dtype or build.dtype
        self.device = build.device
        self._first = dict(zip(outputs, accumulate(self.outputs.values(), initial=0), strict=False))
        self._shares = method is not None
        if build.ranks.size > 1 and method is None:
            self._check_cuts(build)
        self.method = method or self._make_method(build)
        for part in () if self._shares else self.method.methods():
            part.use_kernels(build)
        self.bias = build.empty(sum(self.outputs.values()), dtype=dtype) if bias else None

    def _make_method(self, build: Build) -> LinearMethod:
        return build.linear_method(self.outputs, self.inputs, self.dtype)

    def _check_cuts(self, build: Build) -> None:
        """Raise ConfigError where a share begins or ends among numbers that are stored together."""
        sizes = {name: sum(share.whole for share in shares) for name, shares in self._held.items()}
        whole = build.whole_method(sizes, self._inputs_held.whole)
        for name, shares in self._held.items():
            for _, held in places(shares):
                check_cut(build, name, whole, "outputs", Share(held, sizes[name]))
        check_cut(build, next(iter(self._held)), whole, "inputs", self._inputs_held)

    def shares(self, part: str) -> tuple[Sequence[Share], Share]:
        """The shares of a checkpoint's outputs and inputs of a part that are here."""
        return self._held[part], self._inputs_held

    def parts(self) -> dict[str, tuple[int, ...]]:
        return self._shapes({name: sum(share.whole for share in shares) for name, shares in self._held.items()})

    def optional_parts(self) -> set[str]:
        return {f"{name}.{kind}" for name, kind, layout in self._layouts(self._all_names()) if not layout.needed}

    def part_dtypes(self) -> dict[str, torch.dtype]:
        return {f"{name}.{kind}": layout.dtype for name, kind, layout in self._layouts(self._all_names())}

    def _all_names(self) -> list[str]:
        return [*self.outputs, *([self.fused] if self.fused else [])]

    def fused_parts(self) -> dict[str, tuple[int, ...]]:
        whole = sum(share.whole for shares in self._held.values() for share in shares)
        return self._shapes({self.fused: whole}) if self.fused else {}

    def _shapes(self, outputs: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        shapes = {
            f"{name}.{kind}": layout.shape(outputs[name], self._inputs_held.whole)
            for name, kind, layout in self._layouts(outputs)
        }
        if self.bias is not None:
            shapes |= {f"{name}.bias": (size,) for name, size in outputs.items()}
        return shapes

    def _layouts(self, names: Iterable[str]) -> Iterator[tuple[str, str, TensorLayout]]:
        """The tensors that a checkpoint holds of parts: the part, the ending of the tensor's name, its layout."""
        for name in () if self._shares else names:
            for kind, layout in self.method.part_layouts(self._first.get(name, 0)).items():
                if kind != "bias" or self.bias is None:
                    yield name, kind, layout

    def load(self, part: str, tensor: Tensor, first_row: int = 0) -> None:
        name, _, kind = part.partition(".")
        for place in self._places(name):
            if kind == "bias" and self.bias is not None:
                copy_part(TensorLayout(self.dtype, (OUTPUTS,)), self.bias, tensor, place, first_row)
            elif (found := taken(self.method.part_layouts(place.first)[kind], tensor, place, first_row)) is not None:
                self.method.load(kind, *found)

    def _places(self, name: str) -> Iterator[Part]:
        """The places of a checkpoint's tensor of this name: one place if it is held whole, else one for each share."""
        parts = [name] if name in self.outputs else list(self.outputs)
        shares = [share for part in parts for share in self._held[part]]
        first, (inputs, all_inputs) = self._first[parts[0]], self._inputs_held
        if all(len(share.held) == share.whole for share in shares):
            shares = [Share(range(whole := sum(share.whole for share in shares)), whole)]
        for place, outputs in places(shares):
            yield Part(first + place, outputs, inputs, all_inputs)

    def fill_random(self, generator: torch.Generator) -> None:
        if not self._shares:
            self.method.fill_random(generator)
        if self.bias is not None:
            fill_random(self.bias, generator)

    def finish(self) -> None:
        if not self._shares:
            self.method.finish()


def _all(size: int) -> Share:
    return Share(range(size), size)


class Linear(Weighted):
    """`x [T, inputs] -> [T, sum of outputs]`; queries, keys and values, or gate and up, are one product."""

    def forward(self, x: "Tensor | RowCodes", rows: Any = None) -> Tensor:
        """Multiply plain rows, or codes that were made as `method.coding` says.

        `rows`, the adapters of the rows, are for those who take a linear layer's place (`AdaptedLinear`).
        """
        if isinstance(x, Tensor):
            return self.method.multiply(x, self.added)
        return self.method.multiply_codes(x, self.added)

    @property
    def added(self) -> Tensor | None:
        """The bias that this rank adds."""
        return self.bias

    def total(self, out: Tensor) -> Tensor:
        """The layer's result, of its product here and what was added to that, which may be overwritten."""
        return out

    def scores(self, x: Tensor) -> Tensor:
        """`x [T, inputs] -> [T, sum of outputs]` float32, for a head."""
        return self.method.scores(x, self.bias)

    def row_product(self) -> Callable[..., Tensor] | None:
        """`(x [1, inputs], around=...)`, see `LinearMethod.row_product`."""
        product = self.method.row_product()
        return None if product is None else partial(product, bias=self.added)


class SummandLinear(Linear):
    """One over a rank's share of the inputs: its products are to be added up over ranks; the first adds the bias."""

    def __init__(self, inputs: int, outputs: Mapping[str, int], build: Build, *, bias: bool = False) -> None:
        super().__init__(build.ranks.share(inputs), outputs, build, bias=bias)
        self._ranks = build.ranks
        self._added = self.bias if build.ranks.rank == 0 else None

    @property
    def added(self) -> Tensor | None:
        return self._added


class SummedLinear(SummandLinear):
    """One whose products are added up here."""

    def forward(self, x: "Tensor | RowCodes", rows: Any = None) -> Tensor:
        return self._ranks.sum(super().forward(x, rows))

    def total(self, out: Tensor) -> Tensor:
        return self._ranks.sum(out)

    def row_product(self) -> None:
        """There is none: what follows a product in one launch would come before the sum."""


def column(
    build: Build,
    inputs: int,
    parts: Mapping[str, int | Sequence[Section]],
    *,
    bias: bool = False,
    fused: str | None = None,
) -> Linear:
    """A linear layer of which each rank computes some outputs; `parts` maps checkpoint names to output sizes.

    A part has several sections where ranks do not share all of its outputs alike. `fused` is the name under which some
    checkpoints store all parts as one tensor.
    """
    shares = {name: build.shares([Section(part)] if isinstance(part, int) else part) for name, part in parts.items()}
    return Linear(inputs, shares, build, bias=bias, fused=fused)


def row(build: Build, inputs: int, part: str, outputs: int, *, bias: bool = False) -> Linear:
    """A linear layer that sums over inputs which `column` layers produced."""
    if build.ranks.size == 1:
        return Linear(inputs, {part: outputs}, build, bias=bias)
    return (SummedLinear if build.sums else SummandLinear)(inputs, {part: outputs}, build, bias=bias)
