"""Experts of plain weights by Triton kernels; nothing waits for the device, so that a step can be a CUDA graph."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

from torch import Tensor

from kvern.kernels.moe import fused_experts, hopper_experts
from kvern.layers.build_options import BuildOptions
from kvern.layers.experts import StackedExperts
from kvern.layers.tuned_experts import Ways
from kvern.spec.model import MoeSpec


class FusedExperts(StackedExperts):
    """Experts whose products are grouped by expert on the device."""

    def __init__(self, hidden_size: int, spec: MoeSpec, build: BuildOptions) -> None:
        super().__init__(hidden_size, spec, build)
        self.deterministic = build.deterministic
        hopper = "hopper_linear" in build.kernels and hopper_experts(build.dtype, hidden_size, spec.width)
        hopper = hopper and not build.deterministic and spec.has_plain_gate
        self._ways = Ways(self._multiply, hopper, build.dtype.itemsize == 2)

    def forward(self, x: Tensor, weights: Tensor, topk_ids: Tensor, add: Tensor | None = None) -> Tensor:
        return self._ways(x, weights, topk_ids, add)

    def candidates(self) -> Mapping[int, Mapping[Hashable, Callable[..., Tensor]]]:
        return {} if self.deterministic else self._ways.candidates()

    def choose(self, tokens: int, candidate: Hashable) -> None:
        self._ways.choose(tokens, candidate)

    def _multiply(self, x: Tensor, weights: Tensor, topk_ids: Tensor, add: Tensor | None = None, **way: Any) -> Tensor:
        return fused_experts(
            x,
            self.gate_up_proj,
            self.down_proj,
            weights,
            topk_ids,
            self.spec.activation,
            biases=self.bias_pair,
            add=add,
            deterministic=self.deterministic,
            of=self.share.of,
            **way,
        )
