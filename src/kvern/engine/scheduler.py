"""Decides what each step computes. No torch, no clock: the same calls give the same decisions.

There are no phases. Every request has tokens, and some of them are computed; a step lets computed tokens catch up,
under a budget. A decode is one token behind, a prompt is many, a preempted request is all of them.

    schedule():  1. running requests that are one token behind (decode), best first
                 2. running requests that are further behind (prefill), with what is left of the budget
                 3. waiting requests, best first, while there are slots, blocks and budget
    When blocks run out in 1 or 2, the worst running request is preempted: its blocks go, its tokens stay.

Best first means: aged requests first, then the policy's key, then turn, then arrival. Waiting requests are admitted
strictly in that order: if the best one does not fit, nobody overtakes it. So a request that has aged waits only for
those that run already and those that aged before it.

An adapter's place on the device is the one thing that others pass by: while a request waits for one, requests without
an adapter go on, as they take no such place, and requests with an adapter wait behind it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kvern.adapters.slots import AdapterSlots
from kvern.cache.manager import KVCacheManager
from kvern.engine.policy import PolicyKey, first_come
from kvern.request import FinishReason, Request, State
from kvern.step import NewRequest, ScheduledTokens, SchedulerOutput


@dataclass(frozen=True)
class SchedulerLimits:
    """The options of EngineConfig that the scheduler obeys, resolved to numbers."""

    max_batch_tokens: int
    max_batch_requests: int
    aging_steps: int
    chunked_prefill: bool = True
    continuous: bool = True


class Scheduler:
    """Owns the waiting and the running requests."""

    def __init__(
        self, limits: SchedulerLimits, cache: KVCacheManager, policy: PolicyKey, adapter_slots: int = 0
    ) -> None:
        self.limits = limits
        self.cache = cache
        self.adapters = AdapterSlots(adapter_slots)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.step = 0
        self.preemption_count = 0
        self._batch_open = True  # a static batch takes requests until slots, blocks or the queue are exhausted
        self._policy = policy
        self._arrivals = 0
        self._free_slots = list(range(limits.max_batch_requests - 1, -1, -1))
        self._by_id: dict[str, Request] = {}

    @property
    def has_work(self) -> bool:
        """Some request has not ended."""
        return bool(self.waiting or self.running)

    def get(self, request_id: str) -> Request | None:
        """The request of this id, unless it has ended."""
        return self._by_id.get(request_id)

    def running_request(self, request_id: str) -> Request:
        """A request that a step was just planned for."""
        return self._by_id[request_id]

    def uses_adapter(self, key: int) -> bool:
        """Whether some request that has not ended uses the adapter."""
        return any(request.adapter == key for request in self._by_id.values())

    def add(self, request: Request) -> None:
        """Queue a new request."""
        if request.request_id in self._by_id:
            raise ValueError(f"request id {request.request_id!r} is in use")
        request.arrival = self._arrivals
        self._arrivals += 1
        request.waiting_since = self.step
        self._by_id[request.request_id] = request
        self.cache.register(request)
        self.waiting.append(request)

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """End a request, waiting or running; its blocks are free at once."""
        if request.state is State.FINISHED:
            return
        if request.state is State.RUNNING:
            self._leave(request)
        else:
            self.waiting.remove(request)
        request.state = State.FINISHED
        request.finish_reason, request.stop_reason = reason, stop_reason
        del self._by_id[request.request_id]
        self.cache.forget(request)

    def schedule(self) -> SchedulerOutput:
        """Plan the next step; empty when nothing can run before a step in flight returns."""
        self.step += 1
        output = SchedulerOutput(self.step)
        preempted = self._schedule_running(output)
        if not preempted:
            self._admit(output)
        return output

    def update(self, request: Request, token_id: int) -> bool:
        """Append a sampled token that has arrived; whether the request has reached its length."""
        request.token_ids.append(token_id)
        request.in_flight -= 1
        if request.state is State.RUNNING:
            self.cache.publish(request, self.step)
        return request.output_length >= request.max_tokens

    def _schedule_running(self, output: SchedulerOutput) -> bool:
        preempted = False
        budget = self.limits.max_batch_tokens
        order = self._ordered(self.running)
        pending = dict.fromkeys(order)  # not yet scheduled in this step, best first: those that may be preempted
        for request in sorted(order, key=lambda request: request.remaining_tokens > 1):
            if request not in pending or request.output_length + request.in_flight >= request.max_tokens:
                continue
            count = self._chunk(request, budget)
            if count == 0:
                continue
            known = len(request.block_ids)
            blocks = self.cache.extend(request, request.computed_tokens + count)
            while blocks is None and request in pending:
                victim, _ = pending.popitem()
                self._preempt(victim)
                preempted = True
                if victim is not request:
                    blocks = self.cache.extend(request, request.computed_tokens + count)
            if blocks is None:
                continue
            del pending[request]
            if blocks:
                output.grown.append((request.slot, known, blocks))
            self._take(request, count, output)
            budget -= count
        return preempted

    def _admit(self, output: SchedulerOutput) -> None:
        budget = self.limits.max_batch_tokens - output.token_count
        self._age()
        self._batch_open = self.limits.continuous or self._batch_open or not self.running
        if not self._batch_open:
            return
        adapters_full = False
        reserve = sum(self._needs_more_blocks(request) for request in self.running)
        for request in self._ordered(self.waiting) if self._free_slots and budget > 0 else ():
            if request.in_flight or (request.leader is not None and not request.leader.prompt_scheduled):
                continue  # its next input is still on its way
            if budget <= 0 or not self._free_slots:
                break
            if not self.limits.chunked_prefill and len(request.token_ids) > budget:
                budget = 0
                break
            adapter = request.adapter
            adapters_full = adapters_full or (adapter is not None and not self.adapters.fits(adapter))
            if adapters_full and adapter is not None:
                continue
            copies = self.cache.admit(request, self.step, reserve)
            if copies is None:
                break
            self.waiting.remove(request)
            request.state, request.slot = State.RUNNING, self._free_slots.pop()
            self.running.append(request)
            reserve += self._needs_more_blocks(request)
            output.copies += copies
            output.joined.append(self._joining(request, output))
            count = self._chunk(request, budget)
            self._take(request, count, output)
            budget -= count
        self._batch_open = budget <= 0 and bool(self.waiting and self._free_slots)

    def _joining(self, request: Request, output: SchedulerOutput) -> NewRequest:
        adapter_slot = -1
        if request.adapter is not None:
            adapter_slot, load = self.adapters.enter(request.adapter)
            if load:
                output.adapters.append((adapter_slot, request.adapter))
        return NewRequest(
            slot=request.slot,
            token_ids=list(request.token_ids),
            prompt_length=request.prompt_length,
            params=request.params,
            seed=request.seed,
            stop_token_ids=request.stop_token_ids,
            bad_word_ids=request.bad_word_ids,
            block_ids=list(request.block_ids),
            grammar=request.grammar,
            adapter_slot=adapter_slot,
            embed=request.embed,
        )

    def _needs_more_blocks(self, request: Request) -> bool:
        """Admission leaves one block for each such request, lest it be preempted for the newcomer."""
        return self.cache.blocks_for(request.prompt_length + request.max_tokens) > len(request.block_ids)

    def _chunk(self, request: Request, budget: int) -> int:
        """How many of the request's tokens this step can compute."""
        remaining = request.remaining_tokens
        if remaining <= budget:
            return remaining
        return budget if self.limits.chunked_prefill else 0

    def _take(self, request: Request, count: int, output: SchedulerOutput) -> None:
        sample = count == request.remaining_tokens
        output.scheduled.append(ScheduledTokens(request.slot, request.computed_tokens, count, sample))
        output.request_ids.append(request.request_id)
        request.computed_tokens += count
        request.in_flight += sample
        self.cache.publish(request, self.step)

    def _preempt(self, request: Request) -> None:
        self._leave(request)
        request.state = State.WAITING
        request.preemptions += 1
        request.waiting_since = self.step
        self.preemption_count += 1
        self.waiting.append(request)

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self._free_slots.append(request.slot)
        request.slot = -1
        if request.adapter is not None:
            self.adapters.leave(request.adapter)
        self.cache.free(request, self.step)

    def _age(self) -> None:
        if self._policy is first_come:
            return  # it starves nobody, and users keep sharing by turns
        for request in self.waiting:
            request.aged = request.aged or self.step - request.waiting_since >= self.limits.aging_steps

    def _ordered(self, requests: Iterable[Request]) -> list[Request]:
        def key(request: Request) -> tuple[bool, float, int, int]:
            policy = 0 if request.aged else self._policy(request, self.cache)
            return not request.aged, policy, request.turn, request.arrival

        return sorted(requests, key=key)

    def check_integrity(self) -> None:
        """Raise AssertionError if a request is lost, a slot is shared, or a block is unaccounted for."""
        slots = [request.slot for request in self.running]
        assert sorted(slots + self._free_slots) == list(range(self.limits.max_batch_requests)), "slots do not add up"
        assert set(self._by_id.values()) == {*self.waiting, *self.running}, "a request is lost"
        for request in self.running:
            assert request.state is State.RUNNING and request.computed_tokens > 0
            assert len(request.block_ids) >= self.cache.blocks_for(request.computed_tokens), "tokens without blocks"
        assert all(request.state is State.WAITING and not request.block_ids for request in self.waiting)
        self.cache.check_integrity(self.running)
        self.adapters.check_integrity([request.adapter for request in self.running if request.adapter is not None])
