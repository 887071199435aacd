"""One simulated engine: the core of a server's engine over a simulated executor.

LoadRequest --take--> RequestSpec --> EngineCore --> SimulatedExecutor --> Timeline
"""

import math
import random
from collections.abc import Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Protocol, cast

import msgspec

from kvern.cache.manager import KVCacheManager, MakeExtension
from kvern.cache.messages import TierIndex, blocks_of_page
from kvern.cache.tier import TierTraffic
from kvern.engine.core import EngineCore
from kvern.engine.core_timing import CoreTiming
from kvern.engine.pace import Pace
from kvern.engine.queues import POLICIES
from kvern.engine.scheduler import Scheduler, SchedulerLimits
from kvern.engine.step_costs import StepCosts
from kvern.errors import ConfigError
from kvern.loads.request import BLOCK_TOKENS, LoadRequest
from kvern.request.events import TokenEvent
from kvern.request.request import PromptInput, RequestSpec
from kvern.request.sampling_params import ResolvedParams
from kvern.simulate.executor import Price, SimulatedExecutor, VirtualClock
from kvern.simulate.leap import MOST_FLYING, Leaps
from kvern.simulate.tier_answers import PricedTier
from kvern.simulate.tiers import (
    SimulatedStore,
    ThreadedClock,
    TieredExecutor,
    TierSizes,
    make_stores,
    make_tier,
    page_sizes,
)
from kvern.simulate.timeline import Timeline

if TYPE_CHECKING:
    from kvern.runner.executor import Executor

OWN = 1 << 30
"""Tokens from here on are of one request alone; those below stand for the blocks of prompts."""


class EngineSizes(msgspec.Struct, frozen=True):
    """Sizes by which an engine decides, of its options and its memory; see `EngineConfig` and `Layout`."""

    blocks: int
    block_size: int
    max_model_len: int
    max_batch_requests: int
    max_batch_tokens: int
    depth: int = 1
    policy: str = "fcfs"
    aging_steps: int = 200
    chunked_prefill: bool = True
    continuous: bool = True
    prefix_cache: bool = True
    token_bytes: int = 0
    """The bytes of a token's keys and values; 0: nobody knows."""
    on_device: bool = False
    """Its KV cache is in the memory of a GPU."""
    tier: TierSizes | None = None


class PaceSizes(msgspec.Struct, frozen=True):
    """The target of the time between tokens, with the costs that an engine predicts with; see `Pace`."""

    target: float
    yields: bool
    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    per_key: float
    per_pair: float

    def made(self, clock: "Clock") -> Pace:
        """Returns the pace of an engine that has just begun."""
        costs = StepCosts(self.rows, self.seconds, self.per_key, self.per_pair)
        return Pace(costs, self.target, self.yields, clock)


class Prompts:
    """Makes prompts: equal hashes of blocks are equal tokens, and other tokens are the request's own.

    Without a `vocabulary` a block is one token, repeated: that makes it different from all others, and takes no memory
    of its own. With one, tokens are drawn from it, for a model.

    Without one the next request of a conversation has the answer before in its blocks, so that the cache serves it; a
    model's answers are not known.
    """

    def __init__(self, vocabulary: int | None = None, name: str = "own") -> None:
        """`name`: other names are other tokens of the requests' own."""
        self._vocabulary, self._name = vocabulary, name
        self._names: dict[int, int] = {}
        self._turns: dict[str, tuple[int, LoadRequest]] = {}
        """The last request of each conversation, with its number."""
        self._answers: dict[int, list[tuple[int, int, int]]] = {}
        """The answers within blocks: begin, end, and the token."""

    def spec(self, number: int, request: LoadRequest) -> RequestSpec:
        """Returns a request for the core, whose answer does not end before its length; its seed is its own token."""
        tokens: list[int] = []
        if self._vocabulary is None and request.session:
            self._note_answer(number, request)
        for block in request.blocks:
            count = min(BLOCK_TOKENS, request.prompt_tokens - len(tokens))
            if self._vocabulary is None:
                tokens += self._named(block, count)
            else:
                tokens += self._drawn(f"block {block}", count)
        rest = request.prompt_tokens - len(tokens)
        tokens += [OWN + number] * rest if self._vocabulary is None else self._drawn(f"{self._name} {number}", rest)
        return RequestSpec(
            request_id=str(number),
            prompt=PromptInput(tokens),
            params=self._params,
            max_tokens=request.output_tokens,
            seed=OWN + number,
            owner=request.tenant,
            whole=True,
        )

    def answers(self, request: LoadRequest) -> list[int]:
        """Returns the numbers of requests whose answers a prompt has in it."""
        return [token - OWN for block in request.blocks for _, _, token in self._answers.get(block, ())]

    def _named(self, block: int, count: int) -> list[int]:
        tokens = [self._names.setdefault(block, len(self._names))] * count
        for begin, end, token in self._answers.get(block, ()):
            end = min(end, count)
            tokens[begin:end] = [token] * (end - begin)
        return tokens

    def _note_answer(self, number: int, request: LoadRequest) -> None:
        """Notes where in a request's blocks the answer to the one before is, if it goes on from there."""
        before, last = self._turns.get(request.session, (0, None))
        self._turns[request.session] = number, request
        if last is None or not last.blocks or last.blocks != request.blocks[: len(last.blocks)]:
            return
        begin, end = last.prompt_tokens, min(last.prompt_tokens + last.output_tokens, request.prompt_tokens)
        for place in range(begin // BLOCK_TOKENS, -(-end // BLOCK_TOKENS)):
            start = place * BLOCK_TOKENS
            found = self._answers.setdefault(request.blocks[place], [])
            low, high = max(begin - start, 0), min(end - start, BLOCK_TOKENS)
            if low < high and (not found or found[-1][1] <= low):
                found.append((low, high, OWN + before))

    def _drawn(self, name: str, count: int) -> list[int]:
        dice = random.Random(name)
        return [int(dice.random() * (self._vocabulary or 1)) for _ in range(count)]

    @cached_property
    def _params(self) -> ResolvedParams:
        return ResolvedParams(temperature=0.0)


class Clock(Protocol):
    """The time that a core sees: it passes where the engine waits, and nowhere else."""

    now: float

    def __call__(self) -> float:
        """Returns `now`."""
        ...

    def sleep(self, seconds: float) -> None:
        """Lets time pass."""
        ...

    def reach(self, moment: float) -> None:
        """Lets time pass until a moment, unless that is over."""
        ...


class StepExecutor(Protocol):
    """The part of an executor that is not for the core."""

    busy: float

    @property
    def tier(self) -> PricedTier | None:
        """The stores of the KV cache."""
        ...


def make_scheduler(sizes: EngineSizes, tier: TierIndex | None = None) -> Scheduler:
    """Returns the scheduler of an engine of these sizes, whose blocks a tier may keep."""
    limits = SchedulerLimits(
        sizes.max_batch_tokens, sizes.max_batch_requests, sizes.aging_steps, sizes.chunked_prefill, sizes.continuous
    )
    extensions, identity = list[MakeExtension](), b""
    if tier is not None:
        extensions, identity = [partial(TierTraffic, tier, blocks_of_page(sizes.block_size))], tier.identity
    cache = KVCacheManager(sizes.blocks, sizes.block_size, sizes.prefix_cache, identity, extensions)
    return Scheduler(limits, cache, POLICIES[sizes.policy])


class DrivenEngine:
    """A core with its clock, which is given requests as they arrive; a simulated one, or one of a model.

    Those that arrive while a step runs are given to the core when it has ended, as by an engine's process.
    """

    def __init__(
        self,
        sizes: EngineSizes,
        clock: Clock,
        executor: StepExecutor,
        timeline: Timeline,
        pace: PaceSizes | None = None,
    ) -> None:
        self.clock = clock
        self.executor = executor
        self.timeline = timeline
        self.scheduler = make_scheduler(sizes, executor.tier)
        self.pace = made = None if pace is None else pace.made(clock)
        """The target of the time between tokens; None: there is none."""
        if executor.tier is not None and made is not None and made.costs is not None:
            executor.tier.computing = partial(made.costs.prompt_seconds, sizes.max_batch_tokens)
        timing = CoreTiming(pace=made, clock=clock, sleep=clock.sleep)
        self.leaps: Leaps | None = None
        """Makes several steps at once; None: all are made singly."""
        self.stores: dict[str, SimulatedStore] = {}
        """The simulated stores of its tier."""
        self.core = EngineCore(self.scheduler, cast("Executor", executor), sizes.depth, timing=timing)

    @property
    def has_work(self) -> bool:
        """Some request has not ended."""
        return self.core.has_work

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens that came from the prefix cache."""
        return self.scheduler.cache.statistics.hit_tokens

    @property
    def loaded_tokens(self) -> int:
        """Prompt tokens that came from a tier."""
        stores = {} if self.executor.tier is None else self.executor.tier.figures()
        return sum(store.hit_tokens for store in stores.values())

    def add(self, spec: RequestSpec, arrival: float) -> None:
        """Takes a request, which has arrived at this time, or earlier if a step was running."""
        self.clock.reach(arrival)
        self.timeline.arrived(spec, arrival)
        self.core.add(spec)

    def bring(self, spec: RequestSpec, moment: float) -> None:
        """Loads at this time, or later if a step was running, what stores have of a prompt that will come."""
        self.clock.reach(moment)
        self.core.bring(spec)

    def step(self, until: float = math.inf) -> list[TokenEvent]:
        """Does what the process of an engine does in one turn; the next request arrives then.

        Returns the events of the step, of several at once none.
        """
        if self.leaps is None or not self.leaps.leap(until):
            return self.core.step()
        return []

    def look(self) -> float | None:
        """Returns when steps will have ended until which nothing is decided; None: there are none of these."""
        return None if self.leaps is None else self.leaps.look()

    def land(self, until: float) -> int:
        """Makes the steps that were looked at and end before a moment; returns how many these are."""
        return self.leaps.settle(until) if self.leaps is not None and len(self.leaps.ends) else 0

    def forget(self) -> None:
        """Lets go of what is cached, when all requests have ended."""
        self.core.watch_cache(False)
        self.scheduler.cache.tree.forget()

    def run(self, load: Sequence[LoadRequest], prompts: Prompts) -> None:
        """Runs a whole load, in the order of its arrivals."""
        upcoming = ((prompts.spec(number, request), request.arrival) for number, request in enumerate(load))
        spec, arrival = next(upcoming, (None, 0.0))
        while spec is not None or self.has_work:
            while spec is not None and (arrival <= self.clock.now or not self.has_work):
                self.add(spec, arrival)
                spec, arrival = next(upcoming, (None, 0.0))
            self.step(math.inf if spec is None else arrival)


def simulated_engine(
    sizes: EngineSizes, price: Price, pace: PaceSizes | None = None, leaps: bool = True
) -> DrivenEngine:
    """Returns an engine without a model, which `leaps` where it can."""
    timeline = Timeline()
    if sizes.tier is not None:
        threads = ThreadedClock()
        pages = page_sizes(sizes.block_size, sizes.token_bytes, sizes.max_batch_tokens, sizes.on_device)
        stores = make_stores(sizes.tier, pages, threads)
        tier = make_tier(sizes.tier, pages, sizes.block_size, threads, stores)
        executor = TieredExecutor(threads, price, timeline.ended, tier, sizes.on_device)
        engine = DrivenEngine(sizes, threads, executor, timeline, pace)
        engine.stores = stores
        return engine
    clock = VirtualClock()
    plain = SimulatedExecutor(clock, price, timeline.ended)
    engine = DrivenEngine(sizes, clock, plain, timeline, pace)
    if leaps and sizes.depth <= MOST_FLYING:
        engine.leaps = Leaps(engine.scheduler, plain, timeline, clock, sizes.depth, engine.pace)
    return engine


def check_load(load: Sequence[LoadRequest], sizes: EngineSizes) -> None:
    """Raises ConfigError if a request can never run."""
    longest = min(sizes.max_model_len, sizes.blocks * sizes.block_size)
    if not load:
        raise ConfigError("the load has no requests: there is nothing to run")
    for number, request in enumerate(load, 1):
        tokens = request.prompt_tokens + request.output_tokens
        if tokens > longest:
            raise ConfigError(
                f"request {number} of the load has {tokens} tokens, prompt and answer, and the engine takes {longest}"
            )
        if not sizes.chunked_prefill and request.prompt_tokens > sizes.max_batch_tokens:
            raise ConfigError(
                f"request {number} of the load has a prompt of {request.prompt_tokens} tokens, above max_batch_tokens "
                f"{sizes.max_batch_tokens}: without chunked prefill it never runs"
            )
