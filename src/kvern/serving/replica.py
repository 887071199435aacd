"""One of the engines of a model, in its place: what it says, its requests, and its successors."""

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from kvern.config import EngineConfig
from kvern.engine.output import OutputProcessor
from kvern.errors import EngineDied
from kvern.observe.metrics import Metrics, Refusals
from kvern.request.events import EngineStatistics, all_together
from kvern.request.store_figures import StoreFigures
from kvern.serving import wire
from kvern.serving.child import EngineProcess
from kvern.serving.choice import EngineLoads, Load
from kvern.serving.client_adapters import ClientAdapters, EngineAdapters
from kvern.serving.client_traces import EngineTraces
from kvern.serving.client_weights import ClientWeights, EngineWeights
from kvern.serving.link import EngineLink
from kvern.serving.places import Place
from kvern.serving.prefix_index import EnginePrefixes, PrefixIndex
from kvern.serving.probation import Probation
from kvern.serving.recovery import Recovery
from kvern.serving.supervisor import Death, Supervisor
from kvern.serving.workload import Generation, Turns, Workload

logger = logging.getLogger("kvern")

ASLEEP = "the model was put to sleep: ask again"
FELL_ASLEEP = "the model was put to sleep"
RETRY_SECONDS = 1.0
"""Seconds until memory is asked for again that a GPU did not have."""


class Siblings(Protocol):
    """The engines of a model together, as one of them knows them."""

    outputs: OutputProcessor
    turns: Turns
    refusals: Refusals
    index: PrefixIndex
    loads: EngineLoads
    adapters: ClientAdapters
    weights: ClientWeights
    lost: Callable[[], None]
    cache_changed: Callable[[], None] | None

    @property
    def has_choice(self) -> bool:
        """There are several engines, which keep prefixes: each tells which."""

    @property
    def prefill_engines(self) -> int:
        """The number up to which engines compute prompts for the others, or will when they are back."""

    def has_other(self, replica: "Replica") -> bool:
        """Another one takes requests."""

    def go_on(self, generation: Generation) -> None:
        """Give an engine a request that none has, or whose prompt another has computed."""

    def bring(self, generation: Generation) -> None:
        """Have the engine that is likely to answer a request load what stores have of its prompt."""

    def move(self) -> None:
        """Give what waits for an engine, or behind others' trials, to engines that begin with it at once."""


class Replica:
    """An engine in its place. `name` tells it from its siblings: its number, from 0 on."""

    def __init__(
        self, config: EngineConfig, siblings: Siblings, place: Place, number: int, process: EngineProcess | None
    ) -> None:
        """`process`: of the first engine, if it runs already."""
        self.name = str(number)
        self.number = number
        self.leaving = False
        """It gets no new requests, and ends when it has none."""
        self.metrics = Metrics(config.model_names[0])
        self._earlier = self._latest = EngineStatistics()
        self.supervisor = Supervisor(_numbered(place.config(config), number), self, place, process)
        self.adapters = EngineAdapters(self.supervisor)
        self.weights = EngineWeights(self.supervisor)
        self.traces = EngineTraces(self.supervisor)
        self._prefixes = EnginePrefixes(siblings.index, number)
        self._watched = False
        """The engine tells which prefixes it has."""
        self._siblings = siblings
        self._probation = Probation()
        self.workload = Workload(
            self.supervisor, siblings.outputs, self._probation, siblings.turns, self.metrics, self._prefixes
        )
        self.workload.engine = self.name
        self.is_prefill = number < siblings.prefill_engines
        """It computes prompts for others, and answers only if these are gone."""
        if self.is_prefill:
            self.workload.handed_over = siblings.go_on
            self.workload.stored = siblings.bring
        elif config.role == "prefill":
            self.workload.stored = lambda generation: generation.news.set()
        self.workload.changed = self._weigh
        self._recovery = Recovery(self.workload, self._probation, siblings.refusals, lambda: siblings.has_other(self))
        self._started = False
        self._rested = False
        self._asked_chunks = 0
        """The size of its KV cache that it was asked to have; 0: it has the first one."""
        self._asked_at = 0.0

    @property
    def told_chunks(self) -> int:
        """The chunks that its KV cache has, as it has said."""
        return self._latest.cache_chunks or self.supervisor.link.ready.least_chunks

    @property
    def cache_chunks(self) -> int:
        """The chunks that its KV cache has, or is about to take."""
        has = self.told_chunks
        return has if self._was_refused else max(has, self._asked_chunks)

    @property
    def _was_refused(self) -> bool:
        """Its GPU had no memory for what was asked."""
        return 0 < self._asked_chunks == self._latest.cache_refused

    @property
    def cache_touched(self) -> int:
        """The chunks for which its KV cache has taken memory of the machine, or of its GPU."""
        ready = self.supervisor.link.ready
        return self._latest.cache_touched if ready.gpu is None else self.told_chunks

    @property
    def cache_wanted(self) -> int:
        """The chunks that its requests hold, or will need."""
        return max(self._latest.cache_wanted, self._latest.cache_held)

    def resize_cache(self, chunks: int) -> bool:
        """Let its KV cache have so many chunks of memory; returns whether nobody asked for that before.

        What was refused is asked for again a second later.
        """
        now = time.monotonic()
        is_new = chunks != self._asked_chunks or (self._was_refused and now >= self._asked_at + RETRY_SECONDS)
        if is_new:
            self._asked_chunks, self._asked_at = chunks, now
            self.supervisor.send(wire.ResizeCache(chunks))
        return is_new

    def release_pages(self, size: int) -> None:
        """Have the engine give memory of so many bytes back, of pages in a tier, and take no more until that is 0."""
        self.supervisor.send(wire.ReleasePages(size))

    @property
    def accepts(self) -> bool:
        """There is an engine that begins with requests at once."""
        return self.supervisor.is_ready and not self._probation.active and not self.leaving

    @property
    def state(self) -> dict[str, object]:
        """Its name, whether it takes requests, and its role if there are several, for people."""
        role = {"role": "prefill" if self.is_prefill else "decode"} if self._siblings.prefill_engines else {}
        return {"engine": self.name, "ready": self.supervisor.is_ready, **role}

    @property
    def stranded(self) -> list[Generation]:
        """Requests that wait for an engine, or for others' trials, and are not suspected themselves."""
        suspected = self._probation.suspected
        return [
            generation
            for name, generation in self.workload.running.items()
            if name not in suspected and not (generation.begun and self.supervisor.is_ready)
        ]

    @property
    def stores(self) -> Mapping[str, StoreFigures]:
        """The stores of the KV cache's tier by name, as the engine has said last."""
        return self._latest.stores

    @property
    def statistics(self) -> EngineStatistics:
        """The statistics of all engines that were here, one after another."""
        return all_together([self._earlier, self._latest])

    def watch(self, wanted: bool) -> None:
        """Have the engine tell which prefixes it has, from now on or no longer; the next one does so from its start."""
        if wanted == self._watched or not self.supervisor.is_ready:
            return
        self._watched = wanted
        if wanted:
            self._prefixes.begin()
        else:
            self._prefixes.drop()
        self.supervisor.send(wire.WatchCache(wanted))

    def hear_cache(self, changes: wire.CacheChanges) -> None:
        """Takes what the engine tells of its cache; if something is missing, it tells everything again."""
        if not self._prefixes.hear(changes):
            logger.warning("messages of engine %s about its cache are missing; it is asked for all of them", self.name)
            self._watched = False
            self.watch(True)

    def leave(self) -> None:
        """The engine takes no requests, and has nothing cached that counts, until `resume`."""
        self._watched = False
        self._prefixes.drop()
        self._siblings.loads.drop(self.number)

    def _weigh(self) -> None:
        if self.number in self._siblings.loads:
            self._siblings.loads.put(self._load)

    @property
    def _load(self) -> Load:
        return Load(self.workload.is_full, self.workload.tokens, self.workload.computed, self.number)

    def hear(self, message: wire.Heard) -> None:
        """Takes a message of the engine."""
        if isinstance(message, wire.AdapterRead):
            self.adapters.hear(message)
        elif isinstance(message, wire.WeightsRead | wire.WeightsTaken):
            self.weights.hear(message)
            if isinstance(message, wire.WeightsTaken):
                self.metrics.weights_changed()
        elif isinstance(message, wire.CacheChanges):
            self.hear_cache(message)
        elif isinstance(message, wire.TraceTaken):
            self.traces.hear(message)
        else:
            before, self._latest = self._latest, message.statistics
            if self._siblings.cache_changed is not None and _cache(before) != _cache(self._latest):
                self._siblings.cache_changed()
            self.metrics.step(message.statistics, message.seconds)
            if message.expert_tokens:
                self.metrics.experts.count(message.expert_tokens)
            if message.layer_times:
                self.metrics.layers.hear(message.layer_times)
            self.workload.deliver(message.events)
        self._recovery.heard()

    def died(self, death: Death) -> bool:
        """The engine has ended; returns whether that taught which request may be the cause."""
        self.leave()
        self._earlier = self.statistics.at_the_end()
        self._latest = EngineStatistics()
        self.workload.fate = str(death.reason)
        self.interrupt(death.reason)
        self.metrics.engine(ready=False)
        learnt = self._recovery.died(death)
        self._siblings.move()
        return learnt

    async def rest(self) -> None:
        """End the engine. The next one goes on with its requests, from the tokens that they have."""
        await self.supervisor.rest()
        self.leave()
        self._earlier = self.statistics.at_the_end()
        self._latest = EngineStatistics()
        self._rested = self._started
        self.workload.fate = FELL_ASLEEP
        self.interrupt(EngineDied(ASLEEP))
        self.metrics.rests()

    async def sleep(self) -> None:
        """Have the engine give its memory back. It goes on with its requests when it wakes, from their tokens.

        Raises EngineDied as `Supervisor.sleep`.
        """
        running = self.workload.running.values()
        await self.supervisor.sleep([name for generation in running for name in generation.spec.answer_ids])
        self.leave()
        self._latest, self._asked_chunks = self._latest.at_the_end(), 0
        self._rested = self._started
        self.workload.fate = FELL_ASLEEP
        self.adapters.interrupt_reading(EngineDied(ASLEEP))
        self.metrics.sleeps()

    def lost(self) -> None:
        """The engine has ended in its sleep."""
        self.leave()
        self._earlier = self.statistics.at_the_end()
        self._latest = EngineStatistics()
        self.metrics.rests()
        self.interrupt(EngineDied("the engine has ended"))
        self._siblings.lost()

    def given_up(self) -> None:
        """Engines do not start here: what is suspected to have ended one may show elsewhere that it did not."""
        if self._siblings.has_other(self):
            self._probation.end()
            self._siblings.move()

    async def prepare(self, link: EngineLink, *, woken: bool = False) -> None:
        """Have a new engine, or one that was `woken`, use the present weights, and read all adapters that are in use.

        Raises ConfigError, or InvalidAdapter if it is the first engine.
        """
        if not woken:
            self.interrupt(EngineDied("the engine was replaced"))
        await self._siblings.weights.catch_up(self.weights, link)
        lost = dict(await self._siblings.adapters.read_all(self.adapters, link))
        while await self._siblings.weights.catch_up(self.weights, link):  # they changed meanwhile
            lost |= await self._siblings.adapters.read_all(self.adapters, link)
        if lost and not self._started:
            raise next(iter(lost.values()))
        self._siblings.adapters.lose(lost)
        self.workload.lose(lost)

    def interrupt(self, error: EngineDied) -> None:
        """The engine has ended: what it was reading is not read, and what it had read is gone."""
        self.adapters.interrupt(error)
        self.weights.interrupt(error)
        self.traces.interrupt(error)

    def resume(self) -> None:
        """Give a new engine what it may work on now."""
        self.metrics.engine(ready=True)
        if self._rested:
            self._rested = False
        elif self._started:
            self.metrics.restarted()
        elif (gpu := self.supervisor.link.ready.gpu) is not None:
            self.metrics.watch_gpu(gpu)
        self._asked_chunks = 0
        if self._siblings.cache_changed is None and (own := self.supervisor.link.ready.own_chunks):
            self.resize_cache(own)
        self.leave()  # what was before, whatever became of it
        self._siblings.loads.put(self._load)
        self.watch(self._siblings.has_choice)
        self._started = True
        self.workload.resume()
        self._siblings.adapters.resume(self.adapters)
        self._siblings.move()


def _cache(statistics: EngineStatistics) -> tuple[int, int, int]:
    """Returns what those look at who divide memory among caches."""
    return statistics.cache_chunks, statistics.cache_wanted, statistics.cache_refused


def _numbered(config: EngineConfig, number: int) -> EngineConfig:
    """Returns an engine's options with its number, by which its events and their addresses differ from others'."""
    if not config.kv_events_config:
        return config
    first = config.kv_events_config.get("data_parallel_rank", 0)
    return dataclasses.replace(
        config, kv_events_config={**config.kv_events_config, "data_parallel_rank": first + number}
    )
