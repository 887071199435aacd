"""Decides what each step computes. No torch, no clock: the same calls give the same decisions.

There are no phases. Every request has tokens, and some of them are computed; a step lets computed tokens catch up,
under a budget. A decode is one token behind, a prompt is many, a preempted request is all of them.

    schedule():  1. running requests that are one token behind (decode), best first
                 2. running requests that are further behind (prefill), with what is left of the budget
                 3. waiting requests, best first, while there are slots, blocks and budget
    When blocks run out in 1 or 2, the worst running request is preempted: its blocks go, its tokens stay.

The beams of a search are requests like others. Each is held when its step has come back, until those of all have; then
`branch` lets some go on and others take their places. What a beam has reported outlives its blocks, so beams that find
no room at the same time are computed one after the other.

Best first means: aged requests first, then the policy's key, then turn, then arrival. Waiting requests are admitted
strictly in that order: if the best one does not fit, nobody overtakes it. So a request that has aged waits only for
those that run already and those that aged before it.

An adapter's place on the device is the one thing that others pass by: while a request waits for one, requests without
an adapter go on, as they take no such place, and requests with an adapter wait behind it.
"""

import copy
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from kvern.adapters.slots import AdapterSlots
from kvern.cache.manager import KVCacheManager
from kvern.engine.policy import PolicyKey, first_come
from kvern.request import FinishReason, Request, State
from kvern.step import BlockCopy, Fork, NewRequest, ScheduledTokens, SchedulerOutput


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
        self._forks: dict[int, tuple[Fork, list[BlockCopy]]] = {}  # by slot: what the next step does before all else
        self._names = 0
        self._allowed: Container[str] | None = None

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
        """End a request, waiting or running, with all beams of its search; their blocks are free at once."""
        if request.state is State.FINISHED:
            return
        for member in [request] if request.beams is None else request.beams.requests:
            self._end(member, reason, stop_reason)

    def _end(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
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
            while not output.scheduled and self._make_room():
                self._admit(output)
        if output.scheduled:
            forks = self._forks.values()
            output.forked = [fork for fork, _ in forks]
            output.copies[:0] = [copied for _, copies in forks for copied in copies]
            output.grown[:0] = [
                (fork.slot, fork.length // self.cache.block_size, [copied.target])
                for fork, copies in forks
                for copied in copies
            ]
            self._forks = {}
        return output

    def undo(self, step: int) -> None:
        """The steps from `step` on did not happen, though they were planned: all that run lose their places."""
        for request in list(self.running):
            self._preempt(request)
        for request in self.waiting:
            request.in_flight = 0
        self.cache.tree.forget_since(step)
        self.adapters.clear()

    def restrict(self, units: Container[str] | None) -> None:
        """Let only requests of these units run; None: all. Others that do are preempted."""
        self._allowed = units
        for request in list(self.running):
            if units is not None and request.unit not in units:
                self._preempt(request)

    def update(self, request: Request, token_id: int) -> bool:
        """Append a sampled token that has arrived; whether the request has reached its length."""
        request.token_ids.append(token_id)
        request.in_flight -= 1
        if request.state is State.RUNNING:
            self.cache.publish(request, self.step)
        return request.output_length >= request.max_tokens

    def hold(self, request: Request) -> None:
        """What may follow a beam has arrived."""
        request.in_flight -= 1
        request.held = True

    def branch(self, members: Sequence[Request], children: Sequence[tuple[Request, int]]) -> list[Request]:
        """Let the held beams `members` go on as `children`: each a member and the token behind it.

        A member's first child is itself; the others take the places of members without children, or new ones. Those
        for which there is no room wait. Returns one request for each child.
        """
        parents = {parent for parent, _ in children}
        spare = [member for member in members if member not in parents]
        for member in reversed(spare):
            self._detach(member)
        went_on: set[Request] = set()
        requests = []
        for parent, token_id in children:
            if parent in went_on:
                child = spare.pop(0) if spare else self._sibling(parent)
                self._fork(parent, child, token_id)
                requests.append(child)
            else:
                went_on.add(parent)
                requests.append(parent)
        for parent, token_id in children:
            if parent in went_on:
                went_on.remove(parent)
                if parent.state is State.RUNNING:
                    fork = Fork(parent.slot, parent.slot, len(parent.token_ids), token_id)
                    self._forks[parent.slot] = fork, []
                parent.token_ids.append(token_id)
                parent.held = False
        for member in spare:
            self._retire(member, requests[0])
        return requests

    def _fork(self, parent: Request, child: Request, token_id: int) -> None:
        """Let `child`, which neither runs nor waits, go on behind `parent`."""
        child.token_ids = [*parent.token_ids, token_id]
        child.held = False
        copies = self.cache.fork(parent, child) if parent.state is State.RUNNING and self._free_slots else None
        if copies is None:
            self._wait(child)
            return
        child.state, child.slot = State.RUNNING, self._free_slots.pop()
        self.running.append(child)
        if child.adapter is not None:
            self.adapters.enter(child.adapter)  # its parent runs: the adapter has its place
        self._forks[child.slot] = Fork(child.slot, parent.slot, len(parent.token_ids), token_id), copies

    def _sibling(self, parent: Request) -> Request:
        """One more beam of the same search; it reports nothing of the prompt, which its first beam computes."""
        sibling = copy.copy(parent)
        sibling.request_id = f"{parent.request_id}/{self._names}"
        self._names += 1
        sibling.params = parent.params.replace(prompt_logprobs=None)
        sibling.block_ids, sibling.nodes, sibling.num_computed_tokens, sibling.slot = [], [], 0, -1
        self._by_id[sibling.request_id] = sibling
        self.cache.register(sibling)
        return sibling

    def _detach(self, request: Request) -> None:
        """Take the place of a beam that nothing follows."""
        if request.state is State.RUNNING:
            self.running.remove(request)
            self._free_slots.append(request.slot)
            request.slot = -1
            if request.adapter is not None:
                self.adapters.leave(request.adapter)
            self.cache.drop(request)
        else:
            self.waiting.remove(request)

    def _retire(self, request: Request, heir: Request) -> None:
        """End a beam that was detached. The search keeps the name by which it is known outside."""
        assert request.beams is not None
        if request.request_id == request.beams.name:
            request.request_id, heir.request_id = heir.request_id, request.request_id
            self._by_id[heir.request_id] = heir
        del self._by_id[request.request_id]
        request.state = State.FINISHED
        self.cache.forget(request)

    def _make_room(self) -> bool:
        """Preempt the worst running request if beams are held that wait for others to be admitted; whether it did."""
        waiting = any(request.in_flight for request in self.waiting)
        if waiting or not self.running or not all(request.held for request in self.running):
            return False
        self._preempt(self._ordered(self.running)[-1])
        return True

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
            blocks = self.cache.extend(request, request.num_computed_tokens + count)
            while blocks is None and request in pending:
                victim, _ = pending.popitem()
                self._preempt(victim)
                preempted = True
                if victim is not request:
                    blocks = self.cache.extend(request, request.num_computed_tokens + count)
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
        slots = len(self._free_slots) - sum(_future_siblings(request) for request in self.running)
        for request in self._ordered(self.waiting) if slots > 0 and budget > 0 else ():
            if not self._can_run(request):
                continue
            if budget <= 0 or slots <= _future_siblings(request):
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
            slots -= 1 + _future_siblings(request)
            reserve += self._needs_more_blocks(request)
            output.copies += copies
            output.joined.append(self._joining(request, output))
            count = self._chunk(request, budget)
            self._take(request, count, output)
            budget -= count
        self._batch_open = budget <= 0 and bool(self.waiting and self._free_slots)

    def _can_run(self, request: Request) -> bool:
        """None of its input is still on its way, and it may run."""
        if request.in_flight or request.held or (request.leader is not None and not request.leader.prompt_scheduled):
            return False
        return self._allowed is None or request.unit in self._allowed

    def _joining(self, request: Request, output: SchedulerOutput) -> NewRequest:
        adapter_slot = -1
        if request.adapter is not None:
            adapter_slot, load = self.adapters.enter(request.adapter)
            if load:
                output.adapters.append((adapter_slot, request.adapter))
        return NewRequest.of(request, adapter_slot)

    def _needs_more_blocks(self, request: Request) -> int:
        """Blocks that admission leaves for a running request, lest it be preempted for the newcomer."""
        grows = self.cache.blocks_for(request.prompt_length + request.max_tokens) > len(request.block_ids)
        return grows + _future_siblings(request)

    def _chunk(self, request: Request, budget: int) -> int:
        """How many of the request's tokens this step can compute."""
        remaining = request.remaining_tokens
        if remaining <= budget:
            return remaining
        return budget if self.limits.chunked_prefill else 0

    def _take(self, request: Request, count: int, output: SchedulerOutput) -> None:
        sample = count == request.remaining_tokens
        output.scheduled.append(ScheduledTokens(request.slot, request.num_computed_tokens, count, sample))
        output.request_ids.append(request.request_id)
        request.num_computed_tokens += count
        request.in_flight += sample
        self.cache.publish(request, self.step)

    def _preempt(self, request: Request) -> None:
        self._leave(request)
        self.preemption_count += 1
        self._wait(request)

    def _wait(self, request: Request) -> None:
        """Queue a request that has run."""
        request.state = State.WAITING
        request.preemptions += 1
        request.waiting_since = self.step
        self.waiting.append(request)

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self._free_slots.append(request.slot)
        if self._forks.pop(request.slot, (None, []))[1]:  # the head of its last block was not copied yet
            request.num_computed_tokens -= request.num_computed_tokens % self.cache.block_size
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
            assert request.state is State.RUNNING and request.num_computed_tokens > 0
            assert len(request.block_ids) >= self.cache.blocks_for(request.num_computed_tokens), "tokens without blocks"
        assert all(request.state is State.WAITING and not request.block_ids for request in self.waiting)
        self.cache.check_integrity(self.running)
        self.adapters.check_integrity([request.adapter for request in self.running if request.adapter is not None])


def _future_siblings(request: Request) -> int:
    """Rows that a search will take when its prompt is computed."""
    if request.beams is None or request.output_length:
        return 0
    return request.beams.width - 1
