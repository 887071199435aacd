"""Products of many numbers of rows are computed once while the engine is idle, so that their kernels are loaded.

For one matrix cuBLAS chooses from some hundred kernels by the number of rows, and CUDA loads each when it is first
launched, once all work on the device has ended: a step that comes to a new number waits for the step before it, and
tokens of that one are sent late (`docs/notes/gpu.md`).
"""

from collections import deque
from collections.abc import Iterator

import torch
from torch import nn

from kvern.layers.tuning import TimedLayer, timed_layers
from kvern.runner.step_graphs import Priority

FEW, STRIDE = 512, 37
"""Up to `FEW` rows cuBLAS chooses by tiles of 8 rows; above, so far apart, nearly all of its kernels are met."""
ROWS_AT_ONCE = 1 << 13
"""The most rows of products between which steps may begin: some milliseconds for a large matrix."""
MOST_HEAD_OUTPUTS = 1 << 16
"""A matrix with more is a head, which few rows reach."""


class FirstProducts:
    """Products of each kind of matrix of a model that have not been computed yet, as `Captures`."""

    priority = Priority.FEW_STEPS

    def __init__(self, model: nn.Module, most: int) -> None:
        """`most`: tokens of a step."""
        self.missing: deque[tuple[TimedLayer, list[int]]] = deque()
        for alike in timed_layers(model).values():
            layer = alike[0]
            if layer.product is not None:
                numbers = numbers_of_rows(most if layer.outputs <= MOST_HEAD_OUTPUTS else min(most, FEW))
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
        except torch.OutOfMemoryError:
            self.missing.clear()


def numbers_of_rows(most: int) -> list[int]:
    """The numbers of rows, of 2 to `most`, at which products may begin to use other kernels."""
    few = {first + more for first in range(8, FEW + 1, 8) for more in (0, 1)}
    return sorted(number for number in {*few, *range(FEW, most, STRIDE), most} if 1 < number <= most)


def _parts(numbers: list[int]) -> Iterator[list[int]]:
    """Parts of the numbers, of at most `ROWS_AT_ONCE` rows in all or of one number."""
    part: list[int] = []
    for number in numbers:
        if part and sum(part) + number > ROWS_AT_ONCE:
            yield part
            part = []
        part.append(number)
    if part:
        yield part
