"""Which tokens the grammars of a batch allow next: kept on the host, applied to logits on the device."""

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from kvern.step import NewRequest

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

    from kvern.structured.grammar import Grammars
    from kvern.worker.executor import StepResult

BITS = 32


class GrammarRows:
    """The matchers of the rows whose requests have a grammar."""

    def __init__(self, grammars: "Grammars", vocab_size: int, device: torch.device) -> None:
        self._grammars = grammars
        self._width = -(-vocab_size // BITS)
        self._device = device
        self._shifts = torch.arange(BITS, dtype=torch.int32, device=device)
        self._matchers: dict[int, LLMatcher] = {}
        self._expected: list[tuple[list[LLMatcher | None], StepResult]] = []

    def join(self, joined: Iterable[NewRequest]) -> None:
        """Let requests take their rows; what they have generated already is followed."""
        for request in joined:
            self._matchers.pop(request.slot, None)
            if request.grammar is not None:
                matcher = self._grammars.matcher(request.grammar)
                matcher.consume_tokens(request.token_ids[request.prompt_length :])
                self._matchers[request.slot] = matcher

    def __contains__(self, slot: object) -> bool:
        return slot in self._matchers

    def expect(self, slots: Sequence[int | None], result: "StepResult") -> None:
        """Follow the tokens of `result`, when they are there: one for each of `slots`, None where there is none."""
        matchers = [None if slot is None else self._matchers.get(slot) for slot in slots]
        if any(matcher is not None for matcher in matchers):
            self._expected.append((matchers, result))

    def restrict(self, logits: torch.Tensor, slots: Sequence[int]) -> dict[int, str]:
        """Leave each row of `logits` [N, vocabulary] the tokens that its grammar allows, after all that came before.

        Waits for the tokens of earlier steps, not for this one. If bans have left a row nothing of what its grammar
        allows, the grammar goes before. Returns, by slot, why a grammar cannot be followed any more: some become too
        expensive on the way.
        """
        self._follow()
        rows = [row for row, slot in enumerate(slots) if slot in self._matchers]
        if not rows:
            return {}
        pinned = self._device.type == "cuda"
        masks = torch.empty(len(rows), self._width, dtype=torch.int32, pin_memory=pinned)
        going = []
        for place, row in enumerate(rows):
            matcher = self._matchers[slots[row]]
            if matcher.is_stopped():
                masks[place] = self._ended
            else:
                going.append((matcher, place))
        if going:
            self._executor.unsafe_compute_mask_ptr(going, masks.data_ptr(), 4 * self._width, len(rows))
        index = torch.tensor(rows, pin_memory=pinned).to(self._device, non_blocking=True)
        bits = (masks.to(self._device, non_blocking=True)[:, :, None] >> self._shifts) & 1
        allowed = bits.view(len(rows), -1)[:, : logits.shape[1]].bool()
        scores = logits[index].masked_fill(~allowed, float("-inf"))
        nothing = scores.isneginf().all(-1, keepdim=True)
        logits[index] = torch.where(nothing & allowed, 0.0, scores)
        matchers = {slots[row]: self._matchers[slots[row]] for row in rows}
        return {
            slot: f"the grammar cannot be followed: {' '.join(matcher.get_error().split())}"
            for slot, matcher in matchers.items()
            if matcher.is_error()
        }

    @functools.cached_property
    def _executor(self) -> "LLExecutor":
        """Threads that make masks side by side."""
        from llguidance import LLExecutor

        return LLExecutor()

    @functools.cached_property
    def _ended(self) -> torch.Tensor:
        """The mask of an answer that can only end."""
        bits = torch.zeros(self._width * BITS, dtype=torch.int64)
        bits[list(self._grammars.eos_token_ids)] = 1
        words = (bits.view(-1, BITS) << torch.arange(BITS)).sum(-1)
        return words.to(torch.int32)  # the upper half of the words wraps around, which is meant

    def _follow(self) -> None:
        for matchers, result in self._expected:
            for matcher, token in zip(matchers, result.result().token_ids, strict=True):
                if matcher is not None and token is not None and not matcher.is_stopped():
                    matcher.consume_token(token)
        self._expected.clear()
