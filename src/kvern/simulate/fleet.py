"""Several simulated engines behind the choice of a server: who gets a request, and what the server knows then.

    arrival --> prefix names --> PrefixIndex, EngineLoads: `cheapest` --> DrivenEngine
                                     ^                                        |
                                     +---- what has begun, ended, is cached --+   when the step that did it has ended

Each engine has a clock of its own; the engine whose clock is least takes the next turn. Other choices than the
server's are there to be compared with it.

An engine looks ahead to the end of steps in which nothing is decided (`leap.py`), however many requests arrive
elsewhere. They are made when they have ended, or before the server reads something that they change: when this engine
gets a request, and when a prompt has an answer in it that they add to, or a prefix that they may evict.
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
        self.due = math.inf
        """The moment of its next turn; inf: it has nothing to do until it gets a request."""
        self.losing: list[bytes] = []
        """The names of prefixes that steps may evict that it has looked at."""


class Fleet:
    """Engines that share the requests of a load, numbered from 0 on."""

    def __init__(self, engines: Sequence[DrivenEngine], router: str = "server", seed: int = 0) -> None:
        if router not in ROUTERS:
            raise ConfigError(f"router is {router!r:.40}: there are {', '.join(ROUTERS)}")
        self._members = [Member(engine, number) for number, engine in enumerate(engines)]
        self._loads, self._index = EngineLoads(), PrefixIndex()
        self._turns = Turns()
        self._due: list[tuple[float, int]] = []
        """The moments at which engines take their next turns, and others that are not due any more."""
        self._losing: dict[bytes, list[Member]] = {}
        self._where: dict[str, Member] = {}
        """The engines that have the requests that have not ended."""
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
            for answer in prompts.answers(request):
                if (member := self._where.get(f"{answer}#0")) is not None:
                    self._reach(member, request.arrival)
            self._give(spec, request.arrival)
        self._advance(math.inf)

    def _advance(self, until: float) -> None:
        """Lets engines take the turns that begin before a moment."""
        while self._due and self._due[0][0] < until:
            self._turn()

    def _turn(self) -> None:
        """Lets the engine whose turn is next do a step, or look at several."""
        due, number = heapq.heappop(self._due)
        member = self._members[number]
        if due != member.due:
            return
        self._land(member, math.inf)
        self._settle(member)
        if not member.engine.has_work:
            member.due = math.inf
        elif (end := member.engine.look()) is not None:
            self._let(member, end)
            if member.engine.leaps is not None and member.engine.leaps.evicted:
                self._loses(member, member.engine.leaps.evicted)
        else:
            self._told(member, member.engine.core.step())
            member.teller.tell()
            self._let(member, member.engine.clock.now)

    def _let(self, member: Member, moment: float) -> None:
        """Lets an engine take its next turn at a moment."""
        member.due = moment
        heapq.heappush(self._due, (moment, member.number))

    def _land(self, member: Member, until: float) -> None:
        """Makes the steps that an engine has looked at and that end before a moment."""
        if member.engine.land(until):
            member.teller.tell()
        for name in member.losing:
            self._losing[name].remove(member)
            if not self._losing[name]:
                del self._losing[name]
        member.losing.clear()

    def _loses(self, member: Member, blocks: int) -> None:
        """Notes what an engine may evict; as it adds blocks, it may be one more for each."""
        journal = member.engine.scheduler.cache.journal
        if journal is not None:
            member.losing = journal.names_of(member.engine.scheduler.cache.tree.oldest(2 * blocks))
            for name in member.losing:
                self._losing.setdefault(name, []).append(member)

    def _reach(self, member: Member, moment: float) -> None:
        """Lets an engine take the turns that begin before a moment, without a look at what follows."""
        if member.due == math.inf:
            return
        clock = member.engine.clock
        self._land(member, moment)
        while clock.now < moment:
            self._settle(member)
            if not member.engine.has_work:
                member.due = math.inf
                return
            self._told(member, member.engine.step(moment))
            member.teller.tell()
        if member.due != clock.now:
            self._let(member, clock.now)

    def _told(self, member: Member, events: Sequence[TokenEvent]) -> None:
        """An engine has told what a step did; only those who hand prompts over look at it."""

    def _give(self, spec: RequestSpec, arrival: float) -> None:
        names = prompt_names(spec) if self._knows else ()
        for name in names if self._losing else ():
            if name not in self._index:
                break
            for member in [*self._losing.get(name, ())]:
                self._reach(member, arrival)
        levels = self._index.levels(names)
        spec = msgspec.structs.replace(spec, turn=self._turns.take(spec.owner, 1))
        self._put(spec, arrival, self._members[self._chosen(levels)], names, levels)

    def _put(
        self, spec: RequestSpec, arrival: float, member: Member, names: Iterable[bytes], levels: Sequence[Level]
    ) -> None:
        """Gives an engine a request; `levels`: who has how much of its prefixes, `names`, cached."""
        self._reach(member, arrival)
        uncached = spec.prompt_length - cached_tokens(levels, member.number)
        given = _Given(spec, uncached, self._index.expect(member.number, names))
        member.given[f"{spec.request_id}#0"] = given
        member.computed += uncached
        member.tokens += given.tokens
        self._weigh(member)
        self._where[f"{spec.request_id}#0"] = member
        member.engine.add(spec, arrival)
        if member.due == math.inf:
            self._let(member, member.engine.clock.now)

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
            del self._where[name]
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
