"""Gemma 4 among the models of `tests.support.families`: dense, with experts, and with inputs of each layer's own."""

from typing import Any

WINDOW = 9
_GEMMA4 = {
    "head_dim": 16,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "tie_word_embeddings": True,
}
_GEMMA4_EYES = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "head_dim": 8,
    "position_embedding_size": 16,
}
_GEMMA4_EARS = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [4, 4],
    "output_proj_dims": 16,
}

GEMMA4: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4": (
        "gemma4_text",
        {
            **_GEMMA4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 12,
            "global_head_dim": 24,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 2.0,
        },
    ),
    "gemma4_experts": (
        "gemma4_text",
        {
            **_GEMMA4,
            "global_head_dim": 32,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 3,
            "moe_intermediate_size": 24,
        },
    ),
    "gemma4_vision": (
        "gemma4",
        {
            "text_config": {
                **_GEMMA4,
                "num_hidden_layers": 6,
                "layer_types": ["sliding_attention", "full_attention"] * 3,
                "global_head_dim": 32,
                "hidden_size_per_layer_input": 12,
                "vocab_size_per_layer_input": 131,
                "num_kv_shared_layers": 3,
                "use_double_wide_mlp": True,
            },
            "vision_config": _GEMMA4_EYES,
            "audio_config": _GEMMA4_EARS,
            "tie_word_embeddings": True,
        },
    ),
}
