"""Options of engines with interpreted kernels, and tiny models with recurrent states."""

from typing import Any

NETS: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 2,
    "num_experts": 0,
}
"""A gated delta net of few heads, and an attention."""
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 64,
    "kv_cache_tokens": 512,
    "max_batch_requests": 4,
    "block_size": 4,
}
WITH_STATES: dict[str, dict[str, Any]] = {
    "qwen3_next": NETS | {"num_hidden_layers": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "granitemoehybrid": {
        "num_hidden_layers": 2,
        "layer_types": NETS["layer_types"],
        "num_local_experts": 0,
        "mamba_n_heads": 2,
        "mamba_d_head": 48,
    },
}
