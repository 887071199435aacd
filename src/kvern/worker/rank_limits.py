"""What several ranks cannot do yet, refused by name before any of them starts."""

from pathlib import Path

import torch

from kvern.config import EngineConfig
from kvern.device.ranks import Ranks
from kvern.errors import ConfigError
from kvern.layers.build import Build
from kvern.layers.linear_format import LinearMethods
from kvern.model_spec import ModelSpec
from kvern.models.checkpoint import read_headers
from kvern.models.loader import outline_of, read_config, stored_methods
from kvern.models.share import share_of
from kvern.worker.device import resolve_device


def check_ranks(config: EngineConfig, folder: Path, spec: ModelSpec) -> None:
    """Raise ConfigError for options, for the model in `folder`, and a machine, that do not go with several ranks."""
    size = config.tensor_parallel_size
    refused = {
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
    if resolve_device(config).type == "cuda" and torch.cuda.device_count() < size:
        raise ConfigError(
            f"tensor_parallel_size is {size}, and this machine has {torch.cuda.device_count()} GPUs: lower it to that, "
            "or use device cpu"
        )
    stored = [] if config.load_format == "dummy" else read_headers(folder)
    check_share(spec, size, stored_methods(read_config(folder), spec, stored, quantization=config.quantization))


def check_share(spec: ModelSpec, size: int, linear: LinearMethods) -> None:
    """Raise ConfigError if so many ranks cannot share the model, whose weights are stored as `linear` says."""
    if size > 1:
        build = Build(torch.bfloat16, torch.device("meta"), 1, linear=linear, ranks=Ranks(0, size))
        outline_of(share_of(spec, size), build)
