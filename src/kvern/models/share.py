"""The share of a model that one rank holds (tensor parallelism, Megatron-LM, https://arxiv.org/abs/1909.08053).

Each rank has some heads of every attention and recurrent layer, and a part of the width of every MLP and expert, or
whole experts; its results are summands of the layer's result. KV heads, or groups of recurrent heads, that are fewer
than ranks are replicated. Ranks in DP attention share experts only.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from kvern.errors import ConfigError
from kvern.spec.mixers import (
    AttentionSpec,
    DeltaNetSpec,
    LatentAttentionSpec,
    RecurrentSpec,
    ShortConvSpec,
    TwoMixersSpec,
)
from kvern.spec.model import LayerSpec, MlpSpec, ModelSpec, MoeSpec, Rename


@dataclass(frozen=True)
class WholeExperts:
    """Expert parallelism: whole experts are placed on ranks, with `redundant` additional copies of some."""

    redundant: int = 0


def share_of(
    spec: ModelSpec, size: int, whole_experts: WholeExperts | None = None, *, dp_attention: bool = False
) -> ModelSpec:
    """The model as each of `size` ranks computes it, with sizes of its share. Raises ConfigError if there is none.

    With `dp_attention` each computes its own rows and shares only the experts.
    """
    if whole_experts is not None:
        _check_experts(spec, size, whole_experts)
    if size == 1:
        return spec
    if dp_attention:
        return _share_of_experts(spec, size, whole_experts)
    for reason in _reasons(spec):
        raise ConfigError(f"tensor_parallel_size is {size}, and {spec.model_type} has {reason}, {NOT_YET}")
    if spec.additions.per_layer is not None:
        _check_divides(
            spec, "entries in the inputs of its layers", len(spec.layers) * spec.additions.per_layer.width, size
        )
    layers = tuple(_layer_share(spec, layer, size, whole_experts) for layer in spec.layers)
    return replace(spec, layers=layers, renames=tuple(of_whole(rename, spec) for rename in spec.renames))


def _share_of_experts(spec: ModelSpec, size: int, whole: WholeExperts | None) -> ModelSpec:
    mixtures = [layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoeSpec)]
    refused = {
        "no experts: leave enable_dp_attention off, or use data_parallel_size": not mixtures,
        "experts beside MLPs, which are not possible with enable_dp_attention yet: leave it off": any(
            layer.experts is not None for layer in spec.layers
        ),
        "experts over narrower rows, which are not possible with enable_dp_attention yet: leave it off": any(
            moe.latent for moe in mixtures
        ),
    }
    for what, is_there in refused.items():
        if is_there:
            raise ConfigError(f"enable_dp_attention is on, and {spec.model_type} has {what}")
    layers = [
        replace(layer, mlp=_cut_experts(spec, layer.mlp, size, whole)) if isinstance(layer.mlp, MoeSpec) else layer
        for layer in spec.layers
    ]
    return replace(spec, layers=tuple(layers), renames=tuple(of_whole(rename, spec) for rename in spec.renames))


NOT_YET = "which is not possible together yet: leave tensor_parallel_size at 1"


def _reasons(spec: ModelSpec) -> Iterable[str]:
    """The parts of a model that do not support tensor parallelism."""
    norm = spec.query_key_norm
    parts = {
        "an encoder's layers": spec.encoder is not None,
        "layers that transformers computes": not spec.layers,
        "norms over all heads that are no root-mean-square norms before a rotation": norm is not None
        and norm.scope == "row"
        and (norm.after_rope or norm.norm.kind != "rms"),
    }
    return (part for part, is_there in parts.items() if is_there)


def _layer_share(spec: ModelSpec, layer: LayerSpec, size: int, whole: WholeExperts | None) -> LayerSpec:
    mixer, mlp = layer.mixer, layer.mlp
    if isinstance(mixer, TwoMixersSpec):
        attention, recurrent = _attention(spec, mixer.attention, size), _recurrent(spec, mixer.recurrent, size)
        mixer = replace(mixer, attention=attention, recurrent=recurrent)
    elif isinstance(mixer, AttentionSpec):
        mixer = _attention(spec, mixer, size)
    elif isinstance(mixer, LatentAttentionSpec):
        _check_divides(spec, "attention heads", mixer.heads, size)
        mixer = replace(mixer, heads=mixer.heads // size)
    elif isinstance(mixer, RecurrentSpec):
        mixer = _recurrent(spec, mixer, size)
    if isinstance(mlp, MlpSpec):
        _check_divides(spec, "entries in an MLP", mlp.width, size)
        mlp = replace(mlp, width=mlp.width // size)
    elif mlp is not None:
        mlp = _experts_share(spec, mlp, size, whole)
    experts = None if layer.experts is None else _experts_share(spec, layer.experts, size, whole)
    return replace(layer, mixer=mixer, mlp=mlp, experts=experts)


def _attention(spec: ModelSpec, mixer: AttentionSpec, size: int) -> AttentionSpec:
    _check_divides(spec, "attention heads", mixer.heads, size)
    copies = max(1, size // mixer.kv_heads)
    _check_divides(spec, "KV heads", mixer.kv_heads * copies, size)
    _check_divides(spec, "query heads for each KV head", mixer.heads // mixer.kv_heads, size, sharing=copies)
    return replace(mixer, heads=mixer.heads // size, kv_heads=mixer.kv_heads * copies // size, copies=copies)


def _recurrent(spec: ModelSpec, mixer: RecurrentSpec, size: int) -> RecurrentSpec:
    """A state's heads, or the channels of a convolution."""
    if isinstance(mixer, ShortConvSpec):
        _check_divides(spec, "channels of a convolution", mixer.channels, size)
        return replace(mixer, channels=mixer.channels // size)
    if isinstance(mixer, DeltaNetSpec):
        _check_divides(spec, "key heads of a state", mixer.key_heads, size)
        return replace(mixer, key_heads=mixer.key_heads // size, value_heads=mixer.value_heads // size)
    copies = max(1, size // mixer.groups)
    _check_divides(spec, "groups of heads of a state", mixer.groups * copies, size)
    _check_divides(spec, "heads of a state for each group", mixer.heads // mixer.groups, size, sharing=copies)
    return replace(mixer, heads=mixer.heads // size, groups=mixer.groups * copies // size, copies=copies)


def _experts_share(spec: ModelSpec, moe: MoeSpec, size: int, whole: WholeExperts | None) -> MoeSpec:
    _check_divides(spec, "entries in the MLP beside experts", moe.shared_width, size)
    return _cut_experts(spec, replace(moe, shared_width=moe.shared_width // size), size, whole)


def _cut_experts(spec: ModelSpec, moe: MoeSpec, size: int, whole: WholeExperts | None) -> MoeSpec:
    if whole is not None:
        return replace(moe, placed_over=size, redundant=whole.redundant)
    _check_divides(spec, "entries in an expert", moe.width, size, "enable expert parallel, or ")
    return replace(moe, width=moe.width // size)


def _check_experts(spec: ModelSpec, size: int, whole: WholeExperts) -> None:
    """Raises ConfigError if there are no experts that the ranks could hold whole."""
    mixtures = [layer.mixture for layer in spec.layers if layer.mixture is not None]
    if size == 1:
        raise ConfigError(
            "enable_expert_parallel is on, and tensor_parallel_size is 1: raise it to the ranks that experts are to be "
            "placed on, or leave enable_expert_parallel off"
        )
    if not mixtures:
        raise ConfigError(f"enable_expert_parallel is on, and {spec.model_type} has no experts: leave it off")
    fewest = min(moe.experts for moe in mixtures)
    if size > fewest:
        raise ConfigError(
            f"tensor_parallel_size is {size}, and {spec.model_type} has {fewest} experts: lower it to that, or leave "
            "enable_expert_parallel off"
        )
    if whole.redundant > (size - 1) * fewest:
        raise ConfigError(
            f"redundant_experts is {whole.redundant}, and {size} ranks have at most {(size - 1) * fewest} more copies "
            f"of {fewest} experts: lower it to that"
        )


def _check_divides(
    spec: ModelSpec, what: str, count: int, size: int, instead: str = "", sharing: int | None = None
) -> None:
    """Raises ConfigError if the ranks cannot share evenly; `sharing`: the number of ranks that share, if not all."""
    if count % (sharing or size):
        raise ConfigError(
            f"tensor_parallel_size is {size}, and {spec.model_type} has {count} {what}, which so many ranks cannot "
            f"share evenly: {instead}choose a size that divides them"
        )


def of_whole(rename: Rename, spec: ModelSpec) -> Rename:
    """The rule for tensors of the checkpoint, which has the whole model `spec`."""
    return rename if rename.transform is None else replace(rename, transform=partial(_transformed, rename, spec))


def _transformed(rename: Rename, whole: ModelSpec, tensor: Tensor, share: ModelSpec) -> Tensor:
    assert rename.transform is not None
    return rename.transform(tensor, whole)
