"""The states of a model's layers on the device: which row has which, and what a step does with them."""

from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import chain

import torch

from kvern.attention.memory import zero_cache
from kvern.cache.messages import StateMessage
from kvern.layers.states import StepStates, allocate
from kvern.request.step import ScheduledTokens, SchedulerOutput
from kvern.runner.cached_model import StateStack
from kvern.spec.model import ModelSpec


class StateMemory:
    """`states` places, of which each row of `slots` has one; the scheduler says which (`cache/states.py`).

    A place is of each layer that has states what its specification says (`RecurrentSpec.states`).
    """

    def __init__(self, spec: ModelSpec, states: int, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self._device = device
        self._layers = allocate(spec.recurrent, states, dtype, partial(zero_cache, device=device))
        self._of_row = [-1] * slots
        self._step: StepStates | None = None
        self._due: deque[StepStates] = deque()
        """Steps with drafts of which a later stage says what is kept, when that is known."""

    @property
    def stacks(self) -> list[StateStack]:
        """See `RowStates`."""
        return [StateStack([place], [own[None] for own in tensors]) for place, tensors in enumerate(self._layers)]

    def prepare(self, output: SchedulerOutput) -> None:
        """Before a step: states see drafts, then are zeroed and copied in order; rows that fork or join have theirs."""
        for counts in output.kept if self._due else ():  # the last stage, which accepts at once, defers none
            self._due.popleft().accept(counts)
        message = output.message(StateMessage)
        if message is None:
            return
        for source, target in message.copies:
            for step in self._due:  # its request has gone while its drafts are verified
                step.forget(target)
            for memory in chain.from_iterable(self._layers):
                if source < 0:
                    memory[target].zero_()
                else:
                    memory[target].copy_(memory[source])
        for slot, state in message.given:
            self._of_row[slot] = state

    def plan(self, scheduled: Sequence[ScheduledTokens]) -> StepStates:
        """Plan which tokens go on with which state."""
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

    def defer(self) -> None:
        """Keep what the drafts of the step that was planned last are to write until `SchedulerOutput.kept` tells."""
        step, self._step = self._step, None
        if step is not None and step.drafts:
            self._due.append(step)

    def _indices(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
