"""The states of a step on a device: which tokens go on with which, as kernels read it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvern.kernels.accepted_drafts import Written
from kvern.kernels.convolution import Drafts, Runs


class Noted(NamedTuple):
    """The results of a layer for T drafts, kept so that its states can see the accepted ones.

    inputs    [T, channels]     of its convolution, in the model's dtype
    written                     to its matrices, if it has any
    read      [T, ...] float32  of these, the same for all layers alike; zeros where a token only pads a step
    """

    inputs: Tensor
    written: Written | None
    read: Tensor | None


@dataclass(frozen=True)
class DeviceStates:
    """`StepStates` on a device, whose first tokens are alone of their requests; behind them come `drafts`, then `runs`.

    layers   as `StepStates` has them
    states   [B] int32, of the first B tokens
    noted    of each of `layers`, if there are drafts
    """

    layers: Sequence[Sequence[Tensor]]
    states: Tensor
    drafts: Drafts | None
    runs: Runs | None
    noted: Sequence[Noted] = ()

    def advance(
        self,
        inputs: Sequence[Tensor],
        tokens: Callable[..., Tensor],
        drafts: Callable[..., Tensor],
        runs: Callable[..., Tensor],
    ) -> Tensor:
        """The results of a step's tokens for `inputs`, tensors [T, ...]: `[T, ...]`.

        `tokens(states, *inputs)` takes those that are alone, `drafts(drafts, *inputs)` those that may be rejected, and
        `runs(runs, *inputs)` the others.
        """
        alone, parts = len(self.states), []
        known = alone if self.drafts is None else alone + len(self.drafts.requests)
        if alone:
            parts.append(tokens(self.states, *(item[:alone] for item in inputs)))
        if self.drafts is not None:
            parts.append(drafts(self.drafts, *(item[alone:known] for item in inputs)))
        if self.runs is not None:
            parts.append(runs(self.runs, *(item[known:] for item in inputs)))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
