"""Facts that the tree of a model's modules tells without doubt: sizes, attention, norms, MLPs, names of tensors."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from kvern.errors import UnsupportedModel
from kvern.models.describe import read_activation, read_groups, read_rope
from kvern.models.fallback.description import attention_calls, check_windows, meta_model
from kvern.models.fallback.likeness import like_embedding, like_mlp, like_norm
from kvern.spec.mixers import AttentionSpec
from kvern.spec.model import MlpSpec, MoeSpec, NormSpec, Rename, RopeSpec

_RULES = (
    (r"\.(block_sparse_moe|moe|feed_forward|ffn)\.", ".mlp."),
    (r"\.(attention|attn|self_attention)\.", ".self_attn."),
    (r"\.mlp\.(router\.gate|router\.layer|router)\.weight$", ".mlp.gate.weight"),
    (r"\.mlp\.(\w+\.)?(expert_bias|e_score_correction_bias)$", ".mlp.gate.e_score_correction_bias"),
    (r"\.shared_mlp\.input_linear\.", ".mlp.shared_expert.gate_up_proj."),
    (r"\.shared_mlp\.output_linear\.", ".mlp.shared_expert.down_proj."),
    (r"\.mlp\.(shared_experts|shared_mlp)\.", ".mlp.shared_expert."),
    (r"\.mlp\.input_linear\.weight$", ".mlp.experts.gate_up_proj"),
    (r"\.mlp\.output_linear\.weight$", ".mlp.experts.down_proj"),
    (r"\.w1\.", ".gate_proj."),
    (r"\.w3\.", ".up_proj."),
    (r"\.w2\.", ".down_proj."),
    (r"\.mlp\.(fc1|c_fc|dense_h_to_4h)\.", ".mlp.up_proj."),
    (r"\.mlp\.(fc2|c_proj|dense_4h_to_h)\.", ".mlp.down_proj."),
    (r"\.self_attn\.(softmax_offset|attention_sink_bias)$", ".self_attn.sinks"),
    (r"\.self_attn\.(q|query)_layernorm\.", ".self_attn.q_norm."),
    (r"\.self_attn\.(k|key)_layernorm\.", ".self_attn.k_norm."),
    (r"\.self_attn\.(dense|out_proj|wo|c_proj)\.", ".self_attn.o_proj."),
)
"""Names that parts have, and Llama's, in this order."""


@dataclass(frozen=True)
class LayerFacts:
    """One layer: `norms` are the names of its norms in the order in which they were made; `rope` is that of its kind.

    `mlp` of a mixture has everything that shapes tell. `qk_norm` has the norm of queries and keys and its scope.
    """

    attention: AttentionSpec
    kind: str | None
    norms: tuple[str, ...]
    mlp: MlpSpec | MoeSpec
    rope: RopeSpec
    qk_norm: tuple[NormSpec, str] | None


@dataclass(frozen=True)
class Facts:
    """The model's layers, the norm of all of them, the factor of its embeddings, its biases, and its renames."""

    config: PreTrainedConfig
    settings: dict[str, Any]
    layers: tuple[LayerFacts, ...]
    norm: NormSpec
    embedding_factor: float
    qkv_bias: bool
    output_bias: bool
    head_bias: bool
    renames: tuple[Rename, ...]


def facts_of(config: PreTrainedConfig) -> Facts:
    """The facts of the model of a configuration. Raises UnsupportedModel for what kvern's decoder has no part for."""
    model = meta_model(config)
    text = config.get_text_config()
    settings = text.to_dict()
    calls = attention_calls(model)
    check_windows(text, calls)
    path, layers = _layers(model, text.num_hidden_layers)
    if len(calls) != len(layers):
        raise UnsupportedModel(f"{len(calls)} attentions in {len(layers)} layers")
    kinds = settings.get("layer_types") or [None] * len(layers)
    found = [_layer(layer, call, kind, settings) for layer, call, kind in zip(layers, calls, kinds, strict=True)]
    norms = [spec for _, spec in _norms(layers[0], settings)]
    if not norms or any(norm != norms[0] for norm in norms):
        raise UnsupportedModel("the norms of a layer are of several kinds, or of none that kvern has")
    table = model.get_input_embeddings()
    factor = like_embedding(table) if isinstance(table, nn.Embedding) else None
    attention = [module for name, module in layers[0].named_modules() if type(module) is nn.Linear and "attn" in name]
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    return Facts(
        config=text,
        settings=settings,
        layers=tuple(found),
        norm=norms[0],
        embedding_factor=1.0 if factor is None else factor,
        qkv_bias=bool(attention) and attention[0].bias is not None,
        output_bias=bool(attention) and attention[-1].bias is not None,
        head_bias=head is not None and head.bias is not None,
        renames=_renames(model, path),
    )


def _layers(model: PreTrainedModel, count: int) -> tuple[str, list[nn.Module]]:
    """The path of the list of layers, and the layers."""
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return path, list(module)
    raise UnsupportedModel(f"it has no list of {count} layers")


def _norms(layer: nn.Module, settings: dict[str, Any]) -> list[tuple[str, NormSpec]]:
    """The norms of a layer itself, whose epsilon may be a setting."""
    found = [(name, like_norm(child)) for name, child in layer.named_children()]
    return [(name, spec) for name, spec in found if spec is not None]


def _layer(layer: nn.Module, call: AttentionSpec, kind: str | None, settings: dict[str, Any]) -> LayerFacts:
    return LayerFacts(
        attention=call,
        kind=kind,
        norms=tuple(name for name, _ in _norms(layer, settings)),
        mlp=_mixture(layer, settings) or _mlp(layer),
        rope=read_rope({**settings, "head_dim": call.head_dim}, kind),
        qk_norm=_qk_norm(layer, call),
    )


def _mlp(layer: nn.Module) -> MlpSpec:
    found = [likeness.spec for module in layer.modules() if (likeness := like_mlp(module)) is not None]
    if len(found) != 1:
        raise UnsupportedModel("a layer has no MLP that kvern has, or several")
    return found[0]


def _qk_norm(layer: nn.Module, call: AttentionSpec) -> tuple[NormSpec, str] | None:
    """The norm of the queries, if its name says that it is one, with its scope."""
    for name, module in layer.named_modules():
        if re.search(r"\.(q|query)_(layer)?norm$", name) and (spec := like_norm(module)) is not None:
            width = len(module.get_parameter("weight"))
            return spec, "head" if width == call.head_dim else "row"
    return None


def _mixture(layer: nn.Module, settings: dict[str, Any]) -> MoeSpec | None:
    """Returns what the shapes of a layer's experts tell; None: it has none."""
    tensors = {name: tuple(value.shape) for name, value in layer.state_dict().items()}
    stacked = [shape for name, shape in tensors.items() if len(shape) == 3]
    if len(stacked) != 2:
        return None
    (experts, first, hidden), (_, _, width) = stacked if stacked[0][2] == settings["hidden_size"] else stacked[::-1]
    if hidden != settings["hidden_size"] or first not in (width, 2 * width):
        raise UnsupportedModel("the tensors of experts are not [experts, outputs, inputs]")
    shared = [found.spec for module in layer.modules() if (found := like_mlp(module)) is not None]
    groups, top_groups = read_groups(settings)
    return MoeSpec(
        experts=experts,
        top_k=_top_k(settings),
        width=width,
        activation=read_activation(settings),
        corrected=any(re.search(r"(correction|expert)_bias$", name) for name in tensors),
        groups=groups,
        top_groups=top_groups,
        shared_width=shared[0].width if shared else 0,
        shared_gate=any("shared_expert_gate" in name for name in tensors),
        gated=first == 2 * width,
    )


def _top_k(settings: dict[str, Any]) -> int:
    names = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts", "top_k")
    found = next((settings[name] for name in names if settings.get(name)), None)
    if not isinstance(found, int):
        raise UnsupportedModel(f"config.json does not say how many experts a token takes ({', '.join(names)})")
    return found


def _renames(model: PreTrainedModel, layers: str) -> tuple[Rename, ...]:
    """The renames of places in the model, then those of parts that change one of its names."""
    return (*_places(model, layers), *(Rename(*rule) for rule in _RULES))


def _places(model: PreTrainedModel, layers: str) -> Iterator[Rename]:
    paths = {module: path for path, module in model.named_modules()}
    body = layers.rpartition(".")[0]
    last = [path for module, path in paths.items() if path.rpartition(".")[0] == body and like_norm(module) is not None]
    places = {
        paths.get(model.get_input_embeddings(), ""): "model.embed_tokens",
        layers: "model.layers",
        **dict.fromkeys(last[-1:], "model.norm"),
    }
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    places |= {} if head is None else {paths[head]: "lm_head"}
    for path, wanted in places.items():
        if path and path != wanted:
            yield Rename(rf"^{re.escape(path)}\.", f"{wanted}.")


def used_renames(renames: tuple[Rename, ...], names: list[str]) -> tuple[Rename, ...]:
    """The renames that change one of these names, in their order."""
    used = []
    for rename in renames:
        changed = [re.sub(rename.pattern, rename.replacement, name) for name in names]
        used += [rename] if changed != names else []
        names = changed
    return tuple(used)


def narrowed(facts: Facts, names: list[str]) -> Facts:
    """The facts with the renames alone that change one of the names of a checkpoint's tensors."""
    return replace(facts, renames=used_renames(facts.renames, names))
