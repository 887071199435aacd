"""What several ranks cannot do yet, refused by name before any of them starts."""

from pathlib import Path

import torch

from kvern.config import EngineConfig
from kvern.errors import ConfigError
from kvern.model_spec import ModelSpec
from kvern.models.checkpoint import gguf_file
from kvern.models.loader import read_config
from kvern.models.share import share_of
from kvern.models.stages import check_stages
from kvern.worker.device import resolve_device
from kvern.worker.plan import EIGHT_BIT


def check_ranks(config: EngineConfig, folder: Path, spec: ModelSpec) -> None:
    """Raise ConfigError for options, for the model in `folder`, and a machine, that do not go with several ranks."""
    if resolve_device(config).type == "cuda" and torch.cuda.device_count() < config.ranks:
        raise ConfigError(
            f"tensor_parallel_size is {config.tensor_parallel_size} and pipeline_parallel_size "
            f"{config.pipeline_parallel_size}, and this machine has {torch.cuda.device_count()} GPUs: lower them to "
            "that in all, or use device cpu"
        )
    if config.pipeline_parallel_size > 1:
        _check_options_of_stages(config, spec)
        check_stages(spec, config.pipeline_parallel_size)
    if config.tensor_parallel_size > 1:
        _check_shares(config, folder, spec)


def _check_options_of_stages(config: EngineConfig, spec: ModelSpec) -> None:
    """Raise ConfigError for options that do not go with stages."""
    refused = {
        "adapters": (config.adapter_places > 0, "leave adapters and max_adapters out"),
        f"kv_cache_dtype {config.kv_cache_dtype}": (config.kv_cache_dtype in EIGHT_BIT, "leave kv_cache_dtype auto"),
        f"kv_tier {config.kv_tier}": (config.kv_tier is not None, "leave kv_tier out"),
        f"draft_model {config.draft_model}": (
            config.draft_model is not None,
            "leave draft_model out, or use a proposer",
        ),
        f"proposer {config.proposer}, for a model with states,": (
            config.proposer is not None and bool(spec.recurrent),
            "leave proposer out",
        ),
        "target_itl": (config.target_itl is not None, "leave target_itl out"),
    }
    for what, (is_asked, remedy) in refused.items():
        if is_asked:
            raise ConfigError(
                f"{what} and pipeline_parallel_size {config.pipeline_parallel_size} are not possible together yet: "
                f"{remedy}, or leave pipeline_parallel_size at 1"
            )


def _check_shares(config: EngineConfig, folder: Path, spec: ModelSpec) -> None:
    size = config.tensor_parallel_size
    quantized = config.load_format != "dummy" and not has_plain_weights(folder)
    refused = {
        "adapters": (config.adapter_places > 0, "leave adapters and max_adapters out"),
        "quantized weights or a GGUF file": (
            quantized or config.quantization is not None,
            "use a model with plain weights",
        ),
        f"kv_cache_dtype {config.kv_cache_dtype}": (config.kv_cache_dtype in EIGHT_BIT, "leave kv_cache_dtype auto"),
        f"kv_tier {config.kv_tier}": (config.kv_tier is not None, "leave kv_tier out"),
        f"draft_model {config.draft_model}": (
            config.draft_model is not None,
            "leave draft_model out, or use a proposer",
        ),
        "target_itl": (config.target_itl is not None, "leave target_itl out"),
        "logits_processors": (bool(config.logits_processors), "leave logits_processors out"),
        "deterministic": (config.deterministic, "leave deterministic off"),
    }
    for what, (is_asked, remedy) in refused.items():
        if is_asked:
            raise ConfigError(
                f"{what} and tensor_parallel_size {size} are not possible together yet: {remedy}, or leave "
                "tensor_parallel_size at 1"
            )
    share_of(spec, size)


def has_plain_weights(folder: Path) -> bool:
    """Whether the weights in `folder` can be shared by ranks."""
    return "quantization_config" not in read_config(folder) and gguf_file(folder) is None
