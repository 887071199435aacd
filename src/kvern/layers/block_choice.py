"""The choice of a layer's block, by the model's description and the kernels of a build."""

from kvern.errors import UnsupportedModel
from kvern.layers.attention import fuses_norm
from kvern.layers.block import (
    MixerLayer,
    MlpLayer,
    ParallelLayer,
    SequentialLayer,
    SharedNormLayer,
)
from kvern.layers.build import Build
from kvern.spec.mixers import AttentionSpec
from kvern.spec.model import LayerSpec, ModelSpec


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
        from kvern.layers.augmented import AltUpLayer, AugmentedLayer

        return AugmentedLayer if spec.additions.altup is None else AltUpLayer
    if not spec.block.parallel:
        if "few_rows" in build.kernels and not build.deterministic and can_fuse(spec, layer):
            from kvern.layers.fused import FusedLayer

            return FusedLayer
        return SequentialLayer
    if spec.block.scale != 1.0 or {"attention_out", "mlp_out"} & set(spec.block.norms):
        raise UnsupportedModel(f"{spec.model_type}: parallel blocks with norms after their parts or a residual scale")
    return ParallelLayer if "mlp_in" in spec.block.norms else SharedNormLayer
