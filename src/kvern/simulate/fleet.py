"""Several simulated engines behind the choice of a server: who gets a request, and what the server knows then.

    arrival --> prefix names --> PrefixIndex, EngineLoads: `cheapest` --> DrivenEngine
                                     ^                                        |
                                     +---- what has begun, ended, is cached --+   when the step that did it has ended

Each engine has a clock of its own; the engine whose clock is least takes the next turn. Other choices than the
server's are there to be compared with it.
"""

import heapq
import math
import random
from collections.abc import Iterable, Sequence

import msgspec

from kvern.cache.prefix_names import prompt_names
from kvern.errors import ConfigError
from kvern.loads.request import LoadRequest
from kvern.request.events import TokenEvent
from kvern.request.request import RequestSpec
from kvern.serving.choice import EngineLoads, Load
from kvern.serving.engine_cache import CacheTeller
from kvern.serving.prefix_index import Expected, Level, PrefixIndex, cached_tokens
from kvern.serving.prefix_record import answer_tokens
from kvern.serving.wire import CacheChanges
from kvern.serving.workload import Turns
from kvern.simulate.engine import DrivenEngine, Prompts

ROUTERS = "server", "least", "random", "round-robin"
"""The server's own choice, the engine with the fewest tokens to compute, and two that know nothing."""


def _answer_tokens(spec: RequestSpec) -> int:
    """Returns the work of an answer, if this engine gives one."""
    return 0 if spec.hands_over else answer_tokens(spec)


class _Given:
    """A request that an engine has: the tokens to compute for it, and the names that will be cached soon."""

    def __init__(self, spec: RequestSpec, uncached: int, expected: Expected | None) -> None:
        self.spec = spec
        self.tokens = uncached + _answer_tokens(spec)
        self.expected = expected


class Member:
    """An engine as the server knows it: what it has to do, and what its last step has told."""

    def __init__(self, engine: DrivenEngine, number: int) -> None:
        self.engine = engine
        self.number = number
        self.given: dict[str, _Given] = {}
        self.tokens = self.computed = 0
        self.told: list[CacheChanges] = []
        self.teller = CacheTeller(engine.core, self.told.append)
        self.waits = True
        """It has nothing to do, and takes no turn until it gets a request."""


class Fleet:
    """Engines that share the requests of a load, numbered from 0 on."""

    def __init__(self, engines: Sequence[DrivenEngine], router: str = "server", seed: int = 0) -> None:
        if router not in ROUTERS:
            raise ConfigError(f"router is {router!r:.40}: there are {', '.join(ROUTERS)}")
        self._members = [Member(engine, number) for number, engine in enumerate(engines)]
        self._loads, self._index = EngineLoads(), PrefixIndex()
        self._turns = Turns()
        self._due: list[tuple[float, int]] = []
        """The moments at which engines take their next turns."""
        self._dice = random.Random(f"router {seed}")
        self._count = 0
        self._router = router
        self._knows = router == "server" and len(engines) > 1 and engines[0].scheduler.cache.prefix_cache
        for member in self._members:
            self._loads.put(Load(False, 0, 0, member.number))
            if self._knows:
                self._index.begin(member.number)
                member.teller.watch(True)
                self._hear(member)

    def run(self, load: Sequence[LoadRequest], prompts: Prompts) -> None:
        """Runs a whole load, in the order of its arrivals."""
        for number, request in enumerate(load):
            spec = prompts.spec(number, request)
            self._advance(request.arrival)
            self._give(spec, request.arrival)
        self._advance(math.inf)

    def _advance(self, until: float) -> None:
        """Lets engines take the turns that begin before a moment."""
        while self._due and self._due[0][0] < until:
            self._turn(until)

    def _turn(self, until: float) -> None:
        """Lets the engine whose turn is next do a step."""
        _, number = heapq.heappop(self._due)
        member = self._members[number]
        self._settle(member)
        if member.engine.has_work:
            self._told(member, member.engine.step(until))
            member.teller.tell()
            heapq.heappush(self._due, (member.engine.clock.now, number))
        else:
            member.waits = True

    def _told(self, member: Member, events: Sequence[TokenEvent]) -> None:
        """An engine has told what a step did; only those who hand prompts over look at it."""

    def _give(self, spec: RequestSpec, arrival: float) -> None:
        names = prompt_names(spec) if self._knows else ()
        levels = self._index.levels(names)
        spec = msgspec.structs.replace(spec, turn=self._turns.take(spec.owner, 1))
        self._put(spec, arrival, self._members[self._chosen(levels)], names, levels)

    def _put(
        self, spec: RequestSpec, arrival: float, member: Member, names: Iterable[bytes], levels: Sequence[Level]
    ) -> None:
        """Gives an engine a request; `levels`: who has how much of its prefixes, `names`, cached."""
        uncached = spec.prompt_length - cached_tokens(levels, member.number)
        given = _Given(spec, uncached, self._index.expect(member.number, names))
        member.given[f"{spec.request_id}#0"] = given
        member.computed += uncached
        member.tokens += given.tokens
        self._weigh(member)
        member.engine.add(spec, arrival)
        if member.waits:
            member.waits = False
            heapq.heappush(self._due, (member.engine.clock.now, member.number))

    def _chosen(self, levels: Sequence[Level]) -> int:
        count = len(self._members)
        self._count += 1
        if self._router == "random":
            return self._dice.randrange(count)
        if self._router == "round-robin":
            return (self._count - 1) % count
        chosen = self._loads.cheapest(levels, lambda number: True)
        assert chosen is not None
        return chosen

    def _settle(self, member: Member) -> None:
        """Lets the server know what a step has done that has ended now."""
        begun, ended = member.engine.timeline.news()
        for name in begun:
            given = member.given[name]
            self._cached(given)
            if not given.spec.hands_over:
                self._turns.began(given.spec.turn, given.spec.owner, 1)
            member.tokens -= given.tokens
            given.tokens = _answer_tokens(given.spec)
            member.tokens += given.tokens
        for name in ended:
            if not member.given[name].spec.hands_over:  # its pages may not be in a store yet
                member.tokens -= member.given.pop(name).tokens
        if begun or ended:
            self._weigh(member)
        self._hear(member)

    def _remove(self, member: Member, name: str) -> None:
        """An engine has done what it had to do for another."""
        member.tokens -= member.given.pop(name).tokens
        self._weigh(member)

    def _cached(self, given: _Given) -> None:
        if given.expected is not None:
            self._index.withdraw(given.expected)
            given.expected = None

    def _hear(self, member: Member) -> None:
        for changes in member.told:
            self._index.hear(member.number, changes)
        member.told.clear()

    def _weigh(self, member: Member) -> None:
        full = len(member.given) >= member.engine.scheduler.limits.max_batch_requests
        self._loads.put(Load(full, member.tokens, member.computed, member.number))

    def check_integrity(self) -> None:
        """Raises AssertionError unless the server knows that all requests have ended."""
        self._index.check_integrity()
        assert all(not member.given and not member.tokens for member in self._members), "a request is lost"
