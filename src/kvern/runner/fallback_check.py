"""Checks of a model that transformers computes: its options, and its results over the KV cache, at the start."""

import logging
import math
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvern.attention.memory import CacheOptions
from kvern.attention.torch_sdpa import TorchAttention
from kvern.config import EngineConfig
from kvern.cpu.cores import available_memory, total_memory
from kvern.device.input_batch import build_input_batch
from kvern.device.rows import BatchRows
from kvern.errors import ConfigError, UnsupportedModel, in_a_line
from kvern.models.fallback.spec import TransformersSpec
from kvern.models.loader import LoadOptions
from kvern.request.step import ScheduledTokens
from kvern.runner.device import refuse
from kvern.runner.memory import GIGABYTE, DeviceMemory
from kvern.runner.plan import Plan
from kvern.runner.startup import Startup

if TYPE_CHECKING:
    from kvern.models.fallback.decoder import TransformersDecoder

logger = logging.getLogger("kvern")

TOKENS = 64
"""Tokens of each of two prompts; more where a window is not much longer, so that it shows."""
LONGEST_WINDOW = 256
BLOCK_SIZE = 16
LAST = 16
"""The number of last tokens of each prompt: they follow cached ones, and windows hide others from them."""
CAPTURED = 8
"""Tokens of a step that is captured on trial."""
EXACT = 1e-4
"""The share of their spread by which logits in float32 may differ: sums are made in another order."""


FREE = "free memory of the machine, or use a smaller model"


def load_checked(
    folder: Path, spec: TransformersSpec, plan: Plan, options: LoadOptions, startup: Startup
) -> "TransformersDecoder":
    """Load a model that transformers computes, and check it, as `load_fallback` and `check_fallback`."""
    from kvern.models.fallback.decoder import load_fallback

    with startup.stage("weights"):
        try:
            model = load_fallback(folder, spec, getattr(torch, plan.dtype), options)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"the GPU has no memory for the weights: {in_a_line(error)}; free memory on the card, raise "
                "gpu_memory_share, or use a smaller model"
            ) from error
    with startup.stage("check"):
        check_fallback(model, plan.max_model_len, getattr(torch, plan.plain_cache_dtype))
    return model


@torch.inference_mode()
def check_fallback(decoder: "TransformersDecoder", max_model_len: int, cache_dtype: torch.dtype) -> None:
    """Compare two prompts, in parts that share steps, with the model's own forward passes over whole ones.

    Kinds of parts that kvern computes, and that change logits by more than `bound` says, are given back to transformers
    with a warning. On a GPU find out whether steps can be captured. Raises UnsupportedModel if logits differ without
    them as well, or if the model cannot be run so.
    """
    _check_results(decoder, max_model_len, cache_dtype)
    if decoder.build.device.type == "cuda":
        reason = _why_not_captured(decoder)
        decoder.captures = reason is None
        if reason is not None:
            logger.warning("steps of %s run without CUDA graphs: %s", decoder.spec.model_type, reason)


def _why_not_captured(decoder: "TransformersDecoder") -> str | None:
    """Why there can be no CUDA graphs of steps, of which kvern's attention always can be a part; None: there can."""
    from kvern.runner.step_graphs import GraphMemory, StepOutputs

    def step() -> StepOutputs:
        return StepOutputs(logits=decoder.unattended(CAPTURED))

    mode = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the mode is new, and does not know all that waits: hence the capture
            torch.cuda.set_sync_debug_mode("error")
            step()
            torch.cuda.set_sync_debug_mode(mode)
        GraphMemory(decoder.build.device).capture(step)
    except RuntimeError as error:
        return in_a_line(error)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    return None


def _check_results(decoder: "TransformersDecoder", max_model_len: int, cache_dtype: torch.dtype) -> None:
    """Compare results, and give parts back, as `check_fallback`."""
    swaps, model_type = decoder.swaps, decoder.spec.model_type
    try:
        prompts = _Prompts(decoder, max_model_len, cache_dtype)
        if prompts.fault() is None:
            return
        with swaps.only(swaps.needed):
            fault = prompts.fault()
        if fault is not None and swaps.is_quantized:  # perhaps by how rows are rounded in products
            with swaps.only([]):
                prompts = _Prompts(decoder, max_model_len, cache_dtype)
                fault = prompts.fault()
    except Exception as error:  # whatever a model raises that is not made for this
        fault = in_a_line(error)
    if fault is not None:
        raise UnsupportedModel(f"{model_type} cannot run through transformers: {fault}")
    kept = swaps.needed if prompts.with_products else swaps.multiplying
    beside = kept if prompts.with_products else []
    right: list[str] = []
    for kind in swaps.kinds:
        with swaps.only([*beside, *right, kind]):
            right += [kind] if kind not in kept and prompts.fault() is None else []
    others = [kind for kind in swaps.kinds if kind not in (*kept, *right)]
    if others:
        logger.warning("transformers computes %s of %s, with which kvern's differ", ", ".join(others), model_type)
        decoder.settle([*kept, *right])


class _Prompts:
    """Two prompts, and their logits by the model alone, with which those over a cache of kvern's are compared.

    `with_products`: with quantized weights, products are kvern's, which may round rows. If such parts are switched off
    nothing is rounded so, and the bound is that of plain weights; each pass makes all weights plain.
    """

    def __init__(self, decoder: "TransformersDecoder", max_model_len: int, cache_dtype: torch.dtype) -> None:
        windows = [layer.window for layer in decoder.spec.calls if layer.window and layer.window <= LONGEST_WINDOW]
        self._length = min(max_model_len, max([TOKENS, *(window + LAST for window in windows)]))
        self._decoder, self._cache_dtype = decoder, cache_dtype
        self._device, dtype = decoder.build.device, decoder.build.dtype
        swaps = decoder.swaps
        self.with_products = all(kind in swaps.kinds for kind in swaps.needed)
        self._is_exact = dtype == torch.float32 and not (swaps.is_quantized and self.with_products)
        rounded = dtype == torch.float32 and not self._is_exact  # as rows are to codes
        self._most = bound(torch.bfloat16 if rounded else dtype, len(decoder.spec.calls))
        generator = torch.Generator().manual_seed(0)
        self._ids = torch.randint(decoder.spec.vocab_size, (2, self._length), generator=generator)
        self._own = torch.stack([decoder.plain_logits(row.to(self._device)) for row in self._ids])

    def fault(self) -> str | None:
        """Returns what is wrong with results over a cache, with the parts that kvern computes now; None: nothing."""
        try:
            found = self._deviation()
        except Exception as error:  # whatever a model raises that is not made for this
            return in_a_line(error)
        if found <= self._most:
            return None
        return (
            f"over a cache its logits are off by {found:.2g} of their spread, more than {self._most:.2g}; it may keep "
            "a state, or count positions by itself"
        )

    def _deviation(self) -> float:
        """The share of their spread by which logits are off: of the worst token if they are exact, else the median."""
        length, decoder = self._length, self._decoder
        blocks = -(-length // BLOCK_SIZE)
        rows = BatchRows(2, length, blocks, self._device)
        rows.tokens[:, :length] = self._ids.to(rows.tokens)
        rows.block_table[:] = torch.arange(2 * blocks).view(blocks, 2).T  # one's blocks lie between the other's
        given = decoder.spec.calls, 2 * blocks, BLOCK_SIZE, self._cache_dtype, self._device
        attention = TorchAttention(CacheOptions(*given, sinks=decoder.sinks))
        parts: list[list[torch.Tensor]] = [[], []]
        for ends in zip(*((length // 3, length - 1, length), (length // 2, length // 2 + 1, length)), strict=True):
            starts = [sum(map(len, part)) for part in parts]
            steps = [(slot, starts[slot], end - starts[slot]) for slot, end in enumerate(ends) if end > starts[slot]]
            batch = build_input_batch(rows, [ScheduledTokens(*step, 1) for step in steps], BLOCK_SIZE)
            logits = decoder.logits(decoder(batch.token_ids, batch.positions, attention.plan(batch)))
            for (slot, _, _), part in zip(steps, torch.split(logits, [count for _, _, count in steps]), strict=True):
                parts[slot].append(part)
        off = (torch.stack([torch.cat(part) for part in parts]) - self._own).square().mean(-1).sqrt()
        off /= self._own.std(-1)
        return float(off.max() if self._is_exact else off[:, -LAST:].median())


def check_fallback_options(
    config: EngineConfig, spec: TransformersSpec, dtype: torch.dtype, memory: DeviceMemory
) -> None:
    """Raise ConfigError for what kvern does not do with such a model, or has no memory for."""
    refused = {
        f"max_adapters {config.adapter_places}": (
            config.adapter_places > 0,
            "adapters are for kvern's own models: leave adapters and max_adapters out",
        ),
        "deterministic": (
            config.deterministic,
            "in PyTorch a token's results depend on the batch: leave deterministic off",
        ),
    }
    refuse(refused, f"{spec.model_type}, which transformers computes")
    needed, on_gpu = spec.parameters * dtype.itemsize, memory.device.type == "cuda"
    places = [(total_memory(), "this machine has", "use a smaller model")]
    if on_gpu:
        share = "" if memory.share is None else f" within gpu_memory_share {memory.share}"
        remedy = f"{'raise the share, ' if share else ''}free memory on the card, or use a smaller model"
        places = [
            (memory.free_and_total()[0], f"free on the GPU{share} are", remedy),
            (available_memory(), "transformers loads them into the machine's memory first, of which are free", FREE),
        ]
    stored = str(dtype).removeprefix("torch.") + (", before they are quantized" if config.quantization else "")
    for there, whose, remedy in places:
        if needed > there:
            raise ConfigError(
                f"the weights take {needed / GIGABYTE:.1f} GB in {stored}, and {whose} {there / GIGABYTE:.1f} GB: "
                f"{remedy}"
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
