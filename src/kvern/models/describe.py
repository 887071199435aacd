"""Readers of the settings that most `config.json` files share; a family passes only its own."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvern.errors import UnsupportedModel
from kvern.models.registry import Config
from kvern.plugins import imported
from kvern.spec.mixers import AttentionSpec
from kvern.spec.model import (
    Activation,
    AdditionSpec,
    BiasSpec,
    BlockSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    RopeSpec,
    ScaleSpec,
)
from kvern.spec.rope_scaling import LinearScaling

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
}


def read_activation(config: Config) -> Activation:
    """The activation of the feed-forward half; UnsupportedModel if kvern has none of that name."""
    name = config.get("hidden_activation") or config.get("hidden_act") or "silu"
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(f"activation {name!r:.60} is unknown; known: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def read_head_dim(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def read_attention(
    config: Config, *, scale: float | None = None, window: int | None = None, softcap: float | None = None
) -> AttentionSpec:
    """The attention of a configuration; `scale` defaults to head_dim ** -0.5."""
    heads, head_dim = config["num_attention_heads"], read_head_dim(config)
    return AttentionSpec(
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        scale=head_dim**-0.5 if scale is None else scale,
        window=window,
        softcap=softcap,
    )


def rope_settings(config: Config) -> Mapping[str, Any]:
    """The settings of the rotary embedding, which have one of two names."""
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def read_rope(config: Config, layer_type: str | None = None, *, interleaved: bool = False) -> RopeSpec:
    """Rotary embedding from `rope_parameters`, or from `rope_theta` and `rope_scaling` of older files.

    `layer_type` selects among parameters that are given for each kind of layer.
    """
    given = rope_settings(config)
    if layer_type is not None and layer_type in given:
        given = given[layer_type] or {}
    rope = {key: value for key, value in given.items() if value is not None}
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = float(_first_given(rope, config, ("rotary_emb_base", "rope_theta"), 10000.0))
    partial = float(_first_given(rope, config, ("rotary_pct", "partial_rotary_factor"), 1.0))
    dim = read_head_dim(config) if kind == "proportional" else int(read_head_dim(config) * partial)
    plain = kind in ("default", "mrope")
    scaling = LinearScaling() if plain else imported("kvern.models.rope_scalings:read_scaling")(kind, rope, config)
    return RopeSpec(theta, dim, scaling, interleaved, axes=_axes(rope, dim // 2))


def _axes(rope: Mapping[str, Any], planes: int) -> tuple[int, ...]:
    """The axes of the planes of a model with positions of time, height and width ("mrope"); (): it has none."""
    sections = rope.get("mrope_section")
    if not sections:
        return ()
    if not rope.get("mrope_interleaved"):
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    return tuple(plane % 3 if plane < 3 * sections[plane % 3] else 0 for plane in range(planes))


def _first_given(rope: Mapping[str, Any], config: Config, names: Sequence[str], default: Any) -> Any:
    values = (source.get(name) for source in (rope, config) for name in names)
    return next((value for value in values if value is not None), default)


def read_mlp(config: Config, **fields: Any) -> MlpSpec:
    """A gated MLP of `intermediate_size` unless `fields` say otherwise."""
    given: dict[str, Any] = {"width": config["intermediate_size"], "bias": bool(config.get("mlp_bias", False))}
    if "activation" not in fields:
        given["activation"] = read_activation(config)
    return MlpSpec(**(given | fields))


def read_experts(config: Config) -> int:
    """The number of experts, by any of its three names."""
    names = ("num_local_experts", "n_routed_experts", "num_experts")
    found = next((name for name in names if name in config), None)
    if found is None or config[found] is None:
        raise KeyError(found or " or ".join(names))
    return int(config[found])


def read_moe(config: Config, **fields: Any) -> MoeSpec:
    """Experts of the width `intermediate_size` that a softmax chooses, unless `fields` say otherwise."""
    read: dict[str, Callable[[], Any]] = {
        "experts": lambda: read_experts(config),
        "top_k": lambda: config["num_experts_per_tok"],
        "width": lambda: config["intermediate_size"],
        "activation": lambda: read_activation(config),
    }
    return MoeSpec(**fields, **{name: value() for name, value in read.items() if name not in fields})


def read_groups(config: Config) -> tuple[int, int]:
    """The number of groups of experts, and the number of groups that a token uses; 1 where not given."""
    groups, top_groups = (config.get(name) for name in ("n_group", "topk_group"))
    return 1 if groups is None else groups, 1 if top_groups is None else top_groups


def check_settings(config: Config, expected: Mapping[str, Any]) -> None:
    """Raise UnsupportedModel for a setting that a configuration has otherwise than all that are published."""
    for key, value in expected.items():
        if config.get(key, value) != value:
            raise UnsupportedModel(
                f"{key} is {config[key]!r:.60}: kvern reads {config.get('model_type')!s:.60} with {value!r}"
            )


def kinds_of(names: Iterable[str], known: Mapping[str, str]) -> list[str]:
    """The kinds of layers with these names. Raises UnsupportedModel for a name that is not `known`."""
    names = list(names)
    if unknown := set(names) - set(known):
        raise UnsupportedModel(f"layer type {min(map(str, unknown))!r:.60} is unknown; known: {', '.join(known)}")
    return [known[name] for name in names]


def uniform_layers(
    config: Config,
    *,
    attention: AttentionSpec | None = None,
    rope: RopeSpec | None = None,
    mlp: MlpSpec | MoeSpec | None = None,
) -> tuple[LayerSpec, ...]:
    """`num_hidden_layers` equal layers; arguments that are not given are read from the configuration."""
    layer = LayerSpec(attention or read_attention(config), rope or read_rope(config), mlp or read_mlp(config))
    return (layer,) * int(config["num_hidden_layers"])


def read_layer_types(config: Config, *, pattern: int | None = None) -> tuple[str, ...]:
    """ "full_attention" or "sliding_attention" for each layer.

    Older files have no `layer_types`: there every `pattern`-th layer is full, or all slide if there is no pattern.
    """
    if given := config.get("layer_types"):
        return tuple(given)
    full = [pattern is not None and (index + 1) % pattern == 0 for index in range(config["num_hidden_layers"])]
    return tuple("full_attention" if is_full else "sliding_attention" for is_full in full)


def layers_by_type(
    config: Config,
    kinds: Sequence[str],
    *,
    attention: AttentionSpec | None = None,
    ropes: Mapping[str, RopeSpec | None] | None = None,
    mlp: MlpSpec | MoeSpec | None = None,
) -> tuple[LayerSpec, ...]:
    """A layer of each of `kinds`; "sliding_attention" has a window of `sliding_window` keys, null: all.

    Arguments that are not given are read from the configuration; `ropes` maps a kind to its rotary embedding.
    """
    attention, mlp = attention or read_attention(config), mlp or read_mlp(config)
    if ropes is None:
        ropes = dict.fromkeys(kinds, read_rope(config))
    window = config.get("sliding_window")
    layers = {
        "full_attention": replace(attention, window=None),
        "sliding_attention": replace(attention, window=window),
    }
    unknown = set(kinds) - set(layers)
    if unknown:
        raise UnsupportedModel(f"layer type {sorted(unknown)[0]!r:.60} is unknown; known: {', '.join(layers)}")
    return tuple(LayerSpec(layers[kind], ropes[kind], mlp) for kind in kinds)


def read_rms_norm(config: Config, offset: float = 0.0) -> NormSpec:
    return NormSpec("rms", float(config.get("rms_norm_eps", 1e-6)), offset)


def read_layer_norm(config: Config, key: str = "layer_norm_eps", *, bias: bool = True, offset: float = 0.0) -> NormSpec:
    return NormSpec("layer", float(config.get(key, 1e-5)), offset, bias=bias)


def describe(config: Config, layers: tuple[LayerSpec, ...] | None = None, **fields: Any) -> ModelSpec:
    """A `ModelSpec` with the common settings; `fields` are those that the family decides.

    They have the names of `ModelSpec`, or those in `_GROUPED`.
    """
    if config.get("is_causal") is False:
        raise UnsupportedModel("is_causal is false: kvern's models attend to what is before alone")
    bias, bos = bool(config.get("attention_bias", False)), config.get("bos_token_id")
    given: dict[str, Any] = {
        "model_type": config.get("model_type", ""),
        "vocab_size": config["vocab_size"],
        "hidden_size": config["hidden_size"],
        "layers": uniform_layers(config) if layers is None else layers,
        "max_position_embeddings": config["max_position_embeddings"],
        "norm": read_rms_norm(config),
        "qkv_bias": bias,
        "output_bias": bias,
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
        "bos_token_id": next(iter(bos), None) if isinstance(bos, list) else bos,
        "dtype": config.get("dtype") or config.get("torch_dtype"),
    }
    return ModelSpec(**with_groups(given | fields))


_GROUPED = {
    "block_norms": ("block", "norms"),
    "parallel": ("block", "parallel"),
    "residual_scale": ("block", "scale"),
    "qkv_bias": ("biases", "qkv"),
    "output_bias": ("biases", "output"),
    "lm_head_bias": ("biases", "head"),
    "embedding_scale": ("scales", "embedding"),
    "logit_scale": ("scales", "logit"),
    "logit_softcap": ("scales", "softcap"),
    "per_layer": ("additions", "per_layer"),
    "altup": ("additions", "altup"),
    "layer_scalars": ("additions", "scalars"),
}
"""The names under which families give fields of groups of `ModelSpec`: the group, and the field there."""
_GROUPS = {"block": BlockSpec(), "biases": BiasSpec(), "scales": ScaleSpec(), "additions": AdditionSpec()}


def with_groups(fields: Mapping[str, Any], base: ModelSpec | None = None) -> dict[str, Any]:
    """Fields of `ModelSpec`, of which those of groups may be given by the names in `_GROUPED`.

    The other fields of these groups are those of `base`; None: their defaults.
    """
    made = {name: value for name, value in fields.items() if name not in _GROUPED}
    for name in _GROUPED.keys() & fields.keys():
        group, own = _GROUPED[name]
        known = made.get(group, _GROUPS[group] if base is None else getattr(base, group))
        made[group] = replace(known, **{own: fields[name]})
    return made
