"""A simulated server with several models: requests arrive, models are woken, and time passes there alone."""

import heapq
import itertools
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvern.residency.policy import Footprint, Residency, Terms
from kvern.residency.pressure import HostMemory

GIGABYTE = 1 << 30


class LeastRecentlyUsed(Residency):
    """The usual policy, for comparison: it has no values, and wakes nothing that is not asked."""

    def _preload(self, decision: Any, now: float) -> None:
        pass

    def _value(self, model: Any, state: str, now: float) -> float:
        return float(model.used_at)


@dataclass
class Machine:
    """The memory of a machine, of which others take some."""

    total: int
    others: Sequence[tuple[float, int]]
    """From when on they take how many bytes, in order of time."""
    filled: float = 0.0
    """The share of KV caches that is taken as soon as a model is awake."""
    takes_early: bool = False
    """A model that wakes takes its memory at once, and not at the end."""

    def taken(self, now: float) -> int:
        """The bytes that others take."""
        return next((size for when, size in reversed(self.others) if when <= now), 0)

    def left(self, residency: Residency, now: float) -> HostMemory:
        taken = self.taken(now)
        for name, state in residency.states.items():
            footprint = residency.footprint(name)
            taken += footprint.bytes_in(state)
            if state == "awake":
                taken -= int((1 - self.filled) * footprint.cache)
            elif self.takes_early and residency.moving(name) == "awake":
                taken += footprint.needed_from(state)
        return HostMemory(self.total - taken, self.total)


@dataclass
class World:
    """Carries out what a policy decides. A model that is put to sleep gives its requests `grace` seconds."""

    residency: Residency
    grace: float = 1.0
    now: float = 0.0
    wake_seconds: float = 0.0
    waits: list[float] = field(default_factory=list)
    """Seconds from each request to its begin."""
    most_held: int = 0
    demoted: list[tuple[float, str]] = field(default_factory=list)
    running: dict[str, int] = field(default_factory=dict)
    waiting: dict[str, deque[tuple[float, float]]] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    machine: Machine | None = None
    looks: float = 0.0
    """The seconds between looks at the machine, until the time of the same name."""
    looks_until: float = 0.0
    around: Machine | None = None
    """The machine around GPUs: what models have of it is not counted."""

    def run(self, arrivals: Sequence[tuple[float, str, float]], until: float = float("inf")) -> None:
        """Serve requests: when, for which model, and how long each takes, until all have ended."""
        self._count = itertools.count()
        self._events: list[tuple[float, int, str, Any]] = []
        for when, name, seconds in arrivals:
            self._at(when, "arrive", (name, seconds))
        for number in range(int(self.looks_until / self.looks) if self.looks else 0):
            self._at(number * self.looks, "look", None)
        self._decide()
        while self._events:
            when, _, kind, what = heapq.heappop(self._events)
            if when > until:
                return
            self.now = max(self.now, when)
            getattr(self, f"_{kind}")(what)
            self._decide()

    def _at(self, when: float, kind: str, what: Any) -> None:
        heapq.heappush(self._events, (when, next(self._count), kind, what))

    def _arrive(self, what: tuple[str, float]) -> None:
        name, seconds = what
        self.residency.asked(name, self.now)
        self.waiting.setdefault(name, deque()).append((self.now, seconds))
        self._begin(name)

    def _end(self, name: str) -> None:
        self.running[name] -= 1
        self.residency.ended(name, self.now)

    def _moved(self, what: tuple[str, str]) -> None:
        name, state = what
        self.residency.moved(name, self.now)
        assert self.residency.states[name] == state
        self._begin(name)

    def _look(self, _: Any) -> None:
        pass

    def _begin(self, name: str) -> None:
        """Begin what waits for a model that is awake and not about to sleep; those that run end in any case."""
        if self.residency.states[name] == "awake" and not self.residency.moving(name):
            for asked, seconds in self.waiting.pop(name, ()):
                self.waits.append(self.now - asked)
                self.running[name] = self.running.get(name, 0) + 1
                self._at(self.now + seconds, "end", name)

    def _decide(self) -> None:
        if self.machine is not None:
            self.residency.host = self.machine.left(self.residency, self.now)
        if self.around is not None:
            self.residency.around = HostMemory(self.around.total - self.around.taken(self.now), self.around.total)
        decision = self.residency.decide(self.now)
        self.most_held = max(self.most_held, self.residency.held)
        for move in decision.moves:
            footprint = self.residency.footprint(move.name)
            if move.state == "awake":
                self._check_wakes()
                seconds = footprint.seconds_from(self.residency.states[move.name])
                self.wake_seconds += seconds
            else:
                seconds = self.grace if self.running.get(move.name) else 0.0
                self.demoted.append((self.now, move.name))
            self._at(self.now + seconds, "moved", (move.name, move.state))
        for name in decision.refused:
            assert not self.running.get(name), "a request that had begun would fail"
            for _ in self.waiting.pop(name, ()):
                self.refused[name] = self.refused.get(name, 0) + 1
                self.residency.ended(name, self.now)
        if decision.next_at is not None:
            assert decision.next_at > self.now, "a decision that is due at once is due now"
            if not any(kind == "look" and when == decision.next_at for when, _, kind, _ in self._events[:8]):
                self._at(decision.next_at, "look", None)

    def _check_wakes(self) -> None:
        """All models that wake fit into what the machine has left."""
        if (host := self.residency.host) is not None and self.machine is not None and not self.machine.takes_early:
            states = self.residency.states
            waking = [name for name in states if self.residency.moving(name) == "awake"]
            needed = sum(self.residency.footprint(name).needed_from(states[name]) for name in waking)
            assert needed <= host.spare, (needed, host)


def moves(residency: Residency, now: float) -> list[tuple[str, str]]:
    """The moves of a decision: model and state."""
    return [(move.name, move.state) for move in residency.decide(now).moves]


def awake(residency: Residency, name: str, now: float) -> None:
    """Wake a model for a request that ends after a second."""
    residency.asked(name, now)
    assert moves(residency, now) == [(name, "awake")]
    residency.moved(name, now + 1)
    residency.ended(name, now + 1)


def zipf_load(models: int, requests: int, seed: int, exponent: float = 1.0) -> list[tuple[float, str, float]]:
    """Arrivals of a Poisson process, for models whose popularity falls as a power of their rank."""
    dice = random.Random(seed)
    weights = [(rank + 1) ** -exponent for rank in range(models)]
    when, arrivals = 0.0, []
    for _ in range(requests):
        when += dice.expovariate(1 / 20.0)
        [number] = dice.choices(range(models), weights)
        arrivals.append((when, f"m{number}", dice.uniform(0.5, 3.0)))
    return arrivals


def zipf_world(kind: type[Residency], sizes: Sequence[int], room: int) -> World:
    """Models of so many bytes, of which `room` fit on average. One is woken at 45 GB/s, after 0.2 s."""
    residency = kind(sum(sizes) * room // len(sizes))
    for number, size in enumerate(sizes):
        residency.add(f"m{number}", Terms(), Footprint(size, 0.2 + size / 45e9), 0.0)
    return World(residency)
