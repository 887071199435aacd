"""Sampling from the logits of a step through PyTorch."""

from collections.abc import Sequence

from torch import Tensor

from kvern.device.rows import BatchRows
from kvern.sample.constraints import constrain
from kvern.sample.logprobs import DeviceLogprobs, token_logprobs
from kvern.sample.sampler import sample


class TorchSampling:
    """The `Sampling` of devices without kernels."""

    def __init__(self, rows: BatchRows) -> None:
        self._rows = rows

    def constrain(self, logits: Tensor, slots: Sequence[int], index: Tensor, positions: Tensor) -> None:
        constrain(logits, self._rows, slots, positions.tolist())

    def sample(self, logits: Tensor, slots: Sequence[int], index: Tensor, positions: Tensor, needs: int) -> Tensor:
        return sample(logits, self._rows, slots, positions)

    def write(self, index: Tensor, positions: Tensor, tokens: Tensor) -> None:
        self._rows.tokens[index, positions] = tokens.int()

    def logprobs(self, logits: Tensor, tokens: Tensor, count: int) -> DeviceLogprobs:
        return token_logprobs(logits, tokens, count)
