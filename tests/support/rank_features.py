"""Divisions of a model, engine options that apply to all requests, and families that are not divided."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DIVISIONS: Mapping[str, dict[str, Any]] = {
    "tp 2": {"tensor_parallel_size": 2},
    "pp 2": {"pipeline_parallel_size": 2},
    "ep 2": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "DP attention 2": {"tensor_parallel_size": 2, "enable_expert_parallel": True, "enable_dp_attention": True},
    "dp 2": {"data_parallel_size": 2},
    "prefill + decode": {"prefill_engines": 1, "decode_engines": 1},
    "tp 2 x pp 2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
}
SEVERAL = ("dp 2", "prefill + decode")
"""Those with several engines."""
MIXTURE: Mapping[str, Mapping[str, Any]] = {"qwen3_moe": {"intermediate_size": 128}}
"""The family whose whole experts are placed, with sizes that cut no group; other divisions have the embedded model."""


@dataclass(frozen=True)
class OfEngine:
    """A feature of all requests of an engine, by its options or its model."""

    promise: str
    options: Mapping[str, Any] = field(default_factory=dict)
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Families with what is changed of their sizes; without any: the embedded model, or MIXTURE."""
    changes: bool = False
    """The numbers are not those of the model without it."""


_TWO_OF_EACH = {"layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4}
HYBRIDS = {
    "qwen3_5_moe": _TWO_OF_EACH,
    "granitemoehybrid": _TWO_OF_EACH,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
}
"""Gated delta nets, Mamba-2 and short convolutions, each beside attention and experts."""
OF_ENGINES: Mapping[str, OfEngine] = {
    "quantization": OfEngine(
        "Weights in INT4, in groups: the answers of one process with them.", {"quantization": "int4"}, changes=True
    ),
    "KV tier": OfEngine("A prompt whose blocks left the cache comes out of host memory.", {"kv_tier": ("host:64MB",)}),
    "deterministic": OfEngine(
        "Log-probabilities are the same, bit by bit, alone and in the batch.", {"deterministic": True}
    ),
    "draft model": OfEngine(
        "Drafts of a smaller model are verified and change no answer.", {"draft_model": "kvern-1m"}
    ),
    "hybrids": OfEngine("Models of which some layers keep states: the answers of one process.", models=HYBRIDS),
    "drafts for hybrids": OfEngine(
        "Drafts for such models are verified and change no answer.", {"proposer": "ngram"}, models=HYBRIDS
    ),
}

BETWEEN_STEPS: Mapping[str, str] = {
    "sleep": "Engines that sleep, between answers and in the middle of one, go on with the answers of engines that "
    "never slept. With DP attention they end and start again.",
}
"""What may become of an engine, with its promise."""

NOT_DIVIDED: Mapping[str, str] = {
    "gemma4_vision": "inputs of each layer's own",
    "gemma3n": "several residual streams",
}
"""Families of which there are no stages, and why; ranks share all families."""
OF_EXPERTS = (
    *("mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "granitemoe", "glm4_moe", "glm4_moe_groups", "dots1"),
    *("qwen3_vl_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "minimax_m2"),
    *("lfm2_moe", "granitemoehybrid", "nemotron_h", "qwen3_next", "qwen3_5_moe", "gemma4_experts"),
)
"""Families whose experts can be placed whole."""


def models_of(feature: str, division: str) -> Mapping[str, Mapping[str, Any]]:
    """The families that a feature is tried with; none: the embedded model."""
    whole_experts = "enable_expert_parallel" in DIVISIONS[division]
    return (OF_ENGINES[feature].models if feature in OF_ENGINES else {}) or (MIXTURE if whole_experts else {})
