"""Routers: which experts each token takes, and with what weights."""

from dataclasses import replace

import torch
from torch import Tensor

from kvern.layers.build import Build
from kvern.layers.experts import Experts
from kvern.layers.linear import Weighted
from kvern.layers.linear_format import LinearMethods
from kvern.layers.linear_method import fill_random
from kvern.layers.loadable import copy_rows
from kvern.layers.unquantized import Unquantized

CORRECTION = "gate.e_score_correction_bias"
EXPERT_SCALES = "gate.per_expert_scale"


class SoftmaxRouter(Weighted):
    """The `top_k` of a softmax over all experts: `x [T, hidden]` -> float32 weights and slots, `[T, top_k]`.

    A slot is that of an expert in `share`, or -1. Each expert's tokens are added to `counts [experts]` int64. With
    kernels softmax, choice, weights, counts and slots are one launch, unless groups of experts are chosen first
    (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.2.2).
    """

    def __init__(self, hidden_size: int, build: Build, experts: Experts, dtype: torch.dtype | None = None) -> None:
        spec = experts.spec
        super().__init__(hidden_size, {"gate": spec.experts}, build, bias=spec.bias, dtype=dtype)
        self.spec = spec
        self.counts = experts.expert_counts
        self.share = experts.share
        self._one = torch.ones(1, dtype=torch.int64, device=self.counts.device)
        self._route = build.ops.route if spec.groups == 1 and spec.scoring == "softmax" else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self._route is not None:
            logits, spec = self.method.multiply(x, self.bias), self.spec
            return self._route(logits, spec.top_k, spec.renormalize, spec.routed_scale, self.counts, self.share.slots)
        weights, topk_ids = self.choose(x)
        self.counts.scatter_add_(0, topk_ids.flatten(), self._one.expand(topk_ids.numel()))
        return weights, self.share.here(topk_ids)

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights, and experts in int64, that are not yet counted."""
        scores = self.method.multiply(x, self.bias).softmax(-1, dtype=torch.float32)
        weights, topk_ids = self._within_groups(scores, 1).topk(self.spec.top_k, dim=-1)
        return self._scale(weights), topk_ids

    def _within_groups(self, scores: Tensor, counted: int) -> Tensor:
        """`[T, experts]`, below all others those outside the groups whose `counted` highest add up to the most."""
        if self.spec.groups == 1:
            return scores
        grouped = scores.view(len(scores), self.spec.groups, -1)
        best: Tensor = grouped.topk(counted, dim=-1).values.sum(-1).topk(self.spec.top_groups, dim=-1).indices
        left_out = torch.ones(grouped.shape[:-1], dtype=torch.bool, device=scores.device).scatter_(-1, best, False)
        return grouped.masked_fill(left_out.unsqueeze(-1), -torch.inf).flatten(-2)

    def _scale(self, weights: Tensor) -> Tensor:
        if self.spec.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * self.spec.routed_scale


class ScaledRouter(SoftmaxRouter):
    """A softmax router whose weights are multiplied by a learned number of each expert."""

    def __init__(self, hidden_size: int, build: Build, experts: Experts) -> None:
        super().__init__(hidden_size, build, experts)
        self.per_expert_scale = build.empty(self.spec.experts, dtype=torch.float32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self._route is None:
            return super().forward(x)
        logits, spec = self.method.multiply(x, self.bias), self.spec
        weights, topk_ids = self._route(logits, spec.top_k, spec.renormalize, spec.routed_scale, self.counts)
        return weights * self.per_expert_scale[topk_ids], self.share.here(topk_ids)

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, topk_ids = super().choose(x)
        return weights * self.per_expert_scale[topk_ids], topk_ids

    def parts(self) -> dict[str, tuple[int, ...]]:
        return super().parts() | {EXPERT_SCALES: (self.spec.experts,)}

    def load(self, part: str, tensor: Tensor, first_row: int = 0) -> None:
        if part == EXPERT_SCALES:
            copy_rows(self.per_expert_scale, tensor, first_row)
        else:
            super().load(part, tensor, first_row)

    def fill_random(self, generator: torch.Generator) -> None:
        super().fill_random(generator)
        self.per_expert_scale.fill_(1.0)


class SigmoidRouter(SoftmaxRouter):
    """Each expert scored alone, in float32; a learned bias balances the choice and leaves the weights as they are.

    Choosing groups of experts first: DeepSeek-V3 (https://arxiv.org/abs/2412.19437), section 2.1.2.
    """

    def __init__(self, hidden_size: int, build: Build, experts: Experts) -> None:
        super().__init__(hidden_size, build, experts, torch.float32)
        self.e_score_correction_bias = build.empty(self.spec.experts, dtype=torch.float32).zero_()

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.method.multiply(x.float(), self.bias).sigmoid()
        corrected = self._within_groups(scores + self.e_score_correction_bias, 2)
        topk_ids = corrected.topk(self.spec.top_k, dim=-1).indices
        return self._scale(scores.gather(-1, topk_ids)), topk_ids

    def parts(self) -> dict[str, tuple[int, ...]]:
        return super().parts() | ({CORRECTION: (self.spec.experts,)} if self.spec.corrected else {})

    def load(self, part: str, tensor: Tensor, first_row: int = 0) -> None:
        if part == CORRECTION:
            copy_rows(self.e_score_correction_bias, tensor, first_row)
        else:
            super().load(part, tensor, first_row)

    def fill_random(self, generator: torch.Generator) -> None:
        super().fill_random(generator)
        if self.spec.corrected:
            fill_random(self.e_score_correction_bias, generator)


def make_router(hidden_size: int, build: Build, experts: Experts) -> SoftmaxRouter:
    """The router of these experts. Ranks multiply plain weights of one in the same way: they must choose alike."""
    if build.ranks.size > 1 and isinstance(build.linear_format("gate"), Unquantized):
        build = replace(build, linear=LinearMethods(Unquantized()))
    spec = experts.spec
    if spec.scoring == "sigmoid":
        return SigmoidRouter(hidden_size, build, experts)
    return (ScaledRouter if spec.expert_scales else SoftmaxRouter)(hidden_size, build, experts)
