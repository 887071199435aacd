"""What one of several ranks has of a model (tensor parallelism, Megatron-LM, https://arxiv.org/abs/1909.08053).

Each rank has some heads of every attention and a part of every MLP's width; what it computes with them is a summand of
what the layer gives. KV heads that are fewer than ranks are there several times.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from torch import Tensor

from kvern.errors import ConfigError
from kvern.mixer_spec import AttentionSpec
from kvern.model_spec import LayerSpec, MlpSpec, ModelSpec, Rename


def share_of(spec: ModelSpec, size: int) -> ModelSpec:
    """The model as each of `size` ranks computes it, with sizes of its share. Raises ConfigError if there is none."""
    if size == 1:
        return spec
    for reason in _reasons(spec):
        raise ConfigError(f"tensor_parallel_size is {size}, and {spec.model_type} has {reason}, {NOT_YET}")
    layers = tuple(_layer_share(spec, layer, size) for layer in spec.layers)
    return replace(spec, layers=layers, renames=tuple(of_whole(rename, spec) for rename in spec.renames))


NOT_YET = "which is not possible together yet: leave tensor_parallel_size at 1"


def _reasons(spec: ModelSpec) -> Iterable[str]:
    """What cannot be shared yet."""
    mixers = [mixer for layer in spec.layers for mixer in layer.mixers]
    attentions = [mixer for mixer in mixers if isinstance(mixer, AttentionSpec)]
    mlps = [layer.mlp for layer in spec.layers if isinstance(layer.mlp, MlpSpec)]
    norm = spec.query_key_norm
    parts = {
        "an encoder's layers": spec.encoder is not None,
        "layers that transformers computes": not spec.layers,
        "layers that keep states": bool(spec.recurrent),
        "latent attention": spec.attends_to_latents,
        "several residual streams": spec.altup is not None,
        "inputs of each layer's own, or experts beside an MLP": spec.augmented,
        "a mixture of experts": any(
            layer.mlp is not None and not isinstance(layer.mlp, MlpSpec) for layer in spec.layers
        ),
        "attention sinks": any(item.sinks for item in attentions),
        "norms over the queries of all heads, or one for each": norm is not None and norm.scope != "head",
        "MLPs of which a share is active": any(mlp.sparsity for mlp in mlps),
    }
    return (part for part, is_there in parts.items() if is_there)


def _layer_share(spec: ModelSpec, layer: LayerSpec, size: int) -> LayerSpec:
    mixer, mlp = layer.mixer, layer.mlp
    if isinstance(mixer, AttentionSpec):
        _check_divides(spec, "attention heads", mixer.heads, size)
        copies = max(1, size // mixer.kv_heads)
        _check_divides(spec, "KV heads", mixer.kv_heads * copies, size)
        _check_divides(spec, "query heads for each KV head", mixer.heads // mixer.kv_heads, copies)
        mixer = replace(mixer, heads=mixer.heads // size, kv_heads=mixer.kv_heads * copies // size, copies=copies)
    if isinstance(mlp, MlpSpec):
        _check_divides(spec, "entries in an MLP", mlp.width, size)
        mlp = replace(mlp, width=mlp.width // size)
    return replace(layer, mixer=mixer, mlp=mlp)


def _check_divides(spec: ModelSpec, what: str, count: int, size: int) -> None:
    if count % size:
        raise ConfigError(
            f"tensor_parallel_size is {size}, and {spec.model_type} has {count} {what}, which so many ranks cannot "
            "share evenly: choose a size that divides them"
        )


def of_whole(rename: Rename, spec: ModelSpec) -> Rename:
    """The rule for tensors of the checkpoint, which has the whole model `spec`."""
    return rename if rename.transform is None else replace(rename, transform=partial(_transformed, rename, spec))


def _transformed(rename: Rename, whole: ModelSpec, tensor: Tensor, share: ModelSpec) -> Tensor:
    assert rename.transform is not None
    return rename.transform(tensor, whole)
