"""The config.json of a GGUF file: settings of each architecture under the names that checkpoints use.

Settings that files omit, because llama.cpp knows them, are here. No torch is imported.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvern.errors import CorruptCheckpoint, UnsupportedModel, shown
from kvern.formats.gguf.header import GgufModel
from kvern.formats.gguf.names import (
    LFM2_NAMES,
    MAMBA_NAMES,
    POST_NORMS,
    SANDWICH_NORMS,
    Layout,
    StoredPart,
    stored_parts,
)

Values = Callable[[GgufModel, dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Architecture:
    """An architecture; `values`, or a function that reads them, are its own settings beside the common ones."""

    model_type: str
    values: Values | Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    paired: bool = False
    norm_plus_one: bool = False
    fused_gate_up: bool = False


def kv_heads(model: GgufModel) -> list[int]:
    """The KV heads of each layer, 0 where it has none; [0]: not given."""
    given = model.value("attention.head_count_kv", (int, list), 0)
    heads = given if isinstance(given, list) else [given]
    if not heads or len({count for count in heads if count}) > 1:
        raise UnsupportedModel(f"{model.header.file}: attention.head_count_kv differs among layers that attend")
    return heads


def _layer_types(model: GgufModel, pattern: int) -> dict[str, Any]:
    """The layers with a sliding window: listed, or all except each `pattern`-th."""
    given = model.value("attention.sliding_window_pattern", (int, list), pattern)
    count = model.layers
    slides = given if isinstance(given, list) else [(index + 1) % max(given, 1) != 0 for index in range(count)]
    if len(slides) != count:
        raise CorruptCheckpoint(f"{model.header.file}: sliding_window_pattern has {len(slides)} entries, not {count}")
    return {"layer_types": ["sliding_attention" if slide else "full_attention" for slide in slides]}


def _experts(model: GgufModel) -> dict[str, Any]:
    """The sizes of a mixture, and which layers have none; {} for a dense model."""
    experts = model.value("expert_count", int, 0)
    if not experts:
        return {}
    width = model.rows("ffn_down_exps.weight" if model.has("ffn_down_exps.weight") else "ffn_down.0.weight", -1)
    sparse = {tensor.name.split(".")[1] for tensor in model.tensors if tensor.name.endswith(".ffn_gate_inp.weight")}
    return {
        "num_experts": experts,
        "num_local_experts": experts,
        "num_experts_per_tok": model.needed("expert_used_count", int),
        "moe_intermediate_size": width,
        "mlp_only_layers": [index for index in range(model.layers) if str(index) not in sparse],
    }


def _llama(model: GgufModel, config: dict[str, Any]) -> dict[str, Any]:
    experts = _experts(model)
    if experts:
        return experts | {"model_type": "mixtral", "intermediate_size": experts["moe_intermediate_size"]}
    return {"model_type": "mistral"} if config["sliding_window"] else {}


def _qwen_moe(model: GgufModel, config: dict[str, Any]) -> dict[str, Any]:
    shared = model.rows("ffn_up_shexp.weight") if model.has("ffn_up_shexp.weight") else None
    normalize = model.value("expert_weights_norm", bool, config["model_type"] == "qwen3_moe")
    return _experts(model) | {"shared_expert_intermediate_size": shared, "norm_topk_prob": normalize}


def _expert_width(experts: dict[str, Any]) -> dict[str, Any]:
    """Sizes of experts for families that read the experts' width from the setting of an MLP."""
    return experts | {"intermediate_size": experts.get("moe_intermediate_size")}


def _gpt_oss(model: GgufModel, config: dict[str, Any]) -> dict[str, Any]:
    """gpt-oss; its files omit that bounds of stretched planes are not rounded."""
    scaling = {**(config["rope_scaling"] or {}), "truncate": False}
    return _expert_width(_experts(model)) | _layer_types(model, 2) | {"rope_scaling": scaling}


def _scored_alone(model: GgufModel) -> dict[str, Any]:
    """Sizes of experts with independent scores. Raises UnsupportedModel for other scores."""
    if (gating := model.value("expert_gating_func", int, SIGMOID)) != SIGMOID:
        raise UnsupportedModel(
            f"{model.header.file}: expert_gating_func is {gating}; kvern runs {model.architecture} with {SIGMOID}, "
            "sigmoids"
        )
    return _experts(model)


def _sigmoid_experts(model: GgufModel, config: dict[str, Any]) -> dict[str, Any]:
    return _scored_alone(model) | {
        "first_k_dense_replace": model.value("leading_dense_block_count", int, 0),
        "n_shared_experts": model.value("expert_shared_count", int, 0),
        "routed_scaling_factor": model.value("expert_weights_scale", float, 1.0),
        "norm_topk_prob": model.value("expert_weights_norm", bool),
        "n_group": model.value("expert_group_count", int),
        "topk_group": model.value("expert_group_used_count", int),
        "use_qk_norm": model.has("attn_q_norm.weight"),
    }


def _lfm2(model: GgufModel, config: dict[str, Any]) -> dict[str, Any]:
    """Layers without KV heads are convolutions."""
    kinds = ["full_attention" if heads else "conv" for heads in kv_heads(model)]
    return _scored_alone(model) | {
        "layer_types": kinds,
        "conv_L_cache": model.needed("shortconv.l_cache", int),
        "conv_bias": model.has("shortconv.conv.bias"),
        "block_auto_adjust_ff_dim": False,
        "norm_eps": config["rms_norm_eps"],
        "num_dense_layers": model.value("leading_dense_block_count", int, 0),
    }


def _scaled_gemma(model: GgufModel, config: dict[str, Any], largest: int) -> dict[str, Any]:
    """The largest model of the family scales by the width of all heads together, which files omit."""
    shared = config["hidden_size"] // config["num_attention_heads"]
    scalar = shared if config["num_hidden_layers"] == largest else config["head_dim"]
    scale = model.value("attention.scale", float)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 1 / scale / scale if scale else scalar,
        "final_logit_softcapping": model.value("final_logit_softcapping", float),
        "attn_logit_softcapping": model.value("attn_logit_softcapping", float),
    }


def _gemma2(model: GgufModel, config: dict[str, Any]) -> dict[str, Any]:
    softcaps = {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}
    given = {name: value for name, value in _scaled_gemma(model, config, 46).items() if value is not None}
    window = config["sliding_window"] or 4096
    return softcaps | given | _layer_types(model, 2) | {"sliding_window": window}


def _gemma3(model: GgufModel, config: dict[str, Any]) -> dict[str, Any]:
    return (
        _scaled_gemma(model, config, 62)
        | _layer_types(model, 6)
        | {
            "rope_theta": model.value("rope.freq_base", float, 1e6),
            "rope_local_base_freq": model.value("rope.freq_base_swa", float, 10000.0),
        }
    )


def _cohere(model: GgufModel, config: dict[str, Any]) -> dict[str, Any]:
    scale = model.value("logit_scale", float, 0.0625)
    return {"logit_scale": scale, "use_qk_norm": model.has("attn_q_norm.weight")}


def _granite(model: GgufModel, config: dict[str, Any]) -> dict[str, Any]:
    given = {
        "embedding_multiplier": model.value("embedding_scale", float),
        "residual_multiplier": model.value("residual_scale", float),
        "attention_multiplier": model.value("attention.scale", float, config["head_dim"] ** -0.5),
        "logits_scaling": model.value("logit_scale", float),
    }
    experts = _experts(model)
    width = {"intermediate_size": experts["moe_intermediate_size"]} if experts else {}
    return {name: value for name, value in given.items() if value} | experts | width


def _granite_hybrid(model: GgufModel, config: dict[str, Any]) -> dict[str, Any]:
    """Layers without KV heads are Mamba-2; an MLP for all tokens is added to experts, if there are any."""
    heads, shared = model.needed("ssm.time_step_rank", int), "ffn_up_shexp.weight"
    return {"num_local_experts": 0, **_granite(model, config)} | {
        "layer_types": ["attention" if count else "mamba" for count in kv_heads(model)],
        "position_embedding_type": "rope" if model.value("rope.scaling.finetuned", bool, False) else None,
        "shared_intermediate_size": model.rows(shared if model.has(shared) else "ffn_up.weight"),
        "mamba_n_heads": heads,
        "mamba_d_head": model.needed("ssm.inner_size", int) // max(heads, 1),
        "mamba_n_groups": model.needed("ssm.group_count", int),
        "mamba_d_state": model.needed("ssm.state_size", int),
        "mamba_d_conv": model.needed("ssm.conv_kernel", int),
        "mamba_proj_bias": model.has("ssm_in.bias"),
        "mamba_conv_bias": model.has("ssm_conv1d.bias"),
    }


def _parallel(model: GgufModel, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "use_parallel_residual": model.value("use_parallel_residual", bool, not model.has("ffn_norm.weight")),
        "use_qkv_bias": model.has("attn_q.bias"),
    }


def _gpt_neox(model: GgufModel, config: dict[str, Any]) -> dict[str, Any]:
    parallel = model.value("use_parallel_residual", bool, True)
    return {"hidden_act": "gelu", "use_parallel_residual": parallel, "attention_bias": model.has("attn_qkv.bias")}


SIGMOID = 2
"""The value of `expert_gating_func` for experts with independent scores."""
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", _llama, paired=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen2moe": Architecture("qwen2_moe", _qwen_moe),
    "qwen3moe": Architecture("qwen3_moe", _qwen_moe),
    "qwen2vl": Architecture("qwen2"),
    "qwen3vl": Architecture("qwen3"),
    "qwen3vlmoe": Architecture("qwen3_moe", _qwen_moe),
    "gemma": Architecture("gemma", {"hidden_activation": "gelu_pytorch_tanh"}, norm_plus_one=True),
    "gemma2": Architecture("gemma2", _gemma2, SANDWICH_NORMS, norm_plus_one=True),
    "gemma3": Architecture("gemma3_text", _gemma3, SANDWICH_NORMS, norm_plus_one=True),
    "phi2": Architecture("phi", {"hidden_act": "gelu_new"}),
    "phi3": Architecture("phi3", fused_gate_up=True),
    "olmo": Architecture("olmo", lambda model, _: {"clip_qkv": model.value("attention.clamp_kqv", float)}, paired=True),
    "olmo2": Architecture("olmo2", names=POST_NORMS),
    "olmoe": Architecture("olmoe", lambda model, _: _expert_width(_experts(model)) | {"norm_topk_prob": False}),
    "starcoder2": Architecture(
        "starcoder2", lambda model, _: {"hidden_act": "gelu_pytorch_tanh", "use_bias": model.has("attn_q.bias")}
    ),
    "command-r": Architecture("cohere", _cohere),
    "cohere2": Architecture("cohere2", lambda model, config: _cohere(model, config) | _layer_types(model, 4)),
    "granite": Architecture("granite", _granite, paired=True),
    "granitemoe": Architecture("granitemoe", _granite, paired=True),
    "stablelm": Architecture("stablelm", _parallel),
    "gptneox": Architecture("gpt_neox", _gpt_neox),
    "nemotron": Architecture("nemotron", {"hidden_act": "relu2"}, norm_plus_one=True),
    "exaone4": Architecture(
        "exaone4", lambda model, config: _layer_types(model, 4 if config["sliding_window"] else 1), POST_NORMS
    ),
    "glm4": Architecture(
        "glm4",
        names={
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        fused_gate_up=True,
    ),
    "ernie4_5": Architecture("ernie4_5", lambda _, config: {"use_bias": config["attention_bias"]}),
    "arcee": Architecture("arcee", {"hidden_act": "relu2"}, paired=True),
    "seed_oss": Architecture(
        "seed_oss",
        lambda model, _: {"attention_out_bias": model.has("attn_output.bias")},
        {"post_attention_norm": "post_attention_layernorm"},
    ),
    "smollm3": Architecture("smollm3", paired=True),
    "gpt-oss": Architecture("gpt_oss", _gpt_oss, {"post_attention_norm": "post_attention_layernorm"}),
    "glm4moe": Architecture("glm4_moe", _sigmoid_experts, {"post_attention_norm": "post_attention_layernorm"}),
    "dots1": Architecture("dots1", _sigmoid_experts),
    "minimax-m2": Architecture("minimax_m2", lambda model, _: _expert_width(_scored_alone(model))),
    "hunyuan-dense": Architecture("hunyuan_v1_dense"),
    "granitehybrid": Architecture("granitemoehybrid", _granite_hybrid, MAMBA_NAMES, paired=True),
    "lfm2": Architecture("lfm2", _lfm2, LFM2_NAMES),
    "lfm2moe": Architecture("lfm2_moe", _lfm2, LFM2_NAMES),
}
"""Architectures by their name in `general.architecture`."""


MOST_LAYERS = 4096


def config_of(model: GgufModel) -> dict[str, Any]:
    """Raises UnsupportedModel or CorruptCheckpoint."""
    architecture = _architecture(model)
    config = _common(model, architecture.model_type)
    own = architecture.values
    config |= own if isinstance(own, Mapping) else own(model, config)
    parts = stored_parts(model.tensors, layout_of(model))
    config["quantization_config"] = {"quant_method": "gguf", "types": _types(parts)}
    config["dtype"] = _dtype(parts)
    # a window that is left out is the type's own
    return {name: value for name, value in config.items() if value is not None or name == "sliding_window"}


def layout_of(model: GgufModel) -> Layout:
    """The names and storage of the tensors."""
    architecture, common = _architecture(model), _common(model, "")
    return Layout(
        common["num_attention_heads"],
        common["num_key_value_heads"],
        common["head_dim"],
        architecture.names,
        architecture.paired,
        architecture.norm_plus_one,
        architecture.fused_gate_up and not model.has("ffn_gate.weight"),
        common["num_hidden_layers"],
    )


def _architecture(model: GgufModel) -> Architecture:
    found = ARCHITECTURES.get(model.architecture)
    if found is None:
        raise UnsupportedModel(
            f"{model.header.file}: the GGUF architecture {shown(model.architecture)} is unknown; kvern runs "
            f"{', '.join(ARCHITECTURES)}"
        )
    return found


def _types(parts: list[StoredPart]) -> dict[str, str]:
    """The type of each quantized matrix by its path; of the gates of all experts of a layer, of their ups and downs."""
    types: dict[str, str] = {}
    for part in parts:
        path, name = part.name.rpartition(".")[0], part.tensor.type.name
        within = re.sub(r"(\.experts)\.\d+\.", r"\1.", path)
        if part.tensor.type.numbers > 1 and len(part.shape) != 2:
            raise UnsupportedModel(
                f"{part.tensor.file}: {shown(part.tensor.name)} is stored as {name.upper()}; kvern reads only "
                "matrices of that type"
            )
        if within != path and types.setdefault(within, name) != name:
            raise UnsupportedModel(
                f"{part.tensor.file}: {shown(part.tensor.name)} is stored as {name.upper()}, and other experts of "
                f"the layer as {types[within].upper()}; kvern reads them of one type"
            )
        if part.tensor.type.numbers > 1:
            types[within] = name
    return types


def _dtype(parts: list[StoredPart]) -> str:
    """The dtype of computations: the type of the matrices if all have one; quantized ones do not name theirs."""
    names = {
        part.tensor.type.name for part in parts if len(part.shape) == 2 and not part.name.endswith("mlp.gate.weight")
    }
    return {"f32": "float32", "f16": "float16"}.get(next(iter(names)), "bfloat16") if len(names) == 1 else "bfloat16"


def _common(model: GgufModel, model_type: str) -> dict[str, Any]:
    heads, hidden = model.needed("attention.head_count", int), model.needed("embedding_length", int)
    layers = model.layers
    embedding = model.tensor("token_embd.weight")
    if not (1 <= layers <= MOST_LAYERS and heads >= 1) or embedding is None or len(embedding.shape) != 2:
        raise CorruptCheckpoint(f"{model.header.file}: it has {layers} layers and {heads} heads, or no token_embd")
    head_dim = model.value("attention.key_length", int, hidden // heads)
    if model.value("attention.value_length", int, head_dim) != head_dim:
        raise UnsupportedModel(f"{model.header.file}: keys and values differ in length; kvern runs no such model")
    epsilon = model.value("attention.layer_norm_epsilon", float, 1e-5)
    rotated = model.value("rope.dimension_count", int, head_dim)
    width = model.value("feed_forward_length", (int, list), 0)
    if isinstance(width, list):
        if len(set(width)) != 1:
            raise UnsupportedModel(f"{model.header.file}: feed_forward_length differs among layers")
        width = width[0]
    return {
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(kv_heads(model)) or heads,
        "head_dim": head_dim,
        "max_position_embeddings": model.needed("context_length", int),
        "rms_norm_eps": model.value("attention.layer_norm_rms_epsilon", float, 1e-6),
        "layer_norm_eps": epsilon,
        "norm_epsilon": epsilon,
        "norm_eps": epsilon,
        "rope_theta": model.value("rope.freq_base", float, 10000.0),
        "rope_scaling": _rope_scaling(model),
        "partial_rotary_factor": rotated / head_dim if 0 < rotated < head_dim else None,
        "hidden_act": "silu",
        "sliding_window": model.value("attention.sliding_window", int) or None,
        "tie_word_embeddings": model.tensor("output.weight") is None,
        "attention_bias": model.has("attn_q.bias"),
        "mlp_bias": model.has("ffn_up.bias"),
        "bos_token_id": model.header.get("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": model.header.get("tokenizer.ggml.eos_token_id", int),
    }


def _rope_scaling(model: GgufModel) -> dict[str, Any] | None:
    length = model.value("rope.scaling.original_context_length", int, model.value("context_length", int))
    kind, factor = model.value("rope.scaling.type", str, "none"), model.value("rope.scaling.factor", float, 1.0)
    magnitude = model.value("rope.scaling.attn_factor", float, 1.0)
    same = model.floats("rope_freqs.weight")
    short, long = same or model.floats("rope_factors_short.weight"), same or model.floats("rope_factors_long.weight")
    if short and long:
        return {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "original_max_position_embeddings": length,
            "attention_factor": magnitude,
        }
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": length,
            "attention_factor": magnitude * (1.0 + 0.1 * math.log(max(factor, 1.0))),
            "beta_fast": model.value("rope.scaling.yarn_beta_fast", float),
            "beta_slow": model.value("rope.scaling.yarn_beta_slow", float),
        }
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind not in ("none", "longrope"):
        raise UnsupportedModel(f"{model.header.file}: rope.scaling.type is {shown(kind)}; kvern knows linear and yarn")
    return None
