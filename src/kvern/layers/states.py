"""States of fixed size, which layers keep for each request in place of keys and values, and how a step goes on.

A state cannot go back. So drafts are read with a copy of it, which is dropped, and what layers made of them is noted
until it is known how many are accepted: these the state itself sees then.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from kvern.spec.mixers import RecurrentSpec

GATHERED_BYTES = 1 << 18
"""Larger states are changed where they are, one after another: gathered and put back, they move twice more."""


@dataclass(frozen=True)
class StepStates:
    """The states of a model's layers, and which of them the T tokens of a step go on with and change.

    layers           of each layer that has any, in their order, the tensors [states, ...] of its `RecurrentSpec`
    tokens, states   [B] int64   tokens that are alone of their request, and their states
    runs             (first token, number, state) of each request with more tokens
    drafts           the same of requests whose tokens are drafts but for the first: these change no state before
                     `accept`
    """

    layers: Sequence[Sequence[Tensor]]
    tokens: Tensor
    states: Tensor
    runs: Sequence[tuple[int, int, int]]
    drafts: Sequence[tuple[int, int, int]] = ()
    _noted: list[list[Callable[[int], object]]] = field(default_factory=list)
    """For each of `drafts` what lets each layer's state see its first tokens."""

    def __post_init__(self) -> None:
        self._noted.extend([] for _ in self.drafts)

    def note(self, place: int, advance: Callable[[int], object]) -> None:
        """Remember how a state sees the first tokens of one of `drafts`: by `advance(count)`."""
        self._noted[place].append(advance)

    def accept(self, counts: Sequence[int]) -> None:
        """Let the states of `drafts` see as many of their tokens as are kept."""
        for count, noted in zip(counts, self._noted, strict=True):
            for advance in noted:
                advance(count)

    def forget(self, state: int) -> None:
        """Another request has a state of `drafts`, which is to see none of them."""
        for (_, _, own), noted in zip(self.drafts, self._noted, strict=True):
            if own == state:
                noted.clear()


def allocate(
    mixers: Iterable[RecurrentSpec],
    states: int,
    dtype: torch.dtype,
    zeros: Callable[[tuple[int, ...], torch.dtype], Tensor],
) -> list[list[Tensor]]:
    """So many states of these layers, for a model in `dtype`; `zeros` makes a tensor of a shape."""
    return [
        [zeros((states, *tensor.shape), torch.float32 if tensor.exact else dtype) for tensor in mixer.states]
        for mixer in mixers
    ]


def new_states(
    mixers: Iterable[RecurrentSpec], lengths: Sequence[int], dtype: torch.dtype, device: torch.device
) -> StepStates:
    """New states for sequences of these lengths, which follow one another; for a model in `dtype`."""
    ends, none = list(accumulate(lengths)), torch.empty(0, dtype=torch.int64, device=device)
    runs = [(end - length, length, place) for place, (end, length) in enumerate(zip(ends, lengths, strict=True))]
    layers = allocate(mixers, len(lengths), dtype, lambda shape, dtype: torch.zeros(shape, dtype=dtype, device=device))
    return StepStates(layers, none, none, runs)


def advance_states(
    step: StepStates,
    memory: Tensor,
    inputs: Sequence[Tensor],
    advance: Callable[..., Tensor],
    advance_run: Callable[..., Tensor],
) -> Tensor:
    """Let the states `memory [states, ...]` see a step's tokens: what these read of them, `[T, ...]`.

    `inputs` are tensors [T, ...]. `advance(states, *inputs)` takes one token of each of B states, `advance_run(state,
    *inputs)` several of one; both change the states in place.
    """
    found: list[tuple[Tensor | slice, Tensor]] = []
    if len(step.states) and memory[0].nbytes > GATHERED_BYTES:
        for first, state in zip(step.tokens.tolist(), step.states.tolist(), strict=True):
            token = slice(first, first + 1)
            found.append((token, advance(memory[state : state + 1], *(item[token] for item in inputs))))
    elif len(step.states):
        chosen = memory.index_select(0, step.states)
        found.append((step.tokens, advance(chosen, *(item[step.tokens] for item in inputs))))
        memory.index_copy_(0, step.states, chosen)
    for first, count, state in step.runs:
        run = slice(first, first + count)
        found.append((run, advance_run(memory[state], *(item[run] for item in inputs))))
    for place, (first, count, state) in enumerate(step.drafts):
        run = slice(first, first + count)
        own = [item[run] for item in inputs]
        found.append((run, advance_run(memory[state].clone(), *own)))
        step.note(place, partial(_advance_first, advance_run, memory[state], own))
    if len(found) == 1:
        return found[0][1]
    read = found[0][1].new_empty(len(inputs[0]), *found[0][1].shape[1:])
    for tokens, part in found:
        read[tokens] = part
    return read


def _advance_first(advance_run: Callable[..., Tensor], state: Tensor, inputs: Sequence[Tensor], count: int) -> None:
    """Let a state see the first of a run's tokens."""
    advance_run(state, *(item[:count] for item in inputs))
