"""Settings of each architecture in GGUF files, under the names that checkpoints use.

Settings that files omit, because llama.cpp knows them, are here. No torch is imported.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvern.errors import CorruptCheckpoint, UnsupportedModel
from kvern.formats.gguf.model import GgufModel
from kvern.formats.gguf.names import LFM2_NAMES, MAMBA_NAMES, POST_NORMS, SANDWICH_NORMS

Values = Callable[[GgufModel, dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Architecture:
    """An architecture; `values` adds its own settings to the common configuration."""

    model_type: str
    values: Values = lambda model, config: {}
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


def _minimax(model: GgufModel, config: dict[str, Any]) -> dict[str, Any]:
    return _expert_width(_scored_alone(model))


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


def _gemma(model: GgufModel, config: dict[str, Any]) -> dict[str, Any]:
    return {"hidden_activation": "gelu_pytorch_tanh"}


def _scaled_gemma(model: GgufModel, config: dict[str, Any], largest: int) -> dict[str, Any]:
    """The largest model of the family scales by the width of all heads together, which files omit."""
    shared = config["hidden_size"] // config["num_attention_heads"]
    scalar = shared if config["num_hidden_layers"] == largest else config["head_dim"]
    scale = model.value("attention.scale", float)
    return _gemma(model, config) | {
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


def _olmo(model: GgufModel, config: dict[str, Any]) -> dict[str, Any]:
    return {"clip_qkv": model.value("attention.clamp_kqv", float)}


def _olmoe(model: GgufModel, config: dict[str, Any]) -> dict[str, Any]:
    return _expert_width(_experts(model)) | {"norm_topk_prob": False}


def _cohere(model: GgufModel, config: dict[str, Any]) -> dict[str, Any]:
    scale = model.value("logit_scale", float, 0.0625)
    return {"logit_scale": scale, "use_qk_norm": model.has("attn_q_norm.weight")}


def _cohere2(model: GgufModel, config: dict[str, Any]) -> dict[str, Any]:
    return _cohere(model, config) | _layer_types(model, 4)


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


def _exaone4(model: GgufModel, config: dict[str, Any]) -> dict[str, Any]:
    return _layer_types(model, 4 if config["sliding_window"] else 1)


def _starcoder2(model: GgufModel, config: dict[str, Any]) -> dict[str, Any]:
    return {"hidden_act": "gelu_pytorch_tanh", "use_bias": model.has("attn_q.bias")}


def _phi(model: GgufModel, config: dict[str, Any]) -> dict[str, Any]:
    return {"hidden_act": "gelu_new"}


def _ernie(model: GgufModel, config: dict[str, Any]) -> dict[str, Any]:
    return {"use_bias": config["attention_bias"]}


def _seed_oss(model: GgufModel, config: dict[str, Any]) -> dict[str, Any]:
    return {"attention_out_bias": model.has("attn_output.bias")}


SIGMOID = 2
"""The value of `expert_gating_func` for experts with independent scores."""
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", _llama, paired=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "qwen2moe": Architecture("qwen2_moe", _qwen_moe),
    "qwen3moe": Architecture("qwen3_moe", _qwen_moe),
    "gemma": Architecture("gemma", _gemma, norm_plus_one=True),
    "gemma2": Architecture("gemma2", _gemma2, SANDWICH_NORMS, norm_plus_one=True),
    "gemma3": Architecture("gemma3_text", _gemma3, SANDWICH_NORMS, norm_plus_one=True),
    "phi2": Architecture("phi", _phi),
    "phi3": Architecture("phi3", fused_gate_up=True),
    "olmo": Architecture("olmo", _olmo, paired=True),
    "olmo2": Architecture("olmo2", names=POST_NORMS),
    "olmoe": Architecture("olmoe", _olmoe),
    "starcoder2": Architecture("starcoder2", _starcoder2),
    "command-r": Architecture("cohere", _cohere),
    "cohere2": Architecture("cohere2", _cohere2),
    "granite": Architecture("granite", _granite, paired=True),
    "granitemoe": Architecture("granitemoe", _granite, paired=True),
    "stablelm": Architecture("stablelm", _parallel),
    "gptneox": Architecture("gpt_neox", _gpt_neox),
    "nemotron": Architecture("nemotron", lambda model, config: {"hidden_act": "relu2"}, norm_plus_one=True),
    "exaone4": Architecture("exaone4", _exaone4, POST_NORMS),
    "glm4": Architecture(
        "glm4",
        names={
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        fused_gate_up=True,
    ),
    "ernie4_5": Architecture("ernie4_5", _ernie),
    "arcee": Architecture("arcee", lambda model, config: {"hidden_act": "relu2"}, paired=True),
    "seed_oss": Architecture("seed_oss", _seed_oss, {"post_attention_norm": "post_attention_layernorm"}),
    "smollm3": Architecture("smollm3", paired=True),
    "gpt-oss": Architecture("gpt_oss", _gpt_oss, {"post_attention_norm": "post_attention_layernorm"}),
    "glm4moe": Architecture("glm4_moe", _sigmoid_experts, {"post_attention_norm": "post_attention_layernorm"}),
    "dots1": Architecture("dots1", _sigmoid_experts),
    "minimax-m2": Architecture("minimax_m2", _minimax),
    "hunyuan-dense": Architecture("hunyuan_v1_dense"),
    "granitehybrid": Architecture("granitemoehybrid", _granite_hybrid, MAMBA_NAMES, paired=True),
    "lfm2": Architecture("lfm2", _lfm2, LFM2_NAMES),
    "lfm2moe": Architecture("lfm2_moe", _lfm2, LFM2_NAMES),
}
"""Architectures by their name in `general.architecture`."""
