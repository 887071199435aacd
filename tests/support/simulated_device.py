"""A device that only remembers what was written where.

In place of keys and values each cell of a block holds a number that stands for the token and everything before it, so
a request that reads a cell of another prefix, or one that was never written, is caught at the step that reads it.

Steps can be made to fail: what they, and those behind them, should have written is then lost, and all rows with it.
"""

import math
import random
import zlib
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from kvern.cache.block_pool import BlockPool
from kvern.cache.manager import KVCacheManager, MakeExtension
from kvern.cache.messages import PageLoad, StateMessage, TierIndex, TierMessage, WindowLimits, WindowMessage
from kvern.cache.states import StatePool
from kvern.cache.tier import TierTraffic
from kvern.cache.windows import WindowedBlocks
from kvern.engine.scheduler import SchedulerLimits
from kvern.request.logprobs import joined, packed
from kvern.request.request import Request
from kvern.request.step import (
    BeamCandidates,
    ModelRunnerOutput,
    NewRequest,
    ScheduledTokens,
    SchedulerOutput,
)
from tests.support.simulated_records import RecordChecks
from tests.support.simulated_states import SimulatedStates
from tests.support.simulated_tier import SimulatedTier

VOCABULARY, STOP_TOKEN = 4, 3


@dataclass(frozen=True)
class Setup:
    """One engine: every switch of the scheduler and the cache, and sizes small enough to run out of."""

    paged: bool = True
    prefix_cache: bool = True
    chunked: bool = True
    continuous: bool = True
    policy: str = "fcfs"
    depth: int = 1
    stages: int = 1
    block_size: int = 4
    max_model_len: int = 24
    spare_blocks: int = 3
    slots: int = 4
    spare_budget: int = 3
    aging_steps: int = 30
    adapter_places: int = 2
    tier_pages: int = 0
    """Pages that are kept beside the cache."""
    page_blocks: int = 1
    tier_lies: float = 0.0
    """The share of wrong answers of the index."""
    tier_delay: int = 0
    """Steps until a load has arrived; 0: the result of its own step says so."""
    tier_faults: int = 0
    """Every so many loads bring fewer blocks than they should; 0: none."""
    drafts: int = 0
    """Guessed at most after each step; 0: nobody guesses."""
    on_device: bool = False
    """The device guesses, not a proposer."""
    step_rows: int = 0
    """Tokens that a step with decodes has time for; 0: as many as fit."""
    kept_states: int | None = None
    """Places for states beside those of rows; None: the model has no states."""
    windowed: tuple[int, int] | None = None
    """The window of some layers, and how many block tables they have; None: no layer has a window."""
    all_windowed: bool = False
    """All layers have that window: nothing is stored in the blocks of the first block table."""
    spans: bool = False
    """Neighbouring tokens that are 2 are a span of their prompt."""
    chunk: int = 0
    """Blocks of a chunk of memory; 0: the cache keeps its size."""
    accuracy: float = 0.7
    """The probability that a draft is right."""

    @property
    def size(self) -> int:
        return self.block_size if self.paged else self.max_model_len

    @property
    def blocks(self) -> int:
        tokens = [] if self.all_windowed else [self.max_model_len]
        if self.window is not None:
            tokens += [min(self.max_model_len, self.window.held_tokens + 2 * self.size)] * self.window.tables
        return sum(-(-count // self.size) for count in tokens) + self.spare_blocks

    @property
    def window(self) -> WindowLimits | None:
        positions = -(-self.max_model_len // self.size) + self.spare_blocks if self.all_windowed else 0
        return None if self.windowed is None else WindowLimits(*self.windowed, self.limits.max_batch_tokens, positions)

    @property
    def states(self) -> int:
        return 0 if self.kept_states is None else self.limits.max_batch_requests + self.kept_states

    def spans_of(self, prompt: list[int]) -> tuple[tuple[int, int], ...]:
        """The spans of a prompt, of at most as many tokens as a step."""
        found: list[tuple[int, int]] = []
        for place, token in enumerate(prompt if self.spans else ()):
            first, end = found[-1] if found else (0, -1)
            if token == 2 and end == place and place - first < self.limits.max_batch_tokens:
                found[-1] = first, place + 1
            elif token == 2:
                found.append((place, place + 1))
        return tuple(span for span in found if span[1] - span[0] > 1)

    def cache(self, tier: TierIndex | None) -> KVCacheManager:
        pool = BlockPool(self.blocks, self.chunk if self.paged else 0)
        return make_cache(pool, self.size, self.prefix_cache, tier, self.states, self.window, self.page_blocks)

    @property
    def limits(self) -> SchedulerLimits:
        slots = self.slots if self.paged else min(self.slots, self.blocks)
        budget = slots + self.spare_budget
        if not self.chunked:
            budget = max(budget, self.max_model_len)
        return SchedulerLimits(budget, slots, self.aging_steps, self.chunked, self.continuous, self.stages)


def make_cache(
    blocks: int | BlockPool,
    block_size: int,
    prefix_cache: bool = True,
    tier: TierIndex | None = None,
    states: int = 0,
    window: WindowLimits | None = None,
    page_blocks: int = 1,
) -> KVCacheManager:
    """A cache with those of the extensions that are wanted, of so many blocks, or of a pool like this."""
    pool = BlockPool(blocks) if isinstance(blocks, int) else blocks
    extensions: list[MakeExtension] = []
    if window is not None:
        extensions.append(partial(WindowedBlocks, window))
    if states:
        extensions.append(partial(StatePool, states, 1, page_blocks=1 if tier is None else page_blocks))
    if tier is not None and prefix_cache:
        extensions.append(partial(TierTraffic, tier, page_blocks))
    positions = 0 if window is None else window.positions
    chunk = pool.chunk if pool.most_chunks > 1 else 0
    return KVCacheManager(pool.most, block_size, prefix_cache, extensions=extensions, positions=positions, chunk=chunk)


def first_key(request: Request) -> int:
    """Stands for a request's namespace and adapter; the same in each process, as texts and None hash otherwise."""
    return zlib.crc32(repr((request.spec.namespace, request.spec.adapter)).encode())


def extend_key(key: int, token: int) -> int:
    """The number that stands for a token after everything that `key` stands for."""
    return hash((key, token))


def sampled_token(seed: int, key: int) -> int:
    """The answer of the simulated model after `key`; seeds distinguish the samples of one prompt."""
    return random.Random(hash((seed, key))).choice((0, 0, 1, 1, 2, 2, STOP_TOKEN))


def simulated_logprobs(key: int) -> dict[int, float]:
    """The log-probabilities of the simulated model after `key`; some tokens are impossible."""
    dice = random.Random(hash((-1, key)))  # of integers: that of a text differs between processes
    return {token: -math.inf if dice.random() < 0.2 else -3 * dice.random() for token in range(VOCABULARY)}


def in_table(table: int, key: int | None) -> int | None:
    """The stored value of a token in the block table of layers with a window; in others it is the key."""
    return key if key is None or table < 0 else extend_key(key, VOCABULARY + table)


@dataclass
class Row:
    """The device's view of a running request."""

    request: NewRequest
    tokens: list[int]
    table: list[int]
    windowed: list[dict[int, int]]
    """The block tables of layers with a window."""
    namespace: int
    """And the adapter: what makes the same tokens mean something else."""
    state_index: int = -1
    computed: int | None = None
    """Tokens, as the last step with drafts, or with a row behind drafts, left it; None: such a step never was."""


class StepFailed(Exception):
    """The planned failure of a step."""


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

    def __init__(self, setup: Setup, requests: dict[str, Request], tier: SimulatedTier | None = None) -> None:
        self.setup = setup
        self.tier = tier
        self.requests = requests
        self.memory: list[list[int | None]] = [[None] * setup.size for _ in range(setup.blocks)]
        self.states = SimulatedStates(setup.states, setup.stages > 1)
        self.rows: dict[int, Row] = {}
        self.adapters: dict[int, int] = {}
        self.queue: deque[tuple[SchedulerOutput, PendingResult]] = deque()
        self.faults: dict[str, int] = {}
        """Failures: by unit, the number of computed tokens of a request at which its step fails."""
        self.clashes: list[tuple[str, str]] = []
        """Steps with both units fail."""
        self.failed_steps = 0
        self.clock = 0.0
        self.slowdown = 1.0
        """A second for each token."""
        self.records: RecordChecks | None = None
        self._lost = False
        self._dice = random.Random(2)
        self.arriving: dict[int, tuple[int, list[PageLoad]]] = {}
        """The number of steps that each load takes."""

    def submit(self, output: SchedulerOutput) -> "Future[ModelRunnerOutput]":
        future = PendingResult(self)
        self.queue.append((output, future))
        return future

    def pass_time(self, output: SchedulerOutput) -> None:
        """Let time pass for a step."""
        seconds = output.token_count * self.slowdown
        self.clock += seconds
        if self.records is not None:
            self.records.passed(seconds)
            self.records.computed(output.request_ids)

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
        """The positions of the tokens that a row computes."""
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
            for _, block in self._blocks(self.rows[slot], at):
                self.memory[block][at % self.setup.size] = None
        for copy in output.copies:
            self.memory[copy.target] = [None] * self.setup.size
        states = output.message(StateMessage)
        changed = {self.rows[slot].state_index for slot, _ in places}
        changed |= {to for _, to in (() if states is None else states.copies)}
        self.states.lose(changed)
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
            assert wanted == self.adapters.get(row.request.adapter_index), "another adapter is in its place"
            positions = self._positions(item)
            for token in row.tokens[: positions.stop]:
                key = extend_key(key, token)
                prefix.append(key)
            assert len(prefix) == positions.stop, "a token is computed before it is known"
            keys.append(prefix)
            for position in positions:
                offset = position % self.setup.size
                for table, block in self._blocks(row, position):
                    assert (block, offset) not in written, "two requests write one place"
                    written.add((block, offset))
                    self.memory[block][offset] = in_table(table, prefix[position])
            if self.setup.states:
                before = prefix[positions.start - 1] if positions.start else 0
                assert self.states.seen[row.state_index] == before, f"row {item.slot} goes on with a state not its own"
        self.pass_time(output)
        result = ModelRunnerOutput([], [], [])
        for item, prefix in zip(output.scheduled, keys, strict=True):
            row = self.rows[item.slot]
            size, whole = self.setup.size, 0 if self.setup.all_windowed else len(prefix)
            read = [self.memory[row.table[at // size]][at % size] for at in range(whole)]
            assert read == prefix[:whole], f"row {item.slot} reads keys and values that are not its own"
            self._check_window(row, self._positions(item), prefix)
            kept = self._verified(row, item, prefix)
            width = row.request.params.beam_width
            if width is None:
                if item.sampled and self.setup.stages == 1:
                    row.tokens[len(prefix) + 1 - item.sampled :] = kept
                if any(other.uncertain or other.guesses or other.sampled > 1 for other in output.scheduled):
                    row.computed = len(prefix) + len(kept) - item.sampled
                    self._draft(row, item.guesses * bool(item.sampled), prefix[: row.computed])
            elif item.sampled:
                best = sorted(simulated_logprobs(prefix[-1]).items(), key=lambda pair: -pair[1])
                ids, logprobs = zip(*best[: width + len(row.request.spec.stop_token_ids)], strict=True)
                result.candidates[item.slot] = BeamCandidates(ids, logprobs)
            result.token_ids.append(kept)
            result.logprobs.append(None)
            last = min(item.start + item.count, row.request.spec.prompt_length - 1)
            first = max(item.start + 1, row.request.params.prompt_logprobs_from)
            wanted = row.request.params.prompt_logprobs is not None and last >= first
            marks = [packed([position], [0.0], 1) for position in range(first, last + 1)]
            result.prompt_logprobs.append(joined(marks) if wanted else None)
        result.reports |= self._load(output)
        return result

    def _change_rows(self, output: SchedulerOutput) -> None:
        """Rows fork, then join, grow, and learn what a later stage has sampled."""
        before = dict(self.rows)
        for fork in output.forked:
            source = before[fork.source]
            assert len(source.tokens) == fork.length, "a fork of tokens that are not known"
            tokens = [*source.tokens, fork.token_id]
            table = list(source.table)
            windowed = [dict(table) for table in source.windowed]
            self.rows[fork.slot] = Row(source.request, tokens, table, windowed, source.namespace, source.state_index)
        for request, name in zip(output.joined, self._joined_names(output), strict=True):
            namespace = first_key(self.requests[name.split("/")[0]])
            tokens, table = list(request.token_ids), list(request.block_ids)
            windowed: list[dict[int, int]] = [{} for _ in range(self.setup.windowed[1] if self.setup.windowed else 0)]
            self.rows[request.slot] = Row(request, tokens, table, windowed, namespace)
        states = output.message(StateMessage)
        for slot, state in () if states is None else states.given:
            self.rows[slot].state_index = state
        for slot, first, blocks in output.grown:
            table = self.rows[slot].table
            assert len(table) >= first, "a block table has a gap"
            table[first:] = blocks
        windows = output.message(WindowMessage)
        for grown in () if windows is None else windows.grown:
            own = self.rows[grown.slot].windowed[grown.table]
            assert not own or own.keys() & {grown.first - 1, grown.first}, "a block table has a gap within its window"
            own |= enumerate(grown.block_ids, grown.first)
        for slot, first, token_ids in output.known:
            assert token_ids and len(self.rows[slot].tokens) >= first, "a token between is not known"
            self.rows[slot].tokens[first:] = token_ids

    def _blocks(self, row: Row, position: int) -> list[tuple[int, int]]:
        """The blocks of a row's token in each block table; the index of layers without a window is -1."""
        column = position // self.setup.size
        whole = [] if self.setup.all_windowed else [(-1, row.table[column])]
        return [*whole, *((place, table[column]) for place, table in enumerate(row.windowed))]

    def _check_window(self, row: Row, positions: range, prefix: list[int]) -> None:
        """Checks the keys within the window of queries at these positions."""
        if self.setup.window is None:
            return
        for at in range(max(0, positions.start + 1 - self.setup.window.window), positions.stop):
            for table, block in self._blocks(row, at):
                found = self.memory[block][at % self.setup.size]
                assert found == in_table(table, prefix[at]), "a row sees keys and values that are not its own"

    def _move(self, output: SchedulerOutput, failing: bool) -> None:
        """Performs the moves before a step: pages are saved, adapters loaded, states and blocks copied."""
        tier = output.message(TierMessage)
        for save in () if tier is None or failing else tier.saves:
            assert self.tier is not None
            self.tier.keep(save, self.memory, self.states.seen)
        self.states.prepare(output, failing)
        for adapter_index, adapter in output.adapters:
            assert adapter_index < self.setup.adapter_places
            self.adapters[adapter_index] = adapter
        targets = set()
        for copy in output.copies:
            assert copy.source not in targets, "a copy of what the same step copies"
            targets.add(copy.target)
            self.memory[copy.target][: copy.tokens] = self.memory[copy.source][: copy.tokens]

    def _load(self, output: SchedulerOutput) -> dict[str, object]:
        """A step's time passes for what is being loaded, and other loads begin; the report of what has arrived."""
        self.arriving = {number: (steps - 1, loads) for number, (steps, loads) in self.arriving.items()}
        tier = output.message(TierMessage)
        for save in () if tier is None else tier.written:
            assert self.tier is not None
            self.tier.keep(save, self.memory, self.states.seen)
        for load in () if tier is None else tier.loads:
            assert self.tier is not None
            self.tier.begin(load, self.memory, self.states.seen)
            self.arriving.setdefault(load.load, (self.setup.tier_delay, []))[1].append(load)
        arrived = [self.arrive(number) for number, (steps, _) in list(self.arriving.items()) if steps <= 0]
        return {TierMessage.extension: arrived} if arrived else {}

    def arrive(self, number: int) -> tuple[int, int]:
        """The pages of a load arrive, or some of them; the load and how many."""
        assert self.tier is not None
        _, loads = self.arriving.pop(number)
        faults = self.setup.tier_faults
        count = number % len(loads) if faults and number % faults == 0 else len(loads)
        return number, self.tier.bring(loads, count, self.memory, self.states.seen)

    def _draft(self, row: Row, count: int, prefix: list[int]) -> None:
        """Guess so many tokens behind the newest, mostly right; a drafter's keys of all of them have blocks."""
        if not count:
            return
        newest = len(row.tokens) - 1
        assert newest + count < self.setup.max_model_len, "drafts behind the end"
        assert len(row.table) * self.setup.size >= newest + count + 1, "drafts without blocks"
        key = extend_key(prefix[-1], row.tokens[newest])
        for _ in range(count):
            token = sampled_token(row.request.seed, key)
            wrong = self._dice.random() >= self.setup.accuracy
            row.tokens.append((token + 1) % VOCABULARY if wrong else token)
            key = extend_key(key, row.tokens[-1])

    def _verified(self, row: Row, item: ScheduledTokens, prefix: list[int]) -> list[int]:
        """The sampled tokens as far as drafts agree, and one more; the row's state sees no other drafts."""
        kept: list[int] = []
        for place in range(len(prefix) - item.sampled, len(prefix)):
            kept.append(sampled_token(row.request.seed, prefix[place]))
            if row.tokens[place + 1 : place + 2] != kept[-1:]:
                break
        if self.setup.states:
            self.states.see(row.state_index, prefix, item.sampled, len(kept))
        return kept

    def _joined_names(self, output: SchedulerOutput) -> list[str]:
        names = dict(zip((item.slot for item in output.scheduled), output.request_ids, strict=True))
        return [names[request.slot] for request in output.joined]
