"""The real core, scheduler and cache around a simulated device, with all that must hold at every step."""

import itertools
import math
import random
from collections.abc import Container, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from kvern.cache.states import StatePool
from kvern.cache.windows import WindowedBlocks
from kvern.engine.core import EngineCore
from kvern.engine.core_timing import CoreTiming
from kvern.engine.pace import Pace
from kvern.engine.queues import AGED, POLICIES
from kvern.engine.recorder import Recorder
from kvern.engine.scheduler import Scheduler
from kvern.engine.step_costs import StepCosts
from kvern.engine.step_load import StepLoad
from kvern.planning.estimate import StepFactors
from kvern.planning.hardware import CARDS
from kvern.request.events import TokenEvent
from kvern.request.request import FinishReason, PromptInput, Request, RequestSpec, State
from kvern.request.sampling_params import SamplingParams
from kvern.request.step import (
    ModelRunnerOutput,
    SchedulerOutput,
)
from tests.support.simulated_device import (
    STOP_TOKEN,
    VOCABULARY,
    Setup,
    SimulatedDevice,
    extend_key,
    first_key,
    in_table,
    sampled_token,
)
from tests.support.simulated_records import RecordChecks
from tests.support.simulated_search import searched_answers
from tests.support.simulated_tier import SimulatedTier
from tests.support.speculation import AnyLength

LONG_ENOUGH = 3000
"""Steps after which anything that these tests start must have ended."""


@dataclass
class Heard:
    """The events about one request."""

    tokens: list[int] = field(default_factory=list)
    prompt_positions: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None


HOST_SECONDS = 0.01
"""What passes between two looks at the clock."""
FACTORS = StepFactors([6.0] * 8, 1.0, 0.001, [(0, 0.01)], 0.0, 0.25, 0.01, 0.0, CARDS["h200"])
"""A step of up to six rows takes as long as its weights."""
FAILURE = "its step failed: StepFailed: as planned"


class DeviceRecorder(Recorder):
    """Notes steps by its own clock, on which the host takes no time."""

    def began(self, load: StepLoad, now: float) -> None:
        super().began(load, self._clock())

    def ended(
        self, output: SchedulerOutput, requests: Sequence[Request], result: ModelRunnerOutput, now: float
    ) -> None:
        super().ended(output, requests, result, self._clock())


class SimulatedEngine:
    """Runs requests and checks, at every step, what must always hold."""

    def __init__(self, setup: Setup, factors: StepFactors | None = FACTORS) -> None:
        self.setup = setup
        self.accepted_drafts = 0
        self._dice = random.Random(1)
        self._answers: dict[Request, list[int]] = {}
        self._guesses: dict[str, int] = {}
        """The drafts that the last planned step leaves in each request's row."""
        self.requests: dict[str, Request] = {}
        self.heard: dict[str, Heard] = {}
        self.rests: list[float] = []
        """The seconds of each rest of the core."""
        self.tier = SimulatedTier(setup.tier_pages, setup.tier_lies) if setup.tier_pages else None
        self.cache = setup.cache(self.tier)
        self.scheduler = Scheduler(setup.limits, self.cache, POLICIES[setup.policy], setup.adapter_places)
        self.device = SimulatedDevice(setup, self.requests, self.tier)
        costs = StepCosts([1, 10], [1.0, 10.0], 0.0, 0.001, tile=1)
        pace = Pace(costs, float(setup.step_rows), False, lambda: self.device.clock) if setup.step_rows else None
        drafting = AnyLength(None if setup.on_device else self, VOCABULARY, setup.drafts) if setup.drafts else None
        self.host_seconds = 0.0
        self.longer_rests = 0.0
        """The seconds by which each rest of the core is longer on its clock."""
        recorder = DeviceRecorder(lambda: self.device.clock + sum(self.rests))
        timing = CoreTiming(pace, clock=self._clock, sleep=self._rest, factors=lambda: factors, recorder=recorder)
        self.core = EngineCore(self.scheduler, self, setup.depth, drafting=drafting, timing=timing)
        self.core._handing.begin = lambda _: None  # type: ignore[method-assign]  # ends of prompts are told at once
        self.records = self.device.records = RecordChecks(self.scheduler)
        self._begun = self.now
        self.core.statistics()  # in this idle moment it divides steps from then on
        self._waiting_before: dict[Request, bool] = {}
        self._waiting_since: dict[Request, int] = {}
        self._step_before = 0
        self._preemptions: dict[Request, int] = {}
        self._aged: set[Request] = set()
        self._ended_outside: set[Request] = set()
        self._loading: set[Request] = set()  # when the last step was submitted; its result may have ended that
        self._first_keys: dict[bytes | None, int] = {}

    @property
    def now(self) -> float:
        return self.device.clock + self.host_seconds

    def _clock(self) -> float:
        self.host_seconds += HOST_SECONDS
        return self.now

    def _rest(self, seconds: float) -> None:
        self.rests.append(seconds)
        self.host_seconds += seconds + self.longer_rests
        self.records.passed(seconds)

    def _note(self, event: TokenEvent) -> None:
        self.records.hear(event, self.device.clock + sum(self.rests))

    # Requests

    def add(
        self,
        prompt: list[int],
        max_tokens: int = 4,
        *,
        n: int = 1,
        namespace: int = 0,
        priority: int = 0,
        turn: int = 0,
        owner: str = "",
        stop: bool = False,
        prompt_logprobs_from: int | None = None,
        adapter: int | None = None,
        beams: int | None = None,
        fault: int | None = None,
        whole: bool = False,
        attachments: tuple[Any, ...] = (),
        **search: Any,
    ) -> list[Request]:
        """Queue `n` samples of a prompt, or a search with beams for its `n` best answers.

        A step fails that brings one of them to `fault` computed tokens.
        """
        number = len(self.requests)
        params = SamplingParams(max_tokens=max_tokens, n=n, beam_width=beams, **search)
        if prompt_logprobs_from is not None:
            params = params.replace(prompt_logprobs=0, prompt_logprobs_from=prompt_logprobs_from)
        spec = RequestSpec(
            str(number),
            PromptInput(list(prompt), attachments, spans=self.setup.spans_of(prompt)),
            params.resolved(),
            min(max_tokens, self.setup.max_model_len - len(prompt)),
            seed=number,
            stop_token_ids=frozenset({STOP_TOKEN} if stop else ()),
            priority=priority,
            turn=turn,
            owner=owner,
            namespace=namespace.to_bytes(1, "big"),
            adapter=adapter,
            whole=whole,
            hands_over=bool(self.setup.tier_pages) and number % 4 == 3 and n == 1 and beams is None,
        )
        if fault is not None:
            self.device.faults[spec.request_id] = fault
        self.core.add(spec)
        self.records.requests |= {name: request for name in spec.answer_ids if (request := self.scheduler.get(name))}
        names = spec.answer_ids if beams is None else spec.answer_ids[:1]
        added = [request for name in names if (request := self.scheduler.get(name)) is not None]
        for request in added:
            self.requests[request.request_id] = request
            self._first_keys[self.cache._namespace(request)] = first_key(request)
            self.heard |= {answer_id: Heard() for answer_id in request.answer_ids}
            self._waiting_since[request] = self.scheduler.step
        self.check()
        return added

    @property
    def alive(self) -> list[Request]:
        return [request for name, request in self.requests.items() if self.scheduler.get(name) is not None]

    def clash(self, one: Request, other: Request) -> None:
        """Let steps fail that both are in."""
        if one.unit != other.unit:
            self.device.clashes.append((one.unit, other.unit))

    def abandon(self) -> None:
        """The executor's side: all steps are lost."""
        self.device.abandon()

    def map_cache(self, blocks: int) -> int:
        """The executor's side: other blocks have no memory any more. Some chunks fail to get theirs."""
        memory = self.cache.memory
        if blocks > memory.capacity:
            blocks = memory.blocks_in(self._dice.randint(memory.chunks, -(-blocks // memory.chunk)))
        for block in range(blocks, len(self.device.memory)):
            self.device.memory[block] = [None] * self.setup.size
        return blocks

    def resize(self, share: float) -> None:
        """Have that share of the chunks that one sequence does not need, and those that it needs."""
        memory = self.cache.memory
        least = -(-(self.setup.blocks - self.setup.spare_blocks) // memory.chunk)
        chunks, before = least + round(share * (memory.most_chunks - least)), memory.chunks
        reached, events = self.core.resize_cache(chunks)
        self.records.together |= {event.request_id for event in events}
        for event in events:
            self._hear(event)
        assert reached == memory.chunks
        assert min(before, chunks) <= reached <= max(before, chunks)
        self._note_preempted()
        self.check()

    def finish(self, request: Request, reason: FinishReason = "abort") -> None:
        """End a request from outside, as a client that leaves or a stop string does."""
        for event in self.core.finish([name for name, other in self.requests.items() if other is request], reason):
            assert event.record is not None and not event.token_ids and event.finish_reason is None
            self._note(event)
        self._ended_outside.add(request)
        self.check()

    # Steps

    def step(self) -> None:
        """One call of the core, with all checks."""
        self._waiting_before = {request: self._is_ready(request) for request in self.scheduler.waiting}
        self._step_before = self.scheduler.step
        events = self.core.step()
        self._note_preempted(self._waiting_before)
        if self.scheduler.step > self._step_before:
            self._check_waiting()
        for event in events:
            self._hear(event)
        self.check()

    def _note_preempted(self, waited_before: Container[Request] = ()) -> None:
        for request in self.scheduler.waiting:
            if request.queue.preemptions != self._preemptions.get(request, 0):
                self._preemptions[request] = request.queue.preemptions
                waited = self.scheduler.step - self._waiting_since.get(request, self.scheduler.step)
                if request in waited_before and waited >= self.setup.aging_steps:
                    self._aged.add(request)  # admitted, in a step that was undone at once
                self._waiting_since[request] = request.queue.waiting_since

    def run(self) -> None:
        """Until nothing is left to do; then nothing may be left behind."""
        self.run_requests()
        self.check_idle()

    def run_requests(self) -> None:
        """Until nothing is left to do."""
        for _ in range(LONG_ENOUGH):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work, "the engine does not come to an end"

    def submit(self, output: SchedulerOutput) -> "Future[ModelRunnerOutput]":
        """The executor's side: what was scheduled obeys every limit."""
        limits = self.setup.limits
        self._loading = {
            request for request in self.scheduler.waiting if request.state in (State.LOADING, State.ENCODING)
        }
        assert output.token_count or output.extensions, "there is nothing to do"
        assert output.token_count <= limits.max_batch_tokens, "the token budget is exceeded"
        slots = [item.slot for item in output.scheduled]
        assert len(set(slots)) == len(slots) and set(slots) <= set(range(limits.max_batch_requests))
        assert all(item.count >= max(item.sampled, 1) for item in output.scheduled)
        drafted = {slot: (first - 1, 1 + len(token_ids)) for slot, first, token_ids in output.drafts}
        runs = {item.slot: (item.start, item.sampled) for item in output.scheduled if item.sampled > 1}
        if not self.setup.on_device:
            assert drafted == runs, "drafts are verified, and nothing else"
        assert self.setup.on_device or not any(item.guesses for item in output.scheduled)
        for item, name in zip(output.scheduled, output.request_ids, strict=True):
            assert not self.setup.on_device or item.sampled <= 1 + self._guesses.get(name, 0), "what nobody guessed"
            self._guesses[name] = item.guesses if item.sampled else 0
            request = self.scheduler.get(name)
            assert request is not None
            spans = request.spec.prompt.spans
            ends = item.start, item.start + item.count
            assert all(end <= first or last <= end for first, last in spans for end in ends), "a span in part"
            assert item.spans == tuple(span for span in spans if ends[0] <= span[0] < ends[1])
        if not limits.chunked_prefill:
            assert all(item.sampled for item in output.scheduled), "a whole prefill was split"
        return self.device.submit(output)

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        """The proposer's side: drafts that are mostly right."""
        drafts = []
        for request in requests:
            if request not in self._answers:
                self._answers[request] = self.expected_answer(request)[0]
            known = self._answers[request][request.output_length :]
            guessed = [*known, *self._dice.choices(range(VOCABULARY), k=self.setup.drafts)]
            right = [self._dice.random() < self.setup.accuracy for _ in guessed]
            wrong = [(token + 1) % VOCABULARY for token in guessed]
            drafts.append([one if ok else other for one, ok, other in zip(guessed, right, wrong, strict=True)])
        return [
            tokens[: self._dice.randint(0, self.setup.drafts + request.in_flight)]
            for tokens, request in zip(drafts, requests, strict=True)
        ]

    # Checks

    def check(self) -> None:
        self.scheduler.check_integrity()
        self.check_written()
        assert len(self.scheduler.running) <= self.setup.limits.max_batch_requests
        for request in (*self.scheduler.waiting, *self.scheduler.running):
            assert request.output_length + request.in_flight <= request.max_tokens
            assert 0 <= request.drafts.in_flight <= request.in_flight
            assert 0 <= request.in_flight - request.drafts.in_flight <= self.setup.depth

    def check_written(self) -> None:
        """Checks that blocks that the tree calls written are in the device's memory."""
        tree, states = self.cache.tree, self.cache.extension(StatePool)
        windows = self.cache.extension(WindowedBlocks)
        told = [*(counts for output, _ in self.device.queue for counts in output.kept), *self.core._stages._kept]
        seen = self.device.states.when_told(told)
        for namespace, root in tree._roots.items():
            pending = [(root, self._first_keys[namespace])]
            while pending:
                node, key = pending.pop()
                for child in node.children.values():
                    keys = list(itertools.accumulate(child.tokens, extend_key, initial=key))[1:]
                    if tree.is_written(child) and not self.setup.all_windowed:
                        assert self.device.memory[child.block][: len(keys)] == keys, "a written block is not written"
                    window = None if windows is None else windows.window_at(child)
                    if window is not None and tree.is_written(child) and window.step <= tree.completed:
                        for table, block in enumerate(window.blocks):
                            held = self.device.memory[block][: len(keys)]
                            assert held == [in_table(table, key) for key in keys], "a block is not that of its node"
                    if states is not None and states.is_written(child):
                        assert seen[states.state_at(child)] == keys[-1], "a kept state is not that of its node"
                    pending.append((child, keys[-1]))

    def check_idle(self) -> None:
        """Every block is in the tree or free, and free when the tree is cleared."""
        assert not self.scheduler.running and not self.scheduler.waiting
        seconds = self.core.statistics().seconds
        assert min(seconds) >= 0 and math.isclose(sum(seconds), self.now - self._begun), "seconds are lost or invented"
        pool, tree, memory = self.cache.pool, self.cache.tree, self.cache._blocks._memory
        assert all(tree.is_written(node) for node in tree._unused), "nothing is on its way, and a block is not written"
        idle = sum(extension.evictable_count for extension in self.cache.extensions)
        assert tree.evictable_count == tree.size
        assert memory.free_count + (0 if self.setup.all_windowed else tree.size) + idle == memory.capacity
        if not self.setup.prefix_cache:
            assert tree.size == 0, "a group left blocks behind"
        tree.clear()
        tree.check_integrity()
        assert tree.size == 0 and pool.free_count == pool.capacity and memory.free_count == memory.capacity
        for name, request in self.requests.items():
            if request.params.beam_width is None:
                self._check_answer(request, self.heard[name])
            else:
                self._check_search(request, name)

    def _check_answer(self, request: Request, heard: Heard) -> None:
        """The tokens are those the request gets alone, however it was scheduled."""
        expected, reason = self.expected_answer(request)
        known = request.token_ids[request.prompt_length :]
        untold = request.answer.gathers and request in self._ended_outside
        assert heard.tokens == (known[: len(heard.tokens)] if untold else known)
        assert heard.cached_tokens < request.prompt_length or not heard.cached_tokens
        fault = self.device.faults.get(request.unit)
        if heard.stop_reason == FAILURE:
            assert heard.tokens == expected[: len(heard.tokens)]
        elif fault is not None and request.group is None and request.prompt_length + len(expected) > fault:
            assert request in self._ended_outside, "its step did not fail"
        elif request in self._ended_outside:
            assert heard.tokens == expected[: len(heard.tokens)]
        else:
            assert (heard.tokens, heard.finish_reason) == (expected, reason)
            if request.params.prompt_logprobs is not None:
                first = request.params.prompt_logprobs_from
                assert heard.prompt_positions == list(range(first, request.prompt_length))
                assert heard.cached_tokens < first or first >= request.prompt_length
        if not self.setup.prefix_cache and request.group is None:
            assert heard.cached_tokens == 0

    def _check_search(self, request: Request, name: str) -> None:
        """The answers are those of a search that looks at everything."""
        number = name.removesuffix("#0")
        heard = [self.heard[f"{number}#{index}"] for index in range(request.params.n)]
        if request in self._ended_outside and not any(item.finish_reason for item in heard):
            return
        if any(item.stop_reason == FAILURE for item in heard):
            assert [(item.tokens, item.stop_reason) for item in heard] == [([], FAILURE)] * len(heard)
            return
        assert self.device.faults.get(request.unit, request.prompt_length + 1) > request.prompt_length
        found = [(item.tokens, item.finish_reason) for item in heard]
        expected = searched_answers(request)
        assert found == expected + [([], "abort")] * (len(heard) - len(expected))
        if request.params.prompt_logprobs is not None:
            first = request.params.prompt_logprobs_from
            assert heard[0].prompt_positions == list(range(first, request.prompt_length))

    def expected_answer(self, request: Request) -> tuple[list[int], str]:
        """The answer straight from the simulated model."""
        key = first_key(request)
        for token in request.token_ids[: request.prompt_length]:
            key = extend_key(key, token)
        tokens: list[int] = []
        while len(tokens) < request.max_tokens:
            tokens.append(sampled_token(request.seed, key))
            if tokens[-1] in request.spec.stop_token_ids:
                return tokens, "stop"
            key = extend_key(key, tokens[-1])
        return tokens, "length"

    def _hear(self, event: TokenEvent) -> None:
        self._note(event)
        heard = self.heard[event.request_id]
        assert heard.finish_reason is None, "news of a request that has ended"
        heard.tokens += event.token_ids
        if self.requests[event.request_id.split("#")[0] + "#0"].search is None:
            self.accepted_drafts += max(0, len(event.token_ids) - 1)
        if event.prompt_logprobs is not None:
            heard.prompt_positions += [row.token_ids[0] for row in event.prompt_logprobs.rows()]
        heard.cached_tokens = max(heard.cached_tokens, event.cached_tokens)
        heard.finish_reason, heard.stop_reason = event.finish_reason, event.stop_reason
        if isinstance(event.stop_reason, str) and "failed" in event.stop_reason:
            assert event.stop_reason == FAILURE and event.finish_reason == "abort"
            assert event.request_id.split("#")[0] in {unit.split("#")[0] for unit in self.device.faults}, "innocent"

    def _is_ready(self, request: Request) -> bool:
        """Could run now, if it were its turn."""
        return (
            not request.in_flight
            and not request.is_held
            and request.state not in (State.LOADING, State.ENCODING)
            and (request.leader is None or request.leader.prompt_scheduled)
        )

    def _check_waiting(self) -> None:
        """No request that has waited for `aging_steps` was overtaken in the step that was just planned.

        First come, first served never lets anybody overtake, whatever they have waited. But who waits for an adapter's
        place may be overtaken by requests without one, and who is not on trial by those who are. Of a crowd that
        has waited so long AGED requests age in a step, in the order in which they began to wait.
        """
        step = self.scheduler.step
        before = self._waiting_before  # a held beam is not admitted when it takes another's place
        admitted = [
            request
            for request in self.scheduler.running
            if request in before and (before[request] or request.search is None)
        ]
        for request in self.scheduler.waiting:
            if request.search is not None and request.output_length:  # a beam may lose its place and get another's
                self._waiting_since[request] = request.queue.waiting_since
        old = {item for item, since in self._waiting_since.items() if step - since >= self.setup.aging_steps}
        in_turn = [request for request in before if request in old and request not in self._aged]
        self._aged |= old & {*self.scheduler.waiting, *admitted} - {*in_turn[AGED * (step - self._step_before) :]}
        self._aged |= {request for request in admitted if request.search is not None and request.queue.aged}
        fcfs = self.setup.policy == "fcfs"
        passed_over = [
            request
            for request in self.scheduler.waiting
            if (request in self._aged or fcfs)
            and self._waiting_before.get(request)
            and self.scheduler._cause(request) is None
            and request not in self._loading
            and request.queue.waiting_since != step  # a beam that ran and lost its place
        ]
        for newcomer in admitted:
            for request in passed_over:
                if request.adapter is not None and newcomer.adapter is None:
                    continue
                assert fcfs or newcomer in self._aged, "a request that has aged was overtaken by one that has not"
                if newcomer.owner != request.owner:  # in these, who has less goes first
                    continue
                order = [(item.spec.turn, item.queue.arrival) for item in (newcomer, request)]
                assert order == sorted(order), "equal requests of an owner go by turn, then by arrival"
