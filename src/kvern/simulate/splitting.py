"""Prefill and decode engines over a virtual clock: who computes a prompt is decided by the rule of a server.

arrival --hands_over--> prefill engine: the prompt alone, until its pages are in the host's memory
            |                  |
            +--> decode engine <--+  which loads the pages from there: the store `peer`, parts of them before the last
"""

import heapq
import itertools
import math
from collections.abc import Sequence

import msgspec

from kvern.cache.prefix_names import prompt_names
from kvern.errors import ConfigError
from kvern.request.events import TokenEvent
from kvern.request.request import RequestSpec
from kvern.serving.choice import hands_over
from kvern.serving.prefix_index import Level
from kvern.simulate.engine import DrivenEngine, EngineSizes
from kvern.simulate.fleet import Fleet, Member
from kvern.simulate.tier_options import with_tier
from kvern.simulate.tiers import HOST, PEER, SimulatedHost, SimulatedPeer, StoreSizes, TierSizes

HOST_OPTION = "host:32GB"
"""The memory of each engine for pages that it hands over, if nothing else is said."""


def read_split(text: str) -> tuple[int, int]:
    """Reads 1+3 as the numbers of prefill and of decode engines. Raises ConfigError."""
    parts = [int(part) if part.isascii() and part.isdecimal() and len(part) < 6 else 0 for part in text.split("+")]
    if len(parts) != 2 or not all(parts):
        raise ConfigError(f"split is {text!r:.40}: it must be prefill and decode engines, like 1+3, at least 1 of each")
    return parts[0], parts[1]


def with_peers(sizes: EngineSizes) -> EngineSizes:
    """Returns engines that read each other's host memory, as fast as their own. Raises ConfigError."""
    if sizes.tier is None:
        sizes = with_tier(sizes, [HOST_OPTION])
    assert sizes.tier is not None
    stores: list[StoreSizes] = []
    for store in sizes.tier.stores:
        stores.append(store)
        if store.name == HOST:
            stores.append(msgspec.structs.replace(store, name=PEER, size=0))
    if len(stores) == len(sizes.tier.stores):
        raise ConfigError("split needs a kv_tier host, where prefill engines leave pages: give host:SIZE, too")
    return msgspec.structs.replace(sizes, tier=TierSizes(tuple(stores), sizes.tier.identity))


def _connect(engines: Sequence[DrivenEngine]) -> None:
    """Lets engines read each other's host memory."""
    stores = [engine.stores for engine in engines]
    for own in stores:
        peer = own[PEER]
        assert isinstance(peer, SimulatedPeer)
        others = (each[HOST] for each in stores if each is not own)
        peer.hosts += [host for host in others if isinstance(host, SimulatedHost)]


class SplitFleet(Fleet):
    """Engines of which the first `prefill` compute prompts for the others."""

    def __init__(self, engines: Sequence[DrivenEngine], prefill: int, seed: int = 0) -> None:
        super().__init__(engines, "server", seed)
        self.handed = 0
        """The prompts that were handed over."""
        self.hit_tokens = self.loaded_tokens = 0
        """Prompt tokens that came from caches, and those of them from tiers.

        Of prompts that are handed over they are the prefill engine's: what decode engines load of these was computed.
        """
        self._prefill = prefill
        self._alone: dict[str, tuple[RequestSpec, float]] = {}
        """Requests whose prompts are computed for others, with their arrivals."""
        self._stored: list[tuple[float, int, str, Member | None]] = []
        """Those of which some pages are there, or all, with the engine that has ended with them: the moments at which
        the server learns of it."""
        self._numbers = itertools.count()
        self._continued: set[str] = set()
        """Requests that decode engines have got with a computed prompt."""
        _connect(engines)

    def _advance(self, until: float) -> None:
        """Lets engines take the turns that begin before a moment, and decode engines go on with prompts."""
        while True:
            turn = self._due[0][0] if self._due else math.inf
            stored = self._stored[0][0] if self._stored else math.inf
            if min(turn, stored) >= until:
                return
            if stored > turn:
                self._turn()
                continue
            moment, _, name, member = heapq.heappop(self._stored)
            if member is None:
                self._bring(name, moment)
            else:
                self._hand_over(name, member, moment)

    def _told(self, member: Member, events: Sequence[TokenEvent]) -> None:
        for event in events:
            if event.stored_tokens:
                self._note(member, event.request_id, None)
            if event.finish_reason is None:
                continue
            if event.request_id in self._continued:
                self._continued.remove(event.request_id)
                continue
            self.hit_tokens += event.cached_tokens
            self.loaded_tokens += sum(event.loaded_tokens.values())
            if event.request_id in self._alone:
                self.handed += 1
                self._note(member, event.request_id, member)

    def _note(self, member: Member, name: str, ended: Member | None) -> None:
        """The server learns that some of a prompt is stored, or that an engine has ended with it."""
        heapq.heappush(self._stored, (member.engine.clock.now, next(self._numbers), name, ended))

    def _give(self, spec: RequestSpec, arrival: float) -> None:
        names = prompt_names(spec)
        levels = self._index.levels(names)
        spec = msgspec.structs.replace(spec, turn=self._turns.take(spec.owner, 1))
        usual, before = (self._cheapest(levels, prefill=prefill) for prefill in (False, True))
        uncached = spec.prompt_length - self._index.held_tokens(names, usual.number)
        if hands_over(uncached, before.tokens, usual.tokens):
            self._alone[f"{spec.request_id}#0"] = spec, arrival
            self._put(spec.prompt_alone(tells_parts=True), arrival, before, names, levels)
        else:
            self._put(spec, arrival, usual, names, levels)

    def _bring(self, name: str, moment: float) -> None:
        """Some of a prompt is stored: the decode engine that is likely to go on loads it."""
        spec, _ = self._alone[name]
        usual = self._cheapest(self._index.levels(prompt_names(spec)), prefill=False)
        self._reach(usual, moment)
        usual.engine.bring(spec.prompt_alone(), moment)
        if usual.due == math.inf and usual.engine.has_work:
            self._let(usual, usual.engine.clock.now)

    def _hand_over(self, name: str, member: Member, moment: float) -> None:
        """A prompt is computed: a decode engine goes on."""
        spec, arrival = self._alone.pop(name)
        self._continued.add(name)
        self._settle(member)
        self._remove(member, name)
        del member.engine.timeline.answers[name]
        names = prompt_names(spec)
        levels = self._index.levels(names)
        usual = self._cheapest(levels, prefill=False)
        self._put(spec, moment, usual, names, levels)
        usual.engine.timeline.answers[name].arrival = arrival

    def _cheapest(self, levels: Sequence[Level], *, prefill: bool) -> Member:
        found = self._loads.cheapest(levels, lambda number: (number < self._prefill) == prefill)
        assert found is not None
        return self._members[found]
