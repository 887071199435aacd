"""Attention to the keys and values of each head: the projections around what `heads` compute."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvern.errors import UnsupportedModel
from kvern.layers.build import Build
from kvern.layers.build_options import BuildOptions, Section
from kvern.layers.heads import HeadNorms, TorchHeads
from kvern.layers.linear import column, row
from kvern.layers.loadable import Vector
from kvern.layers.module import Module
from kvern.layers.step_context import StepContext, rows_of
from kvern.spec.model import LayerSpec, ModelSpec, QueryKeyNormSpec

if TYPE_CHECKING:
    from kvern.kernels.quantize_rows import RowCodes


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
        from kvern.layers.compiled_heads import CompiledHeads

        return CompiledHeads(index, model, layer, build)
    if "rotary" in build.kernels:
        if fuses_norm(model.query_key_norm):
            from kvern.layers.triton_heads import TritonHeads

            return TritonHeads(index, model, layer, build)
        if layer.attention.cache_of is not None:
            raise UnsupportedModel(f"{model.model_type}: no kernel normalises queries of layers that borrow keys so")
    return TorchHeads(index, model, layer, build)


def fuses_norm(spec: QueryKeyNormSpec | None) -> bool:
    """Return whether the rotation's kernel knows this norm of queries and keys, or there is none."""
    return spec is None or (spec.norm.kind == "rms" and spec.scope != "row" and not spec.after_rope)
