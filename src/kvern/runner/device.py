"""Checks of what the device of a machine can do, with errors that say what it cannot."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch

from kvern.config import EngineConfig
from kvern.errors import ConfigError
from kvern.layers.build import Build
from kvern.layers.linear_format import LinearMethods
from kvern.models.decoder import Decoder
from kvern.models.weighted import WeightedModel
from kvern.ranks.ranks import ALONE, Ranks
from kvern.runner.memory import GIGABYTE, DeviceMemory
from kvern.runner.plan import EIGHT_BIT, LARGEST_HEAD, REQUIRED_KERNELS, largest_head
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


def check_states(config: EngineConfig, spec: ModelSpec) -> None:
    """Raise ConfigError for what kvern cannot do with a model that has states yet."""
    if not spec.recurrent:
        return
    refused = {
        f"kv_tier {config.kv_tier}": (
            config.kv_tier is not None,
            "a tier keeps blocks and no states: leave kv_tier out",
        ),
        "deterministic": (
            config.deterministic,
            "a state's last bits depend on how a prompt is cut into steps: leave deterministic off",
        ),
    }
    refuse(refused, f"{spec.model_type}, whose layers keep states")


def refuse(refused: Mapping[str, tuple[bool, str]], model: str) -> None:
    """Raise ConfigError for the first option that is asked for, by its name: (whether it is, why not and a remedy)."""
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


def check_encoder(config: EngineConfig, spec: ModelSpec, device: torch.device, *, quantized: bool = False) -> None:
    """Raise ConfigError for what kvern cannot do with an encoder, whose checkpoint may be quantized."""
    on_gpu = device.type != "cpu"
    refused = {
        "quantization on a GPU": (
            on_gpu and (quantized or config.quantization is not None),
            "there weights are plain: leave quantization out, or use device cpu",
        ),
        "deterministic on a GPU": (
            on_gpu and config.deterministic,
            "there a text's last bits depend on its step: leave deterministic off, or use device cpu",
        ),
        f"proposer {config.proposer}": (config.proposer is not None, "nothing is generated: leave proposer out"),
        f"kv_tier {config.kv_tier}": (config.kv_tier is not None, "there is no KV cache: leave kv_tier out"),
        f"kv_cache_dtype {config.kv_cache_dtype}": (
            config.kv_cache_dtype != "auto",
            "there is no KV cache: leave kv_cache_dtype auto",
        ),
        "adapters": (
            config.adapter_places > 0,
            "they are for models that generate: leave adapters and max_adapters out",
        ),
    }
    refuse(refused, f"{spec.model_type}, which is an encoder")


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
