"""Routers: which experts each token takes, and with what weights."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kvern.layers.build import Build
from kvern.layers.loadable import Loadable, copy_rows
from kvern.model_spec import MoeSpec


class SoftmaxRouter(Loadable):
    """The `top_k` of a softmax over all experts: `x [T, hidden]` -> float32 weights and int64 experts, `[T, top_k]`."""

    def __init__(self, hidden_size: int, spec: MoeSpec, build: Build) -> None:
        super().__init__()
        self.spec = spec
        self.weight = build.empty(spec.experts, hidden_size)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, topk_ids = F.linear(x, self.weight).softmax(-1, dtype=torch.float32).topk(self.spec.top_k, dim=-1)
        return self._scale(weights), topk_ids

    def _scale(self, weights: Tensor) -> Tensor:
        if self.spec.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * self.spec.routed_scale

    def parts(self) -> dict[str, tuple[int, ...]]:
        return {"gate.weight": tuple(self.weight.shape)}

    def load(self, part: str, tensor: Tensor, first_row: int = 0) -> None:
        copy_rows(self.get_parameter(part.removeprefix("gate.")), tensor, first_row)


class SigmoidRouter(SoftmaxRouter):
    """Each expert scored alone, in float32; a learned bias balances the choice and leaves the weights as they are."""

    def __init__(self, hidden_size: int, spec: MoeSpec, build: Build) -> None:
        super().__init__(hidden_size, spec, build)
        self.weight = build.empty(spec.experts, hidden_size, dtype=torch.float32)
        self.e_score_correction_bias = build.empty(spec.experts, dtype=torch.float32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.linear(x.float(), self.weight).sigmoid()
        topk_ids = (scores + self.e_score_correction_bias).topk(self.spec.top_k, dim=-1).indices
        return self._scale(scores.gather(-1, topk_ids)), topk_ids

    def parts(self) -> dict[str, tuple[int, ...]]:
        return super().parts() | {"gate.e_score_correction_bias": (self.spec.experts,)}


def make_router(hidden_size: int, spec: MoeSpec, build: Build, counts: Tensor) -> SoftmaxRouter:
    """The router of a specification; one of kernels adds each expert's tokens to `counts [experts]` int64."""
    sigmoid = spec.scoring == "sigmoid"
    if "moe" in build.kernels:
        from kvern.layers.fused_moe import CountingSigmoidRouter, FusedSoftmaxRouter

        return (CountingSigmoidRouter if sigmoid else FusedSoftmaxRouter)(hidden_size, spec, build, counts)
    return (SigmoidRouter if sigmoid else SoftmaxRouter)(hidden_size, spec, build)
