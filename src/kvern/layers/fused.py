"""Parts of a model made of Triton kernels: the same results as those of PyTorch, in fewer passes over memory.

A layer of a single token is bound by the bytes of its weights and by launches. There, norms, the activation and the
residual's addition are done by the products themselves: six launches a layer.
"""

from typing import cast

import torch
from torch import Tensor, nn

from kvern.kernels.activation import gated_activation
from kvern.kernels.linear import Around
from kvern.kernels.norm import add_rms_norm, rms_norm
from kvern.kernels.rotary import rotate_and_store
from kvern.layers.attention import Attend, Attention, PagedAttend
from kvern.layers.block import Residual, SequentialLayer
from kvern.layers.build import Build
from kvern.layers.few_rows import product
from kvern.layers.mlp import GatedMLP
from kvern.layers.norm import HeadNorm, Norm
from kvern.layers.rope import Rotation, rows_of_table
from kvern.model_spec import LayerSpec, MlpSpec, ModelSpec, NormSpec, QueryKeyNormSpec


class FusedRMSNorm(Norm):
    """A root-mean-square norm in one kernel, with the residual's addition before it."""

    weight: nn.Parameter

    def __init__(self, spec: NormSpec, width: int, name: str, build: Build) -> None:
        super().__init__(spec, width, name, build, dtype=torch.float32 if spec.offset else None)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.epsilon)

    def after(self, hidden: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
        if update is None:
            return hidden, rms_norm(hidden, self.weight, self.epsilon)
        return hidden, add_rms_norm(hidden, update, self.weight, self.epsilon)


class FusedAttention(Attention):
    """Attention whose norm, rotation and cache write are one kernel."""

    def __init__(self, index: int, model: ModelSpec, layer: LayerSpec, build: Build) -> None:
        super().__init__(index, model, layer, build)
        self.rotates = layer.rope is not None
        self.interleaved = layer.rope is not None and layer.rope.interleaved
        self.head_norm = cast("HeadNorm", self.norm_before) if model.query_key_norm is not None else None

    def forward(self, hidden: Tensor, rotation: Rotation, attend: Attend, wanted: Tensor | None = None) -> Tensor:
        out: Tensor = self.o_proj(self.attended(self.qkv_proj(hidden), rotation, attend, wanted))
        return out

    def attended(self, qkv: Tensor, rotation: Rotation, attend: Attend, wanted: Tensor | None = None) -> Tensor:
        """What is between the projections: `[T, heads + 2 * kv_heads, head_dim]` flat -> `[T, heads * head_dim]`."""
        paged = cast("PagedAttend", attend)
        table, positions = rotation
        norm = self.head_norm
        query = rotate_and_store(
            qkv,
            positions,
            paged.slot_mapping,
            table if self.rotates else None,
            paged.cache(self.index),
            query_heads=self.heads,
            interleaved=self.interleaved,
            norm_weight=None if norm is None else norm.weight,
            epsilon=0.0 if norm is None else norm.spec.epsilon,
        )
        return paged.over_cache(self.index, query, wanted).flatten(1)


class TableAttention(Attention):
    """Attention with a norm that the kernel does not know: PyTorch rotates, and the backend stores."""

    def forward(self, hidden: Tensor, rotation: Rotation, attend: Attend, wanted: Tensor | None = None) -> Tensor:
        return super().forward(hidden, rows_of_table(rotation), attend, wanted)


class FusedGatedMLP(GatedMLP):
    """A gated MLP whose activation is one kernel."""

    def __init__(self, hidden_size: int, spec: MlpSpec, build: Build) -> None:
        super().__init__(hidden_size, spec, build)
        self.kind = spec.activation

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(gated_activation(self.gate_up_proj(x), self.kind))
        return out


class FusedLayer(SequentialLayer):
    """Attention and MLP behind root-mean-square norms, each added to the residual, with few launches for one row."""

    attention_in: FusedRMSNorm
    mlp_in: FusedRMSNorm
    self_attn: FusedAttention

    def forward(
        self, hidden: Tensor, update: Tensor | None, rotation: Rotation, attend: Attend, wanted: Tensor | None = None
    ) -> Residual:
        if hidden.shape[0] > 1 or (self.selection is not None and self.selection.by_count):
            return super().forward(hidden, update, rotation, attend, wanted)
        attention, norm = self.self_attn, self.attention_in
        if update is None:
            qkv = product(hidden, attention.qkv_proj, Around(norm.weight, norm.epsilon))
        else:
            hidden, normal = norm.after(hidden, update)
            qkv = product(normal, attention.qkv_proj)
        attended = attention.attended(qkv, rotation, attend)
        hidden = product(attended, attention.o_proj, Around(residual=hidden))
        mlp, norm = self.mlp, self.mlp_in
        if not isinstance(mlp, FusedGatedMLP):
            return hidden, mlp(norm(hidden))
        activated = product(hidden, mlp.gate_up_proj, Around(norm.weight, norm.epsilon, activation=mlp.kind))
        return product(activated, mlp.down_proj, Around(residual=hidden)), None


def can_fuse(model: ModelSpec) -> bool:
    """Whether the layers of a model are what `FusedLayer` joins."""
    query_key_norm = model.query_key_norm
    return (
        model.norm.kind == "rms"
        and model.norm.weight
        and set(model.block_norms) == {"attention_in", "mlp_in"}
        and model.residual_scale == 1.0
        and (query_key_norm is None or fuses_norm(query_key_norm))
    )


def fuses_norm(spec: QueryKeyNormSpec) -> bool:
    """Whether the rotation's kernel knows this norm of queries and keys."""
    return spec.norm.kind == "rms" and spec.scope != "row" and not spec.after_rope
