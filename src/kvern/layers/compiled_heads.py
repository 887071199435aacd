"""The operations between the projections of attention by kernels for CPUs."""

from typing import TYPE_CHECKING, cast

from torch import Tensor

from kvern.cpu.library import DTYPES, address
from kvern.cpu.rotary import Heads, rotate, rotate_and_store
from kvern.cpu.rows import NORMS
from kvern.layers.attention import HeadNorms
from kvern.layers.build_options import BuildOptions
from kvern.layers.step_context import PagedAttend, StepContext, rows_of
from kvern.spec.model import LayerSpec, ModelSpec

if TYPE_CHECKING:
    from kvern.layers.head_norms import HeadNorm, RowNorm


class CompiledHeads(HeadNorms):
    """The operations as one kernel, except a norm over heads of several ranks.

    `[T, outputs of qkv_proj] -> [S, heads * head_dim]`, where S is the number of wanted tokens.
    """

    def __init__(self, index: int, model: ModelSpec, layer: LayerSpec, build: BuildOptions) -> None:
        super().__init__(index, model, layer, build)
        self._attention = layer.attention
        self._rope = layer.rope
        self._norm = model.query_key_norm
        is_shared = self._norm is not None and self._norm.scope == "row" and build.ranks.size > 1
        self._norm_of_ranks = self.norm_before if is_shared else None
        self._described: Heads | None = None

    def _kernel_heads(self) -> Heads:
        """The layer's description for the kernel; weights have their addresses once they are loaded."""
        if self._described is None:
            self._described = self._describe()
        return self._described

    def _describe(self) -> Heads:
        spec = self._attention
        rope = self._rope
        norm = self._norm
        heads = Heads(spec.heads, spec.own_kv_heads, spec.head_dim, keys_are_values=spec.keys_are_values)
        if rope is not None:
            heads.rotary_dim, heads.interleaved = rope.dim, rope.interleaved
        if norm is not None and self._norm_of_ranks is None:
            heads.norm, heads.epsilon = NORMS[norm.norm.kind], norm.norm.epsilon
            heads.norm_after, heads.whole_row = norm.after_rope, norm.scope == "row"
            heads.norm_values = norm.values
            module = cast("HeadNorm | RowNorm", self.norm_after if norm.after_rope else self.norm_before)
            weights, biases = module.of_query_and_key()
            heads.query_weight, heads.key_weight = map(address, weights)
            heads.query_bias, heads.key_bias = map(address, biases)
        return heads

    def forward(self, qkv: Tensor, step: StepContext) -> Tensor:
        qkv = qkv.contiguous()
        heads = self._kernel_heads()
        paged = cast("PagedAttend", step.attend)
        table, positions, query_scale = step.rotation
        parts = qkv.view(qkv.shape[0], -1, self.head_dim)
        query = parts[:, : self.heads]
        if self._norm_of_ranks is not None:
            parts[:, : self.rotated] = self._norm_of_ranks(parts[:, : self.rotated])
        cache = paged.cache(self.index) if self.stores else None
        if cache is not None and cache.dtype in DTYPES:
            scales = paged.scales(self.index)
            rotate_and_store(heads, qkv, positions, paged.slot_mapping(self.index), table, cache, scales)
        else:
            value = self.norm_values(parts[:, self.values]).clone() if self.stores else None
            rotate(heads, qkv, positions, table)  # in place, and keys may be values
        if query_scale is not None:
            query.mul_(query_scale)
        if cache is None or cache.dtype in DTYPES:
            return paged.over_cache(self.index, query, step.wanted).flatten(1)
        key = parts[:, self.heads : self.rotated]
        return rows_of(step.attend(self.index, query, key, cast("Tensor", value)), step.wanted).flatten(1)
