"""Sampling from the logits of a step through kernels of a CPU; `torch_sampling.py` does it through PyTorch."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from kvern.cpu.sampling import RowSampler, logprobs
from kvern.device.rows import BatchRows
from kvern.runner.needs import SamplingNeeds

if TYPE_CHECKING:
    from kvern.sample.logprobs import DeviceLogprobs


class Sampling(Protocol):
    """Sampling for the rows of a batch.

    logits     [N, vocabulary] float32, without gaps
    slots      [N] rows of the batch that they belong to; `index` [N] int64 on the device: the same
    positions  [N] int64 on the device: of the tokens that are chosen
    """

    def constrain(self, logits: Tensor, slots: Sequence[int], index: Tensor, positions: Tensor) -> None:
        """Change the logits in place as each row's request asks."""

    def sample(self, logits: Tensor, slots: Sequence[int], index: Tensor, positions: Tensor, needs: int) -> Tensor:
        """Choose one token [N] int64 for each row; `needs`: of all."""

    def write(self, index: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """Let the rows go on with the tokens [N] int64 that were chosen for them."""

    def logprobs(self, logits: Tensor, tokens: Tensor, count: int) -> "DeviceLogprobs":
        """Log-probabilities as `kvern.sample.logprobs.token_logprobs` returns them."""


class CompiledSampling:
    """Through kernels; rows with DRY or rare filters, and no others, through PyTorch.

    What few requests ask for is imported for the first of them, in a millisecond or two.
    """

    def __init__(self, rows: BatchRows) -> None:
        self._rows = rows
        self._sampler = RowSampler(rows)

    def constrain(self, logits: Tensor, slots: Sequence[int], index: Tensor, positions: Tensor) -> None:
        self._sampler.constrain(logits, index, positions)
        rows = self._rows
        repeating = [row for row, slot in enumerate(slots) if rows.request(slot).params.penalizes_repetitions]
        if repeating:
            from kvern.sample.dry import penalize_repetitions

            penalize_repetitions(logits, rows, repeating, slots, positions.tolist(), None)

    def sample(self, logits: Tensor, slots: Sequence[int], index: Tensor, positions: Tensor, needs: int) -> Tensor:
        chosen = self._sampler.sample(logits, index, positions)
        if needs & SamplingNeeds.RARE_FILTERS:
            params = [self._rows.request(slot).params for slot in slots]
            rare = [row for row, item in enumerate(params) if item.has_rare_filters]
            if rare:  # these rows may be but some of a step's
                from kvern.sample.sampler import sample

                place, again = torch.tensor(rare), [slots[row] for row in rare]
                chosen[place] = sample(logits[place], self._rows, again, positions[place])
        return chosen

    def write(self, index: Tensor, positions: Tensor, tokens: Tensor) -> None:
        self._sampler.write(index, positions, tokens)

    def logprobs(self, logits: Tensor, tokens: Tensor, count: int) -> "DeviceLogprobs":
        from kvern.sample.logprobs import DeviceLogprobs

        return DeviceLogprobs(*logprobs(logits.contiguous(), tokens, count))
