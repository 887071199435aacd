"""Multi-head latent attention: keys and values of all heads are made of one vector for each token, which is cached.

    q, [latent | shared key] = projections(hidden)
    query of a head = [q_nope @ key part of kv_b_proj | rotated q_rope]        as wide as what is cached
    attended        = softmax(scale * query @ cached) @ cached latents
    value of a head = attended @ value part of kv_b_proj

So no head's keys and values are ever made: the expansion `kv_b_proj` multiplies queries before, and what was attended
to behind (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1.2).

Ranks share heads; what makes latents, and their cache, is on all of them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor

from kvern.cpu.linear import linear_heads, pack_heads
from kvern.cpu.rotary import Heads, rotate
from kvern.layers.build import Build
from kvern.layers.build_options import Section
from kvern.layers.linear import Weighted, column, row
from kvern.layers.linear_method import LinearShape
from kvern.layers.module import Module
from kvern.layers.norm import Norm
from kvern.layers.rope import Rotation, make_rotate
from kvern.layers.step_context import ExpandingAttend, StepContext, rows_of
from kvern.layers.unquantized import compiles
from kvern.spec.mixers import LatentAttentionSpec
from kvern.spec.model import ModelSpec, NormSpec, RopeSpec

HeadProducts = Callable[..., Tensor]
"""`x [T, heads, inputs] -> [T, heads, outputs]`, each head times a matrix of its own."""


class HeadMatrices:
    """`HeadProducts` by PyTorch, with `columns [heads, inputs, outputs]`; rows of `out` may have gaps."""

    def __init__(self, matrices: Tensor) -> None:
        self.columns = matrices.transpose(1, 2).contiguous()

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        out = x.new_empty(*x.shape[:2], self.columns.shape[2]) if out is None else out
        torch.bmm(x.transpose(0, 1), self.columns, out=out.transpose(0, 1))
        return out


def multiply_heads(matrices: Tensor, is_compiled: bool) -> HeadProducts:
    """The product with `matrices [heads, outputs, inputs]`, by a kernel for CPUs or PyTorch."""
    return partial(linear_heads, pack_heads(matrices)) if is_compiled else HeadMatrices(matrices)


class LatentExpansion(Weighted):
    """The matrices that make keys and values of latents: loaded as one in any format, held plain as two for each head.

    absorb   what makes a key multiplies queries: [T, heads, qk_nope_head_dim] -> [T, heads, kv_lora_rank]
    expand   what makes a value multiplies sums of latents: [T, heads, kv_lora_rank] -> [T, heads, v_head_dim]
    """

    absorb: HeadProducts
    expand: HeadProducts

    def __init__(self, spec: LatentAttentionSpec, build: Build) -> None:
        outputs = spec.heads * (spec.qk_nope_head_dim + spec.v_head_dim)
        super().__init__(spec.kv_lora_rank, {"kv_b_proj": [build.ranks.share(outputs)]}, build)
        self.spec = spec
        self._is_compiled = compiles(LinearShape(outputs, spec.kv_lora_rank, build.dtype, build.device), build)

    def finish(self) -> None:
        super().finish()
        self.divide()
        del self.method

    def divide(self) -> None:
        """Make both products of the matrix that was loaded."""
        matrices = self.method.dequantize().view(self.spec.heads, -1, self.spec.kv_lora_rank)
        keys, values = torch.split(matrices, [self.spec.qk_nope_head_dim, self.spec.v_head_dim], 1)
        self.absorb = multiply_heads(keys.transpose(1, 2), self._is_compiled)
        self.expand = multiply_heads(values, self._is_compiled)


def _compiled_rotation(rope: RopeSpec, spec: LatentAttentionSpec) -> Callable[[Tensor, Rotation], Tensor]:
    """Rotates queries and the shared key `[T, heads + 1, qk_rope_head_dim]` in place, by a kernel for CPUs."""
    heads = Heads(spec.heads + 1, 0, spec.qk_rope_head_dim, rope.dim, interleaved=rope.interleaved)

    def turn(x: Tensor, rotation: Rotation) -> Tensor:
        table, positions, _ = rotation
        rotate(heads, x, positions, table)
        return x

    return turn


class LatentAttention(Module):
    """`hidden [T, hidden] -> [T, hidden]`. `index`: the layer's place among those that attend."""

    def __init__(
        self, index: int, model: ModelSpec, spec: LatentAttentionSpec, rope: RopeSpec | None, build: Build
    ) -> None:
        super().__init__()
        self.index = index
        self.spec = spec
        self._rope = rope
        self._store = None if spec.indexer is not None else build.ops.store_latents
        self._cached = spec.kv_lora_rank + spec.qk_rope_head_dim
        queries = spec.heads * (spec.qk_nope_head_dim + spec.qk_rope_head_dim)
        norm = NormSpec("rms", spec.epsilon)
        parts: dict[str, int | Sequence[Section]] = {"q_proj": queries}
        if spec.q_lora_rank is not None:
            parts = {"q_a_proj": [Section(spec.q_lora_rank, build.ranks.size)]}
        parts["kv_a_proj_with_mqa"] = [Section(self._cached, build.ranks.size)]
        self.in_proj = column(build, model.hidden_size, parts, bias=model.biases.qkv)
        if spec.q_lora_rank is not None:
            self.q_a_layernorm = Norm(norm, spec.q_lora_rank, "q_a_layernorm", build)
            self.q_b_proj = column(build, spec.q_lora_rank, {"q_b_proj": queries})
        self.kv_a_layernorm = Norm(norm, spec.kv_lora_rank, "kv_a_layernorm", build)
        self.expansion = LatentExpansion(spec, build)
        self.o_proj = row(build, spec.heads * spec.v_head_dim, "o_proj", model.hidden_size, bias=model.biases.output)
        self.rotate = make_rotate(rope, spec.qk_rope_head_dim)
        if rope is not None and "cpu_layers" in build.kernels:
            self.rotate = _compiled_rotation(rope, spec)

    def forward(self, hidden: Tensor, step: StepContext) -> Tensor:
        projected = self.in_proj(hidden, step.adapters.rows)
        asked, cached = projected.split([projected.shape[1] - self._cached, self._cached], 1)
        if self.spec.q_lora_rank is not None:
            asked = self.q_b_proj(self.q_a_layernorm(asked), step.adapters.rows)
        attended = (self._attended if self._store is None else self._stored)(asked, cached, step)
        out: Tensor = self.o_proj(attended.flatten(1), step.adapters.wanted)
        return out

    def _attended(self, asked: Tensor, cached: Tensor, step: StepContext) -> Tensor:
        """Queries `[T, heads * (qk_nope_head_dim + qk_rope_head_dim)]`, latents and shared keys -> sums of values.

        `cached [T, kv_lora_rank + qk_rope_head_dim]`; the sums are `[S, heads, v_head_dim]`.
        """
        spec = self.spec
        latent, shared = torch.split(cached, [spec.kv_lora_rank, spec.qk_rope_head_dim], 1)
        heads = torch.unflatten(asked, 1, (spec.heads, -1))
        nope, rope = torch.split(heads, [spec.qk_nope_head_dim, spec.qk_rope_head_dim], 2)
        turned = self.rotate(torch.cat((rope, shared[:, None]), 1), step.rotation)
        query = torch.cat((self.expansion.absorb(nope), turned[:, :-1]), 2)
        key = torch.cat((self.kv_a_layernorm(latent)[:, None], turned[:, -1:]), 2)
        sums = rows_of(step.attend(self.index, query, key, key[..., : spec.kv_lora_rank]), step.wanted)
        return self.expansion.expand(sums)

    def _stored(self, asked: Tensor, cached: Tensor, step: StepContext) -> Tensor:
        """Compute `_attended` with a kernel for norm, rotation and cache write."""
        assert self._store is not None
        spec = self.spec
        paged = cast("ExpandingAttend", step.attend)
        norm = self.kv_a_layernorm
        table, positions, _ = step.rotation
        query = asked.new_empty(len(asked), spec.heads, cached.shape[1])
        own = torch.unflatten(asked, 1, (spec.heads, -1))[..., : spec.qk_nope_head_dim]
        runs = None if step.wanted is not None else paged.expanded
        absorbed = len(asked) if runs is None or not runs.whole else runs.first
        self.expansion.absorb(own[:absorbed], query[:absorbed, :, : spec.kv_lora_rank])
        self._store(
            cached,
            asked,
            positions,
            paged.slot_mapping(self.index),
            table if self._rope is not None else None,
            norm.weight,
            norm.epsilon,
            paged.cache(self.index),
            query,
            interleaved=self._rope is not None and self._rope.interleaved,
        )
        if runs is None:
            return self.expansion.expand(paged.over_cache(self.index, query, step.wanted))
        sums = asked.new_empty(len(asked), spec.heads, spec.v_head_dim)
        if absorbed:
            self.expansion.expand(paged.over_cache(self.index, query)[:absorbed], sums[:absorbed])
        absorb, expand = (cast("HeadMatrices", item) for item in (self.expansion.absorb, self.expansion.expand))
        rotated = query[runs.first :, :, spec.kv_lora_rank :]
        matrices = absorb.columns, expand.columns
        runs.attend(paged.cache(self.index), own[runs.first :], rotated, *matrices, sums[runs.first :])
        return sums
