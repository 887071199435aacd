"""Products of many numbers of rows are computed once while the engine is idle, so that their kernels are loaded.

For one matrix cuBLAS chooses from some hundred kernels by the number of rows, and CUDA loads each when it is first
launched, once all work on the device has ended: a step that comes to a new number waits for the step before it, and
tokens of that one are sent late (`docs/notes/gpu.md`).

The models of steps take part, a draft model and one that transformers computes as well, of which the parts that are
kvern's. No product waits for another rank: each computes those of its own matrices. Ranks in DP attention, all of which
would wait for one that loads a kernel, do this before they start, as an engine does that has no idle moments.
"""

import logging
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from kvern.errors import in_a_line
from kvern.layers.linear import Weighted
from kvern.layers.tuning import TimedLayer, timed_layers
from kvern.runner.loaded_model import LoadedModel
from kvern.runner.plan import Layout
from kvern.runner.step_graphs import Priority, lacks_memory

logger = logging.getLogger("kvern")

FEW, STRIDE = 512, 37
"""Up to `FEW` rows cuBLAS chooses by tiles of 8 rows; above, so far apart, nearly all of its kernels are met."""
ROWS_AT_ONCE = 1 << 13
"""The most rows of products between which steps may begin: some milliseconds for a large matrix. Of one with more rows
steps load the kernels: with 65536 tokens in a step all numbers of rows would take minutes."""


class FirstProducts:
    """Products of each kind of matrix of models that have not been computed yet, as `Captures`."""

    priority = Priority.FEW_STEPS

    def __init__(self, loaded: LoadedModel, layout: Layout) -> None:
        decoders: list[Any] = [loaded.decoder] + ([] if loaded.draft is None else [loaded.draft.decoder])
        kinds: dict[str, list[TimedLayer]] = {}
        heads: set[int] = set()
        for decoder in decoders:
            kinds = timed_layers(decoder if isinstance(decoder, nn.Module) else decoder.model) | kinds
            head = getattr(decoder, "lm_head", None)  # the last stage of a pipeline has it
            heads |= {method.shape.outputs for layer in _layers(head) for method in layer.method.methods()}
        most = min(layout.max_batch_tokens, ROWS_AT_ONCE)
        scored = min(FEW, most, layout.max_batch_requests * (1 + (layout.most_drafts or 0)))
        self.missing: deque[tuple[TimedLayer, list[int]]] = deque()
        for layer, *_ in kinds.values():
            if layer.product is not None:
                numbers = numbers_of_rows(scored if layer.outputs in heads else most)
                self.missing.extend((layer, part) for part in _parts(numbers))

    @torch.inference_mode()
    def capture_next(self) -> None:
        """Compute the next products; all that are missing are left out where there is no memory for them."""
        layer, numbers = self.missing.popleft()
        assert layer.product is not None
        try:
            [rows] = layer.inputs(max(numbers))
            for number in numbers:
                layer.product(rows[:number])
            if rows.is_cuda:
                torch.cuda.synchronize(rows.device)  # or a request that comes would wait for all that were queued
        except RuntimeError as error:
            if not lacks_memory(error):
                raise
            self.missing.clear()
            logger.warning("no GPU memory to load kernels before steps need them, which may wait: %s", in_a_line(error))
            torch.cuda.empty_cache()


def _layers(head: nn.Module | None) -> list[Weighted]:
    return [] if head is None else [layer for layer in head.modules() if isinstance(layer, Weighted)]


def numbers_of_rows(most: int) -> list[int]:
    """The numbers of rows, of 2 to `most`, at which products may begin to use other kernels."""
    few = {first + more for first in range(8, FEW + 1, 8) for more in (0, 1)}
    return sorted(number for number in {*few, *range(FEW, most, STRIDE), most} if 1 < number <= most)


def _parts(numbers: list[int]) -> Iterator[list[int]]:
    """Parts of the numbers, of at most `ROWS_AT_ONCE` rows in all."""
    part: list[int] = []
    for number in numbers:
        if part and sum(part) + number > ROWS_AT_ONCE:
            yield part
            part = []
        part.append(number)
    if part:
        yield part
