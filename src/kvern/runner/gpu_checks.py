"""Checks of what a GPU can do and has memory for, with errors that say what it cannot."""

import dataclasses

import torch

from kvern.config import EngineConfig
from kvern.errors import ConfigError
from kvern.layers.build import Build
from kvern.layers.linear_format import LinearMethods
from kvern.models.decoder import Decoder
from kvern.models.weighted import WeightedModel
from kvern.ranks.ranks import ALONE, Ranks
from kvern.runner.memory import GIGABYTE, DeviceMemory
from kvern.runner.plan import LARGEST_HEAD, largest_head
from kvern.spec.model import ModelSpec


def check_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Raise ConfigError if the GPU cannot compute in this dtype."""
    if device.type == "cuda" and dtype == torch.bfloat16 and torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            name = torch.cuda.get_device_name(device)
            raise ConfigError(
                f"dtype is bfloat16, but {name} has compute capability {major}.{minor} and needs 8.0 for it: "
                "use dtype float16"
            )


def check_head_dim(config: EngineConfig, spec: ModelSpec) -> None:
    """Raise ConfigError if the attention backend that was asked for does not know the model's heads."""
    if config.deterministic and config.attention_backend not in ("auto", "triton"):
        raise ConfigError(
            f"deterministic is on and attention_backend is {config.attention_backend}: only triton attends to a token "
            "the same way in any batch; leave attention_backend auto"
        )
    largest = largest_head(spec)
    if config.attention_backend == "triton" and largest > LARGEST_HEAD:
        raise ConfigError(
            f"attention_backend is triton, whose heads have at most {LARGEST_HEAD} entries, but this model's have "
            f"{largest}: use attention_backend torch_sdpa"
        )


def weight_bytes(spec: ModelSpec, dtype: torch.dtype, linear: LinearMethods, ranks: Ranks = ALONE) -> int:
    """Bytes of the model's weights, or of a rank's share, from its description and how they are stored."""
    # Tables of rotations are no weights, and arithmetic without data makes PyTorch import its compiler, for seconds.
    layers = tuple(dataclasses.replace(layer, rope=None) for layer in spec.layers)
    make: type[WeightedModel] = Decoder
    if spec.encoder is not None:
        from kvern.models.encoder import Encoder

        make = Encoder
    build = Build(dtype, torch.device("meta"), 1, linear=linear, ranks=ranks)
    return make(dataclasses.replace(spec, layers=layers), build).weight_bytes


def check_weights_fit(
    spec: ModelSpec, dtype: torch.dtype, memory: DeviceMemory, linear: LinearMethods, ranks: Ranks = ALONE
) -> None:
    """Raise ConfigError if what the engine may take of the GPU's memory does not hold the weights."""
    if memory.device.type != "cuda":
        return
    needed = weight_bytes(spec, dtype, linear, ranks)
    free, total = memory.free_and_total()
    if needed > free:
        fits = free / dtype.itemsize / 1e9
        taken = total - torch.cuda.mem_get_info(memory.device)[0]
        share = "" if memory.share is None else f" within gpu_memory_share {memory.share}"
        raise ConfigError(
            f"the weights take {needed / GIGABYTE:.1f} GB in {str(dtype).removeprefix('torch.')}, and "
            f"{torch.cuda.get_device_name(memory.device)} has {free / GIGABYTE:.1f} of {total / GIGABYTE:.1f} GB free"
            f"{share} ({taken / GIGABYTE:.1f} are taken): a model of up to {fits:.1f} billion parameters would fit; "
            f"{'raise the share, ' if share else ''}free memory on the card, or use a smaller model"
        )
