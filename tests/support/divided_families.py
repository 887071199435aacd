"""Model families that tests divide over ranks and stages, with the changes that make them divisible."""

from typing import Any

TENSOR_PARALLEL_FAMILIES = (
    *("llama3", "llama_bias", "gemma3", "phi3", "gpt_neox", "olmo2", "cohere"),
    *("lfm2", "qwen3_5", "qwen3_next", "granitemoehybrid", "deepseek_v3", "gemma3n"),
    *("qwen2_moe", "glm4_moe_groups", "gpt_oss"),
)
"""Tied embeddings, biases, norms of each head, fused tensors, tensors that are reordered first, norms of all heads and
with a weight for each, convolutions, states in the orders of two checkpoints and of a group on both ranks, latents,
several residual streams, three kinds of routers."""
TENSOR_PARALLEL_CHANGES: dict[str, dict[str, Any]] = {"granitemoehybrid": {"mamba_n_groups": 1}}
"""Changes of tiny models for tensor parallelism: both ranks have a copy of the group."""
_LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4}
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4}
STAGE_CHANGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe", "granitemoehybrid"), _LINEAR),
    **dict.fromkeys(("lfm2", "lfm2_moe"), _CONVOLUTIONS),
    "nemotron_h": {"layers_block_type": ["linear_attention", "full_attention", "mlp", "moe", "full_attention"]},
}
"""Changes of tiny models for pipeline stages: two layers with keys and values."""
