"""Decides what each step computes. No torch, no clock: the same calls give the same decisions.

There are no phases. Every request has tokens, and some of them are computed; a step lets computed tokens catch up,
under a budget. A decode lacks one token, a prompt many, a preempted request all of them.

    schedule():  1. running requests that lack one token (decode), best first
                 2. running requests that lack more (prefill), with the rest of the budget
                 3. waiting requests, best first, while there are slots, blocks and budget
    A decode with drafts is longer by as many tokens as there is room for: no request waits for drafts.
    Beside decodes, a step's time can bound what it computes of prompts, too (`step_budget.py`).
    When blocks run out in 1 or 2, the worst running request is preempted: its blocks go, its tokens stay.

Best first means: aged requests first, then the policy's key, then what their owners have, turn and arrival. Waiting
requests are admitted strictly in that order: if the best one does not fit, no other overtakes it. So a request that has
aged waits only for those that run already and those that aged before it. Those that cannot run yet are passed by
(`queues.py`). Where one owner's requests have all places, some give way to another owner's (`shares.py`).

An adapter's place on the device is the one thing that others pass by: while a request waits for one, requests without
an adapter continue, because they need no such place, and requests with an adapter wait for their turn.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from kvern.adapters.places import AdapterPlaces
from kvern.cache.manager import KVCacheManager
from kvern.cache.shared_prompt import before_last_part
from kvern.drafting.room import Wanted, to_guess, to_verify
from kvern.engine.queues import Cause, Policy, RunningRequests, WaitingQueue, future_siblings
from kvern.engine.recorder import Recorder
from kvern.engine.rows import decode_token
from kvern.engine.shares import Lacking, Shares, by_owners
from kvern.engine.stages import decodes, in_turn
from kvern.engine.step_budget import StepBudget, StepTime
from kvern.engine.step_load import load_of
from kvern.request.record import Lack, Loss
from kvern.request.request import FinishReason, Request, State
from kvern.request.spans import cut, least, within
from kvern.request.step import BlockCopy, Fork, NewRequest, ScheduledTokens, SchedulerOutput

PREFETCHED = 4
"""So many waiting requests are looked at while they wait."""


LENGTHS = 64
"""The number of answers whose lengths are remembered."""


class PendingForks:
    """Forks that no step has carried out yet; at most one a row."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._forks: dict[int, tuple[Fork, Sequence[BlockCopy], Sequence[int]]] = {}

    def add(self, fork: Fork, copies: Sequence[BlockCopy] = (), blocks: Sequence[int] = ()) -> None:
        """Let a row fork; `blocks` are the last of its block table if they are not those of the other row."""
        self._forks[fork.slot] = fork, copies, blocks

    def cancel(self, slot: int) -> bool:
        """The row's request loses its place; whether what it was forked from has not been copied."""
        fork, *_ = self._forks.pop(slot, (None,))
        return fork is not None and fork.source != slot

    def tell(self, output: SchedulerOutput) -> None:
        """Let a step that was planned do it."""
        if not self._forks:
            return
        forks = self._forks.values()
        output.forked = [fork for fork, _, _ in forks]
        output.copies[:0] = [copied for _, copies, _ in forks for copied in copies]
        for fork, _, blocks in forks:
            if blocks:
                output.grown.append((fork.slot, fork.length // self._block_size, list(blocks)))
        self._forks.clear()


@dataclass(frozen=True)
class SchedulerLimits:
    """The options of EngineConfig that the scheduler obeys, resolved to numbers."""

    max_batch_tokens: int
    max_batch_requests: int
    aging_steps: int
    chunked_prefill: bool = True
    continuous: bool = True
    stages: int = 1


class Scheduler:
    """Owns the waiting and the running requests."""

    def __init__(self, limits: SchedulerLimits, cache: KVCacheManager, policy: Policy, adapter_places: int = 0) -> None:
        self.limits = limits
        self.cache = cache
        self.adapters = AdapterPlaces(adapter_places)
        self.running = RunningRequests(limits.max_batch_requests, policy, cache)
        self.waiting = WaitingQueue(policy, cache, self.running, limits.aging_steps)
        self.shares = Shares(self.running, policy, cache)
        self.forks = PendingForks(cache.block_size)
        self.step = 0
        self.preemption_count = 0
        self.recomputed_tokens = 0
        """The tokens that were computed again: of requests that lost their rows, or that another engine had."""
        self.blocked: Lack | None = None
        """The thing that the best waiting request lacked in the last step; None: none waits that could run."""
        self._recorder: Recorder | None = None
        self._batch_open = True  # a static batch takes requests until slots, blocks or the queue are exhausted
        self.by_id: dict[str, Request] = {}  # of all that have not ended
        self.lengths: deque[int] = deque(maxlen=LENGTHS)
        """The tokens of the last answers that have ended."""
        self._crowded: Request | None = None  # a span of its prompt has waited a step for a free budget
        self._awaited: set[Request] = set()  # waiting requests of which a step in flight samples something
        self._allowed: frozenset[str] | None = None
        self._wanted: Wanted | None = None

    def observe(self, recorder: Recorder) -> None:
        """Tell a recorder what becomes of requests."""
        self._recorder = self.waiting.recorder = recorder

    @property
    def has_work(self) -> bool:
        """Some request has not ended."""
        return bool(self.by_id)

    def get(self, request_id: str) -> Request | None:
        """The request of this id, unless it has ended."""
        return self.by_id.get(request_id)

    # Requests come, report and end

    def finish(
        self, request: Request, reason: FinishReason, stop_reason: int | str | None = None, *, keep_cached: bool = True
    ) -> None:
        """End a request, waiting or running, with all beams of its search; their blocks are free at once."""
        if request.state is State.FINISHED:
            return
        if self._recorder is not None:
            self._recorder.finished(request, reason)
        for member in [request] if request.search is None else request.search.requests:
            self.remove(member, keep_cached)
            member.answer.finish_reason = reason
            member.answer.stop_reason = stop_reason
            self.forget(member)
        if reason != "abort":
            self.lengths.append(request.output_length)

    def update(self, request: Request, token_ids: list[int], sampled: int, unused: int = 0) -> bool:
        """Append the kept tokens of `sampled` ones, without `unused` ones after a stop; returns whether it is full."""
        request.token_ids.extend(token_ids)
        request.in_flight -= sampled
        if sampled > 1:
            request.drafts.in_flight -= sampled - 1
        if request.state is State.RUNNING:
            if sampled > 1:
                request.num_computed_tokens -= sampled - len(token_ids) - unused
            self.cache.publish(request, self.step)
        else:
            self._settle(request)
        return request.output_length >= request.max_tokens

    def hold(self, request: Request) -> None:
        """Holds a beam whose candidates have arrived."""
        assert request.search is not None
        request.in_flight -= 1
        request.search.held.add(request)
        self._settle(request)

    def go_on(self, request: Request, token_id: int) -> None:
        """Let a held beam compute the token that was chosen to follow it."""
        assert request.search is not None
        request.token_ids.append(token_id)
        request.search.held.discard(request)
        self.running.branched(request)
        self.waiting.wake(request)

    def _settle(self, request: Request) -> None:
        """Nothing of a waiting request may be in flight any more."""
        if not request.in_flight and request in self._awaited:
            self._awaited.remove(request)
            self.waiting.wake(request)

    # Steps

    def schedule(self, time: StepTime | None = None, wanted: Wanted | None = None, begin: int = 1) -> SchedulerOutput:
        """Plan the next step, of this `time` if decodes are in it; empty when nothing can run before one returns.

        `wanted` says how many drafts of a request the device should guess; None: none. `begin`: see `in_turn`.
        """
        self.step += 1
        if self.shares.has_lacking:
            for request in self.shares.giving_way(self.step):
                self._preempt(request)
        self._wanted, preempted = wanted, self.preemption_count
        output = SchedulerOutput(self.step)
        self.waiting.loaded(self.cache.ready())
        self.waiting.age(self.step)
        budget = self._schedule_running(output, time, begin)
        self.blocked = "blocks" if self.waiting.has_ready else None
        if self.preemption_count == preempted:
            self.blocked = self._admit(output, budget)
            while not output.scheduled and self._make_room():
                self.blocked = self._admit(output, budget)
            if self.waiting and self._allowed is None and self.cache.prefetches:
                self._prefetch()
        if output.scheduled:
            self.forks.tell(output)
        self.cache.plan(output)
        if output.drafts or wanted is not None:  # single tokens first: they are attended to by kernels of their own
            pairs = sorted(zip(output.scheduled, output.request_ids, strict=True), key=lambda pair: pair[0].count > 1)
            output.scheduled, output.request_ids = [item for item, _ in pairs], [name for _, name in pairs]
        return output

    def undo(self, step: int) -> None:
        """The steps from `step` on did not happen, though they were planned: all that run lose their places."""
        for request in list(self.running):
            self._preempt(request, "undone")
        for request in self._awaited:
            request.in_flight = request.drafts.in_flight = 0
            self.waiting.wake(request)
        self._awaited.clear()
        self.cache.undo(step, list(self.waiting))
        self.waiting.loaded(self.waiting)
        self.adapters.clear()

    def resize(self, chunks: int) -> int:
        """Let the KV cache have so many chunks of memory, or more if others are in use; returns how many.

        No step is in flight. Requests with blocks in others lose their places, and all of their unit.
        """
        units = {request.unit for request in self.cache.beyond(chunks, self.running)}
        for request in [one for one in self.running if one.unit in units]:
            self._preempt(request)
        return self.cache.resize(chunks)

    def renew(self, keep: bool) -> None:
        """Later steps compute with other weights; none is in flight.

        Running requests `keep` what they have, which no other may use then, or lose their places. No request finds what
        is cached, since its namespace changes.
        """
        if keep:
            self.cache.keep(self.running)
        else:
            for request in list(self.running):
                self._preempt(request, "weights")
        self.waiting.loaded(self.cache.renew())

    def restrict(self, units: frozenset[str] | None) -> None:
        """Let only requests of these units run; None: all. Others that do are preempted."""
        self._allowed = units
        if units is None:
            self.waiting.wake_all()
            return
        for request in list(self.running):
            if request.unit not in units:
                self._preempt(request, "undone")
        for unit in units:
            self.waiting.wake(unit)

    def _schedule_running(self, output: SchedulerOutput, time: StepTime | None, begin: int) -> StepBudget:
        """Returns what is left of the budget."""
        crowded, self._crowded = self._crowded, None
        kept = 0 if crowded is None or crowded.state is State.FINISHED else self._least(crowded)[1]
        tokens, behind = self.limits.max_batch_tokens - kept, list[Request]()
        plain = self._wanted is None and not self.cache.counts_tokens
        for request in in_turn(self.running, self.limits.stages, begin):
            if plain and tokens > 0 and decode_token(request, output, self.cache.block_size):
                tokens -= 1
                continue
            remaining = request.remaining_tokens
            if remaining > 1 or (remaining and request.is_before_image):
                behind.append(request)
            elif remaining == 1 <= tokens:
                drafted = request.drafts.token_ids or request.drafts.guesses
                verified = self._verify(request, tokens - len(self.running), output) if drafted else 0
                tokens -= verified or self._advance(request, 1, 1, output)
        budget = StepBudget(tokens + kept, self.limits.chunked_prefill)
        encodes = self.cache.is_loading
        waits = behind or encodes or (self.waiting and self.running.free_rows)
        if time is not None and waits and decodes(output, self.running, self.limits.stages):
            budget.limit(time, load_of(output.scheduled))
        if encodes:
            output.encoding = budget.encode(self.cache.encode)
        if crowded is not None and crowded in behind:
            behind.remove(crowded)
            self._advance_prompt(crowded, budget, output)
        elif kept:
            self._admit(output, budget)
        if behind and self.limits.continuous and self.waiting.has_owners(self.running.rows):
            self._admit(output, budget, new_owners=True)
        for request in by_owners(behind, self.step):
            self._advance_prompt(request, budget, output)
        return budget

    def _advance_prompt(self, request: Request, budget: StepBudget, output: SchedulerOutput) -> None:
        """Compute some of a running request's prompt."""
        start, count = request.num_computed_tokens, self._chunk(request, budget)
        count = self._advance(request, request.remaining_tokens, count, output)
        self._note_again(request, start, count)
        budget.take(start, count)

    def _note_again(self, request: Request, start: int, count: int) -> None:
        """Count those of these tokens that were computed before."""
        self.recomputed_tokens += max(0, min(start + count, request.queue.reached) - start)

    def _chunk(self, request: Request, budget: StepBudget) -> int:
        """Returns how much of a prompt the step computes: whole spans; one that does not fit is first in the next."""
        start, fewest = self._least(request)
        until = self.cache.until(request)
        if not until:
            return 0
        if request.spec.tells_parts and self.cache.tells_parts:
            until = min(until, before_last_part(request.remaining_tokens))
        until = max(until, fewest)
        count = budget.chunk(start, request.remaining_tokens, until, fewest)
        if not count and fewest > 1 and self._crowded is None:
            self._crowded = request
        return cut(request.spec.prompt.spans, start + count) - start

    def _least(self, request: Request) -> tuple[int, int]:
        """Returns where a prompt goes on, and the fewest tokens that a step computes from there."""
        spans, start = request.spec.prompt.spans, request.num_computed_tokens
        if spans and request.state is not State.RUNNING:
            start = self.cache.cached_tokens(request, self.step)
        return start, least(spans, start)

    def _advance(self, request: Request, remaining: int, count: int, output: SchedulerOutput) -> int:
        """Compute `count` of a running request's tokens, if it has not been preempted; how many are computed."""
        if request.state is not State.RUNNING or request.output_length + request.in_flight >= request.max_tokens:
            return 0
        if not count or not self._extend(request, count, output):
            return 0
        self._take(request, count, int(count == remaining), output)
        return count

    def _verify(self, request: Request, spare: int, output: SchedulerOutput) -> int:
        """Compute a decode's next token and the drafts for which there is room; returns how many are computed."""
        count, drafts = to_verify(request, self.cache, len(self.running), spare)
        if not count:
            return 0
        if drafts:
            output.drafts.append((request.slot, request.num_computed_tokens + 1, drafts))
        self._extend(request, 1 + count, output)
        self._take(request, 1 + count, 1 + count, output)
        return 1 + count

    def _extend(self, request: Request, count: int, output: SchedulerOutput) -> bool:
        """Make room for more tokens, if need be that of the worst that are not in this step; whether it was found."""
        known, tokens = len(request.block_ids), request.num_computed_tokens + count
        while (blocks := self.cache.extend(request, tokens)) is None:
            victim = self.shares.worst({item.slot for item in output.scheduled})
            self._preempt(victim)
            if victim is request:
                return False
        if blocks:
            output.grown.append((request.slot, known, blocks))
            self.running.grew(request)
        return True

    def _admit(self, output: SchedulerOutput, budget: StepBudget, new_owners: bool = False) -> Lack | None:
        """Let waiting requests run, best first; with `new_owners` only those of owners with nothing running.

        Returns what the best that stays lacks.
        """
        self._batch_open = self.limits.continuous or self._batch_open or not self.running
        if not self._batch_open:
            return "batch" if self.waiting.has_ready else None
        lack = self._fill(output, budget, new_owners)
        self._batch_open = budget.spent and bool(self.waiting and self.running.free_rows)
        return lack

    def _fill(self, output: SchedulerOutput, budget: StepBudget, new_owners: bool) -> Lack | None:
        rows, adapters_free = self.running.free_rows - self.running.promised_rows, True
        looks = rows > 0 or self.waiting.has_owners(self.running.rows)
        if budget.tokens > 0 and looks:
            self.waiting.refresh()
        while budget.tokens > 0 and looks:
            request = self.waiting.best(adapters_free)
            if request is None:
                return None if adapters_free else "adapter"
            if (cause := self._cause(request)) is not None:
                self.waiting.park(request, cause)
                continue
            if new_owners and not self.shares.is_new(request):
                return None  # it is asked again, without `new_owners`, in the same step
            if request.adapter is not None and not self.adapters.fits(request.adapter):
                self.shares.lacks(Lacking(request, adapter=True))
                adapters_free = False
                continue
            if rows <= future_siblings(request):
                self.shares.lacks(Lacking(request, rows=1 + future_siblings(request) - rows))
                return "rows"
            if not budget.holds(len(request.token_ids)):
                return "budget"
            reserve = 0 if self.shares.is_new(request) else self.running.reserved_blocks
            if self._allowed is None and self.cache.lookup(request, self.step, reserve):
                request.state = State.LOADING
                continue
            if self.cache.awaits(request, self.step):
                request.state = State.ENCODING
                continue
            if not budget.takes(*self._least(request)):
                self._crowded = self._crowded or request
                return "budget"
            copies = self.cache.admit(request, self.step, reserve)
            if copies is None:
                if not self.cache.promised:  # else it only waits for others' loads
                    self.shares.lacks(Lacking(request, blocks=self.cache.blocks_for(len(request.token_ids))))
                return "blocks"
            self.waiting.remove(request)
            adapter_index, load = self.enter(request)
            rows -= 1 + future_siblings(request)
            if load and request.adapter is not None:
                output.adapters.append((adapter_index, request.adapter))
            output.copies += copies
            output.joined.append(_joined(request, adapter_index))
            start, remaining = request.num_computed_tokens, request.remaining_tokens
            request.drafts.read_tokens = start
            count = self._chunk(request, budget)
            self._take(request, count, int(count == remaining), output)
            self._note_again(request, start, count)
            budget.take(start, count)
        if not self.waiting.has_ready:
            return None
        return "rows" if rows <= 0 else "budget"

    def _prefetch(self) -> None:
        """Bring prefixes of the requests that are admitted next, as far as blocks are free beside those before them."""
        before = [request for request in self.running if request.remaining_tokens > 1]
        reserve = self.running.reserved_blocks
        for request in self.waiting.first(PREFETCHED):
            if self._cause(request) is not None:
                continue
            ahead = partial(self._spans, list(before))
            if self.cache.prefetch(request, self.step, reserve, ahead):
                request.state = State.LOADING
                self.waiting.park(request, request)
            before.append(request)
            reserve += self.cache.blocks_for(len(request.token_ids))

    def _spans(self, requests: Sequence[Request]) -> list[tuple[int, int]]:
        """The tokens of requests that are still to be computed."""
        return [
            (
                request.num_computed_tokens
                if request.state is State.RUNNING
                else self.cache.cached_tokens(request, self.step),
                len(request.token_ids),
            )
            for request in requests
        ]

    def _cause(self, request: Request) -> Cause | None:
        """Why a waiting request cannot run: some of its input is still on its way, or it may not."""
        if request.in_flight or request.is_held or request.state in (State.LOADING, State.ENCODING):
            return request
        if request.leader is not None and not request.leader.prompt_scheduled:
            return request.leader
        return None if self._allowed is None or request.unit in self._allowed else request.unit

    def _take(self, request: Request, count: int, sampled: int, output: SchedulerOutput) -> None:
        start = request.num_computed_tokens
        uncertain = request.drafts.in_flight > 0
        guesses = 0
        if self._wanted is not None or request.drafts.guesses:
            wanted = 0 if self._wanted is None else self._wanted(request)
            guesses = to_guess(request, self.cache, len(self.running), wanted, count, sampled)
            if sampled and guesses:  # who guesses keeps keys, too
                self._extend(request, count + 1 + guesses, output)
        spans = within(request.spec.prompt.spans, start, start + count)
        output.scheduled.append(ScheduledTokens(request.slot, start, count, sampled, uncertain, guesses, spans))
        output.request_ids.append(request.request_id)
        request.num_computed_tokens = start + count
        request.in_flight += sampled
        if sampled > 1:
            request.drafts.in_flight += sampled - 1
        self.cache.publish(request, self.step)
        if start < request.prompt_length and request.prompt_scheduled:
            self.waiting.wake(request)

    # Places

    def register(self, request: Request) -> None:
        """Know a request from now on, which neither runs nor waits yet. Raises ValueError for an id that is in use."""
        if request.request_id in self.by_id:
            raise ValueError(f"request id {request.request_id!r} is in use")
        self.by_id[request.request_id] = request
        self.adapters.register(request.adapter)
        self.cache.register(request)

    def forget(self, request: Request) -> None:
        """A request that neither runs nor waits any more has ended."""
        request.state = State.FINISHED
        del self.by_id[request.request_id]
        self.adapters.unregister(request.adapter)
        self.cache.forget(request)
        self.waiting.wake(request)

    def exchange_ids(self, one: Request, other: Request) -> None:
        """Let two requests be known by each other's id."""
        one.request_id, other.request_id = other.request_id, one.request_id
        self.by_id[one.request_id], self.by_id[other.request_id] = one, other

    def enter(self, request: Request) -> tuple[int, bool]:
        """Give a row to a request that has blocks and whose adapter, if it has one, finds a place.

        Returns where the adapter is (-1: there is none), and whether it must be loaded.
        """
        self.running.enter(request)
        self.cache.placed(request)
        if self._recorder is not None:
            self._recorder.entered(request)
        request.queue.running_since = self.step
        if request.prompt_scheduled:
            self.waiting.wake(request)
        return (-1, False) if request.adapter is None else self.adapters.enter(request.adapter)

    def remove(self, request: Request, keep_cached: bool = True) -> None:
        """Let a request neither run nor wait. What it has computed stays cached, or what is in the tree already."""
        if request.state is not State.RUNNING:
            self.waiting.remove(request)
            self._awaited.discard(request)
            return
        if self.forks.cancel(request.slot):
            self.cache.retract(request)
        self.running.leave(request)
        if self._recorder is not None:
            self._recorder.left(request)
        if request.adapter is not None:
            self.adapters.leave(request.adapter)
        if keep_cached:
            self.cache.free(request, self.step)
        else:
            self.cache.drop(request)

    def requeue(self, request: Request) -> None:
        """Let a request wait that has run."""
        request.state = State.WAITING
        request.queue.preemptions += 1
        if request.in_flight:
            self._awaited.add(request)
        self.waiting.add(request, self.step)

    def _preempt(self, request: Request, loss: Loss = "preempted") -> None:
        """Let a running request wait."""
        request.queue.reached = max(request.queue.reached, request.num_computed_tokens)
        self.remove(request)
        if self._recorder is not None:
            self._recorder.preempted(request, loss)
        self.preemption_count += 1
        self.requeue(request)

    def _make_room(self) -> bool:
        """Preempt the worst running request if beams are held that wait for others to be admitted; whether it did."""
        if self._awaited or not self.running or not all(request.is_held for request in self.running):
            return False
        self._preempt(next(reversed(self.running)))
        return True

    def check_integrity(self) -> None:
        """Raise AssertionError if a request is lost, a slot is shared, or a block is unaccounted for."""
        alive = [*self.waiting, *self.running]
        assert set(self.by_id.values()) == set(alive), "a request is lost"
        assert all(request.state is not State.RUNNING and not request.block_ids for request in self.waiting)
        assert self._awaited == {request for request in self.waiting if request.in_flight}
        adapters = sorted(request.adapter for request in alive if request.adapter is not None)
        assert sorted(self.adapters.users.elements()) == adapters, "the users of adapters do not add up"
        self.waiting.check_integrity(self._cause)
        self.running.check_integrity()
        loading = [request for request in self.waiting if request.state in (State.LOADING, State.ENCODING)]
        self.cache.check_integrity(list(self.running), loading)
        self.adapters.check_integrity([request.adapter for request in self.running if request.adapter is not None])


def _joined(request: Request, adapter_index: int) -> NewRequest:
    """The message that a request with a row and blocks joins the batch."""
    return NewRequest(
        request.slot,
        request.spec,
        request.params,
        request.seed,
        list(request.token_ids),
        list(request.block_ids),
        adapter_index,
        request.num_computed_tokens,
    )
