"""The projections around attention; what happens between them is the caller's `Attend`."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from kvern.errors import UnsupportedModel
from kvern.layers.build import Build, Section
from kvern.layers.loadable import Loadable, copy_shares
from kvern.layers.module import Identity, Module
from kvern.layers.norm import RMSNorm, make_query_key_norm
from kvern.layers.rope import Rotation, make_rotate
from kvern.spec.mixers import LatentAttentionSpec
from kvern.spec.model import LayerSpec, ModelSpec

if TYPE_CHECKING:
    from kvern.kernels.quantize_rows import RowCodes
    from kvern.layers.latent_attention import LatentAttention


class Attend(Protocol):
    """Stores a step's keys and values and attends to what each token may see of its request, causally in decoders."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """`query [T, heads, head_dim]`, `key` and `value [T, kv_heads, head_dim]` -> `[T, heads, head_dim]`.

        The inputs are rotated and normalised already; they may be views with gaps between rows. Where values are the
        first `AttentionSpec.value_dim` entries of keys, `value` and the result have as many.
        """


class PagedAttend(Attend, Protocol):
    """An `Attend` whose cache others write to: queries then attend to what is stored."""

    def slot_mapping(self, layer: int) -> Tensor:
        """`[T] int64`, where each token's key and value go: block * block_size + offset."""

    def cache(self, layer: int) -> Tensor:
        """`[2, blocks, block_size, kv_heads, head_dim]`; `[1, ...]` where values are the first entries of keys."""

    def scales(self, layer: int) -> Tensor | None:
        """`[2, kv_heads]` float32, by which the codes of a cache in 8 bits are keys and values; None: it is plain."""

    def over_cache(self, layer: int, query: Tensor, wanted: Tensor | None = None) -> Tensor:
        """`query [T, heads, head_dim]` over the stored keys and values -> `[T, heads, head_dim]`.

        With `wanted`, the indices [S] of the step's tokens that are sampled from, theirs alone: `[S, heads, head_dim]`.
        """


class Context(NamedTuple):
    """What a request's tokens of a step, those of `tokens`, see: the `places [keys]` int64 of its keys in the cache.

    A place is block * block_size + offset; the last ones are the tokens' own, which are stored by then.
    """

    tokens: slice
    places: Tensor


class ReadableAttend(PagedAttend, Protocol):
    """A `PagedAttend` whose cache others read, too."""

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store keys and values `[T, kv_heads, head_dim]`, and attend to nothing."""

    def contexts(self, layer: int) -> list[Context]:
        """Of each request of the step."""


class ExpandedRuns(Protocol):
    """Runs of queries, from the step's token `first` on, that attend to what is made of latents.

    `whole`: they are all runs of the step.
    """

    first: int
    whole: bool

    def attend(self, cache: Tensor, own: Tensor, rotated: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """Write the sums of values of these tokens to `out`; shapes are in `attention/expanded.py`."""


class ExpandingAttend(PagedAttend, Protocol):
    """A `PagedAttend` over latents, of which keys and values may be made."""

    expanded: ExpandedRuns | None


class StepAdapters(NamedTuple):
    """Which adapters a step's rows use, in the form that the adapted linear layers take; None: no row uses one.

    `rows` are all tokens of the step, `wanted` those whose output is: fewer in a last layer, else the same.
    """

    rows: Any = None
    wanted: Any = None


NO_ADAPTERS = StepAdapters()


def rows_of(x: Tensor, wanted: Tensor | None) -> Tensor:
    """The rows of x that are wanted; None: all."""
    return x if wanted is None else x.index_select(0, wanted)


class Sinks(Loadable):
    """The sinks of a layer, `logits [heads]` float32, which attention backends read; `index` is the layer's."""

    def __init__(self, index: int, heads: int, build: Build) -> None:
        super().__init__(build.path)
        self.index, self.logits = index, build.empty(heads, dtype=torch.float32)
        self._share = build.ranks.share(heads)

    def parts(self) -> dict[str, tuple[int, ...]]:
        return {"sinks": (self._share.whole,)}

    def load(self, part: str, tensor: Tensor, first_row: int = 0) -> None:
        copy_shares(self.logits, tensor, first_row, [self._share])


class WantedAttend:
    """What layers attend with that store nothing and compute the tokens `wanted` [S] of a step of `tokens` alone."""

    def __init__(self, attend: PagedAttend, wanted: Tensor, tokens: int) -> None:
        self._attend, self._wanted, self._tokens = attend, wanted, tokens

    def over_cache(self, layer: int, query: Tensor, wanted: None = None) -> Tensor:
        """`query [S, heads, head_dim]` over the stored keys and values -> `[S, heads, head_dim]`."""
        all_queries = query.new_zeros((self._tokens, *query.shape[1:])).index_copy_(0, self._wanted, query)
        return self._attend.over_cache(layer, all_queries, self._wanted)


class Attention(Module):
    """`hidden [T, hidden] -> [T, hidden]`. Queries and keys stay side by side through norm and rotation.

    `index`: the place of the layer's cache among those of the model.
    """

    def __init__(self, index: int, model: ModelSpec, layer: LayerSpec, build: Build) -> None:
        super().__init__()
        spec = layer.attention
        self.index, self.heads, self.head_dim, self.gated = index, spec.heads, spec.head_dim, spec.gated
        own = spec.own_kv_heads
        self.rotated = spec.heads + own
        self.values = slice(spec.heads if spec.keys_are_values else self.rotated, None)
        parts = {"q_proj": [Section((1 + spec.gated) * spec.heads * spec.head_dim)]}
        keys = [Section(own * spec.head_dim, spec.copies)]
        parts |= {"k_proj": keys} if own else {}
        parts |= {"v_proj": keys} if own and not spec.keys_are_values else {}
        self.qkv_proj = build.column(spec.inputs or model.hidden_size, parts, bias=model.qkv_bias, fused="qkv_proj")
        self.o_proj = build.row(spec.heads * spec.head_dim, "o_proj", model.hidden_size, bias=model.output_bias)
        self.rotate = make_rotate(layer.rope, spec.head_dim)
        self.sinks = Sinks(index, spec.heads, build) if spec.sinks else None
        self.norm_before: nn.Module = Identity()
        self.norm_after: nn.Module = Identity()
        self.norm_values: nn.Module = Identity()
        if model.query_key_norm is not None:
            norm = make_query_key_norm(model.query_key_norm, spec, build)
            if model.query_key_norm.after_rope:
                self.norm_after = norm
            else:
                self.norm_before = norm
            if model.query_key_norm.values:
                plain = replace(model.query_key_norm.norm, kind="rms", weight=False, bias=False)
                self.norm_values = RMSNorm(plain, spec.head_dim, "v_norm", build)

    def forward(
        self,
        hidden: "Tensor | RowCodes",
        rotation: Rotation,
        attend: Attend,
        wanted: Tensor | None = None,
        adapters: StepAdapters = NO_ADAPTERS,
    ) -> Tensor:
        qkv = self.qkv_proj(hidden, adapters.rows)
        if not self.gated:
            out: Tensor = self.o_proj(self.attended(qkv, rotation, attend, wanted), adapters.wanted)
            return out
        queries = 2 * self.heads * self.head_dim
        query, gate = torch.unflatten(qkv[:, :queries], 1, (self.heads, 2, self.head_dim)).unbind(2)
        qkv = torch.cat((query.flatten(1), qkv[:, queries:]), 1)
        attended = self.attended(qkv, rotation, attend, wanted)
        gated: Tensor = self.o_proj(attended * rows_of(gate, wanted).flatten(1).sigmoid(), adapters.wanted)
        return gated

    def attended(self, qkv: Tensor, rotation: Rotation, attend: Attend, wanted: Tensor | None = None) -> Tensor:
        """What is between the projections: `[T, those of qkv_proj] -> [S, heads * head_dim]`."""
        parts = qkv.view(qkv.shape[0], -1, self.head_dim)
        query_key = self.norm_after(self.rotate(self.norm_before(parts[:, : self.rotated]), rotation))
        query, key = query_key[:, : self.heads], query_key[:, self.heads :]
        if rotation.query_scale is not None:
            query = query * rotation.query_scale
        return rows_of(attend(self.index, query, key, self.norm_values(parts[:, self.values])), wanted).flatten(1)


class BorrowingAttention(Attention):
    """Attention to the keys and values of an earlier layer, whose cache `index` is."""

    def attended(self, qkv: Tensor, rotation: Rotation, attend: Attend, wanted: Tensor | None = None) -> Tensor:
        query = self.norm_after(self.rotate(self.norm_before(qkv.view(qkv.shape[0], -1, self.head_dim)), rotation))
        if rotation.query_scale is not None:
            query = query * rotation.query_scale
        return cast("PagedAttend", attend).over_cache(self.index, query, wanted).flatten(1)


def make_attention(index: int, model: ModelSpec, layer: LayerSpec, build: Build) -> "Attention | LatentAttention":
    """The attention of a layer, out of kernels where they can do what it needs."""
    if isinstance(layer.mixer, LatentAttentionSpec):
        if layer.mixer.indexer is not None:
            from kvern.layers.indexed_attention import IndexedAttention

            return IndexedAttention(index, model, layer.mixer, layer.rope, build)
        from kvern.layers.latent_attention import LatentAttention

        if "rotary" not in build.kernels:
            return LatentAttention(index, model, layer.mixer, layer.rope, build)
        from kvern.layers.fused_latent import FusedLatentAttention

        return FusedLatentAttention(index, model, layer.mixer, layer.rope, build)
    borrows = layer.attention.cache_of is not None
    if "cpu_layers" in build.kernels:
        from kvern.layers.compiled import BorrowingCompiledAttention, CompiledAttention

        return (BorrowingCompiledAttention if borrows else CompiledAttention)(index, model, layer, build)
    if "rotary" in build.kernels:
        from kvern.layers.fused import BorrowingFusedAttention, FusedAttention, TableAttention, fuses_norm

        if model.query_key_norm is None or fuses_norm(model.query_key_norm):
            return (BorrowingFusedAttention if borrows else FusedAttention)(index, model, layer, build)
        if borrows:
            raise UnsupportedModel(f"{model.model_type}: no kernel normalises queries of layers that borrow keys so")
        return TableAttention(index, model, layer, build)
    return (BorrowingAttention if borrows else Attention)(index, model, layer, build)
