"""The operations between the projections of attention: norms, rotation, the cache write, and attention itself."""

from dataclasses import replace

from torch import Tensor, nn

from kvern.layers.build_options import BuildOptions
from kvern.layers.module import Identity, Module
from kvern.layers.norm import Norm, make_query_key_norm
from kvern.layers.rope import make_rotate, rows_of_table
from kvern.layers.step_context import PagedAttend, StepContext, rows_of
from kvern.spec.model import LayerSpec, ModelSpec


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
