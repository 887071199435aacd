"""The policy of memory: which models are awake, asleep and cold. It has no clock: every call says what time it is.

The value of a model that is not cold is that of GreedyDual-Size-Frequency (Cherkasova 1998):

    value = weight x visits x seconds to wake it / bytes that it frees

The models with the least value make way. Visits fade by half in `half_life` seconds, so that models age which nobody
uses any more; the clock of GreedyDual, which ages them by evictions, was simulated and wakes more. Requests
within the time that a wake takes are one visit.

A model that is in use stays awake for `STAY` times its wake at least: two busy models that do not fit together take
turns, and a tenth of the time goes into wakes. Models that wait are woken in the order of their first request; one that
waits asleep becomes cold if the first lacks its memory.

Where `host` tells how much memory the machine has left, a model is woken only if its weights fit into that, and while
less than a floor is left, which other programs may have caused, idle models make way for nobody.
"""

import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from kvern.residency.pressure import LOOK_SECONDS, HostMemory

State = Literal["cold", "asleep", "awake"]
STATES: tuple[State, ...] = ("cold", "asleep", "awake")

STAY = 10.0
"""The least time that a busy model stays awake, in times of its wake."""
LEAST_STAY, LONGEST_STAY = 20.0, 600.0
"""The least time in seconds while it has requests, since the prefill that they have begun is lost. It doubles each time
that none of them ends, up to the latter."""
HALF_LIFE = 7200.0
FREQUENT = 3.0
"""Visits, as they have faded, from which on a model is woken before it is asked, if there is memory for it."""
LONGEST_SLEEP = 7200.0
"""Seconds without a request after which a model that is asleep becomes cold."""
LONGEST_WAIT = 60.0
"""The most seconds between attempts to wake a model that cannot be woken."""
MOST_DOUBLINGS = 6
"""The failures after which this time grows no more."""


@dataclass(frozen=True)
class Terms:
    """The user's terms of a model."""

    weight: float = 1.0
    """The worth of a second that its clients wait, relative to other models."""
    pin: bool = False
    """It is always awake."""
    keep_alive: float | None = None
    """Seconds without a request after which it is put to sleep. None: when others need the memory."""


@dataclass(frozen=True)
class Footprint:
    """The bytes that a model takes in each state, and how long it takes to wake it; estimated first, then measured."""

    awake: int
    """Bytes."""
    load_seconds: float
    """Seconds from cold to awake."""
    asleep: int | None = None
    """Bytes. None: this model is never asleep."""
    wake_seconds: float = 0.0
    """Seconds from asleep to awake."""
    cache: int = 0
    """The part of `awake` that is taken only as the KV cache fills."""

    def bytes_in(self, state: State) -> int:
        """Returns the bytes of memory that it holds in a state."""
        return 0 if state == "cold" else self.awake if state == "awake" else self.asleep or 0

    def needed_from(self, state: State) -> int:
        """Returns the bytes that a wake takes at once."""
        return max(0, self.awake - self.cache - self.bytes_in(state))

    def given_back(self, state: State, lower: State) -> int:
        """Returns the bytes of the machine that it surely gives back between two states: its KV cache may be empty."""
        return max(0, self.bytes_in(state) - (self.cache if state == "awake" else 0) - self.bytes_in(lower))

    def seconds_from(self, state: State) -> float:
        """Returns the seconds in which it is awake again."""
        return 0.0 if state == "awake" else self.wake_seconds if state == "asleep" else self.load_seconds

    @property
    def below_awake(self) -> State:
        """The state in which it rests."""
        return "cold" if self.asleep is None else "asleep"


@dataclass(frozen=True)
class Move:
    """A change of state to carry out; `Residency.moved` or `Residency.failed` tells its end."""

    name: str
    state: State
    relieves: bool = False
    """No other model takes its memory, of which the machine has too little."""


@dataclass
class Decision:
    """The moves to begin now, models that cannot be woken with the reasons, and when to decide again at the latest."""

    moves: list[Move] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    next_at: float | None = None

    def look_at(self, when: float) -> None:
        """Lets the next decision be made no later than then."""
        self.next_at = when if self.next_at is None else min(self.next_at, when)


@dataclass
class _Model:
    name: str
    terms: Terms
    footprint: Footprint
    keep_alive: float | None
    state: State = "cold"
    target: State | None = None
    requests: int = 0
    wanted_at: float | None = None
    awake_since: float = -math.inf
    used_at: float = -math.inf
    visits: float = 0.0
    visited_at: float = -math.inf
    leaves: State | None = None
    """The state into which it is ordered to go once it has no requests."""
    stay: float = LEAST_STAY
    fruitful: bool = False
    """A request has ended since it was woken."""
    dismissed: bool = False
    """It went to sleep because nobody asked, or by an order, or for other programs: somebody must ask first."""
    interrupted: bool = False
    """It was put to sleep while it had requests, which are not to be refused."""
    failures: int = 0
    barred_until: float = -math.inf
    downloads: bool = False
    """Its files are downloaded: its wake takes no memory yet."""

    @property
    def held(self) -> int:
        """The bytes that it holds, or is about to."""
        return max(self.footprint.bytes_in(state) for state in (self.state, self.target or self.state))


class Residency:
    """The states of models within `memory` bytes."""

    def __init__(self, memory: int, half_life: float = HALF_LIFE) -> None:
        self.memory = memory
        self.host: HostMemory | None = None
        """The memory that the machine, or the GPU, has left at the time of a decision; None: it does not matter."""
        self.around: HostMemory | None = None
        """The memory of the machine around the GPUs, if `host` is theirs; None: it does not matter."""
        self.lent = 0
        """Bytes beyond that, which KV caches give back when a model wakes."""
        self._half_life = half_life
        self._free = 0
        """The bytes at the last look that neither models nor other programs held, used by KV caches or not."""
        self._taken = 0
        """The bytes by which that fell while models take memory that wake; below 0: others gave more back."""
        self._taking: set[str] = set()
        """Models whose wake has begun to take memory."""
        self._models: dict[str, _Model] = {}

    def add(self, name: str, terms: Terms, footprint: Footprint, now: float) -> None:
        """Adds a model, which is cold."""
        model = self._models[name] = _Model(name, terms, footprint, terms.keep_alive)
        if terms.pin:
            model.wanted_at = now

    @property
    def held(self) -> int:
        """The bytes that all models hold, with those of moves that have begun."""
        return sum(model.held for model in self._models.values())

    @property
    def states(self) -> Mapping[str, State]:
        """The states of all models; one that moves is in its old state."""
        return {model.name: model.state for model in self._models.values()}

    @property
    def waking(self) -> int:
        """The bytes of the machine, or the GPU, that models will still take which are being woken."""
        waking = [one for one in self._models.values() if one.target == "awake" and not one.downloads]
        needed = sum(one.footprint.needed_from(one.state) for one in waking)
        taking = sum(one.footprint.needed_from(one.state) for one in waking if one.name in self._taking)
        return needed - max(0, min(taking, self._taken))

    def saw(self, free: int) -> None:
        """Notes the bytes that the machine, or the GPU, has free, with those that KV caches use."""
        self._taken += self._free - free
        self._free = free

    def takes(self, name: str) -> None:
        """Notes that a model which is being woken begins to take memory: what is free falls by that from now on."""
        if not self._taking:
            self._taken = 0
        self._taking.add(name)

    def downloads(self, name: str, is_so: bool) -> None:
        """Notes that a model which is being woken takes no memory so far, or begins to."""
        self._models[name].downloads = is_so

    def moving(self, name: str) -> State | None:
        """Returns the state into which a model moves at present."""
        return self._models[name].target

    def terms(self, name: str) -> Terms:
        """Returns what the user said of a model."""
        return self._models[name].terms

    def footprint(self, name: str) -> Footprint:
        """Returns what is known of a model's memory and times."""
        return self._models[name].footprint

    def visits(self, name: str, now: float) -> float:
        """Returns how often a model was asked, earlier visits counted less."""
        model = self._models[name]
        return model.visits * 0.5 ** ((now - model.visited_at) / self._half_life) if model.visits else 0.0

    def expires_at(self, name: str) -> float | None:
        """Returns when a model is put to sleep if nobody asks it; None: no time is set, or it is in use."""
        model = self._models[name]
        seconds = 0.0 if model.leaves else model.keep_alive
        if seconds is None or model.terms.pin or model.requests or model.state != "awake":
            return None
        return max(model.used_at, model.awake_since) + seconds

    def barred(self, name: str, now: float) -> float:
        """Returns the seconds until a model that could not be woken is tried again; 0 if it may be tried."""
        return max(0.0, self._models[name].barred_until - now)

    def asked(self, name: str, now: float) -> None:
        """Counts a request that begins; it wants the model awake until `ended`."""
        model = self._models[name]
        model.requests += 1
        model.dismissed = False
        if now - model.visited_at >= model.footprint.seconds_from(model.footprint.below_awake):
            model.visits = self.visits(name, now) + 1.0
            model.visited_at = now
        model.used_at = now
        self._want(model, now)

    def ended(self, name: str, now: float) -> None:
        """Counts a request that has ended."""
        model = self._models[name]
        model.requests -= 1
        model.used_at = now
        model.stay, model.fruitful = LEAST_STAY, True
        model.interrupted = model.interrupted and model.requests > 0
        if not model.requests and not model.terms.pin:
            model.wanted_at = None
        self._forget_orders(model)

    def keep(self, name: str, seconds: float | None) -> None:
        """Replaces the `keep_alive` of a model until it goes to sleep."""
        self._models[name].keep_alive = seconds
        self._models[name].leaves = None

    def dismiss(self, name: str, state: State = "asleep") -> None:
        """Puts a model that is awake, or is to be, to sleep as soon as it has no requests, unless it is pinned.

        `state`: cold, to end its process, also if it is asleep.
        """
        model = self._models[name]
        model.leaves = None if model.terms.pin else state
        self._forget_orders(model)

    def moved(self, name: str, now: float, footprint: Footprint | None = None, state: State | None = None) -> None:
        """Ends a move. `footprint`: what was measured; `state`: the one that was reached, if it is another."""
        model = self._models[name]
        assert model.target is not None, f"{name} does not move"
        if model.state == "awake" and model.requests and not model.fruitful:
            model.stay = min(2 * model.stay, LONGEST_STAY)
        if name in self._taking:  # what it took since the last look will be seen
            self._taken -= (footprint or model.footprint).needed_from(model.state)
            self._taking.discard(name)
        model.state, model.target = state or model.target, None
        model.footprint = footprint or model.footprint
        if model.leaves is not None and STATES.index(model.state) <= STATES.index(model.leaves):
            model.leaves, model.keep_alive = None, model.terms.keep_alive  # requests may have come meanwhile
        if model.state == "awake":
            model.failures = 0
            model.fruitful = False
            model.awake_since = now
            model.wanted_at = None
        else:
            self._forget_orders(model)
            self._want(model, now)

    def lost(self, name: str) -> Move | None:
        """Begins the end of a model whose process has ended in its sleep, unless it is being woken, or ended."""
        model = self._models[name]
        if model.state != "asleep" or model.target is not None:
            return None
        model.target = "cold"
        return Move(name, "cold")

    def postponed(self, name: str, footprint: Footprint) -> None:
        """Ends a wake before it takes memory, as the model needs more than was estimated: it waits for that much."""
        model = self._models[name]
        model.target, model.footprint = None, footprint

    def failed(self, name: str, now: float) -> None:
        """Ends a wake that failed: the model is cold, and is tried again after 1, 2, 4 .. s."""
        model = self._models[name]
        model.state, model.target = "cold", None
        self._taking.discard(name)
        model.leaves, model.keep_alive = None, model.terms.keep_alive
        self._bar(model, now)

    def _bar(self, model: _Model, now: float) -> None:
        model.wanted_at = None
        model.barred_until = now + min(LONGEST_WAIT, 2.0 ** min(model.failures, MOST_DOUBLINGS))
        model.failures += 1

    def decide(self, now: float) -> Decision:
        """Returns the moves to begin now, and notes that they have begun; if it raises, none has."""
        decision = Decision()
        try:
            return self._decided(decision, now)
        except BaseException:
            for move in decision.moves:
                self._models[move.name].target = None
            raise

    def _decided(self, decision: Decision, now: float) -> Decision:
        self._return_excess(decision, now)
        self._relieve(decision, now)
        self._relieve_around(decision, now)
        self._expire(decision, now)
        for model in sorted(self._models.values(), key=lambda one: (one.wanted_at is None, one.wanted_at)):
            if model.state == "awake" or model.target is not None:
                continue
            self._want(model, now)
            if model.wanted_at is None:
                if model.barred_until > now and (model.requests or model.terms.pin):
                    decision.look_at(model.barred_until)
            elif not self._woken(model, decision, now):
                return decision  # later ones must not take the memory that it waits for
        self._preload(decision, now)
        return decision

    def _forget_orders(self, model: _Model) -> None:
        """Lets the user's terms hold again for a model that is not awake, and that nobody wants."""
        if not model.requests and "awake" not in (model.state, model.target):
            model.keep_alive = model.terms.keep_alive
            if model.state == "cold" or model.leaves == "asleep":
                model.leaves = None

    def _want(self, model: _Model, now: float) -> None:
        wanted = model.requests or model.terms.pin
        if wanted and model.state != "awake" and model.wanted_at is None and model.barred_until <= now:
            model.wanted_at = now

    def _begin(self, model: _Model, state: State, decision: Decision, relieves: bool = False) -> None:
        model.target, model.downloads = state, False
        model.interrupted = model.interrupted or (model.state == "awake" and model.requests > 0)
        decision.moves.append(Move(model.name, state, relieves))

    def _woken(self, model: _Model, decision: Decision, now: float) -> bool:
        """Wakes a model if there is memory, else lets others make way; returns whether later ones may be woken too."""
        pinned = sum(other.footprint.awake for other in self._models.values() if other.terms.pin and other is not model)
        if (needed := model.footprint.awake) + pinned > self.memory:
            beside = f" beside {_size(pinned)} of models that are pinned" if pinned else ""
            reason = f"it takes {_size(needed)}{beside}, and all models may take {_size(self.memory)}"
            advice = "raise models_memory, lower kv_cache_tokens, on a GPU gpu_memory_share, or use a smaller model"
            decision.refused[model.name] = f"{reason}: {advice}"
            self._bar(model, now)
            return True
        if model.state == "cold" and self._lacks_around:
            if not self._moves() and not model.interrupted:
                reason = f"it is to be loaded, and of the memory of the machine {self.around}: end other programs"
                self._refuse(model, reason, decision, now)
            return True
        added = model.footprint.needed_from(model.state)
        others = sum(
            other.footprint.given_back(other.state, "cold")
            for other in self._models.values()
            if not other.terms.pin and other is not model
        )
        if self._host_lacks(added) > others:
            if not self._moves() and not model.interrupted:  # else its requests go on when there is memory again
                given = (
                    f"it takes {_size(added)} more, other models can give back {_size(others)}, and of the memory here"
                )
                self._refuse(model, f"{given} {self.host}: end other programs, or use a smaller model", decision, now)
            return True
        budget, host = self.held - model.held + needed - self.memory, self._host_lacks(added)
        if budget <= 0 and host <= 0:
            if self._host_lacks(added + self.waking):
                return False  # it may be theirs, until they have taken it
            self._begin(model, "awake", decision)
            return True
        lacking = max(budget - self._left_by_leaving(), host - self._given_back())
        if lacking > 0:
            self._make_way(model, lacking, decision, now)
        return False

    def _moves(self) -> bool:
        """True if some model may soon take memory, or give some back."""
        return any(model.target is not None and not model.downloads for model in self._models.values())

    @staticmethod
    def _refuse(model: _Model, reason: str, decision: Decision, now: float) -> None:
        decision.refused[model.name] = reason
        model.wanted_at = None
        model.barred_until = now + LOOK_SECONDS  # others may end at any time

    def _given_back(self, *, at_once: bool = False) -> int:
        """Returns the bytes of the machine that models give back which are about to sleep or end; `at_once`: to end."""
        leaving = (
            one for one in self._models.values() if one.target == "cold" or (one.target == "asleep" and not at_once)
        )
        return sum(one.footprint.given_back(one.state, one.target or "cold") for one in leaving)

    def _host_lacks(self, added: int) -> int:
        """Returns the bytes that the machine lacks for so many more of a wake; 0: beside what there is."""
        return 0 if self.host is None else max(0, added - self.host.spare - (self.lent if added else 0))

    def _left_by_leaving(self) -> int:
        """Returns the bytes that models give back which are about to sleep or end."""
        leaving = (one for one in self._models.values() if one.target is not None and one.target != "awake")
        return sum(one.held - one.footprint.bytes_in(one.target or "cold") for one in leaving)

    def _make_way(self, wanted: _Model, lacking: int, decision: Decision, now: float) -> None:
        """Begins to put models to sleep that free so many bytes, if there are enough of them now."""
        chosen: list[tuple[_Model, State, int]] = []
        for _, model, state in sorted(self._able(wanted, now), key=lambda able: able[0]):
            until = self._stays_until(model, state) if model.state == "awake" and self._is_busy(model, now) else now
            if until > now:
                decision.look_at(until)
            elif lacking > 0:
                freed = model.footprint.bytes_in(_above(state, model)) - model.footprint.bytes_in(state)
                chosen.append((model, state, freed))
                lacking -= freed
        if lacking > 0:
            return
        last: dict[str, State] = {}
        for model, state, freed in reversed(chosen):  # the most valuable ones stay if the others are enough
            if lacking + freed <= 0 and model.name not in last:
                lacking += freed
            else:
                last.setdefault(model.name, state)
        for name, state in last.items():
            self._begin(self._models[name], state, decision)

    def _able(
        self, wanted: _Model | None, now: float
    ) -> Iterator[tuple[tuple[bool, float, float, bool], _Model, State]]:
        """Yields models that can be put into a lower state: an order, in which the first one makes way, model, state.

        Those that are busy, or wait, come last; then values decide, then the time of the last request.
        """
        for model in self._models.values():
            if model is wanted or model.terms.pin or model.target is not None:
                continue
            busy = model.wanted_at is not None or (model.state == "awake" and self._is_busy(model, now))
            least = 0.0  # a model goes to sleep before it becomes cold
            for state in STATES[STATES.index(model.state) :: -1]:
                if state != model.state and (state == "cold" or model.footprint.asleep is not None):
                    least = max(least, self._value(model, state, now))
                    yield (busy, least, model.used_at, state == "cold"), model, state

    def _value(self, model: _Model, state: State, now: float) -> float:
        """Returns the worth of not putting a model into this state, from the one above it."""
        above, footprint = _above(state, model), model.footprint
        seconds = footprint.seconds_from(state) - footprint.seconds_from(above)
        freed = footprint.bytes_in(above) - footprint.bytes_in(state)
        return model.terms.weight * self.visits(model.name, now) * seconds / max(1, freed)

    def _is_busy(self, model: _Model, now: float) -> bool:
        """True if a model has requests, or had some less than the time of a wake ago."""
        return model.requests > 0 or now - model.used_at < model.footprint.seconds_from(model.footprint.below_awake)

    def _stays_until(self, model: _Model, state: State) -> float:
        """Returns when a busy model may be put into a state."""
        seconds = model.footprint.seconds_from(state)
        if model.requests:
            return model.awake_since + max(STAY * seconds, model.stay)
        return min(model.awake_since + STAY * seconds, model.used_at + seconds)

    def _return_excess(self, decision: Decision, now: float) -> None:
        """Puts the least valuable models to sleep if measured ones take more than was estimated."""
        excess = self.held - self.memory - self._left_by_leaving()
        while excess > 0:
            able = min(self._able(None, now), key=lambda one: one[0], default=None)
            if able is None:
                return
            _, model, state = able
            self._begin(model, state, decision)
            excess -= model.footprint.bytes_in(model.state) - model.footprint.bytes_in(state)

    def _relieve(self, decision: Decision, now: float) -> None:
        """Puts the least valuable models into lower states while the machine has too little memory left.

        Those that are busy take turns, so that one of them stays awake.
        """
        # To fall asleep may take a while: weights are written to a file the first time.
        hurries = self.host is not None and self.host.free < self.host.floor // 2
        lacking = self._host_lacks(0) - self._given_back(at_once=hurries)
        chosen: dict[str, State] = {}
        for _, model, state in sorted(self._able(None, now), key=lambda able: able[0]):
            if lacking <= 0:
                break
            if model.requests and self._is_last(model, chosen):
                continue
            if hurries and state != "cold" and not model.requests:
                continue
            until = self._stays_until(model, state) if model.state == "awake" and self._is_busy(model, now) else now
            if until > now:
                decision.look_at(until)
                continue
            lacking -= model.footprint.given_back(chosen.get(model.name, model.state), state)
            chosen[model.name] = state
        for name, state in chosen.items():
            self._begin(model := self._models[name], state, decision, relieves=True)
            model.dismissed = not model.requests

    @property
    def _lacks_around(self) -> bool:
        return self.around is not None and self.around.spare < 0

    def _relieve_around(self, decision: Decision, now: float) -> None:
        """Ends the least valuable idle model while the machine around the GPUs has too little memory left.

        One by one: nobody knows how much of a model's memory is there.
        """
        if not self._lacks_around or any(model.target == "cold" for model in self._models.values()):
            return
        idle = [(order, model) for order, model, state in self._able(None, now) if state == "cold" and not order[0]]
        if idle:
            _, model = min(idle, key=lambda able: able[0])
            self._begin(model, "cold", decision, relieves=True)
            model.dismissed = True

    def _is_last(self, model: _Model, leaving: Container[str]) -> bool:
        """True for a model that is awake beside pinned ones, and those that leave, alone."""
        awake = [one for one in self._models.values() if one.state == "awake" and one.target is None]
        others = [one for one in awake if one is not model and one.name not in leaving]
        return model.state == "awake" and all(one.terms.pin for one in others)

    def _expire(self, decision: Decision, now: float) -> None:
        for model in self._models.values():
            when, state = self.expires_at(model.name), model.leaves or "asleep"
            if model.state == "asleep" and not model.requests and not model.terms.pin:
                when, state = -math.inf if model.leaves else model.used_at + LONGEST_SLEEP, "cold"
            if when is None or model.target is not None:
                continue
            if when <= now:
                model.dismissed = True
                self._begin(model, "cold" if state == "cold" else model.footprint.below_awake, decision)
            else:
                decision.look_at(when)

    def _preload(self, decision: Decision, now: float) -> None:
        """Wakes a model that is often asked, if there is memory and nothing else moves."""
        if self._lacks_around or any(model.target is not None for model in self._models.values()):
            return
        awake = [one for one in self._models.values() if one.state == "awake" and not one.terms.pin]
        values = sorted(self._value(one, one.footprint.below_awake, now) for one in awake)
        middle = values[len(values) // 2] if values else 0.0
        found = [
            model
            for model in self._models.values()
            if model.state != "awake"
            and not model.dismissed
            and model.barred_until <= now
            and self.visits(model.name, now) >= FREQUENT
            and self.held - model.held + model.footprint.awake <= self.memory
            and not self._host_lacks(model.footprint.needed_from(model.state))
            and self._value(model, model.state, now) > middle  # it would not be the next to make way
        ]
        if found:
            worth = max(
                found,
                key=lambda one: one.terms.weight * self.visits(one.name, now) * one.footprint.seconds_from(one.state),
            )
            self._begin(worth, "awake", decision)


def _above(state: State, model: _Model) -> State:
    """Returns the state from which a model comes into this one."""
    return "asleep" if state == "cold" and model.footprint.asleep is not None else "awake"


def _size(number: int) -> str:
    return f"{number / 1e9:.2f} GB"
