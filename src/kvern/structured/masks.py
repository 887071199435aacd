"""Which tokens the grammars of a batch allow next: kept on the host, applied to logits on the device."""

import functools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from kvern.step import Fork, NewRequest

if TYPE_CHECKING:
    from kvern.structured.backend import Matcher
    from kvern.structured.grammar import Grammars
    from kvern.worker.executor import StepResult

BITS = 32
SPARE_MATCHERS = 512
"""Matchers of ended requests that are kept for others with their grammar."""


def restrict(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """Leave `rows` [R] int64 of `logits` [N, vocabulary] the tokens whose bits are set in `masks` [R, words] int32.

    If nothing of what a mask allows is left in its row, the mask goes before.
    """
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    bits = (masks.view(torch.uint8)[:, :, None] >> shifts) & 1
    allowed = bits.view(len(rows), -1)[:, : logits.shape[1]].bool()
    scores = logits[rows].masked_fill(~allowed, float("-inf"))
    nothing = scores.isneginf().all(-1, keepdim=True)
    logits[rows] = torch.where(nothing & allowed, 0.0, scores)


class GrammarRows:
    """The matchers of the rows whose requests have a grammar. `restrict`: the function above or a kernel like it."""

    def __init__(
        self,
        grammars: "Grammars",
        vocab_size: int,
        device: torch.device,
        restrict: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None] = restrict,
    ) -> None:
        self._grammars = grammars
        self._width = -(-vocab_size // BITS)
        self._device = device
        self._restrict = restrict
        self._matchers: dict[int, Matcher] = {}
        self._grammar_of: dict[int, str] = {}
        self._left: list[tuple[str, Matcher]] = []
        self._spare: dict[str, list[Matcher]] = {}
        self._expected: list[tuple[list[Matcher | None], StepResult]] = []

    def join(self, joined: Iterable[NewRequest]) -> None:
        """Let requests take their rows; what they have generated already is followed."""
        bound = []
        for request in joined:
            self._leave(request.slot)
            if request.grammar is not None:
                bound.append(request)
        if not self._expected:
            self._keep()
        for request, matcher in zip(bound, self._threads.map(self._matcher, bound), strict=True):
            self._matchers[request.slot], self._grammar_of[request.slot] = matcher, request.grammar or ""

    def _matcher(self, request: NewRequest) -> "Matcher":
        assert request.grammar is not None
        spare = self._spare.get(request.grammar)
        matcher = spare.pop() if spare else self._grammars.matcher(request.grammar)
        matcher.consume_tokens(request.token_ids[request.prompt_length :])
        return matcher

    def fork(self, forked: Sequence[Fork]) -> None:
        """Let rows go on behind others with another token, which their matchers then have consumed."""
        taken = [fork for fork in forked if fork.slot != fork.source]
        for fork in taken:
            self._leave(fork.slot)
        for fork in taken:  # before the sources go on: each goes on in its own row
            if fork.source in self._matchers:
                self._matchers[fork.slot] = self._matchers[fork.source].deep_copy()
        for fork in forked:
            matcher = self._matchers.get(fork.slot)
            if matcher is not None and not matcher.is_stopped():
                matcher.consume_token(fork.token_id)

    def _leave(self, slot: int) -> None:
        matcher, grammar = self._matchers.pop(slot, None), self._grammar_of.pop(slot, None)
        if matcher is not None and grammar is not None:
            self._left.append((grammar, matcher))

    def abandon(self) -> None:
        """Forget all rows: which tokens their matchers have followed is not known after a failed step."""
        self._matchers.clear()
        self._grammar_of.clear()
        self._left.clear()
        self._expected.clear()

    def __contains__(self, slot: object) -> bool:
        return slot in self._matchers

    def expect(self, slots: Sequence[int | None], result: "StepResult") -> None:
        """Follow the tokens of `result`, when they are there: one for each of `slots`, None where there is none."""
        matchers = [None if slot is None else self._matchers.get(slot) for slot in slots]
        if any(matcher is not None for matcher in matchers):
            self._expected.append((matchers, result))

    def accept(self, slots: Sequence[int | None], tokens: Sequence[int]) -> list[int]:
        """Follow the tokens just sampled for `slots`, where their grammars allow them; the rows where these do not."""
        refused = []
        for row, (slot, token) in enumerate(zip(slots, tokens, strict=True)):
            matcher = None if slot is None else self._matchers.get(slot)
            if matcher is None:
                continue
            if matcher.is_stopped():
                allowed = token in self._grammars.eos_token_ids
            else:
                allowed = matcher.try_consume_tokens([token]) == 1
            if not allowed:
                refused.append(row)
        return refused

    def restrict(self, logits: torch.Tensor, slots: Sequence[int], rows: Sequence[int] | None = None) -> dict[int, str]:
        """Leave each row of `logits` [N, vocabulary] the tokens that its grammar allows, after all that came before.

        `rows`: those that have grammars and are to be restricted; None: all with grammars. Waits for the tokens of
        earlier steps, not for this one. If bans have left a row nothing of what its grammar allows, the grammar goes
        before. Returns, by slot, why a grammar cannot be followed any more: some become too expensive on the way.
        """
        self._follow()
        if rows is None:
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
        if going:  # on a CPU, the model's own threads have the cores
            self._grammars.fill(going, masks, side_by_side=pinned)
        index = torch.tensor(rows, pin_memory=pinned).to(self._device, non_blocking=True)
        self._restrict(logits, index, masks.to(self._device, non_blocking=True))
        matchers = {slots[row]: self._matchers[slots[row]] for row in rows}
        return {
            slot: f"the grammar cannot be followed: {' '.join(matcher.get_error().split())}"
            for slot, matcher in matchers.items()
            if matcher.is_error()
        }

    @functools.cached_property
    def _threads(self) -> ThreadPoolExecutor:
        """They make matchers side by side, which takes most of a millisecond each."""
        return ThreadPoolExecutor(thread_name_prefix="grammar")

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
        self._keep()

    def _keep(self) -> None:
        """Keep the matchers of rows that ended, whose last tokens came: they have learnt what their grammar takes."""
        for grammar, matcher in self._left:
            if not matcher.is_error() and matcher.reset():
                self._spare[grammar] = [*self._spare.pop(grammar, []), matcher]
        self._left.clear()
        while sum(map(len, self._spare.values())) > SPARE_MATCHERS:
            oldest = next(iter(self._spare))
            self._spare[oldest] = self._spare[oldest][1:]
            if not self._spare[oldest]:
                del self._spare[oldest]
