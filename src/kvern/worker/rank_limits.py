"""What several ranks cannot do yet, refused by name before any of them starts."""

from pathlib import Path

import torch

from kvern.config import EngineConfig
from kvern.errors import ConfigError
from kvern.model_spec import ModelSpec
from kvern.models.checkpoint import gguf_file
from kvern.models.loader import read_config
from kvern.models.share import share_of
from kvern.worker.device import resolve_device
from kvern.worker.plan import EIGHT_BIT


def check_ranks(config: EngineConfig, folder: Path, spec: ModelSpec) -> None:
    """Raise ConfigError for options, for the model in `folder`, and a machine, that do not go with several ranks."""
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
    here = config.executor == "processes"  # Ray gives each rank a GPU, which is all that it sees
    if here and resolve_device(config).type == "cuda" and torch.cuda.device_count() < size:
        raise ConfigError(
            f"tensor_parallel_size is {size}, and this machine has {torch.cuda.device_count()} GPUs: lower it to that, "
            "or use device cpu"
        )
    share_of(spec, size)


def has_plain_weights(folder: Path) -> bool:
    """Whether the weights in `folder` can be shared by ranks."""
    return "quantization_config" not in read_config(folder) and gguf_file(folder) is None
