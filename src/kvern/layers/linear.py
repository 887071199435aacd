"""A linear layer made of one or more checkpoint tensors, stacked along its outputs."""

from collections.abc import Callable, Mapping
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvern.layers.loadable import Loadable, copy_rows

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


class Linear(Loadable):
    """`x [..., inputs] -> [..., sum of outputs]`; queries, keys and values, or gate and up, are one product."""

    bias: nn.Parameter | None

    def __init__(
        self,
        inputs: int,
        outputs: Mapping[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        fused: str | None = None,
        multiply: Multiply | None = None,
    ) -> None:
        super().__init__()
        self.inputs, self.outputs, self.fused = inputs, dict(outputs), fused
        self._first = dict(zip(outputs, accumulate(outputs.values(), initial=0), strict=False))
        self._multiply = multiply or (multiply_on_cpu if device.type == "cpu" else F.linear)
        total = sum(outputs.values())
        self.weight = nn.Parameter(torch.empty(total, inputs, dtype=dtype, device=device), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(total, dtype=dtype, device=device), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self._multiply(x, self.weight, self.bias)

    def parts(self) -> dict[str, tuple[int, ...]]:
        return self._shapes(self.outputs)

    def fused_parts(self) -> dict[str, tuple[int, ...]]:
        return self._shapes({self.fused: sum(self.outputs.values())}) if self.fused else {}

    def _shapes(self, outputs: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (size, self.inputs) for name, size in outputs.items()}
        if self.bias is not None:
            shapes |= {f"{name}.bias": (size,) for name, size in outputs.items()}
        return shapes

    def load(self, part: str, tensor: Tensor, first_row: int = 0) -> None:
        name, _, kind = part.rpartition(".")
        copy_rows(self.get_parameter(kind), tensor, self._first.get(name, 0) + first_row)
