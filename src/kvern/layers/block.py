"""The blocks of a decoder: attention, or what stands in its place, and MLP around the residual stream."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from kvern.errors import UnsupportedModel
from kvern.layers.attention import NO_ADAPTERS, StepAdapters, make_attention, rows_of
from kvern.layers.build import Build, RowFunctions
from kvern.layers.delta_net import make_delta_net
from kvern.layers.mamba2 import make_mamba2
from kvern.layers.mlp import make_mlp
from kvern.layers.module import Identity, Module
from kvern.layers.moe import make_moe
from kvern.layers.norm import Norm, make_norm
from kvern.layers.rope import Rotation
from kvern.layers.short_conv import make_short_conv
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

Residual = tuple[Tensor, Tensor | None]
"""The residual stream `[T, hidden]`, and what is still to be added to it."""
Memory = Any
"""What tokens find of those before them and leave for those behind: an `Attend`, `StepStates`, or both."""


Mix = Callable[..., Tensor]
"""The forward pass of a mixer."""
RECURRENT: Mapping[type, tuple[str, Callable[..., Module]]] = {
    DeltaNetSpec: ("linear_attn", make_delta_net),
    ShortConvSpec: ("conv", make_short_conv),
    Mamba2Spec: ("mamba", make_mamba2),
}
"""Modules of mixers with states, and what a Llama-style checkpoint calls them."""


class Places(NamedTuple):
    """How many layers before this one attend, and how many have states: where in the step's memory its own is."""

    attention: int
    states: int


class SequentialLayer(Module):
    """The mixer, which is attention or what keeps a state, then the MLP, each added to the residual `[T, hidden]`.

    `places`: of its state among those of the model, and of the cache that it reads. What a layer has to add last is
    handed to the next one, which adds it and takes its norm in one go.
    """

    halved_rows = range(0)
    """Steps of so many rows, without adapters or `wanted`, are computed by `FusedLayer.in_halves`."""

    def __init__(self, places: Places, model: ModelSpec, layer: LayerSpec, build: Build) -> None:
        super().__init__()

        on_rows = build.on_rows

        def norm(placement: Placement, part: object) -> Norm | Identity:
            name = model.block_norms.get(placement) if part is not None else None
            return make_norm(model.norm, model.hidden_size, name, build) if name else Identity(on_rows.add)

        self.scale, self._add, self._multiply = model.residual_scale, on_rows.add, on_rows.scale
        self.attention_in, self.attention_out = norm("attention_in", layer.mixer), norm("attention_out", layer.mixer)
        self.mlp_in, self.mlp_out = norm("mlp_in", layer.mlp), norm("mlp_out", layer.mlp)
        if build.late_sums:
            build = replace(build, sums=False)
        mixes = [self._make_mixer(mixer, places, model, layer, build) for mixer in layer.mixers]
        if isinstance(layer.mixer, TwoMixersSpec):
            attend, advance = mixes
            mixes = [added(attend, advance, layer.mixer.attention_scale, on_rows)]
        if mixes:
            self.mix = mixes[0]
        if isinstance(layer.mlp, MlpSpec):
            self.mlp = make_mlp(model.hidden_size, layer.mlp, build.at("mlp"))
        elif isinstance(layer.mlp, MoeSpec):
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
        name, make = RECURRENT[type(mixer)]
        module = make(places.states, model.hidden_size, mixer, build.at(name))
        setattr(self, name, module)
        return module.forward

    def forward(
        self,
        hidden: Tensor,
        update: Tensor | None,
        rotation: Rotation,
        memory: Memory,
        wanted: Tensor | None = None,
        adapters: StepAdapters = NO_ADAPTERS,
    ) -> Residual:
        """All tokens are kept for later ones; the output is that of the tokens `wanted` [S], None: of all."""
        hidden, normal = self.attention_in.after(hidden, update)
        attended: Tensor = self.attention_out(self.mix(normal, rotation, memory, wanted, adapters))
        hidden, normal = self.mlp_in.after(rows_of(hidden, wanted), self._scaled(attended))
        return hidden, self._scaled(self.mlp_out(self.mlp(normal, adapters.wanted)))

    def _scaled(self, update: Tensor) -> Tensor:
        return update if self.scale == 1.0 else self._multiply(update, self.scale)


def added(attend: Mix, advance: Mix, scale: float, on_rows: RowFunctions) -> Mix:
    """Both mixers over the same rows, attention's times `scale`; their memory is a pair."""

    def mix(
        hidden: Tensor, rotation: Rotation, memory: Memory, wanted: Tensor | None, adapters: StepAdapters
    ) -> Tensor:
        of_cache, of_states = memory
        attended = on_rows.scale(attend(hidden, rotation, of_cache, wanted, adapters), scale)
        return on_rows.add(attended, advance(hidden, rotation, of_states, wanted, adapters))

    return mix


class MixerLayer(SequentialLayer):
    """The mixer alone."""

    def forward(
        self,
        hidden: Tensor,
        update: Tensor | None,
        rotation: Rotation,
        memory: Memory,
        wanted: Tensor | None = None,
        adapters: StepAdapters = NO_ADAPTERS,
    ) -> Residual:
        hidden, normal = self.attention_in.after(hidden, update)
        attended: Tensor = self.attention_out(self.mix(normal, rotation, memory, wanted, adapters))
        return rows_of(hidden, wanted), self._scaled(attended)


class MlpLayer(SequentialLayer):
    """The MLP alone."""

    def forward(
        self,
        hidden: Tensor,
        update: Tensor | None,
        rotation: Rotation,
        memory: Memory,
        wanted: Tensor | None = None,
        adapters: StepAdapters = NO_ADAPTERS,
    ) -> Residual:
        update = None if update is None else rows_of(update, wanted)
        hidden, normal = self.mlp_in.after(rows_of(hidden, wanted), update)
        return hidden, self._scaled(self.mlp_out(self.mlp(normal, adapters.wanted)))


class ParallelLayer(SequentialLayer):
    """Attention and MLP read the same residual, through norms of their own."""

    def forward(
        self,
        hidden: Tensor,
        update: Tensor | None,
        rotation: Rotation,
        memory: Memory,
        wanted: Tensor | None = None,
        adapters: StepAdapters = NO_ADAPTERS,
    ) -> Residual:
        hidden, normal = self.attention_in.after(hidden, update)
        attended: Tensor = self.mix(normal, rotation, memory, wanted, adapters)
        hidden = rows_of(hidden, wanted)
        return hidden, self._add(attended, self.mlp(self.mlp_in(hidden), adapters.wanted))


class SharedNormLayer(SequentialLayer):
    """Attention and MLP read the same residual through one norm."""

    def forward(
        self,
        hidden: Tensor,
        update: Tensor | None,
        rotation: Rotation,
        memory: Memory,
        wanted: Tensor | None = None,
        adapters: StepAdapters = NO_ADAPTERS,
    ) -> Residual:
        hidden, normal = self.attention_in.after(hidden, update)
        attended: Tensor = self.mix(normal, rotation, memory, wanted, adapters)
        return rows_of(hidden, wanted), self._add(attended, self.mlp(rows_of(normal, wanted), adapters.wanted))


class PostNormLayer(SequentialLayer):
    """Attention and MLP, whose sums with the residual are normalised: what a layer hands on has nothing to be added."""

    def forward(
        self,
        hidden: Tensor,
        update: Tensor | None,
        rotation: Rotation,
        memory: Memory,
        wanted: Tensor | None = None,
        adapters: StepAdapters = NO_ADAPTERS,
    ) -> Residual:
        attended: Tensor = self.mix(hidden, rotation, memory, wanted, adapters)
        _, hidden = self.attention_out.after(rows_of(hidden, wanted), attended)
        _, hidden = self.mlp_out.after(hidden, self.mlp(hidden, adapters.wanted))
        return hidden, None


def adds_by_norms(spec: ModelSpec) -> bool:
    """Whether all that a model's layers compute goes to the residual by way of a norm."""
    return (
        spec.norm.kind == "rms"
        and spec.norm.weight
        and set(spec.block_norms) == {"attention_in", "mlp_in"}
        and not (spec.parallel or spec.augmented)
    )


def sums_late(spec: ModelSpec, build: Build) -> bool:
    """Whether norms add up what ranks compute of a model's layers.

    They are kernels, whose results depend on how many rows there are.
    """
    return build.ranks.peers is not None and "norm" in build.kernels and not build.deterministic and adds_by_norms(spec)


def block_class(spec: ModelSpec, layer: LayerSpec, build: Build) -> type[SequentialLayer]:
    """The block of one of a model's layers, of few launches where the build has the kernels."""
    if layer.mixer is None or layer.mlp is None:
        return MlpLayer if layer.mixer is None else MixerLayer
    if spec.augmented:
        if spec.parallel or spec.residual_scale != 1.0:
            raise UnsupportedModel(
                f"{spec.model_type}: inputs, experts and scalars beside parallel blocks or a residual scale"
            )
        if spec.altup is not None:
            from kvern.layers.altup import AltUpLayer

            return AltUpLayer
        from kvern.layers.augmented import AugmentedLayer

        return AugmentedLayer
    if not spec.parallel:
        if "few_rows" in build.kernels and not build.deterministic:
            from kvern.layers.fused import FusedLayer, can_fuse

            if can_fuse(spec, layer):
                return FusedLayer
        return SequentialLayer
    if spec.residual_scale != 1.0 or {"attention_out", "mlp_out"} & set(spec.block_norms):
        raise UnsupportedModel(f"{spec.model_type}: parallel blocks with norms after their parts or a residual scale")
    return ParallelLayer if "mlp_in" in spec.block_norms else SharedNormLayer
