"""Weights as they are: multiplied by PyTorch, on a CPU by a kernel or packed for oneDNN."""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from kvern.cpu.processor import forced_isa
from kvern.layers.build_options import BuildOptions
from kvern.layers.compiled_linear import CompiledMethod, compiles
from kvern.layers.experts import Experts, StackedExperts
from kvern.layers.linear_format import LinearFormat
from kvern.layers.linear_method import INPUTS, OUTPUTS, LinearMethod, LinearShape, TensorLayout
from kvern.spec.model import MoeSpec

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

    def experts(self, hidden_size: int, spec: MoeSpec, build: BuildOptions) -> Experts | None:
        if compiles(LinearShape(hidden_size, spec.width, build.dtype, build.device), build):
            return None
        return StackedExperts(hidden_size, spec, build)
