"""Tiny configurations of models with Mamba-2 or short convolutions; see `tests/support/families.py`."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from kvern.layers import delta_net

GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.4,
    "logits_scaling": 0.5,
}
"""Granite's multipliers."""
_MAMBA = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}

STATE_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": (
        "lfm2",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "block_multiple_of": 16,
            "conv_bias": True,
            "conv_L_cache": 4,
        },
    ),
    "lfm2_moe": (
        "lfm2_moe",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
        },
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            **GRANITE,
            **_MAMBA,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mamba_proj_bias": True,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "intermediate_size": 24,
            "shared_intermediate_size": 40,
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention"],
            "head_dim": 16,
            "mamba_num_heads": 6,
            "mamba_head_dim": 12,
            "n_groups": 2,
            "ssm_state_size": 12,
            "chunk_size": 16,
            "time_step_min": 1e-30,  # transformers bounds the steps of prompts by it, and of no other tokens
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 40,
            "moe_latent_size": 16,
            "routed_scaling_factor": 1.5,
        },
    ),
    "falcon_h1": (
        "falcon_h1",
        {
            **_MAMBA,
            "mamba_d_ssm": 96,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "embedding_multiplier": 3.0,
            "lm_head_multiplier": 0.5,
            "attention_in_multiplier": 0.8,
            "attention_out_multiplier": 0.7,
            "key_multiplier": 0.6,
            "ssm_in_multiplier": 1.2,
            "ssm_out_multiplier": 0.5,
            "ssm_multipliers": [0.9, 0.8, 0.7, 0.6, 0.5],
            "mlp_multipliers": [0.7, 0.4],
        },
    ),
}


def rule_inputs(rule: ModuleType, tokens: int) -> Iterator[torch.Tensor]:
    """Queries, keys, values, betas and decays, of which some leave next to nothing of what was before."""
    generator = torch.Generator().manual_seed(tokens)
    keys, heads = 4 if rule is delta_net else 2, 4
    for _ in range(2):
        yield torch.nn.functional.normalize(torch.randn(tokens, keys, 8, generator=generator), dim=-1)
    yield torch.randn(tokens, heads, 5, generator=generator)
    if rule is delta_net:
        yield torch.rand(tokens, heads, generator=generator)
    yield -torch.rand(tokens, heads, generator=generator) * torch.tensor([0.0, 0.01, 1.0, 30.0])
