"""Latent attention out of Triton kernels: norm, rotation and cache write are one launch."""

from typing import cast

import torch
from torch import Tensor

from kvern.kernels.store_latents import store_latents
from kvern.layers.attention import Attend, ExpandingAttend
from kvern.layers.build import Build
from kvern.layers.latent_attention import HeadMatrices, LatentAttention
from kvern.layers.rope import Rotation
from kvern.spec.mixers import LatentAttentionSpec
from kvern.spec.model import ModelSpec, RopeSpec


class FusedLatentAttention(LatentAttention):
    """Latent attention whose rotation is none, or of whole keys."""

    def __init__(
        self, index: int, model: ModelSpec, spec: LatentAttentionSpec, rope: RopeSpec | None, build: Build
    ) -> None:
        super().__init__(index, model, spec, rope, build)
        self.rotates = rope is not None
        self.interleaved = rope is not None and rope.interleaved

    def attended(
        self, asked: Tensor, cached: Tensor, rotation: Rotation, attend: Attend, wanted: Tensor | None
    ) -> Tensor:
        spec, paged, norm = self.spec, cast("ExpandingAttend", attend), self.kv_a_layernorm
        table, positions, _ = rotation
        query = asked.new_empty(len(asked), spec.heads, cached.shape[1])
        own = torch.unflatten(asked, 1, (spec.heads, -1))[..., : spec.qk_nope_head_dim]
        runs = None if wanted is not None else paged.expanded
        absorbed = len(asked) if runs is None or not runs.whole else runs.first
        self.expansion.absorb(own[:absorbed], query[:absorbed, :, : spec.kv_lora_rank])
        store_latents(
            cached,
            asked,
            positions,
            paged.slot_mapping(self.index),
            table if self.rotates else None,
            cast("Tensor", norm.weight),
            norm.epsilon,
            paged.cache(self.index),
            query,
            interleaved=self.interleaved,
        )
        if runs is None:
            return self.expansion.expand(paged.over_cache(self.index, query, wanted))
        sums = asked.new_empty(len(asked), spec.heads, spec.v_head_dim)
        if absorbed:
            self.expansion.expand(paged.over_cache(self.index, query)[:absorbed], sums[:absorbed])
        absorb, expand = (cast("HeadMatrices", item) for item in (self.expansion.absorb, self.expansion.expand))
        rotated = query[runs.first :, :, spec.kv_lora_rank :]
        matrices = absorb.columns, expand.columns
        runs.attend(paged.cache(self.index), own[runs.first :], rotated, *matrices, sums[runs.first :])
        return sums
