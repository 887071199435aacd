"""Model types that transformers computes, small."""

from typing import Any

from tests.support.gemma4_families import WINDOW

MIXED_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
_EXPERTS = {"num_experts": 6, "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
FALLBACKS: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus": ("apertus", {}),
    "jais2": ("jais2", {}),
    "gpt2": ("gpt2", {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 256, "tie_word_embeddings": True}),
    "persimmon": ("persimmon", {"hidden_size": 64}),
    "diffllama": ("diffllama", {}),
    "hy_v3": ("hy_v3", {"head_dim": 16, **_EXPERTS}),
    "afmoe": (
        "afmoe",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": MIXED_TYPES,
            "num_dense_layers": 1,
            "num_shared_experts": 1,
            **_EXPERTS,
        },
    ),
    "vaultgemma": (
        "vaultgemma",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "layer_types": MIXED_TYPES,
            "query_pre_attn_scalar": 10,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 2.0,
        },
    ),
    "mimo_v2_flash": (
        "mimo_v2_flash",
        {
            "head_dim": 16,
            "v_head_dim": 12,
            "sliding_window": WINDOW,
            "layer_types": MIXED_TYPES,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            **_EXPERTS,
        },
    ),
    "minicpm3": (
        "minicpm3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 20,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 12,
            "v_head_dim": 10,
        },
    ),
}
"""Model types that transformers computes: learned positions, two attentions a layer, experts, windows, softcaps, sinks,
and values narrower than keys."""
