"""The states of a model's layers on the device: which row has which, and what a step does with them."""

from collections.abc import Sequence
from functools import partial
from itertools import chain

import torch

from kvern.attention.memory import zero_cache
from kvern.device.input_batch import InputBatch
from kvern.layers.states import StepStates, allocate
from kvern.model_spec import ModelSpec
from kvern.step import SchedulerOutput


class StateMemory:
    """`states` places, of which each row of `slots` has one; the scheduler says which (`cache/states.py`).

    A place is of each layer that has states what its specification says (`RecurrentSpec.states`).
    """

    def __init__(self, spec: ModelSpec, states: int, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self._device = device
        self._layers = allocate(spec.recurrent, states, dtype, partial(zero_cache, device=device))
        self._of_row = [-1] * slots

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

    def plan(self, batch: InputBatch) -> StepStates:
        """Which tokens go on with which state."""
        tokens, states, runs, first = [], [], [], 0
        for slot, count in zip(batch.slots, batch.counts, strict=True):
            state = self._of_row[slot]
            assert state >= 0, f"row {slot} has no state"
            if count == 1:
                tokens.append(first)
                states.append(state)
            else:
                runs.append((first, count, state))
            first += count
        return StepStates(self._layers, self._indices(tokens), self._indices(states), runs)

    def _indices(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
