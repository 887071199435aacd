"""Weights as they are, packed for a kernel for CPUs."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from kvern.cpu.activation import KINDS
from kvern.cpu.linear import PackedWeight, gated_linear, linear, pack, unpack
from kvern.cpu.processor import forced_isa
from kvern.layers.build_options import BuildOptions
from kvern.layers.linear_method import INPUTS, OUTPUTS, LinearMethod, LinearShape, Product, TensorLayout


class CompiledMethod(LinearMethod):
    """`weight [outputs, inputs]` in the dtype of the activations, until `finish` packs it.

    A row's products do not depend on the rows beside it. Rows of embeddings are read from the packed matrix.
    """

    name = "compiled"
    weight: Tensor
    packed: PackedWeight
    _is_gated = False

    @property
    def compiled(self) -> bool:
        return True

    def layouts(self) -> Mapping[str, TensorLayout]:
        return {"weight": TensorLayout(self.shape.dtype, (OUTPUTS, INPUTS))}

    def finish(self) -> None:
        self.packed = pack(self.weight, gated=self._is_gated)
        del self.weight

    def stored(self) -> list[Tensor]:
        return [self.packed.numbers]

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, self.packed, bias)

    def scores(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, self.packed, bias, torch.float32)

    def gated(self, activation: str) -> Product:
        self._is_gated = True
        return partial(self._multiply_gated, KINDS[activation])

    def _multiply_gated(self, kind: int, x: Tensor, bias: Tensor | None) -> Tensor:
        return gated_linear(x, self.packed, bias, kind)

    def dequantize(self) -> Tensor:
        return unpack(self.packed)

    def embed(self, ids: Tensor) -> Tensor:
        return unpack(self.packed, ids)

    def embed_share(self, ids: Tensor, held: range) -> Tensor:
        return unpack(self.packed, ids, held.start)


def compiles(shape: LinearShape, build: BuildOptions) -> bool:
    """Return whether the kernel multiplies such a matrix.

    Where a processor has matrix tiles (AMX), oneDNN's products of many bfloat16 rows take a fraction of the time, but a
    row's results depend on how many there are.
    """
    if "cpu_linear" not in build.kernels or shape.device.type != "cpu":
        return False
    if shape.dtype == torch.bfloat16:
        forced = forced_isa()
        has_tiles = torch.cpu._is_amx_tile_supported() if forced is None else forced.name == "amx"
        return build.deterministic or not has_tiles
    return shape.dtype == torch.float32
