"""Weights as they are: multiplied by PyTorch, on a CPU packed for a kernel of kvern's or for oneDNN."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from kvern.cpu.linear import PackedWeight, gated_linear, has_tiles, linear, pack, unpack
from kvern.cpu.processor import forced_isa
from kvern.cpu.rows import ACTIVATIONS
from kvern.layers.build_options import BuildOptions
from kvern.layers.linear_format import LinearFormat
from kvern.layers.linear_method import INPUTS, OUTPUTS, LinearMethod, LinearShape, Product, TensorLayout
from kvern.spec.model import MoeSpec

if TYPE_CHECKING:
    from kvern.layers.experts import Experts


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

    @property
    def looks_up(self) -> bool:
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
        return partial(self._multiply_gated, ACTIVATIONS[activation])

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

    Where a processor has matrix tiles (AMX), and the kernel may not use them, oneDNN's products of many bfloat16 rows
    take a fraction of the time, but a row's results depend on how many there are.
    """
    if "cpu_linear" not in build.kernels or shape.device.type != "cpu":
        return False
    if shape.dtype == torch.bfloat16:
        forced = forced_isa()
        are_there = torch.cpu._is_amx_tile_supported() if forced is None else forced.name == "amx"
        return build.deterministic or not are_there or has_tiles()
    return shape.dtype == torch.float32


Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""`(x [T, inputs], weight [outputs, inputs], bias [outputs] | None) -> [T, outputs]`."""


def multiply_on_cpu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Few rows with the weight as the left factor: oneDNN reorders the right one of bfloat16 factors at every call."""
    if x.shape[0] == 1:
        row = torch.mv(weight, x[0]) if bias is None else torch.addmv(bias, weight, x[0])
        return row.unsqueeze(0)
    if x.dtype != torch.bfloat16 or x.shape[0] > weight.shape[0]:
        return F.linear(x, weight, bias)
    product = torch.mm(weight, x.t()) if bias is None else torch.addmm(bias[:, None], weight, x.t())
    return product.t()


def multiply_on(device: torch.device) -> Multiply:
    """PyTorch's product in the way that suits a device."""
    return multiply_on_cpu if device.type == "cpu" else F.linear


class UnquantizedMethod(LinearMethod):
    """`weight [outputs, inputs]` in the dtype of the activations."""

    name = "unquantized"
    weight: Tensor

    def __init__(self, shape: LinearShape) -> None:
        super().__init__(shape)
        self._multiply = multiply_on(shape.device)

    def layouts(self) -> Mapping[str, TensorLayout]:
        return {"weight": TensorLayout(self.shape.dtype, (OUTPUTS, INPUTS))}

    def stored(self) -> list[Tensor] | None:
        return [self.weight]

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._multiply(x, self.weight, bias)

    def activated(self, activation: str) -> Product | None:
        """cuBLAS ends a product with a bias by this one activation."""
        return self._multiply_gelu if activation == "gelu_tanh" and self.shape.device.type == "cuda" else None

    def _multiply_gelu(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if bias is None:
            return F.gelu(self.multiply(x, None), approximate="tanh")
        return torch._addmm_activation(bias, x, self.weight.t(), use_gelu=True)

    def dequantize(self) -> Tensor:
        return self.weight

    def embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class TableMethod(UnquantizedMethod):
    """Rows that are looked up as they are stored, and never multiplied."""

    @property
    def compiled(self) -> bool:
        return True


class PackedMethod(UnquantizedMethod):
    """bfloat16 weights on a CPU, kept in oneDNN's own blocked order.

    Plain weights are reordered at every call when several tokens are multiplied, and read in a poor order when there is
    one; packed ones take about two thirds of the time at any number of tokens.
    """

    def finish(self) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), 1)
        del self.weight

    def stored(self) -> None:
        """oneDNN alone knows it."""

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, bias, "none", [], "")
        return out

    def dequantize(self) -> Tensor:
        plain: Tensor = self.packed.to_dense()
        return plain


def _packs() -> bool:
    """Return whether oneDNN packs bfloat16: PyTorch has it, and the processor has the instructions that it needs."""
    forced = forced_isa()
    if not torch._C._has_mkldnn or (forced is not None and forced.name in ("scalar", "avx2")):
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class Unquantized(LinearFormat):
    """Plain weights, multiplied by PyTorch, or on a CPU by a kernel."""

    def linear(self, shape: LinearShape, build: BuildOptions) -> LinearMethod:
        if compiles(shape, build):
            return CompiledMethod(shape)
        on_cpu = shape.device.type == "cpu" and shape.dtype == torch.bfloat16
        return PackedMethod(shape) if on_cpu and _packs() else UnquantizedMethod(shape)

    def embedding(self, shape: LinearShape, build: BuildOptions) -> LinearMethod:
        return CompiledMethod(shape) if compiles(shape, build) else UnquantizedMethod(shape)

    def table(self, shape: LinearShape, build: BuildOptions) -> LinearMethod:
        return TableMethod(shape)

    def experts(self, hidden_size: int, spec: MoeSpec, build: BuildOptions) -> "Experts | None":
        if compiles(LinearShape(hidden_size, spec.width, build.dtype, build.device), build):
            return None
        from kvern.layers.experts import StackedExperts

        return StackedExperts(hidden_size, spec, build)
