"""The engines of one model: the choice of an engine for a request, and of another one when that engine is gone.

A conversation returns to the engine that has its earlier turns cached, unless the work that waits there exceeds what
the cache saves: then another engine computes the prompt, and has it cached, too. See `choice.py`.
"""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence, Sized

import msgspec

from kvern.adapters.names import AdapterNames
from kvern.cache.prefix_names import prompt_names
from kvern.config import EngineConfig
from kvern.engine.inputs import Prompt, is_checked_quickly
from kvern.engine.output import OutputProcessor
from kvern.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineClosed,
    EngineDied,
    EngineUnavailable,
    InvalidRequest,
    shown,
)
from kvern.observe.metrics import Refusals
from kvern.request.request import NO_OPTIONS, RequestOptions, RequestSpec
from kvern.request.sampling_params import SamplingParams
from kvern.request.weights import weights_prefix
from kvern.serving.child import EngineProcess
from kvern.serving.choice import EngineLoads, hands_over
from kvern.serving.client_adapters import ClientAdapters, EngineAdapters
from kvern.serving.client_inputs import ClientInputs
from kvern.serving.client_weights import ClientWeights
from kvern.serving.page_sharing import PageSharing
from kvern.serving.places import Place, check_memory, place_of, places_of
from kvern.serving.prefill_servers import PrefillServer
from kvern.serving.prefix_index import Level, PrefixIndex
from kvern.serving.prompt_service import PromptService
from kvern.serving.replica import Replica
from kvern.serving.served import SERVED
from kvern.serving.supervisor import Supervisor, until_one_is_available
from kvern.serving.weight_files import WeightFiles
from kvern.serving.wire import BringPages, Ready
from kvern.serving.workload import Generation, Turns, Workload

logger = logging.getLogger("kvern")


class Replicas:
    """The engines of a configuration, one or several, which come and go, and the requests that they are given.

    With one engine, nothing is chosen.
    """

    def __init__(
        self,
        config: EngineConfig,
        inputs: ClientInputs,
        outputs: OutputProcessor,
        names: AdapterNames,
        process: EngineProcess | None,
    ) -> None:
        """`process`: of the first engine, if it runs already."""
        self._inputs = inputs
        self._ids = itertools.count()
        self.outputs = outputs
        self.index = PrefixIndex()
        self.loads = EngineLoads()
        self.turns = Turns()
        self.refusals = Refusals(config.model_names[0])
        self.named = False
        """Engines are named in reports: there are several, or there were."""
        self.resting = False
        """The engines have ended, or are about to, until `start`; requests wait for them."""
        self.lost: Callable[[], None] = lambda: None
        """Is called when an engine has ended in its sleep."""
        self.cache_changed: Callable[[], None] | None = None
        """Is called when an engine needs another size of its KV cache, or has it. None: no other model shares memory
        with this one."""
        self.wake: Callable[[], Awaitable[None]] | None = None
        """Waits until resting engines take requests again. Raises EngineUnavailable. None: they never rest."""
        self._config = config
        self._replicas = [
            Replica(config, self, place, number, None if number else process)
            for number, place in enumerate(_places(config))
        ]
        self._numbered = {replica.number: replica for replica in self}
        self._changing = asyncio.Lock()
        self._sharing = PageSharing(config)
        self.adapters = ClientAdapters(
            names, self._engine_adapters, self._adapter_keys, self.until_available, self._handed_keys
        )
        self._prompts = PromptService(
            config, lambda: self.ready, lambda: self.trouble, self._compute, lambda: self.adapters.named
        )
        hooks = self._replicas[0].metrics, self._again, self.go_on, self._digest
        try:
            self._servers = [PrefillServer(server, outputs, self.turns, *hooks) for server in config.prefill_server]
        except ValueError as error:
            raise ConfigError(f"prefill_server is {', '.join(config.prefill_server)}: {error}") from error
        for server in self._servers:
            server.workload.stored = self.bring
        files = WeightFiles(config)
        self.weights = ClientWeights(lambda: [replica.weights for replica in self], self.until_available, files)

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas)

    def __len__(self) -> int:
        return len(self._replicas)

    @property
    def ready(self) -> Ready:
        """The reports of the engines after loading the model, with the smallest of their sizes."""
        each = [replica.supervisor.link.ready for replica in self]
        return msgspec.structs.replace(
            each[0],
            max_model_len=min(ready.max_model_len for ready in each),
            max_batch_requests=min(ready.max_batch_requests for ready in each),
        )

    @property
    def max_batch_requests(self) -> int:
        """Sequences that run at the same time at most, in all engines."""
        return sum(replica.supervisor.link.ready.sequences for replica in self)

    @property
    def trouble(self) -> str | None:
        """Why no engine takes requests at present; None if one does, or if they rest."""
        if self.resting or any(replica.supervisor.is_ready for replica in self._staying):
            return None
        return str(self._staying[0].supervisor.unavailable or "the engine is being replaced")

    @property
    def prefill_engines(self) -> int:
        """The number up to which engines compute prompts for the others, or will when they are back."""
        return self._config.prefill_engines

    @property
    def degraded(self) -> str | None:
        """The reason why something works less well than it should; None: all works."""
        if self._servers and not self.resting and not any(server.is_ready for server in self._servers):
            return "no prefill server answers: engines compute all prompts"
        there = any(one.is_prefill and one.supervisor.is_ready for one in self._staying)
        if not self.prefill_engines or self.resting or there:
            return None
        return "no prefill engine takes requests: decode engines compute all prompts"

    @property
    def waits_for(self) -> list[str]:
        """Returns what has to come before all engines and prefill servers work, for people; empty: they do, or rest."""
        engines = [(f"engine {one.name}", one.supervisor.waits_for) for one in self._staying]
        servers = [(f"prefill server {one.name}", one.waits_for) for one in self._servers]
        return [] if self.resting else [f"{name}: {said}" for name, said in (*engines, *servers) if said]

    @property
    def prefill_servers(self) -> list[dict[str, object]]:
        """The states of the servers that compute prompts for these engines, see `PrefillServer.state`."""
        return [server.state for server in self._servers]

    @property
    def unfinished(self) -> int:
        """Answers that have not ended, running or waiting."""
        return len(self.outputs)

    async def start(self, process: EngineProcess | None = None) -> None:
        """Start all, at the same time, the first one in `process` if it runs already.

        Raises ConfigError with the reason of one that cannot; then all rest.
        """
        starts = [
            asyncio.create_task(replica.supervisor.start(None if place else process))
            for place, replica in enumerate(self)
        ]
        try:
            await asyncio.gather(*starts)
            await self._sharing.start()
            self._prompts.start()
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.wait(starts)
            await self.rest()
            raise
        self.resting = False
        self._settle()
        for server in self._servers:
            server.start(self.ready.pages, self._config.kv_tier)

    async def rest(self) -> None:
        """End the engines until `start`. What they have not answered goes on then."""
        self.resting = True
        async with self._changing:
            await asyncio.gather(*(replica.rest() for replica in self))

    async def sleep(self) -> bool:
        """Have the engines give their memory back until `start`.

        False: one could not, or their weights are being replaced, so that all have ended.
        """
        self.resting = True
        if self.weights.is_changing:
            await self.rest()
            return False
        async with self._changing:
            ends = await asyncio.gather(*(replica.sleep() for replica in self), return_exceptions=True)
        failed = [error for error in ends if error is not None]
        if failed:
            logger.warning("an engine is ended, as it cannot sleep: %s", failed[0])
            await self.rest()
        return not failed

    def fail(self, error: EngineUnavailable) -> None:
        """End all requests: there is no engine to go on with them."""
        for one in (*self, *self._servers):
            for generation in list(one.workload.running.values()):
                one.workload.end(generation, error)

    async def add(self) -> Replica:
        """Start another engine. Raises ConfigError with the reason if there is no place for it, or it does not start.

        Its requests may be as long as those of the others, and as many.
        """
        async with self._changing:
            names, promised = {replica.name for replica in self}, self.ready
            number = next(number for number in itertools.count() if str(number) not in names)
            place = _place(self._config, number, len(self) + 1)
            check_memory(self._config, place)
            config = dataclasses.replace(
                self._config,
                data_parallel_size=1,
                prefill_engines=0,
                decode_engines=0,
                max_model_len=promised.max_model_len,
                max_batch_requests=promised.max_batch_requests,
            )
            replica = self._numbered[number] = Replica(config, self, place, number, None)
            try:
                await replica.supervisor.start()
            except BaseException:
                await replica.supervisor.stop()
                replica.leave()
                del self._numbered[number]
                raise
            self._replicas = sorted([*self, replica], key=lambda one: one.number)
            self._settle()
            self.move()
            return replica

    async def remove(self, name: str, grace_seconds: float) -> None:
        """End an engine, which gets no new requests. After `grace_seconds` others go on with those that still run.

        Those whose adapter no other engine knows any more end here. Who cancels this before keeps the engine.

        Raises InvalidRequest if there is no such engine, or if no other takes requests.
        """
        async with self._changing:
            replica = self._found(name)
            replica.leaving = True
            try:
                self.move()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(replica.workload.until_ended(), grace_seconds)
                await replica.workload.until_ended(self._is_tied)
            except BaseException:
                replica.leaving = False
                raise
            replica.supervisor.cease()
            self._replicas.remove(replica)
            replica.leave()
            del self._numbered[replica.number]
            self._settle()
            replica.workload.fate = f"engine {name} was removed"
            for generation in list(replica.workload.running.values()):
                replica.workload.give(generation, self._chosen(generation).workload)
            replica.interrupt(EngineDied(f"engine {name} was removed"))
            await asyncio.shield(replica.supervisor.stop())

    async def close(self, closed: EngineClosed) -> None:
        """End all requests, also those whose prompts other servers compute, which give them to no engine before."""
        await asyncio.gather(*(server.stop() for server in self._servers))
        for one in (*self, *self._servers):
            one.workload.close(closed)
        for replica in self:
            replica.interrupt(closed)

    async def stop(self) -> None:
        """End all."""
        await self._prompts.stop()
        await self._sharing.stop()
        await asyncio.gather(*(server.stop() for server in self._servers))
        await asyncio.gather(*(replica.supervisor.stop() for replica in self))

    async def until_available(self) -> None:
        """Wait for an engine that takes requests. Raises EngineUnavailable or EngineClosed."""
        if not self.resting and any(replica.supervisor.is_ready and not replica.leaving for replica in self):
            return
        while True:
            while self._sleeps and self.wake is not None:
                await self.wake()
            await until_one_is_available(self._supervisors, lambda: self._sleeps)
            if not self._sleeps:
                return

    def check_alive(self) -> None:
        """Raise EngineUnavailable if engines keep dying, wherever they are."""
        troubles = [trouble for one in self._staying if (trouble := one.supervisor.unavailable) is not None]
        if len(troubles) == len(self._staying):
            raise troubles[0]

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions = NO_OPTIONS,
        *,
        news: asyncio.Event,
        patient: bool = False,
        adapter: str | None = None,
    ) -> Generation:
        """Check a prompt and hand it to an engine, waiting for one if all are being replaced.

        `patient` as in `Generation`; `adapter` is the name of one that is loaded.

        Raises InvalidRequest, InvalidParameter, ServerBusy or EngineDied.
        """
        asked = time.monotonic()
        request_id = f"{os.getpid()}-{next(self._ids)}"
        size = len(prompt) if isinstance(prompt, Sized) else 0
        work = functools.partial(self._inputs.processor.request, request_id, prompt, params, options)
        is_quick = isinstance(prompt, list) and is_checked_quickly(prompt, params, options)
        checked = work() if is_quick else await self._inputs.run(size, work, options.owner)
        text = prompt if isinstance(prompt, str) else None
        await self.until_available()  # it takes its turn when there is an engine
        generation = self.prepare(checked, text, news=news, asked=asked, patient=patient, adapter=adapter)
        await self.give([generation])
        return generation

    async def give(self, generations: Sequence[Generation]) -> None:
        """Give some that were prepared to engines, waiting for one if all are being replaced. Raises EngineDied.

        Those with the most work first: the others then fill up what the engines' shares differ by. Each engine begins
        with them in the order in which they were prepared, by their turns. Those whose adapter was lost since then end.
        """
        await self.until_available()
        for generation in sorted(generations, key=lambda one: one.most_tokens, reverse=True):
            self.go_on(generation)

    def prepare(
        self,
        checked: RequestSpec,
        text: str | None,
        *,
        news: asyncio.Event,
        asked: float,
        patient: bool = False,
        adapter: str | None = None,
    ) -> Generation:
        """A request, of a prompt that was this text, as an engine can be given it.

        Raises InvalidRequest if the adapter is unknown.
        """
        key = self.adapters.names.key(adapter)
        output = self.outputs.add(text, checked)
        turn = self.turns.take(checked.owner, checked.params.sequences)
        spec = msgspec.structs.replace(checked, adapter=key, turn=turn)
        generation = Generation(output, spec, news, asked, patient)
        generation.served = SERVED.get()
        if self.has_choice:
            digest = self._digest(key)
            generation.names = prompt_names(spec, adapter_digest=digest, weights=weights_prefix(self.weights.version))
        return generation

    def withdraw(self, generations: Iterable[Generation]) -> None:
        """End those that were prepared and given to nobody."""
        for generation in generations:
            self.outputs.abort(generation.spec.answer_ids)
            self.turns.give_back(generation.spec.owner, generation.spec.params.sequences)

    def abort(self, generations: Sequence[Generation]) -> None:
        """End those that have not ended; their blocks are free after the step that runs."""
        for generation in generations:
            if generation.workload is not None:
                generation.workload.abort([generation])

    async def follow(
        self, generations: Sequence[Generation], news: asyncio.Event, deadline: float | None = None
    ) -> AsyncIterator[None]:
        """Wake whenever one of them, all submitted with `news`, has grown, until all have ended. Leaving aborts them.

        Raises EngineDied, RequestFailed, or DeadlineExceeded when the loop's clock passes `deadline` before.
        """
        try:
            while True:
                try:
                    async with contextlib.nullcontext() if deadline is None else asyncio.timeout_at(deadline):
                        await news.wait()
                except TimeoutError as error:
                    raise DeadlineExceeded("timeout has passed before the answer was complete: allow more") from error
                news.clear()
                for generation in generations:
                    if generation.error is not None:
                        raise generation.error
                finished = all(generation.output.finished for generation in generations)
                yield
                if finished:
                    return
        finally:
            self.abort(generations)

    def move(self) -> None:
        """Give what waits for an engine, or behind others' trials, to engines that begin with it at once."""
        for replica in self:
            if not replica.accepts:
                for generation in replica.stranded:
                    chosen = self._cheapest(generation)
                    if chosen is not None:
                        replica.workload.give(generation, chosen.workload)

    def go_on(self, generation: Generation) -> None:
        """Give an engine a request that none has, or whose prompt another has computed."""
        if (error := generation.lost_adapter(self.adapters.lost)) is None:
            self._workload(generation).take(generation)
            if generation.handed_over:
                self.adapters.forget_unloaded()
        else:
            generation.error = error  # before others see that it has ended
            self.withdraw([generation])
            generation.fail(error)

    def bring(self, generation: Generation) -> None:
        """Have the engine that is likely to answer a request load what stores have of its prompt."""
        if (chosen := self._cheapest_of(generation, self.index.levels(generation.names), prefill=False)) is not None:
            chosen.supervisor.send(BringPages(generation.stored_part()))

    def has_other(self, replica: Replica) -> bool:
        """Another one takes requests."""
        return any(other.accepts for other in self if other is not replica)

    @property
    def _sleeps(self) -> bool:
        """The engines rest until somebody asks."""
        return self.resting and self.wake is not None

    @property
    def _staying(self) -> list[Replica]:
        return [replica for replica in self if not replica.leaving]

    def _supervisors(self) -> Sequence[Supervisor]:
        return [replica.supervisor for replica in self._staying]

    def _engine_adapters(self) -> Sequence[EngineAdapters]:
        return [replica.adapters for replica in self]

    def _found(self, name: str) -> Replica:
        """The engine that may be removed. Raises InvalidRequest."""
        found = next((replica for replica in self if replica.name == name), None)
        if found is None:
            names = ", ".join(replica.name for replica in self)
            raise InvalidRequest(f"engine is {shown(name)}: this model's are {names}")
        if not self.has_other(found):
            raise InvalidRequest(f"engine {name} is the only one that takes requests: add another before")
        return found

    def _settle(self) -> None:
        """An engine has come or gone: where there is a choice each tells what it has cached."""
        self.named = self.named or len(self) > 1
        for replica in self:
            replica.watch(self.has_choice)
            replica.metrics.engine_name = replica.name if self.named else None

    @property
    def has_choice(self) -> bool:
        """There are several engines, which keep prefixes: each tells which."""
        return (len(self) > 1 or bool(self._servers)) and self._config.prefix_cache

    def _digest(self, adapter: int | None) -> bytes:
        """The digest of an adapter, as the engines that have read it say."""
        if adapter is None:
            return b""
        found = (replica.adapters.digests.get(adapter) for replica in self)
        return next((digest for digest in found if digest is not None), b"")

    def _is_tied(self, generation: Generation) -> bool:
        """True if a request must stay with its engine, as it uses an adapter that was unloaded."""
        return not any(generation.spec.adapter in replica.adapters.known for replica in self._staying)

    def _adapter_keys(self) -> set[int | None]:
        """Returns the keys of the adapters that requests use."""
        return {generation.spec.adapter for replica in self for generation in replica.workload.running.values()}

    def _handed_keys(self) -> set[int | None]:
        """Returns the keys of the adapters of requests whose prompts are computed for other engines."""
        running = (one for replica in self if replica.is_prefill for one in replica.workload.running.values())
        return {generation.spec.adapter for generation in running if generation.hands_over}

    def _workload(self, generation: Generation) -> Workload:
        """Returns the workload of the engine for a request, or of a server that computes its prompt before."""
        chosen = self._chosen(generation)
        takers = [server.workload for server in self._servers if server.takes(generation, chosen.stores)]
        if not self._servers or weights_prefix(self.weights.version):  # they have the weights of the model's folder
            return chosen.workload
        if len(self) == 1:
            generation.levels = self.index.levels(generation.names)
        uncached = self._to_compute(generation, chosen)
        if not takers:
            if generation.served is not None and generation.may_hand_over and hands_over(uncached, 0, 0):
                for one in self._servers:
                    if reason := one.refuses(generation, chosen.stores):
                        generation.served.refused(one.name, reason)
            return chosen.workload
        before = min(takers, key=lambda one: one.tokens)
        generation.hands_over = hands_over(uncached, before.tokens, chosen.workload.tokens)
        return before if generation.hands_over else chosen.workload

    def _again(self, generation: Generation) -> None:
        """The server that was to compute a prompt is gone."""
        assert generation.workload is not None
        generation.workload.give(generation, self._chosen(generation).workload)

    async def _compute(self, spec: RequestSpec, adapter: str | None, stored: Callable[[int], Awaitable[None]]) -> str:
        """Compute a prompt for another server, which `stored` tells how many tokens are in stores; what none has.

        Raises as `follow` and `until_available`."""
        await self.until_available()
        news = asyncio.Event()
        generation = self.prepare(spec, None, news=news, asked=time.monotonic(), patient=True, adapter=adapter)
        self.go_on(generation)
        async for _ in self.follow([generation], news):
            if not generation.output.finished:
                await stored(generation.stored_tokens)
        return str(generation.output.outputs[0].stop_reason or "")

    def _chosen(self, generation: Generation) -> Replica:
        """Returns the engine for a request: one that starts it at once, else the one that may be soonest."""
        generation.hands_over = False
        if len(self) == 1:
            return self._replicas[0]
        if (cheapest := self._cheapest(generation)) is not None:
            return cheapest
        staying = self._staying
        known = [replica for replica in staying if generation.spec.adapter in replica.adapters.known]
        ready = [replica for replica in known if replica.supervisor.is_ready]
        usual = [replica for replica in ready if not replica.is_prefill]
        return min(usual or ready or staying, key=lambda replica: replica.workload.tokens)

    def _cheapest(self, generation: Generation) -> Replica | None:
        """Returns the cheapest engine that starts it at once; None: there is none.

        It is a prefill engine if the prompt is long enough.
        """
        generation.hands_over = False
        levels = generation.levels = self.index.levels(generation.names)
        usual = self._cheapest_of(generation, levels, prefill=False)
        if not self.prefill_engines:
            return usual
        before = self._cheapest_of(generation, levels, prefill=True)
        if before is None or usual is None or not generation.may_hand_over:
            return usual or before
        uncached = self._to_compute(generation, usual)
        generation.hands_over = hands_over(uncached, before.workload.tokens, usual.workload.tokens)
        return before if generation.hands_over else usual

    def _to_compute(self, generation: Generation, replica: Replica) -> int:
        """Returns the tokens of a prompt that an engine has neither cached nor in its tier."""
        return generation.spec.prompt_length - self.index.held_tokens(generation.names, replica.number)

    def _cheapest_of(self, generation: Generation, levels: Sequence[Level], *, prefill: bool) -> Replica | None:
        adapter = generation.spec.adapter

        def may(number: int) -> bool:
            replica = self._numbered[number]
            return replica.accepts and adapter in replica.adapters.known and replica.is_prefill == prefill

        number = self.loads.cheapest(levels, may)
        return None if number is None else self._numbered[number]


def _places(config: EngineConfig) -> Sequence[Place]:
    """The places of all engines. Raises ConfigError if there are too few."""
    if config.executor == "ray":
        return [_place(config, 0, config.data_parallel_size)] * config.data_parallel_size
    return places_of(config)


def _place(config: EngineConfig, number: int, count: int) -> Place:
    """The place of engine `number` (from 0) of `count`. Raises ConfigError if there is none."""
    if config.executor == "ray":
        from kvern.serving.node_engine import ray_place

        return ray_place(config, count)
    return place_of(config, number, count)
