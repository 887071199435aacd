"""Routers and experts made of Triton kernels; nothing waits for the device, so that a step can be a CUDA graph."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any

from torch import Tensor

from kvern.kernels.moe import fused_experts, hopper_experts, route
from kvern.layers.build import Build
from kvern.layers.experts import StackedExperts
from kvern.layers.router import ScaledRouter, SoftmaxRouter
from kvern.layers.tuned_experts import Ways
from kvern.spec.model import MoeSpec


class FusedExperts(StackedExperts):
    """Experts whose products are grouped by expert on the device."""

    def __init__(self, hidden_size: int, spec: MoeSpec, build: Build) -> None:
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


class FusedSoftmaxRouter(SoftmaxRouter):
    """Softmax, choice, weights, counts and slots in one kernel: float32 weights and int32 slots, `[T, top_k]`.

    Where groups are chosen first, PyTorch does all that.
    """

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.spec.groups > 1:
            return super().forward(x)
        logits, spec = self.method.multiply(x, self.bias), self.spec
        return route(logits, spec.top_k, spec.renormalize, spec.routed_scale, self.counts, self.share.slots)


class FusedScaledRouter(ScaledRouter):
    """As `FusedSoftmaxRouter`, whose weights are then multiplied by a learned number of each expert."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.method.multiply(x, self.bias)
        weights, topk_ids = route(logits, self.spec.top_k, self.spec.renormalize, self.spec.routed_scale, self.counts)
        return weights * self.per_expert_scale[topk_ids], self.share.here(topk_ids)
