"""One weight matrix: how it is stored, loaded and multiplied. This is the interface between layers and formats.

A layer owns a `LinearMethod` and knows nothing else of its weight. What a checkpoint holds of a matrix is described by
`TensorLayout`s, from which follow the parameters, the shapes of each part, and where rows, parts and shards go.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvern.layers.build_options import BuildOptions
from kvern.layers.module import Module

if TYPE_CHECKING:
    from kvern.kernels.linear import Around
    from kvern.kernels.quantize_rows import Coding, RowCodes

Product = Callable[[Tensor, Tensor | None], Tensor]
"""`(x [T, inputs], bias [outputs] | None) -> [T, outputs]`."""

RANDOM_SPREAD = 0.035


@dataclass(frozen=True)
class CodesProduct:
    """A `Product` of rows that become codes first, as `coding` says; others may make them instead."""

    coding: "Coding"
    multiply_codes: "Callable[[RowCodes, Tensor | None], Tensor]"

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self.multiply_codes(self.coding(x), bias)


class LinearShape(NamedTuple):
    """A matrix that multiplies rows of `dtype` on `device`."""

    outputs: int
    inputs: int
    dtype: torch.dtype
    device: torch.device


class RowProduct(Protocol):
    """The product of a single row, with what is around it."""

    def __call__(self, x: Tensor, bias: Tensor | None, around: "Around" = ...) -> Tensor:
        """`x [1, inputs] -> [1, outputs]`; `around`: nothing, a norm, an activation or a residual."""


class Axis(NamedTuple):
    """A dimension of a stored tensor: `times` entries for each `per` outputs, inputs, or numbers of all rows together.

    For "others" it has `per`, which is `ANY` where a checkpoint decides.
    """

    of: Literal["outputs", "inputs", "numbers", "others"]
    per: int = 1
    times: int = 1


ANY = -1
OUTPUTS, INPUTS = Axis("outputs"), Axis("inputs")


class TensorLayout(NamedTuple):
    """A tensor that a checkpoint holds for a matrix, if it is not `needed` perhaps, and the parameter it is read into.

    A checkpoint may leave out or add dimensions of one entry. `common`: it is of all that a matrix multiplies, also
    where a rank has only some of the experts in it.
    """

    dtype: torch.dtype
    axes: tuple[Axis, ...]
    needed: bool = True
    common: bool = False

    def shape(self, outputs: int, inputs: int) -> tuple[int, ...]:
        """The shape of the tensor of a matrix, or of a part of one."""
        counts = {"outputs": outputs, "inputs": inputs, "numbers": outputs * inputs}
        return tuple(
            -(-counts[axis.of] // axis.per) * axis.times if axis.of in counts else axis.per for axis in self.axes
        )


@dataclass(frozen=True)
class Part:
    """A part of a checkpoint, as "k_proj", within a matrix: its outputs begin at the matrix's output `first`.

    `outputs` and `inputs` are those of the part that the matrix holds: all, or the slice of a shard, of rows that have
    `all_inputs`; None: as many as are held.
    """

    first: int
    outputs: range
    inputs: range
    all_inputs: int | None = None


def copy_part(layout: TensorLayout, target: Tensor, tensor: Tensor, part: Part, first_row: int, along: int = 0) -> None:
    """Copy into a matrix's `target` what `part` takes of `tensor`, a run of the part's tensor.

    Its entries of the dimension `along` begin at `first_row`; of all others it has all.
    """
    for dim, (of, per, times) in enumerate(layout.axes):
        begin = first_row if dim == along else 0
        first = begin
        end = begin + tensor.shape[dim]
        place = 0
        if of != "others":
            wanted = part.outputs if of == "outputs" else part.inputs
            start, stop = wanted.start // per * times, -(-wanted.stop // per) * times
            place = (part.first // per * times if of == "outputs" else 0) - start
            first, end = max(first, start), min(end, stop)
        if first >= end:
            return
        tensor = tensor.narrow(dim, first - begin, end - first)
        target = target.narrow(dim, place + first, end - first)
    target.copy_(tensor)


def taken(layout: TensorLayout, tensor: Tensor, part: Part, first_row: int) -> tuple[Tensor, Part, int] | None:
    """The entries of a run of a part's tensor that `part` takes, as a view: others are not read. None: there are none.

    Of all dimensions but the first, which has a first row, the part is one of what is left.
    """
    for dim, (of, per, times) in enumerate(layout.axes):
        if of in ("numbers", "others"):
            continue
        wanted = part.outputs if of == "outputs" else part.inputs
        begin = first_row if dim == 0 else 0
        first = max(begin, wanted.start // per * times)
        end = min(begin + tensor.shape[dim], -(-wanted.stop // per) * times)
        if first >= end:
            return None
        tensor = tensor.narrow(dim, first - begin, end - first)
        if dim == 0:
            first_row = first
        else:
            left_out = wanted.start // per * per
            held = range(wanted.start - left_out, wanted.stop - left_out)
            part = replace(part, outputs=held) if of == "outputs" else replace(part, inputs=held)
    return tensor, part, first_row


def fill_random(parameter: Tensor, generator: torch.Generator) -> None:
    """Fill a parameter with small random numbers, or with random integers if it holds integers."""
    if not parameter.is_floating_point():
        parameter.random_(generator=generator)
    elif parameter.element_size() > 1:
        nn.init.uniform_(parameter, -RANDOM_SPREAD, RANDOM_SPREAD, generator=generator)
    else:
        numbers = torch.empty(parameter.shape, device=parameter.device)
        parameter.copy_(nn.init.uniform_(numbers, -RANDOM_SPREAD, RANDOM_SPREAD, generator=generator))


def all_stored(found: Iterable[list[Tensor] | None]) -> list[Tensor] | None:
    """The tensors of several `LinearMethod.stored` together."""
    lists = list(found)
    return None if None in lists else list(chain(*filter(None, lists)))


class LinearMethod(Module, ABC):
    """One weight matrix `[outputs, inputs]`: what is stored of it, and the products with it.

    A format says with `layouts` what it reads, with `storage` what it keeps, if that is something else, and with
    `multiply` and `dequantize` what that means; whatever else is here has an answer that is right for all formats, and
    that a format may better.
    """

    name: str
    """The format's name, in the keys of measurements."""

    def __init__(self, shape: LinearShape) -> None:
        super().__init__()
        self.shape = shape
        for kind, layout in self.storage().items():
            data = torch.empty(layout.shape(shape.outputs, shape.inputs), dtype=layout.dtype, device=shape.device)
            setattr(self, kind, nn.Parameter(data, requires_grad=False))

    @abstractmethod
    def layouts(self) -> Mapping[str, TensorLayout]:
        """The layouts of a checkpoint's tensors, by the ending of their names."""

    def storage(self) -> Mapping[str, TensorLayout]:
        """The parameters that are made, by name."""
        return self.layouts()

    def part_layouts(self, first: int) -> Mapping[str, TensorLayout]:
        """The layouts of a checkpoint's tensors for the part that begins at the matrix's output `first`."""
        return self.layouts()

    @property
    def compiled(self) -> bool:
        """A kernel for CPUs multiplies, once all is loaded: no row's results depend on those beside it."""
        return False

    @property
    def looks_up(self) -> bool:
        """True if a kernel for CPUs looks rows up, once all is loaded."""
        return False

    def methods(self) -> Iterable["LinearMethod"]:
        """The methods whose products are timed: this one, or its parts."""
        return (self,)

    @abstractmethod
    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x [T, inputs] -> [T, outputs]` in the dtype of x, with `bias [outputs]` added."""

    def rounded(self, x: Tensor) -> Tensor:
        """The activations `x [T, inputs]` as the format multiplies them: plain or rounded."""
        return x

    def multiply_plain(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The result of `multiply` by PyTorch alone."""
        return F.linear(x, self.dequantize(), bias)

    def scores(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The result of `multiply` in float32."""
        return self.multiply(x, bias).float()

    @abstractmethod
    def dequantize(self) -> Tensor:
        """The plain matrix `[outputs, inputs]` in the shape's dtype, not to be written to: it may be what is stored."""

    def cuts(self) -> tuple[int, int]:
        """Parts begin, and shards are cut, at multiples of so many outputs and inputs."""
        axes = [axis for layout in (*self.layouts().values(), *self.storage().values()) for axis in layout.axes]
        outputs, inputs = (math.lcm(*(axis.per for axis in axes if axis.of == of)) for of in ("outputs", "inputs"))
        return outputs, inputs

    def load(self, kind: str, tensor: Tensor, part: Part, first_row: int = 0) -> None:
        """Take what `part` has of `tensor`: rows, from `first_row` on, of the part's tensor; any dtype and device.

        Rows are counted in the whole part; of other dimensions `tensor` and `part` may be what a share is in (`taken`).
        """
        copy_part(self.layouts()[kind], getattr(self, kind), tensor, part, first_row)

    def fill_random(self, generator: torch.Generator) -> None:
        """Weights to measure speed and memory with, instead of `load`."""
        for parameter in self.parameters():
            fill_random(parameter, generator)

    def finish(self) -> None:
        """All is loaded: store it as the products want it. Nothing is loaded afterwards."""

    def stored(self) -> list[Tensor] | None:
        """All that products read, once all is loaded, alike for one shape. None: it is not to be overwritten."""
        return None

    def use_kernels(self, build: BuildOptions) -> None:
        """Told once what a layer's products may be made of; formats that multiply by kernels of their own ask here."""

    def row_product(self) -> RowProduct | None:
        """The product of a single row in one launch with what is around it; None: the parts of a layer run alone."""
        return None

    def gated(self, activation: str) -> Product | None:
        """The product of gate and up, the matrix's halves, with activation(gate) * up as its `outputs / 2` results.

        None: the activation is a launch of its own. Asked for before anything is timed.
        """
        return None

    def activated(self, activation: str) -> Product | None:
        """The product with an activation of its results, which may differ with the number of rows.

        None: the activation is a launch of its own.
        """
        return None

    def embed(self, ids: Tensor) -> Tensor:
        """The rows `ids [T]` int64 of the matrix: `[T, inputs]`. A format that stores embeddings reads those alone."""
        return F.embedding(ids, self.dequantize())

    def embed_share(self, ids: Tensor, held: range) -> Tensor:
        """The rows `ids` of a larger matrix, of which this one has the rows `held`; the other rows are 0."""
        places = ids - held.start
        others = (places < 0) | (places >= len(held))
        return self.embed(places.masked_fill_(others, 0)).masked_fill_(others[:, None], 0)

    def coding(self, rows: int) -> "Coding | None":
        """The coding of so many rows, if they are multiplied as codes; the operation before may then make codes."""
        return None

    def multiply_codes(self, x: "RowCodes", bias: Tensor | None) -> Tensor:
        """The product of rows that were coded as `coding` says for this number of rows."""
        raise NotImplementedError(f"{self.name} multiplies plain rows")

    def candidates(self) -> Mapping[int, Mapping[Hashable, Product]]:
        """The ways to multiply that are to be timed, by the most rows that they are for and by their descriptions."""
        return {}

    def choose(self, rows: int, candidate: Hashable) -> None:
        """Use one of the `candidates` for up to so many rows."""
