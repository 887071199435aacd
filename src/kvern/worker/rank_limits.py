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
from kvern.models.share import WholeExperts, share_of
from kvern.worker.device import resolve_device


def check_ranks(config: EngineConfig, folder: Path, spec: ModelSpec) -> None:
    """Raise ConfigError for options, for the model in `folder`, and a machine, that do not go with several ranks."""
    size = config.tensor_parallel_size
    here = config.executor == "processes"  # Ray gives each rank a GPU, which is all that it sees
    if here and resolve_device(config).type == "cuda" and torch.cuda.device_count() < size:
        raise ConfigError(
            f"tensor_parallel_size is {size}, and this machine has {torch.cuda.device_count()} GPUs: lower it to that, "
            "or use device cpu"
        )
    stored = [] if config.load_format == "dummy" else read_headers(folder)
    linear = stored_methods(read_config(folder), spec, stored, quantization=config.quantization)
    check_share(spec, size, linear, whole_experts(config))


def whole_experts(config: EngineConfig) -> WholeExperts | None:
    """How the options have experts placed over ranks; None: their widths are cut."""
    return WholeExperts(config.redundant_experts) if config.enable_expert_parallel else None


def check_share(spec: ModelSpec, size: int, linear: LinearMethods, placing: WholeExperts | None = None) -> None:
    """Raise ConfigError if so many ranks cannot share the model, whose weights are stored as `linear` says."""
    if size > 1:
        build = Build(torch.bfloat16, torch.device("meta"), 1, linear=linear, ranks=Ranks(0, size))
        outline_of(share_of(spec, size, placing), build)
