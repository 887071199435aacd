"""One of the engines that answer for a model: a process that is replaced when it dies, and what it was given."""

from typing import Protocol

from kvern.config import EngineConfig
from kvern.engine.output import OutputProcessor
from kvern.errors import EngineDied
from kvern.observe.metrics import Metrics, Refusals
from kvern.request.events import EngineStatistics, all_together
from kvern.serving.child import EngineProcess
from kvern.serving.client_adapters import ClientAdapters, EngineAdapters
from kvern.serving.generation import Generation
from kvern.serving.link import EngineLink
from kvern.serving.places import Place
from kvern.serving.prefix_record import PrefixRecord
from kvern.serving.probation import Probation
from kvern.serving.recovery import Recovery
from kvern.serving.supervisor import Death, Supervisor
from kvern.serving.turns import Turns
from kvern.serving.wire import AdapterRead, Events
from kvern.serving.workload import Workload


class Siblings(Protocol):
    """The objects that the engines of a model share."""

    outputs: OutputProcessor
    turns: Turns
    adapters: ClientAdapters
    refusals: Refusals

    def has_other(self, replica: "Replica") -> bool:
        """Another engine begins with requests at once."""

    def move(self) -> None:
        """Give requests that wait for an engine to those that there are."""


class Replica:
    """An engine in its place. `name` tells it from its siblings: its number, from 0 on."""

    def __init__(
        self, config: EngineConfig, siblings: Siblings, place: Place, number: int, process: EngineProcess | None
    ) -> None:
        """`process`: of the first engine, if it runs already."""
        self.name = str(number)
        self.leaving = False
        """It gets no new requests, and ends when it has none."""
        self.metrics = Metrics(config.model_names[0])
        self._earlier = self._latest = EngineStatistics()
        self.supervisor = Supervisor(place.config(config), self, place, process)
        self.adapters = EngineAdapters(self.supervisor)
        self.record = PrefixRecord()
        self._siblings = siblings
        self._probation = Probation()
        self.workload = Workload(
            self.supervisor, siblings.outputs, self._probation, siblings.turns, self.metrics, self.record
        )
        self._recovery = Recovery(self.workload, self._probation, siblings.refusals, lambda: siblings.has_other(self))
        self._started = False

    @property
    def accepts(self) -> bool:
        """There is an engine that begins with requests at once."""
        return self.supervisor.is_ready and not self._probation.active and not self.leaving

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
    def statistics(self) -> EngineStatistics:
        """The statistics of all engines that were here, one after another."""
        return all_together([self._earlier, self._latest])

    def remember(self, wanted: bool) -> None:
        """Starts or ends the record of what the engine has cached."""
        if wanted != self.record.is_kept:
            self.record.begin(self.supervisor.link.ready.cache_tokens if wanted else 0)

    def hear(self, message: AdapterRead | Events) -> None:
        """Takes a message of the engine."""
        if isinstance(message, AdapterRead):
            self.adapters.hear(message)
        else:
            self._latest = message.statistics
            self.metrics.step(message.statistics, message.seconds)
            if message.expert_tokens:
                self.metrics.experts.count(message.expert_tokens)
            self.workload.deliver(message.events)
        self._recovery.heard()

    def died(self, death: Death) -> bool:
        """The engine has ended; returns whether that taught which request may be the cause."""
        self._earlier = self.statistics.at_the_end()
        self._latest = EngineStatistics()
        self.adapters.interrupt(death.reason)
        self.metrics.engine(ready=False)
        learnt = self._recovery.died(death)
        self._siblings.move()
        return learnt

    def given_up(self) -> None:
        """Engines do not start here: what is suspected to have ended one may show elsewhere that it did not."""
        if self._siblings.has_other(self):
            self._probation.end()
            self._siblings.move()

    async def prepare(self, link: EngineLink) -> None:
        """Have a new engine read all adapters that are in use. Raises InvalidAdapter if it is the first engine."""
        self.adapters.interrupt(EngineDied("the engine was replaced"))
        lost = await self._siblings.adapters.read_all(self.adapters, link)
        if lost and not self._started:
            raise next(iter(lost.values()))
        self._siblings.adapters.lose(lost)
        self.workload.lose(lost)

    def resume(self) -> None:
        """Give a new engine what it may work on now."""
        self.metrics.engine(ready=True)
        if self._started:
            self.metrics.restarted()
        elif (gpu := self.supervisor.link.ready.gpu) is not None:
            self.metrics.watch_gpu(gpu)
        if self.record.is_kept:
            self.record.begin(self.supervisor.link.ready.cache_tokens)
        self._started = True
        self.workload.resume()
        self._siblings.adapters.resume(self.adapters)
        self._siblings.move()
