"""Masks of the tokens that the grammars of a batch allow: matchers on the host, masks applied on the device.

A model can continue JSON endlessly where a grammar lets it: a text, one element after the other, brackets within
brackets. Shortly before `max_tokens` such an answer takes the shortest way out: it closes what is open (`Landing`).
"""

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from llguidance import LLMatcher

from kvern.request.step import OUT_OF_TOKENS, Fork, NewRequest
from kvern.structured.matchers import GrammarLibrary, Matchers

if TYPE_CHECKING:
    from kvern.request.step import StepResult


LONGEST_WAY = 256
"""The most tokens of a way out; answers that need more are not finished."""
MOST_GROWTH = 16
"""The most by which one token usually lengthens the way out: it may open that many brackets."""


def has_ways(grammar: str) -> bool:
    """True if answers of a compiled grammar contain JSON."""
    return '"json_schema"' in grammar


@dataclass
class Landing:
    """The landing of one answer. `left`: tokens that remain; `budget`: all its tokens.

    `began`: it is on its way out; `over`: it has ended, so that later tokens do not belong to it. Both depend on the
    answer's tokens alone, so a replay gives the same.
    """

    budget: int
    left: int
    began: bool = False
    over: bool = False
    _asked_below: int = field(default=1 << 62)
    _way: list[int] = field(default_factory=list)

    def forced(self, matcher: LLMatcher, library: GrammarLibrary) -> int | None:
        """The token that must come next; None: the form alone decides."""
        if self.began and not self._way:
            self.over = True
        if not self.began and self.left < self._asked_below:
            self._ask(matcher, library)
        return self._way[0] if self._way else None

    def went_on(self) -> None:
        """The answer has one token more: the forced one, if there was one."""
        self.left -= 1
        self._way = self._way[1:]

    def copy(self) -> "Landing":
        """The landing of an answer that forks from this one."""
        return replace(self)

    def _ask(self, matcher: LLMatcher, library: GrammarLibrary) -> None:
        way = library.way_out(matcher, min(self.left, LONGEST_WAY))
        if way is None:
            self._asked_below = self.left * 7 // 8
            return
        margin = 1 + min(MOST_GROWTH, self.budget // 64)
        spare = self.left - len(way) - margin
        if spare <= 0 and way:
            self._way, self.began = way, True
        self._asked_below = self.left - spare // (MOST_GROWTH + 1)


BITS = 32
FOLLOWING_SECONDS = 0.5
"""Limit of the computing time that one answer may spend at once on its grammar."""
STEADY_SECONDS = 0.001
"""Additional seconds for each token."""
LONGEST_FILL_SECONDS = 0.05
"""The most seconds for the masks of all rows."""

T = TypeVar("T")


def restrict(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """Bans tokens of `rows` [R] int64 of `logits` [N, vocabulary] without a bit in `masks` [R, words] int32."""
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    bits = (masks.view(torch.uint8)[:, :, None] >> shifts) & 1
    allowed = bits.view(len(rows), -1)[:, : logits.shape[1]].bool()
    scores = logits[rows].masked_fill(~allowed, float("-inf"))
    nothing = scores.isneginf().all(-1, keepdim=True)
    logits[rows] = torch.where(nothing & allowed, 0.0, scores)


class Restricted(NamedTuple):
    """The result of applying masks to rows of logits."""

    broken: dict[int, str]
    """The reason why each row's grammar cannot be followed any more; some become too expensive."""
    unknown: list[int]
    """Rows after whose drafts the slow grammar was not followed: these drafts may not be accepted."""


class GrammarRows:
    """The matchers of rows with a grammar. `restrict` is the function above or an equivalent kernel."""

    def __init__(
        self,
        library: GrammarLibrary,
        vocab_size: int,
        device: torch.device,
        restrict: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None] = restrict,
    ) -> None:
        self._library = library
        self._store = Matchers(library)
        self._width = -(-vocab_size // BITS)
        self._device = device
        self._restrict = restrict
        self._matchers: dict[int, LLMatcher] = {}
        self._grammar_of: dict[int, str] = {}
        self._left: list[tuple[str, LLMatcher]] = []
        self._spent: dict[LLMatcher, float] = {}
        """Excess seconds of each slow matcher, beyond its share for every token."""
        self._landings: dict[LLMatcher, Landing] = {}
        """The landings of answers in JSON."""
        self._computed = 0.0
        """The thread time when it was last read."""
        self._one_by_one = False
        self._expected: list[tuple[list[LLMatcher | None], StepResult]] = []

    def join(self, joined: Iterable[NewRequest]) -> None:
        """Enters requests in their rows, and follows their generated tokens."""
        bound = []
        for request in joined:
            self._leave(request.slot)
            if request.spec.grammar is not None:
                bound.append(request)
        if not self._expected:
            self._keep()
        taken = self._store.take([request.spec.grammar or "" for request in bound])
        self._computed = time.thread_time()
        for request, matcher in zip(bound, taken, strict=True):
            self._matchers[request.slot], self._grammar_of[request.slot] = matcher, request.spec.grammar or ""
            generated = request.token_ids[request.spec.prompt_length :]
            if request.spec.params.beam_width is not None or not has_ways(request.spec.grammar or ""):
                self._timed(matcher, matcher.consume_tokens, generated)
                continue
            self._landings[matcher] = Landing(request.spec.max_tokens, request.spec.max_tokens)
            for token in generated:  # as it was when they were generated
                self._forced(matcher)
                self._take(matcher, token)

    def prepare(self, grammar: str) -> "Future[None] | None":
        """Starts to make a matcher of this grammar in a thread; None: it exists."""
        return self._store.prepare(grammar)

    def fork(self, forked: Sequence[Fork]) -> None:
        """Copies the matchers of other rows and lets them consume another token."""
        taken = [fork for fork in forked if fork.slot != fork.source]
        for fork in taken:
            self._leave(fork.slot)
        self._computed = time.thread_time()
        for fork in taken:  # before the sources go on: each goes on in its own row
            if fork.source in self._matchers:
                self._matchers[fork.slot] = self._copy(self._matchers[fork.source])
        for fork in forked:
            matcher = self._matchers.get(fork.slot)
            if matcher is not None and not matcher.is_stopped():
                self._take(matcher, fork.token_id)

    def _leave(self, slot: int) -> None:
        matcher, grammar = self._matchers.pop(slot, None), self._grammar_of.pop(slot, None)
        if matcher is not None:
            self._forget(matcher)
        if matcher is not None and grammar is not None:
            self._left.append((grammar, matcher))

    def _copy(self, source: LLMatcher) -> LLMatcher:
        """A copy of a matcher with its state here."""
        copy = self._timed(source, source.deep_copy)
        if source in self._spent:
            self._spent[copy] = self._spent[source]
        if source in self._landings:
            self._landings[copy] = self._landings[source].copy()
        return copy

    def _forget(self, matcher: LLMatcher) -> None:
        self._spent.pop(matcher, None)
        self._landings.pop(matcher, None)

    def abandon(self) -> None:
        """Forget all rows: which tokens their matchers have followed is not known after a failed step."""
        self._matchers.clear()
        self._grammar_of.clear()
        self._left.clear()
        self._spent.clear()
        self._landings.clear()
        self._expected.clear()

    def __contains__(self, slot: object) -> bool:
        return slot in self._matchers

    def expect(self, slots: Sequence[int | None], result: "StepResult") -> None:
        """Consumes the tokens of `result` when they have arrived: one for each of `slots`, None where there is none."""
        matchers = [None if slot is None else self._matchers.get(slot) for slot in slots]
        if any(matcher is not None for matcher in matchers):
            self._expected.append((matchers, result))

    def accept(self, slots: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Consumes the tokens sampled for `slots`; returns the indices of those that a grammar refuses."""
        self._computed = time.thread_time()
        return [
            place
            for place, (slot, token) in enumerate(zip(slots, tokens, strict=True))
            if not self._accepts(self._matchers[slot], token)
        ]

    def _accepts(self, matcher: LLMatcher, token: int) -> bool:
        """Consumes a token if it is allowed; returns whether it was."""
        forced = self._forced(matcher)
        if matcher.is_stopped():
            return token in self._library.eos_token_ids
        if forced not in (None, token) or self._timed(matcher, matcher.try_consume_tokens, [token]) != 1:
            return False
        if matcher in self._landings:
            self._landings[matcher].went_on()
        return True

    def restrict(
        self,
        logits: torch.Tensor,
        slots: Sequence[int],
        rows: Sequence[int] | None = None,
        drafts: Callable[[], Sequence[int]] | None = None,
    ) -> Restricted:
        """Applies the grammars to rows of `logits` [N, vocabulary], after all earlier tokens.

        `rows`: rows with grammars to apply; None: all with grammars. This waits for the tokens of earlier steps, not of
        this one. If bans have left a row nothing of what its grammar allows, the grammar takes precedence. Rows of one
        slot are adjacent, with drafts between them: `drafts()` [N] returns those at the positions of the sampled
        tokens. Rows after a draft that is not allowed are not changed.
        """
        self._follow()
        if rows is None:
            rows = [row for row, slot in enumerate(slots) if slot in self._matchers]
        if not rows:
            return Restricted({}, [])
        pinned = self._device.type == "cuda"
        masks = torch.empty(len(rows), self._width, dtype=torch.int32, pin_memory=pinned)
        runs = [list(run) for _, run in itertools.groupby(range(len(rows)), lambda place: slots[rows[place]])]
        going = []
        for first, *_ in runs:
            matcher = self._matchers[slots[rows[first]]]
            mask = self._mask(matcher)
            if mask is None:
                going.append((matcher, first))
            else:
                masks[first] = mask
        self._fill(going, masks, side_by_side=pinned)  # on a CPU, the model's own threads have the cores
        restricted = Restricted(self.broken(slots, [rows[first] for first, *_ in runs]), [])
        if drafts is not None and len(runs) < len(rows):
            guesses = drafts()
            for run in runs:
                of_run = [rows[place] for place in run]
                matcher = self._matchers[slots[of_run[0]]]
                if len(run) > 1 and of_run[0] not in restricted.broken:
                    self._go_ahead(matcher, [guesses[row] for row in of_run], of_run, masks[run[0] :], restricted)
        index = torch.tensor(rows, pin_memory=pinned).to(self._device, non_blocking=True)
        self._restrict(logits, index, masks.to(self._device, non_blocking=True))
        return restricted

    def _go_ahead(
        self,
        matcher: LLMatcher,
        drafts: Sequence[int],
        rows: Sequence[int],
        masks: torch.Tensor,
        restricted: Restricted,
    ) -> None:
        """Fills `masks` [R or more, words] of one slot's `rows` [R] after the first, as far as drafts are allowed."""
        masks[1 : len(rows)] = -1
        ahead = self._copy(matcher)
        for place in range(1, len(rows)):
            if self._spent.get(ahead):
                restricted.unknown.append(rows[place - 1])
                break
            if not self._accepts(ahead, drafts[place - 1]):
                break
            mask = self._mask(ahead)
            if mask is None:
                self._timed(ahead, self._library.fill, [(ahead, place)], masks, False)
            else:
                masks[place] = mask
            reason = self._reason(ahead)
            if reason is not None:
                restricted.broken[rows[place]] = reason
                break
        self._forget(ahead)

    def _mask(self, matcher: LLMatcher) -> torch.Tensor | None:
        """The mask of a matcher, if the library need not be asked."""
        forced = self._forced(matcher)
        if matcher.is_stopped():
            return self._ended
        return None if forced is None else self._only([forced])

    def _fill(self, going: Sequence[tuple[LLMatcher, int]], masks: torch.Tensor, side_by_side: bool) -> None:
        """If all of them side by side took long, they are looked at one by one the next time: one may be to blame."""
        start = time.perf_counter()
        self._computed = time.thread_time()
        if side_by_side and not self._one_by_one:
            self._library.fill(going, masks, True)
        else:
            for pair in going:
                self._timed(pair[0], self._library.fill, [pair], masks, False)
        self._one_by_one = not self._one_by_one and time.perf_counter() - start > LONGEST_FILL_SECONDS

    def _timed(self, matcher: LLMatcher, work: Callable[..., T], *arguments: Any) -> T:
        """Runs `work(*arguments)` and charges its time to the matcher."""
        start = time.perf_counter()
        result = work(*arguments)
        seconds = time.perf_counter() - start
        if seconds > STEADY_SECONDS:
            before, self._computed = self._computed, time.thread_time()
            seconds = min(seconds, self._computed - before)
        seconds -= STEADY_SECONDS
        if seconds > 0 or matcher in self._spent:
            self._spent[matcher] = max(0.0, self._spent.get(matcher, 0.0) + seconds)
        return result

    def broken(self, slots: Sequence[int], rows: Iterable[int]) -> dict[int, str]:
        """The reason, by row, why its grammar cannot be followed any more."""
        reasons = ((row, self._reason(self._matchers[slots[row]])) for row in rows)
        return {row: reason for row, reason in reasons if reason is not None}

    def _reason(self, matcher: LLMatcher) -> str | None:
        if matcher.is_error():
            return f"the grammar cannot be followed: {' '.join(matcher.get_error().split())}"
        if self._spent and self._spent.get(matcher, 0.0) > FOLLOWING_SECONDS:
            return (
                f"the grammar takes too long to follow: more than {FOLLOWING_SECONDS} s of computing and "
                f"{1000 * STEADY_SECONDS:g} ms a token; use fewer alternatives or repetitions"
            )
        return OUT_OF_TOKENS if matcher in self._landings and self._landings[matcher].over else None

    def _forced(self, matcher: LLMatcher) -> int | None:
        """The token with which the answer must continue to end in time."""
        landing = self._landings.get(matcher)
        return None if landing is None else self._timed(matcher, landing.forced, matcher, self._library)

    def _take(self, matcher: LLMatcher, token: int) -> None:
        self._timed(matcher, matcher.consume_token, token)
        if matcher in self._landings:
            self._landings[matcher].went_on()

    @functools.cached_property
    def _ended(self) -> torch.Tensor:
        """The mask of an answer that can only end."""
        return self._only(self._library.eos_token_ids)

    def _only(self, tokens: Sequence[int]) -> torch.Tensor:
        """The mask of these."""
        bits = torch.zeros(self._width * BITS, dtype=torch.int64)
        bits[list(tokens)] = 1
        words = (bits.view(-1, BITS) << torch.arange(BITS)).sum(-1)
        return words.to(torch.int32)  # the upper half of the words wraps around, which is meant

    def _follow(self) -> None:
        for matchers, result in self._expected:
            tokens = result.result().token_ids
            self._computed = time.thread_time()
            for matcher, sampled in zip(matchers, tokens, strict=True):
                if matcher is not None:
                    for token in sampled:
                        self._forced(matcher)
                        if not matcher.is_stopped():
                            self._take(matcher, token)
        self._expected.clear()
        self._keep()

    def _keep(self) -> None:
        """Keeps the matchers of ended rows after their last tokens, because they have cached work for their grammar."""
        for grammar, matcher in self._left:
            self._store.give_back(grammar, matcher)
        self._left.clear()
