"""Options that several ranks do not support yet: they are refused by name before any rank starts."""

from collections.abc import Sequence
from pathlib import Path

import torch

from kvern.config import EngineConfig
from kvern.drafting.models.choice import OWN_LAYER, entries_of, reads_embeddings
from kvern.errors import ConfigError
from kvern.layers.build import Build
from kvern.layers.linear_format import LinearMethods
from kvern.models.checkpoint import read_headers
from kvern.models.loader import outline_of, read_config, stored_methods
from kvern.models.share import WholeExperts, share_of
from kvern.models.stages import check_stages
from kvern.ranks.ranks import Ranks, dp_attention_rank, ranks_of
from kvern.runner.device import resolve_device
from kvern.spec.model import ModelSpec


def check_ranks(config: EngineConfig, folder: Path, spec: ModelSpec) -> None:
    """Raise ConfigError for options, for the model in `folder`, and a machine, that do not go with several ranks."""
    here = config.executor == "processes"  # Ray gives each rank a GPU, which is all that it sees
    if here and resolve_device(config).type == "cuda" and torch.cuda.device_count() < config.ranks:
        raise ConfigError(
            f"tensor_parallel_size is {config.tensor_parallel_size} and pipeline_parallel_size "
            f"{config.pipeline_parallel_size}, and this machine has {torch.cuda.device_count()} GPUs: lower them to "
            "that in all, or use device cpu"
        )
    if config.pipeline_parallel_size > 1:
        check_stages(spec, config.pipeline_parallel_size)
    if config.enable_dp_attention:
        _check_dp_attention(config)
    if config.tensor_parallel_size > 1:
        _check_shares(config, folder, spec)


def _check_dp_attention(config: EngineConfig) -> None:
    """Raise ConfigError for options that do not go with DP attention."""
    refused = {
        f"pipeline_parallel_size {config.pipeline_parallel_size}": (
            config.pipeline_parallel_size > 1,
            "leave pipeline_parallel_size at 1",
        ),
        f"draft_model {OWN_LAYER}": (config.draft_model == OWN_LAYER, "give another draft_model"),
        "target_itl": (bool(config.target_itl_seconds), "leave target_itl out"),
    }
    for what, (is_asked, remedy) in refused.items():
        if is_asked:
            raise ConfigError(
                f"{what} and enable_dp_attention are not possible together yet: {remedy}, or leave "
                "enable_dp_attention off"
            )


def _check_shares(config: EngineConfig, folder: Path, spec: ModelSpec) -> None:
    size = config.tensor_parallel_size
    if config.deterministic and (config.redundant_experts or config.rebalance_seconds):
        raise ConfigError(
            "deterministic is on, and copies of experts, or experts that move, add up in other orders in other steps: "
            "leave redundant_experts and rebalance_experts out, or deterministic off"
        )
    stored = [] if config.load_format == "dummy" else read_headers(folder)
    linear = stored_methods(read_config(folder), spec, stored, quantization=config.quantization)
    placing = WholeExperts(config.redundant_experts) if config.enable_expert_parallel else None
    check_share(spec, size, linear, placing, dp_attention=config.enable_dp_attention)


def rank_of(config: EngineConfig, number: int, layers: Sequence[range], draft: Path | None) -> Ranks:
    """Process `number` of an engine whose stages have these layers, beside a draft model or head in a folder."""
    if config.enable_dp_attention:
        return dp_attention_rank(number, config.tensor_parallel_size)
    embeds, entries = reads_embeddings(config, draft), tuple[int, ...]()
    if embeds and draft is not None and len(layers) > 1:
        entries = entries_of(read_config(draft), layers[-1].stop)
    return ranks_of(number, config.tensor_parallel_size, layers, embeds=embeds, entries=entries)


def check_share(
    spec: ModelSpec,
    size: int,
    linear: LinearMethods,
    placing: WholeExperts | None = None,
    *,
    dp_attention: bool = False,
) -> None:
    """Raise ConfigError if so many ranks cannot share the model, whose weights are stored as `linear` says."""
    if size > 1:
        ranks = dp_attention_rank(0, size) if dp_attention else Ranks(0, size)
        build = Build(torch.bfloat16, torch.device("meta"), 1, linear=linear, ranks=ranks)
        outline_of(share_of(spec, size, placing, dp_attention=dp_attention), build)
