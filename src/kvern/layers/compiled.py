"""Attention of kernels for CPUs."""

from typing import cast

from torch import Tensor

from kvern.cpu.library import DTYPES, address
from kvern.cpu.norm import KINDS
from kvern.cpu.rotary import Heads, rotate, rotate_and_store
from kvern.layers.attention import Attend, Attention, PagedAttend, rows_of
from kvern.layers.build import Build
from kvern.layers.norm import HeadNorm, RowNorm, SharedRowNorm
from kvern.layers.rope import Rotation
from kvern.spec.model import LayerSpec, ModelSpec


class CompiledAttention(Attention):
    """Attention whose norms, rotation and cache write are one kernel, but for a norm that takes other ranks."""

    def __init__(self, index: int, model: ModelSpec, layer: LayerSpec, build: Build) -> None:
        super().__init__(index, model, layer, build)
        self._attention, self._rope, self._norm = layer.attention, layer.rope, model.query_key_norm
        self._norm_of_ranks = self.norm_before if isinstance(self.norm_before, SharedRowNorm) else None
        self._described: Heads | None = None

    def _kernel_heads(self) -> Heads:
        if self._described is None:
            self._described = self._heads()
        return self._described

    def _heads(self) -> Heads:
        """What the kernel knows of the layer; weights have their places once they are loaded."""
        spec, rope, norm = self._attention, self._rope, self._norm
        heads = Heads(spec.heads, spec.own_kv_heads, spec.head_dim, keys_are_values=spec.keys_are_values)
        if rope is not None:
            heads.rotary_dim, heads.interleaved = rope.dim, rope.interleaved
        if norm is not None and self._norm_of_ranks is None:
            heads.norm, heads.epsilon, heads.norm_after = KINDS[norm.norm.kind], norm.norm.epsilon, norm.after_rope
            heads.whole_row, heads.norm_values = norm.scope == "row", norm.values
            module = cast("HeadNorm | RowNorm", self.norm_after if norm.after_rope else self.norm_before)
            weights, biases = module.of_query_and_key()
            heads.query_weight, heads.key_weight = map(address, weights)
            heads.query_bias, heads.key_bias = map(address, biases)
        return heads

    def attended(self, qkv: Tensor, rotation: Rotation, attend: Attend, wanted: Tensor | None = None) -> Tensor:
        qkv, heads = qkv.contiguous(), self._kernel_heads()
        table, positions, query_scale = rotation
        parts = qkv.view(qkv.shape[0], -1, self.head_dim)
        if self._norm_of_ranks is not None:
            parts[:, : self.rotated] = self._norm_of_ranks(parts[:, : self.rotated])
        query = parts[:, : self.heads]
        paged = cast("PagedAttend", attend)
        cache = paged.cache(self.index)
        if cache.dtype in DTYPES:
            scales = paged.scales(self.index)
            rotate_and_store(heads, qkv, positions, paged.slot_mapping(self.index), table, cache, scales)
            if query_scale is not None:
                query.mul_(query_scale)
            return paged.over_cache(self.index, query, wanted).flatten(1)
        value = self.norm_values(parts[:, self.values]).clone()  # keys, which may be values, are rotated in place
        rotate(heads, qkv, positions, table)
        if query_scale is not None:
            query.mul_(query_scale)
        return rows_of(attend(self.index, query, parts[:, self.heads : self.rotated], value), wanted).flatten(1)


class BorrowingCompiledAttention(CompiledAttention):
    """Attention to the keys and values of an earlier layer, whose cache `index` is."""

    def attended(self, qkv: Tensor, rotation: Rotation, attend: Attend, wanted: Tensor | None = None) -> Tensor:
        qkv = qkv.contiguous()
        table, positions, query_scale = rotation
        rotate(self._kernel_heads(), qkv, positions, table)
        query = qkv.view(qkv.shape[0], -1, self.head_dim)
        if query_scale is not None:
            query.mul_(query_scale)
        return cast("PagedAttend", attend).over_cache(self.index, query, wanted).flatten(1)
