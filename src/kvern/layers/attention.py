"""Attention to the keys and values of each head: the projections, and what is between them.

That is norms, rotation, the cache write, and attention itself: `TorchHeads`, or kernels.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from kvern.errors import UnsupportedModel
from kvern.layers.build import Build
from kvern.layers.build_options import BuildOptions, Section
from kvern.layers.linear import column, row
from kvern.layers.loadable import Vector
from kvern.layers.module import Identity, Module
from kvern.layers.norm import Norm
from kvern.layers.rope import make_rotate, rows_of_table
from kvern.layers.step_context import PagedAttend, StepContext, rows_of
from kvern.plugins import imported
from kvern.spec.model import LayerSpec, ModelSpec, QueryKeyNormSpec

if TYPE_CHECKING:
    from kvern.kernels.quantize_rows import RowCodes


class HeadNorms(Module):
    """The norms of a layer's queries and keys, before or after their rotation, and of its values.

    `index` is the place of the layer's cache among those of the model; a layer that has no keys and values of its own
    attends to those of the earlier layer whose cache it is.
    """

    def __init__(self, index: int, model: ModelSpec, layer: LayerSpec, build: BuildOptions) -> None:
        super().__init__()
        spec = layer.attention
        self.index = index
        self.heads = spec.heads
        self.head_dim = spec.head_dim
        self.stores = spec.own_kv_heads > 0
        self.rotated = spec.heads + spec.own_kv_heads
        self.values = slice(spec.heads if spec.keys_are_values else self.rotated, None)
        self.norm_before: nn.Module = Identity()
        self.norm_after: nn.Module = Identity()
        self.norm_values: nn.Module = Identity()
        if model.query_key_norm is not None:
            from kvern.layers.head_norms import make_query_key_norm

            norm = make_query_key_norm(model.query_key_norm, spec, build)
            if model.query_key_norm.after_rope:
                self.norm_after = norm
            else:
                self.norm_before = norm
            if model.query_key_norm.values:
                plain = replace(model.query_key_norm.norm, kind="rms", offset=0.0, weight=False, bias=False)
                self.norm_values = Norm(plain, spec.head_dim, "v_norm", build, build.dtype)


class TorchHeads(HeadNorms):
    """The operations in PyTorch; queries and keys stay side by side through norm and rotation.

    `[T, outputs of qkv_proj] -> [S, heads * head_dim]`, where S is the number of wanted tokens.
    """

    def __init__(self, index: int, model: ModelSpec, layer: LayerSpec, build: BuildOptions) -> None:
        super().__init__(index, model, layer, build)
        self._rotate = make_rotate(layer.rope, self.head_dim)
        self._takes_rows = "rotary" in build.kernels and layer.rope is not None

    def forward(self, qkv: Tensor, step: StepContext) -> Tensor:
        rotation = rows_of_table(step.rotation) if self._takes_rows else step.rotation
        parts = qkv.view(qkv.shape[0], -1, self.head_dim)
        query_key = self.norm_after(self._rotate(self.norm_before(parts[:, : self.rotated]), rotation))
        query = query_key[:, : self.heads]
        if rotation.query_scale is not None:
            query = query * rotation.query_scale
        if not self.stores:
            paged: PagedAttend = step.attend  # type: ignore[assignment]
            return paged.over_cache(self.index, query, step.wanted).flatten(1)
        value = self.norm_values(parts[:, self.values])
        attended = step.attend(self.index, query, query_key[:, self.heads :], value)
        return rows_of(attended, step.wanted).flatten(1)


class Sinks(Vector):
    """The sinks of a layer, `weight [heads]` float32, which attention backends read; `index` is the layer's."""

    def __init__(self, index: int, heads: int, build: BuildOptions) -> None:
        super().__init__(heads, "sinks", build)
        self.index = index


class Attention(Module):
    """`hidden [T, hidden] -> [S, hidden]`. `index` is the place of the layer's cache among those of the model."""

    def __init__(self, index: int, model: ModelSpec, layer: LayerSpec, build: Build) -> None:
        super().__init__()
        spec = layer.attention
        self.heads = spec.heads
        self.head_dim = spec.head_dim
        self.gated = spec.gated
        own = spec.own_kv_heads
        parts = {"q_proj": [Section((1 + spec.gated) * spec.heads * spec.head_dim)]}
        keys = [Section(own * spec.head_dim, spec.copies)]
        parts |= {"k_proj": keys} if own else {}
        parts |= {"v_proj": keys} if own and not spec.keys_are_values else {}
        self.qkv_proj = column(build, spec.inputs or model.hidden_size, parts, bias=model.biases.qkv, fused="qkv_proj")
        self.o_proj = row(build, spec.heads * spec.head_dim, "o_proj", model.hidden_size, bias=model.biases.output)
        self.sinks = Sinks(index, spec.heads, build) if spec.sinks else None
        self.attended = make_heads(index, model, layer, build)

    def forward(self, hidden: "Tensor | RowCodes", step: StepContext) -> Tensor:
        qkv = self.qkv_proj(hidden, step.adapters.rows)
        if not self.gated:
            out: Tensor = self.o_proj(self.attended(qkv, step), step.adapters.wanted)
            return out
        queries = 2 * self.heads * self.head_dim
        query, gate = torch.unflatten(qkv[:, :queries], 1, (self.heads, 2, self.head_dim)).unbind(2)
        qkv = torch.cat((query.flatten(1), qkv[:, queries:]), 1)
        attended = self.attended(qkv, step)
        gated: Tensor = self.o_proj(attended * rows_of(gate, step.wanted).flatten(1).sigmoid(), step.adapters.wanted)
        return gated


def make_heads(index: int, model: ModelSpec, layer: LayerSpec, build: BuildOptions) -> HeadNorms:
    """The operations between the projections of a layer, by kernels where a build has them."""
    if "cpu_layers" in build.kernels:
        return cast("HeadNorms", imported("kvern.layers.compiled_heads:CompiledHeads")(index, model, layer, build))
    if "rotary" in build.kernels:
        if fuses_norm(model.query_key_norm):
            return cast("HeadNorms", imported("kvern.layers.triton_heads:TritonHeads")(index, model, layer, build))
        if layer.attention.cache_of is not None:
            raise UnsupportedModel(f"{model.model_type}: no kernel normalises queries of layers that borrow keys so")
    return TorchHeads(index, model, layer, build)


def fuses_norm(spec: QueryKeyNormSpec | None) -> bool:
    """Return whether the rotation's kernel knows this norm of queries and keys, or there is none."""
    return spec is None or (spec.norm.kind == "rms" and spec.scope != "row" and not spec.after_rope)
