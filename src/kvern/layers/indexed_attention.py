"""Latent attention to the keys that an indexer selects: DeepSeek sparse attention (DeepSeek-V3.2-Exp, section 2.1).

Each query of a request scores all keys before it and itself, by index keys much smaller than latents,

    score = sum over index heads of weight * relu(index query @ index key)

and attends to the `top_k` with the highest scores; of equal ones to the earliest, so that a selection does not depend
on the chunks that a prompt came in. An index key lies behind its token's latent, in the same row of the cache.
"""

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from kvern.layers.build import Build
from kvern.layers.latent_attention import LatentAttention
from kvern.layers.linear import column
from kvern.layers.module import Module
from kvern.layers.norm import Norm
from kvern.layers.rope import Rotation, make_rotate, rows_of_table
from kvern.layers.step_context import Context, ReadableAttend, StepAdapters, StepContext, rows_of
from kvern.spec.mixers import IndexerSpec, LatentAttentionSpec
from kvern.spec.model import ModelSpec, NormSpec, RopeSpec

MOST_NUMBERS = 1 << 24
"""Scores, and entries of selected keys, that are held at once: queries are taken in runs of so many."""


class Asked(NamedTuple):
    """The index queries `[T, index heads, head_dim]` by which T queries select keys, and their float32 weights."""

    queries: Tensor
    weights: Tensor

    def of(self, rows: Tensor) -> "Asked":
        return Asked(self.queries[rows], self.weights[rows])


class Indexer(Module):
    """Index queries, keys and weights of tokens; the first entries of each head are rotated in halves."""

    def __init__(self, model: ModelSpec, spec: LatentAttentionSpec, indexer: IndexerSpec, build: Build) -> None:
        super().__init__()
        assert spec.q_lora_rank is not None
        self.heads = indexer.heads
        self.wq_b = column(build, spec.q_lora_rank, {"wq_b": indexer.heads * indexer.head_dim})
        self.wk = column(build, model.hidden_size, {"wk": indexer.head_dim})
        norm = NormSpec("layer", spec.epsilon, bias=True)
        self.k_norm = Norm(norm, indexer.head_dim, "k_norm", build, build.dtype)
        self.weights_proj = column(build, model.hidden_size, {"weights_proj": indexer.heads})
        self._scale = (indexer.heads * indexer.head_dim) ** -0.5

    def forward(self, hidden: Tensor, latent: Tensor, adapters: StepAdapters) -> tuple[Asked, Tensor]:
        """`hidden [T, hidden]`, `latent [T, q_lora_rank]` of the queries -> what is asked, and keys `[T, head_dim]`.

        Queries and keys are not rotated yet.
        """
        queries = self.wq_b(latent, adapters.rows).unflatten(1, (self.heads, -1))
        key = self.k_norm(self.wk(hidden, adapters.rows))
        weights = self.weights_proj(hidden, adapters.rows).float() * self._scale
        return Asked(queries, weights), key


class IndexedAttention(LatentAttention):
    """`hidden [T, hidden] -> [T, hidden]`. `index`: the layer's place among those that attend."""

    def __init__(
        self, index: int, model: ModelSpec, spec: LatentAttentionSpec, rope: RopeSpec | None, build: Build
    ) -> None:
        super().__init__(index, model, spec, rope, build)
        assert spec.indexer is not None
        self.indexer = Indexer(model, spec, spec.indexer, build.at("indexer").whole)  # all index heads select
        self.top_k, self._index_dim = spec.indexer.top_k, spec.indexer.head_dim
        self._rotate_index = make_rotate(rope, spec.qk_rope_head_dim)
        self._takes_tables = "cpu_layers" in build.kernels
        self._is_interleaved = rope is not None and rope.interleaved

    def forward(self, hidden: Tensor, step: StepContext) -> Tensor:
        spec = self.spec
        paged = cast("ReadableAttend", step.attend)
        wanted = step.wanted
        projected = self.in_proj(hidden, step.adapters.rows)
        asked, latent, shared = torch.split(
            projected, [projected.shape[1] - self._cached, spec.kv_lora_rank, spec.qk_rope_head_dim], 1
        )
        asked = self.q_a_layernorm(asked)
        query = self.q_b_proj(asked, step.adapters.rows).unflatten(1, (spec.heads, -1))
        nope, rope = torch.split(query, [spec.qk_nope_head_dim, spec.qk_rope_head_dim], 2)
        turned = self.rotate(torch.cat((rope, shared[:, None]), 1), step.rotation)
        query = torch.cat((self.expansion.absorb(nope), turned[:, :-1]), 2)
        selecting, index_key = self.indexer(hidden, asked, step.adapters)
        selecting, index_key = self._rotated(selecting, index_key, step.rotation)
        key = torch.cat((self.kv_a_layernorm(latent), turned[:, -1], index_key), 1)[:, None]
        paged.store(self.index, key, key[..., : spec.kv_lora_rank])
        contexts = paged.contexts(self.index)
        if all(len(context.places) <= self.top_k for context in contexts):
            attended = paged.over_cache(self.index, F.pad(query, (0, self._index_dim)), wanted)
        else:
            attended = self._over_selected(query, selecting, paged.cache(self.index), contexts, wanted)
        out: Tensor = self.o_proj(self.expansion.expand(attended).flatten(1), step.adapters.wanted)
        return out

    def _rotated(self, asked: Asked, key: Tensor, rotation: Rotation) -> tuple[Asked, Tensor]:
        """The rotation is that of latents: where it turns pairs, halves are made pairs, of queries and keys alike."""
        both = torch.cat((asked.queries, key[:, None]), 1)
        rotated = self.spec.qk_rope_head_dim
        first, rest = both[..., :rotated], both[..., rotated:]
        if self._is_interleaved:
            first = torch.stack(first.chunk(2, -1), -1).flatten(2)
        turned = self._rotate_index(first, rows_of_table(rotation) if self._takes_tables else rotation)
        both = torch.cat((turned, rest), 2)
        return Asked(both[:, :-1], asked.weights), both[:, -1]

    def _over_selected(
        self, query: Tensor, asked: Asked, cache: Tensor, contexts: list[Context], wanted: Tensor | None
    ) -> Tensor:
        """Queries `[T, heads, kv_lora_rank + qk_rope_head_dim]` -> sums of latents `[T or S, heads, kv_lora_rank]`."""
        stored = cache.flatten(0, 3)
        out = query.new_empty(*query.shape[:2], self.spec.kv_lora_rank)
        for context in contexts:
            rows = torch.arange(context.tokens.start, context.tokens.stop)
            if wanted is not None:
                rows = wanted[(wanted >= context.tokens.start) & (wanted < context.tokens.stop)]
            index_keys = stored[context.places, query.shape[2] :].float()
            held = max(len(index_keys) * asked.queries.shape[1], self.top_k * max(stored.shape[1], query.shape[1]))
            for run in torch.split(rows, max(1, MOST_NUMBERS // held)):
                last = run - context.tokens.stop + len(context.places)
                selected, is_key = places_of(selection(asked.of(run), index_keys, last, self.top_k), self.top_k)
                keys = stored[context.places[selected], : query.shape[2]].float()
                scores = torch.einsum("qhd,qkd->qhk", query[run].float(), keys) * self.spec.scale
                weights = scores.masked_fill_(~is_key[:, None], -torch.inf).softmax(-1)
                sums = torch.einsum("qhk,qkd->qhd", weights, keys[..., : self.spec.kv_lora_rank])
                out[run] = sums.to(out.dtype)
        return rows_of(out, wanted)


def selection(asked: Asked, index_keys: Tensor, last: Tensor, top_k: int) -> Tensor:
    """The keys of a request that its queries attend to: `[Q, keys]` bool, at most `top_k` in each row.

    `index_keys [keys, head_dim]` float32; `last [Q]` int64: the newest key that each query sees, its own.
    """
    scores = torch.einsum("qhd,kd->qhk", asked.queries.float(), index_keys).relu_()
    scores = torch.einsum("qh,qhk->qk", asked.weights, scores)
    visible = torch.arange(len(index_keys)) <= last[:, None]
    if len(index_keys) <= top_k:
        return visible
    scores.masked_fill_(~visible, -torch.inf)
    least = scores.topk(top_k).values[:, -1:]
    above, equal = scores > least, (scores == least) & visible
    return above | (equal & (equal.cumsum(1) <= top_k - above.sum(1, keepdim=True)))


def places_of(selected: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The ascending places `[Q, most]` int64 where rows `[Q, keys]` bool are true, and which places are valid."""
    rows, columns = selected.nonzero(as_tuple=True)
    places = torch.zeros(len(selected), most, dtype=torch.int64)
    places[rows, selected.cumsum(1)[rows, columns] - 1] = columns
    return places, torch.arange(most) < selected.sum(1, keepdim=True)
