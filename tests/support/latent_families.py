"""The families of `tests/support/families.py` that attend to latents."""

from typing import Any

_COMMON: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "q_lora_rank": 28,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-2,
}
STRETCHED = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}

LATENT: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": (
        "deepseek_v2",
        _COMMON | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "attention_bias": True},
    ),
    "deepseek_v3": (
        "deepseek_v3",
        _COMMON | {"n_group": 4, "topk_group": 2, "rope_parameters": STRETCHED, "attention_bias": True},
    ),
    "glm4_moe_lite": (
        "glm4_moe_lite",
        _COMMON | {"n_routed_experts": 6, "v_head_dim": 20, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
}

INDEXED: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v32": (
        "deepseek_v32",
        _COMMON
        | {
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": STRETCHED,
            "index_n_heads": 14,
            "index_head_dim": 12,
            "index_topk": 7,
        },
    ),
}
