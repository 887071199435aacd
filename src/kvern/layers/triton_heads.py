"""The operations between the projections of attention by Triton kernels: norm, rotation and cache write in one."""

from typing import cast

from torch import Tensor

from kvern.kernels.rotary import rotate_and_store, rotate_queries
from kvern.layers.attention import HeadNorms
from kvern.layers.build_options import BuildOptions
from kvern.layers.head_norms import HeadNorm
from kvern.layers.step_context import PagedAttend, StepContext
from kvern.spec.model import LayerSpec, ModelSpec


class TritonHeads(HeadNorms):
    """The operations of a layer whose norm the rotation's kernel knows.

    `[T, outputs of qkv_proj] -> [S, heads * head_dim]`, where S is the number of wanted tokens.
    """

    def __init__(self, index: int, model: ModelSpec, layer: LayerSpec, build: BuildOptions) -> None:
        super().__init__(index, model, layer, build)
        self._rotates = layer.rope is not None
        self._interleaved = layer.rope is not None and layer.rope.interleaved
        self._norm = cast("HeadNorm", self.norm_before) if model.query_key_norm is not None else None
        self._epsilon = 0.0 if self._norm is None else self._norm.spec.epsilon
        self._normalizes_values = model.query_key_norm is not None and model.query_key_norm.values
        self._keys_are_values = layer.attention.keys_are_values

    def forward(self, qkv: Tensor, step: StepContext) -> Tensor:
        paged = cast("PagedAttend", step.attend)
        query = self._stored(qkv, step, paged) if self.stores else self._queries(qkv, step)
        if step.rotation.query_scale is not None:
            query.mul_(step.rotation.query_scale)
        return paged.over_cache(self.index, query, step.wanted).flatten(1)

    def _stored(self, qkv: Tensor, step: StepContext, paged: PagedAttend) -> Tensor:
        """The queries `[T, heads, head_dim]`; keys and values are stored."""
        table, positions, _ = step.rotation
        return rotate_and_store(
            qkv,
            positions,
            paged.slot_mapping(self.index),
            table if self._rotates else None,
            paged.cache(self.index),
            scales=paged.scales(self.index),
            query_heads=self.heads,
            interleaved=self._interleaved,
            norm_weight=None if self._norm is None else self._norm.weight,
            epsilon=self._epsilon,
            norm_values=self._normalizes_values,
            keys_are_values=self._keys_are_values,
        )

    def _queries(self, qkv: Tensor, step: StepContext) -> Tensor:
        """The queries `[T, heads, head_dim]` of a layer without keys and values of its own."""
        table, positions, _ = step.rotation
        return rotate_queries(
            qkv,
            positions,
            table if self._rotates else None,
            heads=self.heads,
            interleaved=self._interleaved,
            norm_weight=None if self._norm is None else self._norm.weight,
            epsilon=self._epsilon,
        )
