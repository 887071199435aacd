"""The states of a model's layers on the device: which row has which, and what a step does with them."""

from collections.abc import Sequence
from functools import partial
from itertools import chain

import torch

from kvern.attention.memory import zero_cache
from kvern.layers.states import StepStates, allocate
from kvern.model_spec import ModelSpec
from kvern.step import ScheduledTokens, SchedulerOutput


class StateMemory:
    """`states` places, of which each row of `slots` has one; the scheduler says which (`cache/states.py`).

    A place is of each layer that has states what its specification says (`RecurrentSpec.states`).
    """

    def __init__(self, spec: ModelSpec, states: int, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self._device = device
        self._layers = allocate(spec.recurrent, states, dtype, partial(zero_cache, device=device))
        self._of_row = [-1] * slots
        self._step: StepStates | None = None

    def prepare(self, output: SchedulerOutput) -> None:
        """Before a step: zero and copy states, in their order, and let rows that fork or join have theirs."""
        for source, target in output.state_copies:
            for memory in chain.from_iterable(self._layers):
                if source < 0:
                    memory[target].zero_()
                else:
                    memory[target].copy_(memory[source])
        for fork in output.forked:
            self._of_row[fork.slot] = fork.state_index
        for request in output.joined:
            self._of_row[request.slot] = request.state_index

    def plan(self, scheduled: Sequence[ScheduledTokens]) -> StepStates:
        """Which tokens go on with which state."""
        tokens: list[int] = []
        states: list[int] = []
        runs: list[tuple[int, int, int]] = []
        drafts: list[tuple[int, int, int]] = []
        first = 0
        for item in scheduled:
            state = self._of_row[item.slot]
            assert state >= 0, f"row {item.slot} has no state"
            if item.count == 1:
                tokens.append(first)
                states.append(state)
            else:
                (drafts if item.sampled > 1 else runs).append((first, item.count, state))
            first += item.count
        self._step = StepStates(self._layers, self._indices(tokens), self._indices(states), runs, drafts)
        return self._step

    def accept(self, scheduled: Sequence[ScheduledTokens], kept: torch.Tensor) -> None:
        """Let states see the drafts of the step that was planned last, as far as `kept [R]` says."""
        step, self._step = self._step, None  # what was noted is needed no more
        assert step is not None
        step.accept([count for item, count in zip(scheduled, kept.tolist(), strict=True) if item.sampled > 1])

    def _indices(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
