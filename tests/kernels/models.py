"""Models whose kernels are tested, by their sizes: together they launch every kernel in its different forms."""

from typing import Any

from kvern.models.registry import spec_from_config
from kvern.spec.model import ModelSpec

TINY: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}
LARGE: dict[str, Any] = TINY | {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
GEMMA = {"attn_logit_softcapping": 5.0, "hidden_activation": "gelu_pytorch_tanh"}
GEMMA4: dict[str, Any] = {
    "attention_k_eq_v": True,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
}
NETS: dict[str, Any] = {
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
}
LARGE_NETS = NETS | {
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
LATENTS: dict[str, Any] = {
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LARGE_LATENTS = LATENTS | {
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
}
CONVOLUTIONS: dict[str, Any] = {
    "layer_types": ["conv", "full_attention"],
    "conv_L_cache": 3,
    "conv_bias": False,
    "norm_eps": 1e-5,
    "block_auto_adjust_ff_dim": False,
}
MAMBA: dict[str, Any] = {
    "mamba_d_conv": 4,
    "mamba_n_heads": 4,
    "mamba_d_head": 24,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
}
GRANITE = MAMBA | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 40}
FALCON = MAMBA | {"mamba_d_ssm": 96, "mamba_rms_norm": True, "ssm_multipliers": [0.9, 0.8, 0.7, 0.6, 0.5]}
NEMOTRON: dict[str, Any] = {
    "layers_block_type": ["mamba", "moe", "attention"],
    "num_hidden_layers": 3,
    "head_dim": 16,
    "conv_kernel": 4,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "moe_latent_size": 16,
}
TINY_MODELS: dict[str, dict[str, Any]] = {
    "llama": TINY,
    "gemma2": TINY | GEMMA | {"head_dim": 20, "sliding_window": 9, "query_pre_attn_scalar": 10},
    "glm4": TINY | {"head_dim": 16, "partial_rotary_factor": 0.5},
    "qwen3_moe": TINY | {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    "qwen3_5_text": TINY | NETS | {"head_dim": 16},
    "glm4_moe_lite": TINY | LATENTS | {"num_key_value_heads": 4},
    "gemma4_text": TINY
    | GEMMA4
    | {"head_dim": 16, "global_head_dim": 32, "sliding_window": 9, "hidden_size_per_layer_input": 12}
    | {"vocab_size_per_layer_input": 200, "enable_moe_block": True}
    | {"num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 24},
    "gpt_oss": TINY
    | {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 9}
    | {"rope_scaling": {"rope_type": "default"}},
    "lfm2": TINY | CONVOLUTIONS,
    "nemotron_h": TINY | NEMOTRON,
    "falcon_h1": TINY | FALCON,
}
LARGE_MODELS: dict[str, dict[str, Any]] = {
    "llama": LARGE,
    "gemma2": LARGE | GEMMA | {"head_dim": 256, "sliding_window": 1024, "query_pre_attn_scalar": 256},
    "qwen3_moe": LARGE
    | {"hidden_size": 2048, "num_key_value_heads": 4, "head_dim": 128}
    | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True},
    "qwen3_5_text": LARGE | LARGE_NETS | {"num_hidden_layers": 4, "head_dim": 256, "num_key_value_heads": 4},
    "glm4_moe_lite": LARGE
    | LARGE_LATENTS
    | {"hidden_size": 2048, "intermediate_size": 10240, "num_attention_heads": 20, "num_key_value_heads": 20},
    "gemma4_text": LARGE
    | GEMMA4
    | {"hidden_size": 5376, "intermediate_size": 21504, "num_key_value_heads": 16, "num_global_key_value_heads": 4}
    | {"head_dim": 256, "global_head_dim": 512, "sliding_window": 1024},
    "gpt_oss": LARGE
    | {"hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "head_dim": 64}
    | {"num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128}
    | {"rope_scaling": {"rope_type": "default"}},
    "lfm2": LARGE | CONVOLUTIONS | {"hidden_size": 2048},
    "nemotron_h": LARGE
    | NEMOTRON
    | {"hidden_size": 2688, "num_key_value_heads": 2, "head_dim": 128, "mamba_num_heads": 64, "mamba_head_dim": 64}
    | {"n_groups": 8, "ssm_state_size": 128, "n_routed_experts": 128, "num_experts_per_tok": 6}
    | {"moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "moe_latent_size": None},
    "granitemoehybrid": LARGE
    | GRANITE
    | {"mamba_n_heads": 128, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128}
    | {"num_local_experts": 72, "num_experts_per_tok": 10, "intermediate_size": 768, "shared_intermediate_size": 1536},
    "falcon_h1": LARGE
    | FALCON
    | {"hidden_size": 5120, "intermediate_size": 21504, "num_attention_heads": 20, "num_key_value_heads": 4}
    | {"head_dim": 128, "mamba_d_ssm": 4096, "mamba_n_heads": 32, "mamba_d_head": 128, "mamba_d_state": 256},
}

TINY_ENCODERS: dict[str, dict[str, Any]] = {
    "bert": TINY | {"hidden_size": 60, "num_attention_heads": 3, "num_hidden_layers": 1},
    "modernbert": TINY | {"num_hidden_layers": 3, "local_attention": 10, "pad_token_id": 0},
}
LARGE_ENCODERS: dict[str, dict[str, Any]] = {
    name: fields | {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
    for name, fields in TINY_ENCODERS.items()
}


def spec_of(model: str, models: dict[str, dict[str, Any]] = TINY_MODELS) -> ModelSpec:
    """The description of a model, by its type."""
    return spec_from_config({"model_type": model} | models[model])
