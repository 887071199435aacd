"""How a described model becomes modules: the precision, the device, and which linear layers hold its weights."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvern.layers.linear import Linear, Multiply


@dataclass(frozen=True)
class Build:
    """`dtype` and `device` of weights and activations, and the longest sequence, in tokens, that positions cover.

    `kernels` names the modules of `kvern.kernels` that parts may be made of; without them PyTorch does the work.
    `multiply` is how linear layers multiply (None: PyTorch). `deterministic` forbids whatever makes a token's result
    depend on the other tokens of a step.
    """

    dtype: torch.dtype
    device: torch.device
    max_model_len: int
    kernels: frozenset[str] = frozenset()
    multiply: Multiply | None = None
    deterministic: bool = False

    def column(self, inputs: int, parts: Mapping[str, int], *, bias: bool = False, fused: str | None = None) -> Linear:
        """A linear layer whose outputs are computed independently; `parts` maps checkpoint names to output sizes.

        `fused` is the name under which some checkpoints store all parts as one tensor.
        """
        return Linear(
            inputs, parts, bias=bias, fused=fused, dtype=self.dtype, device=self.device, multiply=self.multiply
        )

    def row(self, inputs: int, part: str, outputs: int, *, bias: bool = False) -> Linear:
        """A linear layer that sums over inputs which `column` layers produced."""
        return Linear(inputs, {part: outputs}, bias=bias, dtype=self.dtype, device=self.device, multiply=self.multiply)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.nn.Parameter:
        """An uninitialised parameter; reading a checkpoint fills it."""
        data = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return torch.nn.Parameter(data, requires_grad=False)
