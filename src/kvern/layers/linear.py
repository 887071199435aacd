"""A linear layer made of one or more checkpoint tensors, stacked along its outputs."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvern.layers.cuts import check_cut
from kvern.layers.linear_method import OUTPUTS, LinearMethod, Part, TensorLayout, copy_part, fill_random, taken
from kvern.layers.loadable import Loadable
from kvern.ranks.ranks import Share, places

if TYPE_CHECKING:
    from kvern.kernels.quantize_rows import RowCodes
    from kvern.layers.build import Build


class Weighted(Loadable):
    """One weight matrix `[sum of outputs, inputs]` and what a checkpoint calls its parts.

    `fused` is the name under which some checkpoints store all parts as one tensor. A module whose `method` is another's
    shares its weight: it loads no more than its own bias.

    `inputs` and `outputs` are those of the matrix. `shares`, by part one or several that lie one behind the other, and
    `inputs_share` say which of a checkpoint's these are; what has none is there whole.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        inputs: int,
        outputs: Mapping[str, int],
        build: "Build",
        *,
        bias: bool = False,
        fused: str | None = None,
        method: LinearMethod | None = None,
        dtype: torch.dtype | None = None,
        shares: Mapping[str, Sequence[Share]] | None = None,
        inputs_share: Share | None = None,
    ) -> None:
        super().__init__(build.path)
        whole = {name: [Share(range(size), size)] for name, size in outputs.items()}
        self._held: Mapping[str, Sequence[Share]] = whole | dict(shares or {})
        self._inputs_held = inputs_share or Share(range(inputs), inputs)
        self.inputs, self.outputs, self.fused = inputs, dict(outputs), fused
        self.dtype, self.device = dtype or build.dtype, build.device
        self._first = dict(zip(outputs, accumulate(outputs.values(), initial=0), strict=False))
        self._shares = method is not None
        if build.ranks.size > 1 and method is None:
            self._check_cuts(build)
        self.method = method or self._make_method(build)
        for part in () if self._shares else self.method.methods():
            part.use_kernels(build)
        self.bias = build.empty(sum(outputs.values()), dtype=dtype) if bias else None

    def _make_method(self, build: "Build") -> LinearMethod:
        return build.linear_method(self.outputs, self.inputs, self.dtype)

    def _check_cuts(self, build: "Build") -> None:
        """Raise ConfigError where a share begins or ends among numbers that are stored together."""
        sizes = {name: sum(share.whole for share in shares) for name, shares in self._held.items()}
        whole = build.whole_method(sizes, self._inputs_held.whole)
        for name, shares in self._held.items():
            for _, held in places(shares):
                check_cut(build, name, whole, "outputs", Share(held, sizes[name]))
        check_cut(build, next(iter(self._held)), whole, "inputs", self._inputs_held)

    def shares(self, part: str) -> tuple[Sequence[Share], Share]:
        """Which of a checkpoint's outputs and inputs of a part are here."""
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
        """Where what a checkpoint calls so goes: at once what is held whole, else share by share."""
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


class Linear(Weighted):
    """`x [T, inputs] -> [T, sum of outputs]`; queries, keys and values, or gate and up, are one product."""

    def forward(self, x: "Tensor | RowCodes", rows: Any = None) -> Tensor:
        """Of plain rows, or of codes that were made as `method.coding` says.

        `rows`, the adapters of the rows, are for those who take a linear layer's place (`AdaptedLinear`).
        """
        if isinstance(x, Tensor):
            return self.method.multiply(x, self.added)
        return self.method.multiply_codes(x, self.added)

    @property
    def added(self) -> Tensor | None:
        """The bias that is added here."""
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

    def __init__(self, inputs: int, outputs: Mapping[str, int], build: "Build", *, bias: bool = False) -> None:
        super().__init__(inputs, outputs, build, bias=bias, inputs_share=build.ranks.share(inputs))
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
