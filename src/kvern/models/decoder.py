"""The one decoder: modules chosen from a `ModelSpec`, run over a flat line of tokens from many requests."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from kvern.errors import UnsupportedModel
from kvern.layers.adapted_linear import Selection
from kvern.layers.attention import Attend, make_attention, rows_of
from kvern.layers.embedding import Embedding
from kvern.layers.linear import Linear
from kvern.layers.loadable import Loadable
from kvern.layers.mlp import make_mlp
from kvern.layers.module import Identity, Module
from kvern.layers.moe import make_moe
from kvern.layers.norm import Norm, make_norm
from kvern.layers.rope import RopeTable, Rotation
from kvern.models.build import Build
from kvern.models.spec import LayerSpec, MlpSpec, ModelSpec, Placement

__all__ = ["Attend", "Build", "Decoder", "Slot"]

Residual = tuple[Tensor, Tensor | None]
"""The residual stream `[T, hidden]`, and what is still to be added to it."""


class SequentialLayer(Module):
    """Attention, then the MLP, each added to the residual `[T, hidden]`.

    What a layer has to add last is handed to the next one, which adds it and takes its norm in one go. `selection` is
    that of its linear layers, if they are adapted.
    """

    selection: Selection[Any] | None = None

    def __init__(self, index: int, model: ModelSpec, layer: LayerSpec, build: Build) -> None:
        super().__init__()

        def norm(placement: Placement) -> Norm | Identity:
            name = model.block_norms.get(placement)
            return make_norm(model.norm, model.hidden_size, name, build) if name else Identity()

        self.scale = model.residual_scale
        self.attention_in, self.attention_out = norm("attention_in"), norm("attention_out")
        self.mlp_in, self.mlp_out = norm("mlp_in"), norm("mlp_out")
        self.self_attn = make_attention(index, model, layer, build)
        if isinstance(layer.mlp, MlpSpec):
            self.mlp = make_mlp(model.hidden_size, layer.mlp, build)
        else:
            self.mlp = make_moe(model.hidden_size, layer.mlp, build)

    def forward(
        self, hidden: Tensor, update: Tensor | None, rotation: Rotation, attend: Attend, wanted: Tensor | None = None
    ) -> Residual:
        """All tokens are stored for later attention; the output is that of the tokens `wanted` [S], None: of all."""
        hidden, normal = self.attention_in.after(hidden, update)
        attended: Tensor = self.attention_out(self.self_attn(normal, rotation, attend, wanted))
        hidden, normal = self.mlp_in.after(rows_of(hidden, wanted), self._scaled(attended))
        return hidden, self._scaled(self.mlp_out(self.mlp(normal)))

    def _scaled(self, update: Tensor) -> Tensor:
        return update if self.scale == 1.0 else update * self.scale


class ParallelLayer(SequentialLayer):
    """Attention and MLP read the same residual, through norms of their own."""

    def forward(
        self, hidden: Tensor, update: Tensor | None, rotation: Rotation, attend: Attend, wanted: Tensor | None = None
    ) -> Residual:
        hidden, normal = self.attention_in.after(hidden, update)
        attended: Tensor = self.self_attn(normal, rotation, attend, wanted)
        hidden = rows_of(hidden, wanted)
        return hidden, attended.add_(self.mlp(self.mlp_in(hidden)))


class SharedNormLayer(SequentialLayer):
    """Attention and MLP read the same residual through one norm."""

    def forward(
        self, hidden: Tensor, update: Tensor | None, rotation: Rotation, attend: Attend, wanted: Tensor | None = None
    ) -> Residual:
        hidden, normal = self.attention_in.after(hidden, update)
        attended: Tensor = self.self_attn(normal, rotation, attend, wanted)
        return rows_of(hidden, wanted), attended.add_(self.mlp(rows_of(normal, wanted)))


def _layer_class(spec: ModelSpec, build: Build) -> type[SequentialLayer]:
    if not spec.parallel:
        if "few_rows" in build.kernels and not build.deterministic:
            from kvern.layers.fused import FusedLayer, can_fuse

            if can_fuse(spec):
                return FusedLayer
        return SequentialLayer
    if spec.residual_scale != 1.0 or {"attention_out", "mlp_out"} & set(spec.block_norms):
        raise UnsupportedModel(f"{spec.model_type}: parallel blocks with norms after their parts or a residual scale")
    return ParallelLayer if "mlp_in" in spec.block_norms else SharedNormLayer


@dataclass(frozen=True)
class Slot:
    """Where one checkpoint tensor goes: its shape there, and `load(tensor, first_row)`, see `Loadable.load`."""

    shape: tuple[int, ...]
    load: Callable[[Tensor, int], None]


class Decoder(nn.Module):
    """A language model with uninitialised weights; `kvern.models.loader` fills them."""

    def __init__(self, spec: ModelSpec, build: Build) -> None:
        super().__init__()
        self.spec, self.build = spec, build
        ropes = list(dict.fromkeys(layer.rope for layer in spec.layers if layer.rope is not None))
        self.rope_tables = nn.ModuleList(RopeTable(rope, build) for rope in ropes)
        self._rope_index = tuple(0 if layer.rope is None else ropes.index(layer.rope) for layer in spec.layers)
        self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size, spec.embedding_scale, build)
        make = _layer_class(spec, build)
        self.layers = nn.ModuleList(make(index, spec, layer, build) for index, layer in enumerate(spec.layers))
        self.norm = make_norm(spec.norm, spec.hidden_size, "norm", build)
        self.lm_head = self._make_head()

    def _make_head(self) -> Linear:
        spec, build = self.spec, self.build
        head = build.column(spec.hidden_size, {"lm_head": spec.vocab_size}, bias=spec.lm_head_bias)
        if spec.tie_word_embeddings:
            head.weight = self.embed_tokens.weight
        return head

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend, wanted: Tensor | None = None) -> Tensor:
        """Run the tokens of one step: `token_ids` and `positions`, both int64 `[T]` -> hidden states `[T, hidden]`.

        The tokens may belong to any number of requests: all that ties a token to its request is what `attend` does.
        With `wanted` [S], indices of tokens, only their states [S, hidden] are returned, and the last layer computes
        for the others no more than their keys and values.
        """
        rotations: list[Rotation] = [table(positions) for table in self.rope_tables] or [(positions, positions)]
        hidden: Tensor = self.embed_tokens(token_ids)
        update: Tensor | None = None
        for index, (layer, rope) in enumerate(zip(self.layers, self._rope_index, strict=True), 1):
            last = index == len(self.layers)
            hidden, update = layer(hidden, update, rotations[rope], attend, wanted if last else None)
        _, normal = self.norm.after(hidden, update)
        return normal

    def logits(self, hidden: Tensor, *, upcast: bool = True) -> Tensor:
        """Score the vocabulary: `hidden [N, hidden]` -> float32 `[N, vocab]`.

        Without `upcast` they keep the model's dtype where nothing is computed with them.
        """
        logits: Tensor = self.lm_head(hidden)
        if not upcast and self.spec.logit_scale == 1.0 and self.spec.logit_softcap is None:
            return logits
        logits = logits.float()
        if self.spec.logit_scale != 1.0:
            logits = logits.mul_(self.spec.logit_scale)
        if (cap := self.spec.logit_softcap) is not None:
            logits = logits.div_(cap).tanh_().mul_(cap)
        return logits

    def slots(self, stored: Collection[str] = ()) -> dict[str, Slot]:
        """Map the names of a Llama-style checkpoint to where each tensor goes.

        Modules that a checkpoint may store fused are listed fused if those names are among `stored`.
        """
        return dict(self._slots(stored))

    def _slots(self, stored: Collection[str]) -> Iterator[tuple[str, Slot]]:
        for path, module in self.named_modules():
            if isinstance(module, Loadable):
                prefix = _checkpoint_prefix(path)
                fused = module.fused_parts()
                parts = fused if any(prefix + name in stored for name in fused) else module.parts()
                for name, shape in parts.items():
                    if not (self.spec.tie_word_embeddings and name == "lm_head.weight"):
                        yield prefix + name, Slot(shape, partial(module.load, name))


def _checkpoint_prefix(path: str) -> str:
    """What precedes the part names of the module at `path`; norms of queries and keys count as the attention's own."""
    parent = path.rpartition(".")[0].removesuffix(".norm_before").removesuffix(".norm_after")
    return "" if path == "lm_head" else f"model.{parent}." if parent else "model."
