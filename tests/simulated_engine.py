"""The real core, scheduler and cache around a device that only remembers what was written where.

In place of keys and values each cell of a block holds a number that stands for the token and everything before it, so
a request that reads a cell of another prefix, or one that was never written, is caught at the step that reads it.

Steps can be made to fail: what they, and those behind them, should have written is then lost, and all rows with it.
"""

import itertools
import math
import random
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from kvern.cache.manager import KVCacheManager
from kvern.engine.core import EngineCore
from kvern.engine.policy import POLICIES
from kvern.engine.scheduler import Scheduler, SchedulerLimits
from kvern.events import TokenEvent
from kvern.request import FinishReason, PromptInput, Request, RequestSpec, State, requests_of
from kvern.sampling_params import SamplingParams
from kvern.step import (
    BeamCandidates,
    BlockLoad,
    Logprob,
    ModelRunnerOutput,
    NewRequest,
    ScheduledTokens,
    SchedulerOutput,
)
from tests.host_tier import HostTier

VOCABULARY = 4
STOP_TOKEN = 3
LONG_ENOUGH = 3000
"""Steps after which anything that these tests start must have ended."""


@dataclass(frozen=True)
class Setup:
    """One engine: every switch of the scheduler and the cache, and sizes small enough to run out of."""

    paged: bool = True
    prefix_cache: bool = True
    chunked: bool = True
    continuous: bool = True
    policy: str = "fcfs"
    depth: int = 1
    block_size: int = 4
    max_model_len: int = 24
    spare_blocks: int = 3
    slots: int = 4
    spare_budget: int = 3
    aging_steps: int = 30
    adapter_slots: int = 2
    tier_blocks: int = 0
    """Blocks that are kept beside the cache."""
    tier_delay: int = 0
    """Steps until a load has arrived; 0: the result of its own step says so."""
    tier_faults: int = 0
    """Every so many loads bring fewer blocks than they should; 0: none."""
    drafts: int = 0
    """Guessed at most after each step; 0: there is no proposer."""
    accuracy: float = 0.7
    """How probable it is that a draft is what the model says."""

    @property
    def size(self) -> int:
        return self.block_size if self.paged else self.max_model_len

    @property
    def blocks(self) -> int:
        return -(-self.max_model_len // self.size) + self.spare_blocks

    @property
    def limits(self) -> SchedulerLimits:
        slots = self.slots if self.paged else min(self.slots, self.blocks)
        budget = slots + self.spare_budget
        if not self.chunked:
            budget = max(budget, self.max_model_len)
        return SchedulerLimits(budget, slots, self.aging_steps, self.chunked, self.continuous)


def first_key(request: Request) -> int:
    """Stands for a request's namespace and adapter."""
    return hash((request.spec.namespace, request.spec.adapter))


def extend_key(key: int, token: int) -> int:
    """The number that stands for a token after everything that `key` stands for."""
    return hash((key, token))


def sampled_token(seed: int, key: int) -> int:
    """What the simulated model answers after `key`; seeds tell the samples of one prompt apart."""
    return random.Random(hash((seed, key))).choice((0, 0, 1, 1, 2, 2, STOP_TOKEN))


def simulated_logprobs(key: int) -> dict[int, float]:
    """What the simulated model thinks of each token after `key`; some cannot follow."""
    dice = random.Random(hash(("beams", key)))
    return {token: -math.inf if dice.random() < 0.2 else -3 * dice.random() for token in range(VOCABULARY)}


def searched_answers(request: Request) -> list[tuple[list[int], str]]:
    """Tokens and ending of what a beam search finds, best first: all continuations of all beams, one step at a time."""
    params, stop, length = request.params, request.stop_token_ids, 0
    width, penalty = params.beam_width or 0, params.length_penalty
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    ended: list[tuple[float, list[int], str]] = []
    prompt = first_key(request)
    for token in request.token_ids[: request.prompt_length]:
        prompt = extend_key(prompt, token)
    while beams:
        length += 1
        found = []
        for total, tokens in beams:
            key = prompt
            for token in tokens:
                key = extend_key(key, token)
            logprobs = simulated_logprobs(key).items()
            found += [(total + value, [*tokens, token]) for token, value in logprobs if value > -math.inf]
        found.sort(reverse=True)
        last = length == request.max_tokens
        ended += [
            (total / length**penalty, tokens, "stop" if tokens[-1] in stop else "length")
            for total, tokens in found[:width]
            if last or tokens[-1] in stop
        ]
        ended = sorted(ended, key=lambda item: -item[0])[:width]
        beams = [item for item in found if not last and item[1][-1] not in stop][:width]
        if beams and len(ended) == width:
            most = request.max_tokens if params.early_stopping == "never" and penalty > 0 else length
            if params.early_stopping is True or beams[0][0] / most**penalty <= ended[-1][0]:
                break
    return [(tokens, reason) for _, tokens, reason in ended[: params.n]]


@dataclass
class Row:
    """The device's view of a running request."""

    request: NewRequest
    tokens: list[int]
    table: list[int]
    namespace: int
    """And the adapter: what makes the same tokens mean something else."""
    computed: int | None = None
    """Tokens, as the last step with drafts, or with a row behind drafts, left it; None: such a step never was."""


class StepFailed(Exception):
    """As planned."""


class PendingResult(Future[ModelRunnerOutput]):
    """The result of a step that runs when somebody asks for it, or for a later one."""

    def __init__(self, device: "SimulatedDevice") -> None:
        super().__init__()
        self._device = device

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        while not self.done():
            self._device.run_next()
        return super().result(timeout)


class SimulatedDevice:
    """An Executor that runs late, so that a step that shares lists with the scheduler is caught too."""

    def __init__(self, setup: Setup, requests: dict[str, Request]) -> None:
        self.setup = setup
        self.requests = requests
        self.memory: list[list[int | None]] = [[None] * setup.size for _ in range(setup.blocks)]
        self.rows: dict[int, Row] = {}
        self.adapters: dict[int, int] = {}
        self.queue: deque[tuple[SchedulerOutput, PendingResult]] = deque()
        self.faults: dict[str, int] = {}
        """By unit: a step that brings one of its requests to so many computed tokens fails."""
        self.clashes: list[tuple[str, str]] = []
        """Steps with both units fail."""
        self.failed_steps = 0
        self._lost = False
        self.kept: dict[bytes, list[int | None]] = {}
        self.arriving: dict[int, tuple[int, list[BlockLoad]]] = {}
        """By number of the load: in so many steps."""

    def submit(self, output: SchedulerOutput) -> "Future[ModelRunnerOutput]":
        future = PendingResult(self)
        self.queue.append((output, future))
        return future

    def run_next(self) -> None:
        output, future = self.queue.popleft()
        try:
            future.set_result(self.execute(output))
        except StepFailed as error:
            future.set_exception(error)

    def abandon(self) -> None:
        """Steps behind the one that failed run to their end, then nothing is known of any row."""
        assert self._lost, "nothing has failed"
        while self.queue:
            self.run_next()
        self._lost = False
        self.arriving.clear()
        self.rows.clear()
        self.adapters.clear()

    def _fails(self, output: SchedulerOutput) -> bool:
        units = [self.requests[name.split("/")[0]].unit for name in output.request_ids]
        ends = [self._positions(item).stop for item in output.scheduled]
        fault = any(end >= self.faults.get(unit, end + 1) for unit, end in zip(units, ends, strict=True))
        return fault or any(one in units and other in units for one, other in self.clashes)

    def _positions(self, item: ScheduledTokens) -> range:
        """Of the tokens that a row computes."""
        start = item.start
        if item.uncertain and not self._lost:
            computed = self.rows[item.slot].computed
            assert computed is not None and computed <= item.start, "where a row goes on is not known"
            start = computed
        return range(start, start + item.count)

    def _lose(self, output: SchedulerOutput) -> None:
        """Spoil what the step was to write."""
        places = [(item.slot, at) for item in output.scheduled for at in self._positions(item)]
        for slot, at in places:
            self.memory[self.rows[slot].table[at // self.setup.size]][at % self.setup.size] = None
        for copy in output.copies:
            self.memory[copy.target] = [None] * self.setup.size
        self._lost = True
        self.failed_steps += 1
        raise StepFailed("as\nplanned")

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Save, copy, fork, join, grow, write all tokens, check what each would attend to and sample, then load."""
        failing = self._lost or self._fails(output)
        self._move(output, failing)
        self._change_rows(output)
        if failing:
            self._lose(output)
        for slot, first, token_ids in output.drafts:
            assert len(self.rows[slot].tokens) == first and token_ids, "drafts do not follow what is known"
            self.rows[slot].tokens += token_ids
        keys = []
        written: set[tuple[int, int]] = set()
        for item, name in zip(output.scheduled, output.request_ids, strict=True):
            row, key, prefix = self.rows[item.slot], self.rows[item.slot].namespace, []
            wanted = self.requests[name.split("/")[0]].adapter
            assert wanted == self.adapters.get(row.request.adapter_slot), "another adapter is in the slot"
            positions = self._positions(item)
            for token in row.tokens[: positions.stop]:
                key = extend_key(key, token)
                prefix.append(key)
            assert len(prefix) == positions.stop, "a token is computed before it is known"
            keys.append(prefix)
            for position in positions:
                block, offset = row.table[position // self.setup.size], position % self.setup.size
                assert (block, offset) not in written, "two requests write one place"
                written.add((block, offset))
                self.memory[block][offset] = prefix[position]
        result = ModelRunnerOutput([], [], [])
        for item, prefix in zip(output.scheduled, keys, strict=True):
            row = self.rows[item.slot]
            read = [self.memory[row.table[at // self.setup.size]][at % self.setup.size] for at in range(len(prefix))]
            assert read == prefix, f"row {item.slot} reads keys and values that are not its own"
            kept = self._verified(row, item, prefix)
            width = row.request.params.beam_width
            if width is None:
                if item.sampled:
                    row.tokens[len(prefix) + 1 - item.sampled :] = kept
                if output.drafts or any(other.uncertain for other in output.scheduled):
                    row.computed = len(prefix) + len(kept) - item.sampled
            elif item.sampled:
                best = sorted(simulated_logprobs(prefix[-1]).items(), key=lambda pair: -pair[1])
                ids, logprobs = zip(*best[: width + len(row.request.spec.stop_token_ids)], strict=True)
                result.candidates[item.slot] = BeamCandidates(ids, logprobs)
            result.token_ids.append(kept)
            result.logprobs.append(None)
            last = min(item.start + item.count, row.request.spec.prompt_length - 1)
            first = max(item.start + 1, row.request.params.prompt_logprobs_from)
            wanted = row.request.params.prompt_logprobs is not None and last >= first
            marks = [{position: Logprob(0.0, 1)} for position in range(first, last + 1)]
            result.prompt_logprobs.append(marks if wanted else None)
        result.loaded = self._load(output)
        return result

    def _change_rows(self, output: SchedulerOutput) -> None:
        """Rows fork, then join and grow."""
        before = dict(self.rows)
        for fork in output.forked:
            source = before[fork.source]
            assert len(source.tokens) == fork.length, "a fork of tokens that are not known"
            tokens = [*source.tokens, fork.token_id]
            self.rows[fork.slot] = Row(source.request, tokens, list(source.table), source.namespace)
        for request, name in zip(output.joined, self._joined_names(output), strict=True):
            namespace = first_key(self.requests[name.split("/")[0]])
            self.rows[request.slot] = Row(request, list(request.token_ids), list(request.block_ids), namespace)
        for slot, first, blocks in output.grown:
            table = self.rows[slot].table
            assert len(table) >= first, "a block table has a gap"
            table[first:] = blocks

    def _move(self, output: SchedulerOutput, failing: bool) -> None:
        """What comes before all else: blocks are saved, adapters loaded, blocks copied."""
        for save in output.saves:
            self.kept[save.key] = [None] * self.setup.size if failing else list(self.memory[save.block])
        for slot, adapter in output.adapters:
            assert slot < self.setup.adapter_slots
            self.adapters[slot] = adapter
        targets = set()
        for copy in output.copies:
            assert copy.source not in targets, "a copy of what the same step copies"
            targets.add(copy.target)
            self.memory[copy.target][: copy.tokens] = self.memory[copy.source][: copy.tokens]

    def _load(self, output: SchedulerOutput) -> list[tuple[int, int]]:
        """Begin to load; what has arrived already."""
        for load in output.loads:
            self.memory[load.block] = [None] * self.setup.size
            self.arriving.setdefault(load.load, (self.setup.tier_delay, []))[1].append(load)
        return [] if self.setup.tier_delay else [self.arrive(number) for number in list(self.arriving)]

    def arrive(self, number: int) -> tuple[int, int]:
        """The blocks of a load arrive, or some of them; the load and how many."""
        _, loads = self.arriving.pop(number)
        faults = self.setup.tier_faults
        count = number % len(loads) if faults and number % faults == 0 else len(loads)
        for load in loads[:count]:
            self.memory[load.block] = list(self.kept[load.key])
        return number, count

    def wait(self) -> list[tuple[int, int]]:
        """A step's time passes; the loads that have arrived."""
        self.arriving = {number: (steps - 1, loads) for number, (steps, loads) in self.arriving.items()}
        return [self.arrive(number) for number, (steps, _) in list(self.arriving.items()) if steps <= 0]

    def _verified(self, row: Row, item: ScheduledTokens, prefix: list[int]) -> list[int]:
        """What is sampled, as far as drafts agree with it, and one token more."""
        kept: list[int] = []
        for place in range(len(prefix) - item.sampled, len(prefix)):
            kept.append(sampled_token(row.request.seed, prefix[place]))
            if row.tokens[place + 1 : place + 2] != kept[-1:]:
                break
        return kept

    def _joined_names(self, output: SchedulerOutput) -> list[str]:
        names = dict(zip((item.slot for item in output.scheduled), output.request_ids, strict=True))
        return [names[request.slot] for request in output.joined]


@dataclass
class Heard:
    """What the events said about one request."""

    tokens: list[int] = field(default_factory=list)
    prompt_positions: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None


FAILURE = "its step failed: StepFailed: as planned"


class SimulatedEngine:
    """Runs requests and checks, at every step, what must always hold."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.accepted_drafts = 0
        self._dice = random.Random(1)
        self._answers: dict[Request, list[int]] = {}
        self.requests: dict[str, Request] = {}
        self.heard: dict[str, Heard] = {}
        self.tier = HostTier(setup.tier_blocks) if setup.tier_blocks else None
        self.cache = KVCacheManager(setup.blocks, setup.size, setup.prefix_cache, tier=self.tier)
        self.scheduler = Scheduler(setup.limits, self.cache, POLICIES[setup.policy], setup.adapter_slots)
        self.device = SimulatedDevice(setup, self.requests)
        self.core = EngineCore(self.scheduler, self, setup.depth, proposer=self if setup.drafts else None)
        self._waiting_before: dict[Request, bool] = {}
        self._waiting_since: dict[Request, int] = {}
        self._preemptions: dict[Request, int] = {}
        self._aged: set[Request] = set()
        self._ended_outside: set[Request] = set()
        self._loading: set[Request] = set()  # when the last step was submitted; its result may have ended that
        self._first_keys: dict[bytes | None, int] = {}

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
        stop: bool = False,
        prompt_logprobs_from: int | None = None,
        adapter: int | None = None,
        beams: int | None = None,
        fault: int | None = None,
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
            PromptInput(list(prompt)),
            params.resolved(),
            min(max_tokens, self.setup.max_model_len - len(prompt)),
            seed=number,
            stop_token_ids=frozenset({STOP_TOKEN} if stop else ()),
            priority=priority,
            turn=turn,
            namespace=namespace.to_bytes(1, "big"),
            adapter=adapter,
        )
        added = requests_of(spec)
        for request in added:
            self.requests[request.request_id] = request
            self._first_keys[self.cache._namespace(request)] = first_key(request)
            self.heard |= {answer_id: Heard() for answer_id in request.answer_ids}
            self._waiting_since[request] = self.scheduler.step
            if fault is not None:
                self.device.faults[request.unit] = fault
            self.core.add(request)
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

    def finish(self, request: Request, reason: FinishReason = "abort") -> None:
        """End a request from outside, as a client that leaves or a stop string does."""
        self.core.finish([name for name, other in self.requests.items() if other is request], reason)
        self._ended_outside.add(request)
        self.check()

    # Steps

    def step(self) -> None:
        """One call of the core, with all checks."""
        self._waiting_before = {request: self._is_ready(request) for request in self.scheduler.waiting}
        for load, count in self.device.wait() if self.setup.tier_delay else ():
            self.core.loaded(load, count)
        step_before = self.scheduler.step
        events = self.core.step()
        for request in self.scheduler.waiting:
            if request.preemptions != self._preemptions.get(request, 0):
                self._preemptions[request] = request.preemptions
                waited = self.scheduler.step - self._waiting_since.get(request, self.scheduler.step)
                if request in self._waiting_before and waited >= self.setup.aging_steps:
                    self._aged.add(request)  # admitted, in a step that was undone at once
                self._waiting_since[request] = request.waiting_since
        if self.scheduler.step > step_before:
            self._check_waiting()
        for event in events:
            self._hear(event)
        self.check()

    def run(self) -> None:
        """Until nothing is left to do; then nothing may be left behind."""
        for _ in range(LONG_ENOUGH):
            if not self.core.has_work and not self.device.arriving:
                break
            self.step()
        assert not self.core.has_work, "the engine does not come to an end"
        self.check_idle()

    def submit(self, output: SchedulerOutput) -> "Future[ModelRunnerOutput]":
        """The executor's side: what was scheduled obeys every limit."""
        limits = self.setup.limits
        self._loading = {request for request in self.scheduler.waiting if request.state is State.LOADING}
        assert output.token_count or output.loads, "there is nothing to do"
        assert output.token_count <= limits.max_batch_tokens, "the token budget is exceeded"
        slots = [item.slot for item in output.scheduled]
        assert len(set(slots)) == len(slots) and set(slots) <= set(range(limits.max_batch_requests))
        assert all(item.count >= max(item.sampled, 1) for item in output.scheduled)
        drafted = {slot: (first - 1, 1 + len(token_ids)) for slot, first, token_ids in output.drafts}
        runs = {item.slot: (item.start, item.sampled) for item in output.scheduled if item.sampled > 1}
        assert drafted == runs, "drafts are verified, and nothing else"
        if not limits.chunked_prefill:
            assert all(item.sampled for item in output.scheduled), "a whole prefill was split"
        return self.device.submit(output)

    def propose(self, requests: Sequence[Request]) -> list[list[int]]:
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
            assert 0 <= request.drafts_in_flight <= request.in_flight
            assert 0 <= request.in_flight - request.drafts_in_flight <= self.setup.depth

    def check_written(self) -> None:
        """What the tree calls written is in the device's memory."""
        tree = self.cache.tree
        for namespace, root in tree._roots.items():
            pending = [(root, self._first_keys[namespace])]
            while pending:
                node, key = pending.pop()
                for child in node.children.values():
                    keys = list(itertools.accumulate(child.tokens, extend_key, initial=key))[1:]
                    if tree.is_written(child):
                        assert self.device.memory[child.block][: len(keys)] == keys, "a written block is not written"
                    pending.append((child, keys[-1]))

    def check_idle(self) -> None:
        """Every block is in the tree or free, and free when the tree is cleared."""
        assert not self.scheduler.running and not self.scheduler.waiting
        pool, tree = self.cache.pool, self.cache.tree
        assert all(tree.is_written(node) for node in tree._unused), "nothing is on its way, and a block is not written"
        assert pool.free_count + tree.size == pool.capacity and tree.evictable_count == tree.size
        if not self.setup.prefix_cache:
            assert tree.size == 0, "a group left blocks behind"
        assert self.tier is None or not any(self.tier.users.values()), "a block of the tier is never released"
        tree.clear()
        tree.check_integrity()
        assert tree.size == 0 and pool.free_count == pool.capacity
        for name, request in self.requests.items():
            if request.params.beam_width is None:
                self._check_answer(request, self.heard[name])
            else:
                self._check_search(request, name)

    def _check_answer(self, request: Request, heard: Heard) -> None:
        """The tokens are those the request gets alone, however it was scheduled."""
        expected, reason = self.expected_answer(request)
        assert heard.tokens == request.token_ids[request.prompt_length :]
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
            if tokens[-1] in request.stop_token_ids:
                return tokens, "stop"
            key = extend_key(key, tokens[-1])
        return tokens, "length"

    def _hear(self, event: TokenEvent) -> None:
        heard = self.heard[event.request_id]
        assert heard.finish_reason is None, "news of a request that has ended"
        heard.tokens += event.token_ids
        if self.requests[event.request_id.split("#")[0] + "#0"].beams is None:
            self.accepted_drafts += max(0, len(event.token_ids) - 1)
        for entry in event.prompt_logprobs or ():
            heard.prompt_positions += entry
        heard.cached_tokens = max(heard.cached_tokens, event.cached_tokens)
        heard.finish_reason, heard.stop_reason = event.finish_reason, event.stop_reason
        if isinstance(event.stop_reason, str) and "failed" in event.stop_reason:
            assert event.stop_reason == FAILURE and event.finish_reason == "abort"
            assert event.request_id.split("#")[0] in {unit.split("#")[0] for unit in self.device.faults}, "innocent"

    def _is_ready(self, request: Request) -> bool:
        """Could run now, if it were its turn."""
        return (
            not request.in_flight
            and not request.held
            and request.state is not State.LOADING
            and (request.leader is None or request.leader.prompt_scheduled)
        )

    def _check_waiting(self) -> None:
        """No request that has waited for `aging_steps` was overtaken in the step that was just planned.

        First come, first served never lets anybody overtake, whatever they have waited. But who waits for an adapter's
        place may be overtaken by requests without one, and who is not on trial by those who are.
        """
        step = self.scheduler.step
        before = self._waiting_before  # a held beam is not admitted when it takes another's place
        admitted = [
            request
            for request in self.scheduler.running
            if request in before and (before[request] or request.beams is None)
        ]
        for request in self.scheduler.waiting:
            if request.beams is not None and request.output_length:  # a beam may lose its place and get another's
                self._waiting_since[request] = request.waiting_since
        old = {item for item, since in self._waiting_since.items() if step - since >= self.setup.aging_steps}
        self._aged |= old & {*self.scheduler.waiting, *admitted}
        self._aged |= {request for request in admitted if request.beams is not None and request.aged}
        fcfs = self.setup.policy == "fcfs"
        passed_over = [
            request
            for request in self.scheduler.waiting
            if (request in self._aged or fcfs)
            and self._waiting_before.get(request)
            and self.scheduler._cause(request) is None
            and request not in self._loading
            and request.waiting_since != step  # a beam that ran and lost its place
        ]
        for newcomer in admitted:
            for request in passed_over:
                if request.adapter is not None and newcomer.adapter is None:
                    continue
                assert fcfs or newcomer in self._aged, "a request that has aged was overtaken by one that has not"
                order = [(item.turn, item.arrival) for item in (newcomer, request)]
                assert order == sorted(order), "equal requests go by turn, then in the order of their arrival"
