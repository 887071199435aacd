"""Checks of a model that transformers computes: its options, and its results over the KV cache, at the start."""

import math
from typing import TYPE_CHECKING

import torch

from kvern.attention.memory import CacheOptions
from kvern.attention.torch_sdpa import TorchAttention
from kvern.config import EngineConfig
from kvern.cpu.cores import total_memory
from kvern.device.input_batch import build_input_batch
from kvern.device.rows import BatchRows
from kvern.errors import ConfigError, UnsupportedModel, in_a_line
from kvern.models.fallback.spec import TransformersSpec
from kvern.request.step import ScheduledTokens
from kvern.runner.device import refuse
from kvern.runner.memory import GIGABYTE

if TYPE_CHECKING:
    from kvern.models.fallback.decoder import TransformersDecoder

TOKENS = 64
"""Tokens of each of two prompts; more where a window is not much longer, so that it shows."""
LONGEST_WINDOW = 256
BLOCK_SIZE = 16
LAST = 16
"""The number of last tokens of each prompt: they follow cached ones, and windows hide others from them."""
EXACT = 1e-4
"""The share of their spread by which logits in float32 may differ: sums are made in another order."""


@torch.inference_mode()
def check_fallback(decoder: "TransformersDecoder", max_model_len: int, cache_dtype: torch.dtype) -> None:
    """Compare two prompts, in parts that share steps, with the model's own forward passes over whole ones.

    Raises UnsupportedModel if logits differ by more than `bound` says, or if the model cannot be run so.
    """
    model_type, most = decoder.spec.model_type, bound(decoder.model.dtype, len(decoder.spec.calls))
    try:
        found = _deviation(decoder, max_model_len, cache_dtype)
    except Exception as error:  # whatever a model raises that is not made for this
        raise UnsupportedModel(f"{model_type} cannot run through transformers: {in_a_line(error)}") from error
    if not found <= most:
        raise UnsupportedModel(
            f"{model_type} cannot run through transformers: over a cache its logits are off by {found:.2g} of their "
            f"spread, more than {most:.2g}; it may keep a state, or count positions by itself"
        )


def _deviation(decoder: "TransformersDecoder", max_model_len: int, cache_dtype: torch.dtype) -> float:
    """The share of their spread by which logits are off: of the worst token in float32, else the median."""
    windows = [layer.window for layer in decoder.spec.calls if layer.window and layer.window <= LONGEST_WINDOW]
    length = min(max_model_len, max([TOKENS, *(window + LAST for window in windows)]))
    device, dtype = decoder.model.device, decoder.model.dtype
    blocks = -(-length // BLOCK_SIZE)
    rows = BatchRows(2, length, blocks, device)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(decoder.spec.vocab_size, (2, length), generator=generator)
    rows.tokens[:, :length] = ids.to(rows.tokens)
    rows.block_table[:] = torch.arange(2 * blocks).view(blocks, 2).T  # one's blocks lie between the other's
    attention = TorchAttention(
        CacheOptions(decoder.spec.calls, 2 * blocks, BLOCK_SIZE, cache_dtype, device, sinks=decoder.sinks)
    )
    parts: list[list[torch.Tensor]] = [[], []]
    for ends in zip(*((length // 3, length - 1, length), (length // 2, length // 2 + 1, length)), strict=True):
        starts = [sum(map(len, part)) for part in parts]
        steps = [(slot, starts[slot], end - starts[slot]) for slot, end in enumerate(ends) if end > starts[slot]]
        batch = build_input_batch(rows, [ScheduledTokens(*step, 1) for step in steps], BLOCK_SIZE)
        logits = decoder.logits(decoder(batch.token_ids, batch.positions, attention.plan(batch)))
        for (slot, _, _), part in zip(steps, torch.split(logits, [count for _, _, count in steps]), strict=True):
            parts[slot].append(part)
    own = torch.stack([decoder.own_logits(row.to(device)) for row in ids])
    off = (torch.stack([torch.cat(part) for part in parts]) - own).square().mean(-1).sqrt() / own.std(-1)
    return float(off.max() if dtype == torch.float32 else off[:, -LAST:].median())


def check_fallback_options(
    config: EngineConfig, spec: TransformersSpec, dtype: torch.dtype, device: torch.device
) -> None:
    """Raise ConfigError for what kvern does not do with such a model, or has no memory for."""
    refused = {
        f"device {device.type}": (device.type != "cpu", "kvern runs it on a CPU alone: use device cpu"),
        f"max_adapters {config.adapter_places}": (
            config.adapter_places > 0,
            "adapters change kvern's own layers: leave adapters and max_adapters out",
        ),
        f"quantization {config.quantization}": (
            config.quantization is not None,
            "weights are quantized in kvern's own layers: leave quantization out",
        ),
        "deterministic": (
            config.deterministic,
            "in PyTorch a token's results depend on the batch: leave deterministic off",
        ),
    }
    refuse(refused, f"{spec.model_type}, which transformers computes")
    needed, memory = spec.parameters * dtype.itemsize, total_memory()
    if needed > memory:
        raise ConfigError(
            f"the weights take {needed / GIGABYTE:.1f} GB, and this machine has {memory / GIGABYTE:.1f} GB: use a "
            "smaller model"
        )


def bound(dtype: torch.dtype, layers: int) -> float:
    """The difference that two right computations of so many layers may have, as a share of the spread of the logits.

    In 16 bits each layer rounds about four times, by half a unit in the last place of what it adds to; such errors add
    up like those of a random walk, in both computations. Twice that is allowed.
    """
    if dtype == torch.float32:
        return EXACT
    half_unit = torch.finfo(dtype).eps / 2
    return 2 * half_unit * math.sqrt(2 * 4 * layers)
