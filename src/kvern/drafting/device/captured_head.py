"""Steps of a draft head on a CPU, captured once for each number of tokens as those of a model are."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvern.attention.compiled import CompiledAttention
from kvern.cpu.attention import Step
from kvern.cpu.capture import Memory, Program, capture
from kvern.cpu.library import is_recorded
from kvern.cpu.sampling import RowSampler, read_decodes
from kvern.device.rows import BatchRows
from kvern.drafting.models.head import DraftHead
from kvern.request.step import ScheduledTokens
from kvern.runner.captured_decodes import MOST_TOKENS


class CapturedHead:
    """Captured steps of a head whose layer and cache are kernels; PyTorch computes nothing between them."""

    def __init__(self, head: DraftHead, attention: CompiledAttention, rows: BatchRows, block_size: int) -> None:
        self._head = head
        self._attention = attention
        self._rows = rows
        self._block_size = block_size
        self._sampler = RowSampler(rows)
        self._memory = Memory()
        self._passes: dict[tuple[int, bool], _Pass] = {}
        self._draws: dict[int, _Draw] = {}
        self._captures = True

    def forward(self, scheduled: Sequence[ScheduledTokens], states: Tensor, *, told: bool) -> Tensor | None:
        """The head's states `[T, hidden]` for the tokens of a step, each computed with the token after it.

        These next tokens are in the rows. None: the step is too large, or could not be captured.

        states  of the step's tokens: `[T, state_size]` if they come from the model (`told`), else the head's own
        """
        slots = [item.slot for item in scheduled for _ in range(item.count)]
        starts = [item.start + place for item in scheduled for place in range(item.count)]
        if not self._captures or is_recorded() or not 0 < len(slots) <= MOST_TOKENS:
            return None
        key = len(slots), told
        found = self._passes.get(key) or _Pass(self._rows, states)
        last = self._rows.tokens.shape[1] - 1
        found.states.copy_(states)
        found.places[:2] = torch.tensor((slots, starts))
        found.following[:] = torch.tensor((slots, [min(start + 1, last) for start in starts]))
        if found.program is None:
            found.program = self._captured(found, self._pass(found, told))
            if found.program is None:
                return None
            self._passes[key] = found
        return found.program.run(0, 0)[0].clone()

    def draw(self, slots: Tensor, positions: Tensor, states: Tensor) -> bool:
        """Let rows `slots` [N] int64 go on at `positions` [N] int64 with what `states` [N, hidden] lead to.

        Returns whether it did.
        """
        if not self._captures or is_recorded() or len(slots) > MOST_TOKENS:
            return False
        found = self._draws.get(len(slots)) or _Draw(states, self._head)
        found.states.copy_(states)
        found.slots.copy_(slots)
        found.positions.copy_(positions)
        if found.program is None:
            found.program = self._captured(found, *self._draw(found))
            if found.program is None:
                return False
            self._draws[len(slots)] = found
        if found.logits is None or self._head.drafted is None:
            found.program.run(_SCORE, _CHOOSE)
        else:
            (scores,) = found.program.run(_SCORE, _SCORE)
            found.logits.index_copy_(1, self._head.drafted.token_ids, scores)
            found.program.run(_CHOOSE, _CHOOSE)
        return True

    def _captured(self, kept: "_Pass | _Draw", *stages: Callable[..., tuple[Tensor, ...]]) -> Program | None:
        program = capture("steps of the draft head", lambda: Program(self._memory, kept, *stages))
        if program is None:
            self._captures = False
            self._passes.clear()
            self._draws.clear()
        return program

    def _pass(self, kept: "_Pass", told: bool) -> Callable[[], tuple[Tensor, ...]]:
        head = self._head
        rows = self._rows
        size = self._block_size

        def forward() -> tuple[Tensor, ...]:
            _, positions, slot_mapping, _ = read_decodes(kept.places, rows.tokens, rows.block_table, rows.turns, size)
            token_ids = read_decodes(kept.following, rows.tokens, rows.block_table, rows.turns, size).token_ids
            attend = self._attention.attend((kept.step, slot_mapping))
            # The layer may add to what it is given.
            states = head.enter(kept.states) if told else head.build.ops.beside((kept.states,))
            return (head.forward(token_ids, states, positions, attend),)

        return forward

    def _draw(self, kept: "_Draw") -> Sequence[Callable[..., tuple[Tensor, ...]]]:
        def score() -> tuple[Tensor, ...]:
            return (self._head.scores(kept.states),)

        def choose(scores: Tensor) -> tuple[Tensor, ...]:
            chosen = self._sampler.sample(scores if kept.logits is None else kept.logits, kept.slots, kept.positions)
            self._sampler.write(kept.slots, kept.positions, chosen)
            return (chosen,)

        return score, choose


_SCORE, _CHOOSE = range(2)
"""The stages of a draw."""


class _Pass:
    """The inputs of a pass over N tokens: `states`, and rows and positions of their tokens and of the next ones.

    places     [3, N] int64, as for a `Step`
    following  [2, N] int64
    """

    def __init__(self, rows: BatchRows, states: Tensor) -> None:
        self.places = torch.ones(3, len(states), dtype=torch.int64)
        self.following = torch.zeros(2, len(states), dtype=torch.int64)
        self.states = torch.empty_like(states)
        self.step = Step(rows.block_table, self.places)
        self.program: Program | None = None


class _Draw:
    """The inputs of a draw for N rows; `logits` [N, vocabulary], where scores are those of a part of the vocabulary."""

    def __init__(self, states: Tensor, head: DraftHead) -> None:
        self.slots, self.positions = torch.zeros(2, len(states), dtype=torch.int64)
        self.states = torch.empty_like(states)
        vocabulary = head.spec.vocab_size
        self.logits = None if head.drafted is None else torch.full((len(states), vocabulary), float("-inf"))
        self.program: Program | None = None
