"""The states of a step on a device: which tokens go on with which, as kernels read it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvern.kernels.convolution import Runs


@dataclass(frozen=True)
class DeviceStates:
    """`StepStates` on a device, whose first tokens are alone of their requests; those behind are `runs`, if any.

    layers   as `StepStates` has them
    states   [B] int32, of the first B tokens
    """

    layers: Sequence[Sequence[Tensor]]
    states: Tensor
    runs: Runs | None

    def advance(self, inputs: Sequence[Tensor], tokens: Callable[..., Tensor], runs: Callable[..., Tensor]) -> Tensor:
        """What a step's tokens make of `inputs`, tensors [T, ...]: `[T, ...]`.

        `tokens(states, *inputs)` takes those that are alone, `runs(runs, *inputs)` the others.
        """
        alone, parts = len(self.states), []
        if alone:
            parts.append(tokens(self.states, *(item[:alone] for item in inputs)))
        if self.runs is not None:
            parts.append(runs(self.runs, *(item[alone:] for item in inputs)))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
