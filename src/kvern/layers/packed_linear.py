"""Linear layers for the CPU: bfloat16 weights in oneDNN's own blocked order.

Plain weights are reordered at every call when several tokens are multiplied, and read in a poor order when there is
one; packed ones take about two thirds of the time at any number of tokens.
"""

import torch
from torch import Tensor, nn

from kvern.layers.linear import Linear
from kvern.layers.module import Module


class PackedLinear(Module):
    """A `Linear` that can be applied and no longer loaded; its plain weights are gone."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.inputs, self.outputs, self.fused = linear.inputs, linear.outputs, linear.fused
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 1)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return out


def pack_linears(module: nn.Module) -> None:
    """Replace every bfloat16 `Linear` below `module` that is on a CPU with oneDNN, freeing each before the next."""
    for name, child in module.named_children():
        if not isinstance(child, Linear):
            pack_linears(child)
        elif child.weight.device.type == "cpu" and child.weight.dtype == torch.bfloat16 and _has_onednn():
            setattr(module, name, PackedLinear(child))


def _has_onednn() -> bool:
    return bool(torch._C._has_mkldnn)
