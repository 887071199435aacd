"""Limits of a model's sizes in `config.json`, checked before anything is built."""

import math
from collections.abc import Mapping
from dataclasses import is_dataclass, replace
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from kvern.spec.mixers import AttentionSpec, DeltaNetSpec, LatentAttentionSpec, Mamba2Spec, RecurrentSpec
from kvern.spec.model import LayerSpec, MlpSpec, ModelSpec, MoeSpec, Rename, RopeSpec

MOST_LAYERS = 1024
_LARGEST: Mapping[int, str] = {
    1 << 6: "altup_num_inputs",
    1 << 8: "linear_conv_kernel_dim conv_L_cache mamba_d_conv mamba_expand conv_kernel",
    MOST_LAYERS: (
        "num_hidden_layers max_window_layers first_k_dense_replace decoder_sparse_step no_rope_layer_interval "
        "num_dense_layers num_kv_shared_layers num_mtp_modules num_nextn_predict_layers"
    ),
    1 << 12: (
        "num_attention_heads num_key_value_heads num_global_key_value_heads head_dim index_n_heads index_head_dim "
        "qk_nope_head_dim qk_rope_head_dim v_head_dim global_head_dim num_local_experts n_routed_experts num_experts "
        "num_experts_per_tok top_k_experts n_shared_experts linear_num_key_heads linear_num_value_heads "
        "linear_key_head_dim linear_value_head_dim mamba_n_heads mamba_n_groups mamba_d_state mamba_num_heads "
        "mamba_head_dim ssm_state_size n_groups attention_head_dim hidden_size_per_layer_input"
    ),
    1 << 16: "q_lora_rank kv_lora_rank laurel_rank",
    1 << 17: "hidden_size moe_latent_size",
    1 << 20: (
        "intermediate_size moe_intermediate_size shared_expert_intermediate_size mamba_d_ssm shared_intermediate_size "
        "moe_shared_expert_intermediate_size block_ff_dim block_multiple_of"
    ),
    1 << 22: "vocab_size vocab_size_per_layer_input",
    1 << 24: "index_topk max_position_embeddings original_max_position_embeddings",
}
SIZES = {name: most for most, names in _LARGEST.items() for name in names.split()}
"""The largest allowed value of each; several times that of any existing model."""
NEEDED = ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads")
"""Settings that must not be null or 0."""
PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers", "activation_sparsity_pattern", "attn_type_list")
"""Lists with an entry for each of `num_hidden_layers`."""
KINDS: Mapping[str, type] = {
    **dict.fromkeys(("text_config", "rope_parameters", "rope_scaling"), dict),
    **dict.fromkeys((*PER_LAYER, "layers_block_type"), list),
}
"""Settings that must be an object or a list, if given."""
POSITIVE = frozenset(
    {"vocab_size", "hidden_size", "max_position_embeddings", "heads", "kv_heads", "head_dim", "width", "experts"}
    | {"top_k", "groups", "top_groups", "theta", "dim", "window", "trained_len"}
    | {"key_heads", "value_heads", "key_dim", "value_dim", "kernel", "channels", "state_dim"}
    | {"streams", "laurel_rank", "softcap"}
    | {"q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"}
)


_MOST: Mapping[str, int] = {
    **dict.fromkeys(("heads", "kv_heads", "head_dim", "dim", "experts", "groups", "top_groups"), 1 << 12),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "key_heads", "value_heads"), 1 << 12),
    **dict.fromkeys(("key_dim", "value_dim", "state_dim"), 1 << 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "laurel_rank"), SIZES["kv_lora_rank"]),
    **dict.fromkeys(("width", "shared_width", "channels"), SIZES["mamba_d_ssm"]),
    **{name: SIZES[name] for name in ("hidden_size", "vocab_size", "max_position_embeddings")},
}
"""The largest allowed values of a description, which may come from a file."""


class Unfit(ValueError):
    """An invalid configuration; `values` are the wrong values, where known."""

    def __init__(self, message: str, *values: Any) -> None:
        super().__init__(message)
        self.values = values


def check_config(config: Mapping[str, Any], within: str = "") -> None:
    """Raises Unfit for invalid sizes, for layer lists of another length, and for values of other types.

    `within` precedes names in messages.
    """
    for name, most in SIZES.items():
        value = config.get(name)
        sizes = value if name == "intermediate_size" and isinstance(value, list) else [value]  # one for each layer
        if value is not None and not all(type(size) is int and 0 <= size <= most for size in sizes):
            raise Unfit(f"{within}{name} is {value!r:.60}: it must be a whole number of at most {most}")
    for name, value in config.items():
        if isinstance(value, str) and value.lower() in ("true", "false"):
            raise Unfit(f"{within}{name} is {value!r}: it must be true or false, not a text")
    for name in NEEDED:
        if name in config and not config[name]:
            raise Unfit(f"{within}{name} is {config[name]!r}: it must be a whole number above 0")
    for name, kind in KINDS.items():
        if config.get(name) is not None and not isinstance(config[name], kind):
            raise Unfit(
                f"{within}{name} is {config[name]!r:.60}: it must be {'a list' if kind is list else 'an object'}"
            )
    count = config.get("num_hidden_layers")
    for name in (*PER_LAYER, "intermediate_size"):
        if isinstance(value := config.get(name), list) and value and count is not None and len(value) != count:
            raise Unfit(
                f"{within}{name} has {len(value)} entries, and num_hidden_layers is {count}: it must have one for each "
                "layer"
            )
    if isinstance(text := config.get("text_config"), dict):
        check_config(text, "text_config.")


def check_spec(spec: ModelSpec) -> None:
    """Raises Unfit for a description of which no model can be built."""
    if not 1 <= len(spec.layers) <= MOST_LAYERS:
        raise Unfit(f"there are {len(spec.layers)} layers: there must be from 1 to {MOST_LAYERS}")
    for name, hint in _hints(ModelSpec).items():
        if name != "layers":
            _check(name, getattr(spec, name), hint)
    if not spec.attentions:
        raise Unfit(
            f"none of {len(spec.layers)} layers attends, by layer_types or its older names: kvern schedules by a KV "
            "cache, and needs one that does"
        )
    for layer in {id(layer): layer for layer in spec.layers}.values():
        _check("layer", layer, LayerSpec)
        _check_layer(layer, spec.max_position_embeddings)
    _check_borrowing(spec)
    _check_streams(spec)


def _check_streams(spec: ModelSpec) -> None:
    """Checks that a model with several residual streams has only one kind of layer."""
    if spec.additions.altup is None:
        return
    parts = spec.additions.per_layer is not None and not spec.additions.scalars
    if not parts or any(layer.mixer is None or layer.mlp is None or layer.experts for layer in spec.layers):
        raise Unfit(
            "several residual streams go with layers that have a mixer, an MLP and inputs of their own, and no more"
        )


def _check_borrowing(spec: ModelSpec) -> None:
    """Checks layers that share the caches of others: those must be earlier, have a cache, and have the same heads."""
    caching = spec.caching_layers
    for place, layer in enumerate(spec.layers):
        owner = getattr(layer.mixer, "cache_of", None)
        if owner is not None and not (owner < place and owner in caching):
            raise Unfit(f"layer {place} attends to the cache of layer {owner}, which has none by then")
        if owner is not None and replace(layer.attention, cache_of=None) != spec.layers[owner].attention:
            raise Unfit(f"layer {place} attends to the cache of layer {owner}, whose attention is another")


def _check_layer(layer: LayerSpec, length: int) -> None:
    if not layer.mixers and layer.mlp is None:
        raise Unfit("a layer has neither a mixer nor an MLP")
    for moe in (layer.mlp, layer.experts):
        if isinstance(moe, MoeSpec):
            _check_experts(moe)
    if isinstance(layer.mlp, MlpSpec):
        _check_mlp(layer.mlp)
    experts = layer.mlp if isinstance(layer.mlp, MoeSpec) else None
    if layer.mlp is not None and layer.mlp.activation == "clamped_swiglu" and (experts is None or experts.shared_width):
        raise Unfit("the activation is clamped_swiglu, which only experts that are chosen have")
    for mixer in layer.mixers:
        _check_mixer(mixer, layer.rope, length)


def _check_mlp(mlp: MlpSpec) -> None:
    scaled = (mlp.gate_scale, mlp.out_scale) != (1.0, 1.0)
    if not mlp.gated and scaled:
        raise Unfit("an MLP without a gate has scales: only one with a gate may")
    if not 0 <= mlp.sparsity < 1:
        raise Unfit(f"the sparsity of an MLP is {mlp.sparsity}: it must be from 0 to less than 1")
    if mlp.sparsity and (scaled or not mlp.gated):
        raise Unfit("an MLP with a sparsity has scales or no gate: it must have a gate, and no scales")


def _check_mixer(
    mixer: AttentionSpec | LatentAttentionSpec | RecurrentSpec, rope: RopeSpec | None, length: int
) -> None:
    if isinstance(mixer, DeltaNetSpec) and mixer.value_heads % mixer.key_heads:
        raise Unfit(f"{mixer.value_heads} value heads cannot share {mixer.key_heads} key heads evenly")
    if isinstance(mixer, Mamba2Spec) and mixer.heads % mixer.groups:
        raise Unfit(f"{mixer.heads} heads of Mamba cannot share {mixer.groups} groups evenly")
    if isinstance(mixer, Mamba2Spec) and mixer.inner > SIZES["mamba_d_ssm"]:
        raise Unfit(f"Mamba has {mixer.inner} numbers of a token: there may be {SIZES['mamba_d_ssm']}")
    if isinstance(mixer, RecurrentSpec):
        return
    if isinstance(mixer, LatentAttentionSpec):
        head_dim = mixer.qk_rope_head_dim
        _check_indexer(mixer)
    elif mixer.heads % mixer.kv_heads:
        raise Unfit(f"{mixer.heads} attention heads cannot share {mixer.kv_heads} key-value heads evenly")
    else:
        head_dim = mixer.head_dim
    if rope is None:
        return
    if rope.dim % 2 or rope.dim > head_dim:
        raise Unfit(f"{rope.dim} entries of a head of {head_dim} are rotated: it must be an even part")
    try:
        frequencies, factor = rope.scaling.frequencies(rope.theta, rope.dim, length)
    except (ArithmeticError, ValueError):
        frequencies, factor = [], math.nan
    if len(frequencies) != rope.dim // 2 or not all(
        isinstance(number, int | float) and math.isfinite(number) for number in (*frequencies, factor)
    ):
        raise Unfit(f"the rotary embedding's scaling does not give {rope.dim // 2} finite frequencies")


def _check_indexer(mixer: LatentAttentionSpec) -> None:
    if mixer.indexer is None:
        return
    if mixer.q_lora_rank is None:
        raise Unfit("an indexer reads the latents of queries, and q_lora_rank is None")
    if mixer.indexer.head_dim < mixer.qk_rope_head_dim:
        raise Unfit(
            f"index_head_dim is {mixer.indexer.head_dim}: {mixer.qk_rope_head_dim} entries (qk_rope_head_dim) are "
            "rotated"
        )


def _check_experts(moe: MoeSpec) -> None:
    if moe.top_k > moe.experts:
        raise Unfit(f"a token takes {moe.top_k} experts of {moe.experts}")
    if moe.latent and not moe.shared_width:
        raise Unfit(f"experts over rows of {moe.latent} stand beside no MLP that every token takes")
    if moe.groups == 1:
        return
    size, least = moe.experts // moe.groups, 2 if moe.scoring == "sigmoid" else 1
    if moe.experts % moe.groups or size < least or moe.top_groups > moe.groups or moe.top_k > moe.top_groups * size:
        raise Unfit(
            f"a token takes {moe.top_k} experts from {moe.top_groups} of {moe.groups} groups of {moe.experts} experts: "
            f"groups must be of the same size, of {least} or more, and have the experts"
        )


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _check(name: str, value: Any, hint: Any) -> None:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        if value is None and NoneType in get_args(hint):
            return
        options = [option for option in get_args(hint) if option is not NoneType]
        hint = type(value) if type(value) in options else options[0]
    if is_dataclass(value) and not isinstance(value, Rename):
        if isinstance(hint, type) and is_dataclass(hint) and not isinstance(value, hint):
            raise Unfit(f"{name} is a {type(value).__name__}")
        for field, kind in _hints(type(value)).items():  # type: ignore[arg-type]
            _check(field, getattr(value, field), kind)
    elif origin is tuple and isinstance(value, tuple):
        for item in value:
            _check(name, item, get_args(hint)[0])
    elif not _fits(value, hint, origin):
        raise Unfit(f"{name} is {value!r:.60}: it must be {_wanted(hint)}", value)
    elif type(value) is int and value > _MOST.get(name, value):
        raise Unfit(f"{name} is {value!r:.60}: it must be at most {_MOST[name]}", value)
    elif name == "epsilon" and value < 0:
        raise Unfit(f"the norms' epsilon is {value}: it must not be below 0")
    elif name in POSITIVE and value <= 0:
        raise Unfit(f"{name} is {value!r:.60}: it must be above 0", value)


def _fits(value: Any, hint: Any, origin: Any) -> bool:
    if origin is Mapping:
        names = get_args(get_args(hint)[0])
        return isinstance(value, Mapping) and all(key in names and _fits(at, str, None) for key, at in value.items())
    if origin is Literal:
        return value in get_args(hint)
    if hint is bool:
        return value is None or isinstance(value, bool)
    if hint is int:
        return type(value) is int and -1 <= value < 1 << 31
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)
    if hint is str:
        return isinstance(value, str) and len(value) <= 100
    return origin is not tuple


def _wanted(hint: Any) -> str:
    names = {bool: "true or false", int: "a whole number below 2^31", float: "a finite number", str: "a short text"}
    return names.get(hint, "of another kind")
