"""The engines of one model: which of them is given a request, and what becomes of it when that one is gone.

    cost of an engine = tokens to be computed for those that it has + tokens of the prompt that it has not cached

The cheapest takes it, of those where nobody has to end before. So a conversation returns to where its earlier turns are
cached, unless more waits there than that would spare: then another computes the prompt once, and has it cached for what
else begins with it.
"""

import asyncio
from collections.abc import Iterator

import msgspec

from kvern.adapters.names import AdapterNames
from kvern.config import EngineConfig
from kvern.engine.child import EngineProcess
from kvern.engine.client_adapters import ClientAdapters
from kvern.engine.generation import Generation
from kvern.engine.output import OutputProcessor
from kvern.engine.places import places_of
from kvern.engine.prefix_record import piece_keys
from kvern.engine.replica import Replica
from kvern.engine.supervisor import until_one_is_available
from kvern.engine.turns import Turns
from kvern.engine.wire import Ready
from kvern.observe.metrics import Refusals


class Replicas:
    """Those of a configuration, one or several; with one, nothing is chosen. `process`: of the first, if it runs."""

    def __init__(
        self, config: EngineConfig, outputs: OutputProcessor, names: AdapterNames, process: EngineProcess | None
    ) -> None:
        self.outputs = outputs
        self.turns = Turns()
        self.refusals = Refusals(config.model_names[0])
        places = places_of(config)
        self._replicas = [
            Replica(config, self, place, str(number) if places[1:] else None, None if number else process)
            for number, place in enumerate(places)
        ]
        self.adapters = ClientAdapters(names, [replica.adapters for replica in self], self._adapter_keys)

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas)

    def __len__(self) -> int:
        return len(self._replicas)

    @property
    def ready(self) -> Ready:
        """What each engine said of itself when its model was loaded, with the smallest of their sizes."""
        each = [replica.supervisor.link.ready for replica in self]
        return msgspec.structs.replace(
            each[0],
            max_model_len=min(ready.max_model_len for ready in each),
            max_batch_requests=min(ready.max_batch_requests for ready in each),
        )

    @property
    def trouble(self) -> str | None:
        """Why no engine takes requests at present; None if one does."""
        if any(replica.supervisor.is_ready for replica in self):
            return None
        return str(self._replicas[0].supervisor.unavailable or "the engine is being replaced")

    async def start(self) -> None:
        """Start all, at the same time. Raises ConfigError with the reason of one that cannot."""
        starts = [asyncio.create_task(replica.supervisor.start()) for replica in self]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.wait(starts)
            await self.stop()
            raise

    async def stop(self) -> None:
        """End all."""
        await asyncio.gather(*(replica.supervisor.stop() for replica in self))

    async def until_available(self) -> None:
        """Wait for an engine that takes requests. Raises EngineUnavailable or EngineClosed."""
        await until_one_is_available([replica.supervisor for replica in self])

    def take(self, generation: Generation) -> None:
        """Give it to an engine; some take requests."""
        if len(self._replicas) == 1:
            self._replicas[0].workload.take(generation)
            return
        if any(replica.record.is_kept for replica in self):
            generation.piece_keys = piece_keys(generation.spec)
        ready = [replica for replica in self if replica.supervisor.is_ready]
        chosen = self._cheapest(generation) or min(ready, key=lambda replica: replica.workload.tokens)
        chosen.workload.take(generation)

    def move(self) -> None:
        """Give what waits for an engine, or behind others' trials, to engines that begin with it at once."""
        for replica in self:
            if not replica.accepts:
                for generation in replica.stranded:
                    chosen = self._cheapest(generation)
                    if chosen is not None:
                        replica.workload.give(generation, chosen.workload)

    def has_other(self, replica: Replica) -> bool:
        """Another one takes requests."""
        return any(other.accepts for other in self if other is not replica)

    def _adapter_keys(self) -> set[int | None]:
        """Of the adapters that requests use."""
        return {generation.spec.adapter for replica in self for generation in replica.workload.running.values()}

    def _cheapest(self, generation: Generation) -> Replica | None:
        """Of those that begin with it at once; of equal ones that which has computed least, so that all caches fill."""
        able = [replica for replica in self if replica.accepts and generation.spec.adapter in replica.adapters.known]
        return min(able, key=lambda one: (one.workload.cost(generation), one.record.added), default=None)
