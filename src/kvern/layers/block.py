"""The blocks of a decoder: attention, or what stands in its place, and MLP around the residual stream."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple, cast

from torch import Tensor

from kvern.device import marks
from kvern.errors import UnsupportedModel
from kvern.layers.attention import Attention, fuses_norm
from kvern.layers.build import Build
from kvern.layers.halves import Update, joined
from kvern.layers.mlp import make_mlp
from kvern.layers.module import Identity, Module
from kvern.layers.norm import Gain, Norm
from kvern.layers.ops import Ops
from kvern.layers.step_context import StepContext, rows_of
from kvern.plugins import imported
from kvern.spec.mixers import (
    AttentionSpec,
    DeltaNetSpec,
    LatentAttentionSpec,
    Mamba2Spec,
    RecurrentSpec,
    ShortConvSpec,
    TwoMixersSpec,
)
from kvern.spec.model import LayerSpec, MlpSpec, ModelSpec, MoeSpec, Placement

Residual = tuple[Tensor, Update]
"""The residual stream `[T, hidden]`, and what is still to be added to it."""
Mix = Callable[[Tensor, StepContext], Tensor]
"""The forward pass of a mixer."""
RECURRENT: Mapping[type, tuple[str, str]] = {
    DeltaNetSpec: ("linear_attn", "kvern.layers.delta_net:DeltaNet"),
    ShortConvSpec: ("conv", "kvern.layers.convolution:ShortConv"),
    Mamba2Spec: ("mamba", "kvern.layers.mamba2:Mamba2"),
}
"""Names of mixers with states in a Llama-style checkpoint, and their modules, imported for models that have them."""


class Places(NamedTuple):
    """The numbers of earlier layers that attend and that have states: the places of a layer's own cache and states."""

    attention: int
    states: int


class SequentialLayer(Module):
    """The mixer, which is attention or what keeps a state, then the MLP, each added to the residual `[T, hidden]`.

    `places`: of its state among those of the model, and of the cache that it reads. What a layer has to add last is
    handed to the next one, which adds it and takes its norm in one go.
    """

    def __init__(self, places: Places, model: ModelSpec, layer: LayerSpec, build: Build) -> None:
        super().__init__()

        ops = build.ops

        def norm(placement: Placement, part: object) -> Norm | Gain | Identity:
            if placement in model.block.gains:
                return Gain(model.hidden_size, model.block.gains[placement], build)
            name = model.block.norms.get(placement) if part is not None else None
            return Norm(model.norm, model.hidden_size, name, build) if name else Identity(ops.add)

        self.scale = model.block.scale
        self._add = ops.add
        self._multiply = ops.scale
        self.attention_in, self.attention_out = norm("attention_in", layer.mixer), norm("attention_out", layer.mixer)
        self.mlp_in, self.mlp_out = norm("mlp_in", layer.mlp), norm("mlp_out", layer.mlp)
        if build.late_sums:
            build = replace(build, sums=False)
        mixes = [self._make_mixer(mixer, places, model, layer, build) for mixer in layer.mixers]
        if isinstance(layer.mixer, TwoMixersSpec):
            attend, advance = mixes
            mixes = [added(attend, advance, layer.mixer.attention_scale, ops)]
        if mixes:
            self.mix = mixes[0]
        if isinstance(layer.mlp, MlpSpec):
            self.mlp = make_mlp(model.hidden_size, layer.mlp, build.at("mlp"))
        elif isinstance(layer.mlp, MoeSpec):
            from kvern.layers.moe import make_moe

            self.mlp = make_moe(model.hidden_size, layer.mlp, build.at("mlp"))

    def _make_mixer(
        self,
        mixer: AttentionSpec | LatentAttentionSpec | RecurrentSpec,
        places: Places,
        model: ModelSpec,
        layer: LayerSpec,
        build: Build,
    ) -> Mix:
        if not isinstance(mixer, RecurrentSpec):
            self.self_attn = make_attention(places.attention, model, layer, build.at("self_attn"))
            return self.self_attn.forward
        name, kind = RECURRENT[type(mixer)]
        module = imported(kind)(places.states, model.hidden_size, mixer, build.at(name))
        setattr(self, name, module)
        return cast("Mix", module.forward)

    def forward(self, hidden: Tensor, update: Update, step: StepContext) -> Residual:
        """All tokens are kept for later ones; the output is that of the tokens `wanted` [S], None: of all."""
        hidden, normal = self.attention_in.after(hidden, update)
        return self.after_mixer(rows_of(hidden, step.wanted), self.mix(normal, step), step)

    def after_mixer(self, hidden: Tensor, mixed: Tensor, step: StepContext) -> Residual:
        """The rest of the layer, row by row: `hidden [S, hidden]` is the residual, `mixed` the result of the mixer."""
        attended: Tensor = self.attention_out(mixed)
        marks.begin(marks.MLP)
        hidden, normal = self.mlp_in.after(hidden, self._scaled(attended))
        return hidden, self._scaled(self.mlp_out(self.mlp(normal, step.adapters.wanted)))

    def _scaled(self, update: Tensor) -> Tensor:
        return update if self.scale == 1.0 else self._multiply(update, self.scale)


def added(attend: Mix, advance: Mix, scale: float, ops: Ops) -> Mix:
    """Both mixers over the same rows; the result of attention is multiplied by `scale`."""

    def mix(hidden: Tensor, step: StepContext) -> Tensor:
        return ops.add(ops.scale(attend(hidden, step), scale), advance(hidden, step))

    return mix


class MixerLayer(SequentialLayer):
    """The mixer alone."""

    def forward(self, hidden: Tensor, update: Update, step: StepContext) -> Residual:
        hidden, normal = self.attention_in.after(hidden, update)
        attended: Tensor = self.attention_out(self.mix(normal, step))
        return rows_of(hidden, step.wanted), self._scaled(attended)


class MlpLayer(SequentialLayer):
    """The MLP alone."""

    def forward(self, hidden: Tensor, update: Update, step: StepContext) -> Residual:
        marks.begin(marks.MLP)
        hidden, update = joined(hidden, update)
        update = None if update is None else rows_of(update, step.wanted)
        hidden, normal = self.mlp_in.after(rows_of(hidden, step.wanted), update)
        return hidden, self._scaled(self.mlp_out(self.mlp(normal, step.adapters.wanted)))


class ParallelLayer(SequentialLayer):
    """Attention and MLP read the same residual, through norms of their own."""

    def forward(self, hidden: Tensor, update: Update, step: StepContext) -> Residual:
        hidden, normal = self.attention_in.after(hidden, update)
        attended: Tensor = self.mix(normal, step)
        marks.begin(marks.MLP)
        hidden = rows_of(hidden, step.wanted)
        return hidden, self._add(attended, self.mlp(self.mlp_in(hidden), step.adapters.wanted))


class SharedNormLayer(SequentialLayer):
    """Attention and MLP read the same residual through one norm."""

    def forward(self, hidden: Tensor, update: Update, step: StepContext) -> Residual:
        hidden, normal = self.attention_in.after(hidden, update)
        attended: Tensor = self.mix(normal, step)
        marks.begin(marks.MLP)
        return rows_of(hidden, step.wanted), self._add(
            attended, self.mlp(rows_of(normal, step.wanted), step.adapters.wanted)
        )


class PostNormLayer(SequentialLayer):
    """Attention and MLP, whose sums with the residual are normalised: what a layer hands on has nothing to be added."""

    def forward(self, hidden: Tensor, update: Update, step: StepContext) -> Residual:
        attended: Tensor = self.mix(hidden, step)
        _, hidden = self.attention_out.after(rows_of(hidden, step.wanted), attended)
        marks.begin(marks.MLP)
        _, hidden = self.mlp_out.after(hidden, self.mlp(hidden, step.adapters.wanted))
        return hidden, None


def make_attention(index: int, model: ModelSpec, layer: LayerSpec, build: Build) -> Module:
    """The attention of a layer."""
    if not isinstance(layer.mixer, LatentAttentionSpec):
        return Attention(index, model, layer, build)
    if layer.mixer.indexer is None:
        from kvern.layers.latent_attention import LatentAttention

        return LatentAttention(index, model, layer.mixer, layer.rope, build)
    from kvern.layers.indexed_attention import IndexedAttention

    return IndexedAttention(index, model, layer.mixer, layer.rope, build)


def can_fuse(model: ModelSpec, layer: LayerSpec) -> bool:
    """Return whether a layer of a model can be a `FusedLayer`."""
    return (
        isinstance(layer.mixer, AttentionSpec)
        and not layer.mixer.gated
        and model.norm.kind == "rms"
        and model.norm.weight
        and set(model.block.norms) == {"attention_in", "mlp_in"}
        and model.block.scale == 1.0
        and fuses_norm(model.query_key_norm)
    )


def adds_by_norms(spec: ModelSpec) -> bool:
    """Return whether a norm adds everything that a model's layers compute to the residual."""
    return (
        spec.norm.kind == "rms"
        and spec.norm.weight
        and set(spec.block.norms) == {"attention_in", "mlp_in"}
        and not (spec.block.parallel or spec.augmented)
    )


def sums_late(spec: ModelSpec, build: Build) -> bool:
    """Return whether norms add up what ranks compute of a model's layers.

    They are kernels, whose results depend on how many rows there are.
    """
    return build.ranks.peers is not None and "norm" in build.kernels and not build.deterministic and adds_by_norms(spec)


def block_class(spec: ModelSpec, layer: LayerSpec, build: Build) -> type[SequentialLayer]:
    """The block of one of a model's layers, of few launches where the build has the kernels."""
    if layer.mixer is None or layer.mlp is None:
        return MlpLayer if layer.mixer is None else MixerLayer
    if spec.augmented:
        if spec.block.parallel or spec.block.scale != 1.0:
            raise UnsupportedModel(
                f"{spec.model_type}: inputs, experts and scalars beside parallel blocks or a residual scale"
            )
        augmented = "AugmentedLayer" if spec.additions.altup is None else "AltUpLayer"
        return cast("type[SequentialLayer]", imported(f"kvern.layers.augmented:{augmented}"))
    if not spec.block.parallel:
        if "few_rows" in build.kernels and not build.deterministic and can_fuse(spec, layer):
            return cast("type[SequentialLayer]", imported("kvern.layers.fused:FusedLayer"))
        return SequentialLayer
    if spec.block.scale != 1.0 or {"attention_out", "mlp_out"} & set(spec.block.norms):
        raise UnsupportedModel(f"{spec.model_type}: parallel blocks with norms after their parts or a residual scale")
    return ParallelLayer if "mlp_in" in spec.block.norms else SharedNormLayer
