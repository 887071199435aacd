"""The device of a rank, and checks of what it can do for a model, with errors that say what it cannot."""

from collections.abc import Mapping
from pathlib import Path

import torch

from kvern.config import EngineConfig
from kvern.errors import ConfigError
from kvern.runner.plan import EIGHT_BIT, REQUIRED_KERNELS
from kvern.spec.mixers import LatentAttentionSpec
from kvern.spec.model import ModelSpec


def resolve_device(config: EngineConfig, rank: int = 0) -> torch.device:
    """The configured device of a rank, if this machine has it; Ray lets each see its own alone. Raises ConfigError."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is cuda, but {missing_gpu()}")
    on_gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    return torch.device("cuda", 0 if config.executor == "ray" else rank) if on_gpu else torch.device("cpu")


def missing_gpu() -> str:
    """Why PyTorch has no GPU here, and what to do."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"PyTorch {torch.__version__} is built without CUDA: install a CUDA build of torch, or use device cpu"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        if "driver" in reason.lower() and Path("/dev/nvidiactl").exists():
            return f"PyTorch {torch.__version__} cannot use its driver: {reason}; update the driver, or use device cpu"
    return "PyTorch sees no GPU here: check that nvidia-smi lists one, or use device cpu"


def check_states(config: EngineConfig, spec: ModelSpec) -> None:
    """Raise ConfigError for what kvern cannot do with a model that has states yet."""
    if not spec.recurrent:
        return
    refused = {
        "deterministic": (
            config.deterministic,
            "a state's last bits depend on how a prompt is cut into steps: leave deterministic off",
        ),
        f"kv_tier {config.shown_kv_tier} with speculation and pipeline stages": (
            bool(config.kv_tier) and config.has_drafts and config.pipeline_parallel_size > 1,
            "a stage writes states of drafts steps later, perhaps over loaded ones: leave kv_tier or speculation out",
        ),
    }
    refuse(refused, f"{spec.model_type}, whose layers keep states")


def refuse(refused: Mapping[str, tuple[bool, str]], model: str) -> None:
    """Raise ConfigError for the first option in `refused` that is asked for.

    refused: by the option's name whether it is asked for, and why it is refused, with a remedy
    """
    for what, (is_asked, reason) in refused.items():
        if is_asked:
            raise ConfigError(f"{what} does not go with {model}: {reason}")


def check_state_kernels(spec: ModelSpec, kernels: frozenset[str], device: torch.device) -> None:
    """Raise ConfigError on a GPU where a model's states have no kernels that work: nothing else computes them there."""
    if spec.recurrent and device.type == "cuda" and not kernels >= {*REQUIRED_KERNELS, "states"}:
        raise ConfigError(
            f"{spec.model_type} has layers that keep states, and their kernels do not work on this GPU (the log says "
            "why): use device cpu"
        )


def check_latents(config: EngineConfig, spec: ModelSpec, device: torch.device) -> None:
    """Raise ConfigError for what kvern cannot do with latent attention yet."""
    if not spec.attends_to_latents:
        return
    on_gpu = device.type != "cpu"
    rotated = all(
        layer.rope is None or layer.rope.dim == layer.mixer.qk_rope_head_dim
        for layer in spec.layers
        if isinstance(layer.mixer, LatentAttentionSpec)
    )
    refused = {
        f"device {device.type}": (
            on_gpu and not rotated,
            "kernels for GPUs rotate the key that heads share as a whole: use device cpu",
        ),
        "deterministic": (
            on_gpu and config.deterministic,
            "on a GPU what heads make of latents depends on the batch: leave deterministic off, or use device cpu",
        ),
        f"kv_cache_dtype {config.kv_cache_dtype}": (
            config.kv_cache_dtype in EIGHT_BIT,
            "a latent has no scales: leave kv_cache_dtype auto",
        ),
    }
    refuse(refused, f"{spec.model_type}, which attends to latents")


def check_indexers(config: EngineConfig, spec: ModelSpec) -> None:
    """Raise ConfigError for what kvern cannot do with attention to selected keys."""
    if config.deterministic and any(_indexed(layer.mixer) for layer in spec.layers):
        raise ConfigError(
            f"deterministic does not go with {spec.model_type}, whose queries attend to what an indexer selects: "
            "PyTorch computes that, and a token's results depend on the batch: leave deterministic off"
        )


def _indexed(mixer: object) -> bool:
    return isinstance(mixer, LatentAttentionSpec) and mixer.indexer is not None


def check_kernels(spec: ModelSpec, device: torch.device) -> None:
    """Raise ConfigError for a GPU, if there are no kernels for it of what the model's layers are made of."""
    parts = {
        "indexers of what queries attend to": any(_indexed(layer.mixer) for layer in spec.layers),
        "several residual streams": spec.additions.altup is not None,
    }
    missing = [part for part, is_there in parts.items() if is_there]
    if device.type != "cpu" and missing:
        raise ConfigError(
            f"device {device.type} does not go with {spec.model_type}, which has {', '.join(missing)}: there are no "
            "kernels of such for GPUs: use device cpu"
        )
