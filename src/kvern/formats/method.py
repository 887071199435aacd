"""The base of all formats of quantized weights: multiplication, whatever the codes are.

A format stores a matrix as rows of codes; `rows` returns their values, and `packed` the form that kernels read.
`gpu/products.py` multiplies packed weights on a GPU, `kvern/cpu/packed.py` on a CPU; without kernels a product decodes
a few rows at a time.
"""

from abc import abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvern.cpu.packed import KINDS, LANES, STEP, Groups, GroupsProduct, Int8Product, rows_of, side_by_side
from kvern.cpu.rows import widened
from kvern.kernels.packed import E2M1, NF4, NON_LINEAR
from kvern.kernels.packed import Packed as Packed
from kvern.layers.build_options import BuildOptions
from kvern.layers.linear_method import LinearMethod, LinearShape, Product, RowProduct, fill_random

if TYPE_CHECKING:
    from kvern.formats.gpu.products import PackedProducts
    from kvern.kernels.quantize_rows import Coding, RowCodes

RUN_NUMBERS = 1 << 20
"""Plain numbers that a product without kernels makes at a time: they should be read again while still in a cache."""

RANDOM_SCALE = 1 / 64
"""The factor of random scales relative to plain weights, since integer codes are as large as 127."""


NUMBERS: Mapping[str, Sequence[float]] = {"int4": range(16), "e2m1": E2M1, "nf4": NF4, "iq4_nl": NON_LINEAR}
"""The values of 4-bit codes before zero and scale."""
MIDDLE = {"int4": 8, "int8": 0}
"""The zero of a matrix without zeros."""

CpuProduct = GroupsProduct | Int8Product
"""The product with one matrix on a CPU, which stores it in another order."""


class QuantizedMethod(LinearMethod):
    """A matrix of codes, of which the rows can be made plain alone."""

    _products: "PackedProducts | None" = None
    _on_cpu = False
    _cpu_product: CpuProduct | None = None

    @abstractmethod
    def rows(self, index: Tensor | slice) -> Tensor:
        """The plain rows, of the index [N] int64 or a slice of the outputs: `[N, inputs]` in the shape's dtype."""

    @abstractmethod
    def packed(self) -> Packed:
        """The weights that kernels read, after loading; before it, others of the same code."""

    def activation_codes(self) -> "Coding | None":
        """The coding that converts `x [T, inputs]` to codes, with float32 scales of rows or groups."""
        return None

    def coding(self, rows: int) -> "Coding | None":
        return None if self._products is None else self._products.coding(rows)

    def multiply_codes(self, x: "RowCodes", bias: Tensor | None) -> Tensor:
        assert self._products is not None
        return self._products.multiply_codes(x, bias)

    def own_products(self) -> Mapping[str, Product]:
        """Ways to multiply more than 16 rows on a GPU that only this format has, by name, once all is loaded."""
        return {}

    def cpu_product(self) -> CpuProduct | None:
        """The product on a CPU, after loading; None: no kernel supports it."""
        return packed_product(self.shape, self.packed())

    def finish(self) -> None:
        """Gives the codes and scales to the CPU kernel, which reorders them."""
        self._cpu_product = self.cpu_product() if self._on_cpu else None
        if self._cpu_product is not None:
            for name, lanes in self._cpu_product.stored().items():
                setattr(self, name, nn.Parameter(lanes, requires_grad=False))

    @property
    def compiled(self) -> bool:
        return self._cpu_product is not None

    def stored(self) -> list[Tensor] | None:
        return list(self.parameters())

    def stored_part(self, first: int, outputs: int) -> list[Tensor]:
        """The stored rows of `outputs` outputs from `first`, as views; no block may cross these bounds."""
        layouts, whole = self.storage(), self.shape.outputs
        of_rows = [
            tensor
            for name, tensor in self.named_parameters()
            if name not in layouts or layouts[name].axes[0].of == "outputs"
        ]
        return [tensor[first * len(tensor) // whole : (first + outputs) * len(tensor) // whole] for tensor in of_rows]

    def stored_rows(self, stored: Tensor, index: Tensor | slice) -> Tensor:
        """Rows of the codes or scales, in whichever order they are stored."""
        if self._cpu_product is None:
            return stored[index]
        return rows_of(stored, torch.arange(self.shape.outputs)[index])

    def use_kernels(self, build: BuildOptions) -> None:
        self._on_cpu = "cpu_packed" in build.kernels
        if "quantized" in build.kernels and self.shape.dtype == build.dtype:
            from kvern.formats.gpu.products import PackedProducts, multiplies

            if multiplies(self.packed().code, self.shape.inputs):
                self._products = PackedProducts(self, build.deterministic, "hopper_linear" in build.kernels)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self._products is not None:
            return self._products.multiply(x, bias)
        if self._cpu_product is not None:
            return self._cpu_product(x, bias)
        return self.multiply_plain(x, bias)

    def scores(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self._cpu_product is not None:
            return self._cpu_product(widened(x), None if bias is None else widened(bias))
        return super().scores(x, bias)

    def multiply_part(self, x: Tensor, first: int, outputs: int) -> Tensor:
        """Multiplies by `outputs` outputs from `first`: `[T, outputs]`, with a CPU kernel or decoded rows."""
        if self._cpu_product is not None and first % LANES == 0:
            return self._cpu_product(x, None, first, outputs)
        return F.linear(self.rounded(x), self.rows(slice(first, first + outputs)))

    def multiply_plain(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The named fallback: rows of RUN_NUMBERS at a time are made plain, then multiplied by PyTorch."""
        x = self.rounded(x)
        out = torch.cat([F.linear(x, self.rows(run)) for run in self._runs()], -1)
        return out if bias is None else out + bias

    def row_product(self) -> RowProduct | None:
        """None of a matrix that may have an `order`, which norms do not know."""
        if self._products is None or "order" in self.storage():
            return None
        return self._products.multiply_row

    def candidates(self) -> Mapping[int, Mapping[Hashable, Product]]:
        return {} if self._products is None else self._products.candidates()

    def choose(self, rows: int, candidate: Hashable) -> None:
        if self._products is not None:
            self._products.choose(rows, candidate)

    def fill_random(self, generator: torch.Generator) -> None:
        """Fills the matrix with random codes, and with scales that give small numbers in any format."""
        for parameter in self.parameters():
            fill_random(parameter, generator)
            if parameter.is_floating_point() and parameter.element_size() > 1:
                parameter.mul_(RANDOM_SCALE)

    def dequantize(self) -> Tensor:
        return self.rows(slice(0, self.shape.outputs))

    def embed(self, ids: Tensor) -> Tensor:
        return self.rows(ids)

    def _runs(self) -> Iterator[slice]:
        step = max(1, RUN_NUMBERS // self.shape.inputs)
        for first in range(0, self.shape.outputs, step):
            yield slice(first, min(first + step, self.shape.outputs))


def groups_product(shape: LinearShape, matrix: Groups) -> GroupsProduct:
    """The product with a matrix on a CPU; activations of bfloat16 models are rounded."""
    return GroupsProduct(matrix, shape.outputs, rounded=shape.dtype == torch.bfloat16)


def packed_product(shape: LinearShape, packed: Packed) -> GroupsProduct | None:
    """The product on a CPU with a matrix that is packed as for GPU kernels; None: no kernel supports it."""
    code = packed.code
    scale = packed.scale
    zero = packed.zero
    group = packed.group
    wide = code == "int8"
    if not (wide or code in NUMBERS) or scale is None or packed.outputs_per_scale > 1:
        return None
    if shape.inputs % group or group % (STEP if wide else 2 * STEP):
        return None
    if not wide and scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    if any(item is not None and item.dtype not in KINDS for item in (scale, zero)):
        return None
    numbers = None if wide else NUMBERS[code]
    if code == "int4" and zero is None:
        numbers = [number - MIDDLE[code] for number in range(16)]
    factor = None if packed.factor is None else side_by_side(packed.factor.unsqueeze(1))
    zeros = None if zero is None else side_by_side(zero)
    codes = side_by_side(packed.codes.flatten(1), STEP)
    return groups_product(shape, Groups(codes, numbers, side_by_side(scale), zeros, group, packed.order, factor))
