"""Gemma 3n among the models of `tests.support.families`."""

from typing import Any

from tests.support.gemma4_families import WINDOW

GEMMA3N: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3n": (
        "gemma3n_text",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] * 2,
            "num_kv_shared_layers": 3,
            "intermediate_size": [80, 64, 96, 80, 88, 72],
            "activation_sparsity_pattern": [0.7, 0.0, 0.9, 0.0, 0.6, 0.0],
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 120,
            "altup_num_inputs": 3,
            "laurel_rank": 10,
            "final_logit_softcapping": 2.0,
            "tie_word_embeddings": True,
        },
    ),
}
