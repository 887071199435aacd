"""The keeper of several models: carries out what `Residency` decides, and measures what it costs.

    request --use--> Residency --decide--> moves --> EngineClient.start and .rest --measure--> Residency

One task decides, after every request and every move, and each move is a task: a model that loads holds up nobody but
its own requests. A process that has imported what engines need is kept in reserve for the next model that is woken.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from kvern.errors import ConfigError, EngineUnavailable, KvernError, in_a_line
from kvern.observe.metrics import ModelFigures
from kvern.residency.broker import release_pages, settle, taken, touched
from kvern.residency.gpus import card_memory, memory_around
from kvern.residency.options import ServedModel
from kvern.residency.policy import STATES, Decision, Footprint, Move, Residency, State
from kvern.residency.pressure import HostMemory, Watch
from kvern.serving.child import EngineChild, EngineProcess
from kvern.serving.client import EngineClient
from kvern.serving.link import EngineLink

logger = logging.getLogger("kvern")

LOOK_SECONDS = 0.05
"""The interval of checks whether a model that was dismissed has gone."""
ASLEEP_BYTES = 200_000_000
LOADS_TO_WAKES = 10.0
"""Estimates of what an engine takes that is asleep, half of what it does awake at most, and of how many times faster it
wakes than it loads, until it has."""
RESERVE_BYTES = 200_000_000
"""Memory of a process in reserve: it is the first to go when the machine has little left."""
GRACE_SECONDS = 2.0
"""Seconds in which requests may end before their model is put to sleep; later ones go on when it is woken."""
GIVEN_BACK_SECONDS = 0.2
"""Seconds in which KV caches give memory back, before idle models make way."""


class Resident:
    """One of several models."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self.made: EngineClient | None = None
        """Its client, made with its first request."""
        self.client: EngineClient | None = None
        """The client, once it was awake and knows the model."""
        self.figures = ModelFigures(model.name)
        self.trouble = ""
        """Why it could not be woken the last time."""
        self.waiting: set[asyncio.Future[None]] = set()
        """Requests that wait until it is awake."""

    @property
    def name(self) -> str:
        """The model's first name."""
        return self.model.name

    @property
    def names(self) -> list[str]:
        """The values of `model` for it and its adapters."""
        if self.client is None:
            return self.model.names
        return [*self.client.names, *(adapter.name for adapter in self.client.adapters.names.all())]


class Keeper:
    """Keeps models within `memory` bytes. Belongs to one event loop; begins and ends as a context.

    `known` is called with a client when it can make requests, before the first is made.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        memory: int,
        process: EngineProcess | None,
        watch: Watch | None = None,
        around: Watch | None = None,
    ) -> None:
        """`process`: one that runs already, for the first model that is woken. `watch`: what tells how much memory the
        machine, or the GPU, has left; `around`: that of the machine around GPUs. None: nobody looks.

        Raises ModelNotFound.
        """
        self.residency = Residency(memory)
        self.residents = [Resident(model) for model in models]
        self.known: Callable[[EngineClient], None] = lambda client: None
        self._closed: KvernError | None = None
        self._by_name = {resident.name: resident for resident in self.residents}
        self._reserve = process
        self._watch = watch
        self._around = around
        self._on_gpu = any(model.gpu is not None for model in models)
        self._makers = ThreadPoolExecutor(len(models), "kvern-models")  # downloads may take hours
        self._news = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._deciding: asyncio.Task[None] | None = None
        self._sees_at: float | None = None
        """When it is seen what was given back as the machine had little memory; None: it has enough."""
        self._released: set[EngineLink] = set()
        """The engines whose tiers have given memory back, and take no more until they have slept."""
        self._touched = 0
        """The bytes that KV caches had at the last look."""
        self._waiting = 0
        """The number of models that wait until KV caches have given back what they take of a GPU."""
        for model in models:
            self.residency.add(model.name, model.terms, model.estimate(), time.monotonic())

    async def __aenter__(self) -> "Keeper":
        """Wakes the models that are pinned. Raises ConfigError with the reason of one that cannot be woken."""
        self._deciding = asyncio.create_task(self._decide_forever())
        try:
            pinned = [resident for resident in self.residents if resident.model.terms.pin]
            await asyncio.gather(*map(self.meet, pinned))
        except BaseException as error:
            await self.__aexit__()
            if isinstance(error, EngineUnavailable):
                raise ConfigError(str(error)) from error
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        """Aborts what runs, and ends all processes."""
        for task in (*self._tasks, *([self._deciding] if self._deciding else [])):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await asyncio.gather(*(one.made.__aexit__() for one in self.residents if one.made is not None))
        self._makers.shutdown(wait=False, cancel_futures=True)
        self._end_reserve()

    def find(self, name: object) -> Resident | None:
        """Returns the model of this name, or of the adapter of this name."""
        return next((resident for resident in self.residents if name in resident.names), None)

    def state(self, resident: Resident) -> State:
        """Returns the state of a model."""
        return self.residency.states[resident.name]

    async def meet(self, resident: Resident) -> EngineClient:
        """Returns a model's client, which knows the model, woken for that if it never was. Raises EngineUnavailable."""
        if resident.client is None:
            with self.use(resident):
                await self.awake(resident)
        assert resident.client is not None
        return resident.client

    def keep(self, resident: Resident, seconds: float | None) -> None:
        """Lets a model stay awake for so many seconds without a request this time; None: until others need memory."""
        if seconds == 0:
            self.residency.dismiss(resident.name)
        else:
            self.residency.keep(resident.name, seconds)
        self._news.set()

    async def dismiss(self, resident: Resident, state: State, seconds: float) -> State:
        """Puts a model to sleep, or ends its process, once it has no requests; returns its state then, or after so many
        seconds."""
        self.residency.dismiss(resident.name, state)
        self._news.set()
        more = STATES[STATES.index(state) + 1 :]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.state(resident) in more or self.residency.moving(resident.name) in more:
                    await asyncio.sleep(LOOK_SECONDS)
        return self.state(resident)

    def close(self, error: KvernError) -> None:
        """Ends all that wait for a model, now and later, with an error: the server ends."""
        self._closed = error
        for resident in self.residents:
            _end(resident, error)

    @contextlib.contextmanager
    def use(self, resident: Resident) -> Iterator[None]:
        """Wants the model awake until the block ends."""
        self.residency.asked(resident.name, time.monotonic())
        self._news.set()
        try:
            yield
        finally:
            self.residency.ended(resident.name, time.monotonic())
            self._news.set()

    async def awake(self, resident: Resident) -> None:
        """Waits until a model that is in use is awake. Raises EngineUnavailable with the reason if it cannot be."""
        if self._closed is not None:
            raise self._closed
        if self.residency.moving(resident.name) is None:
            if self.state(resident) == "awake":
                return
            if seconds := self.residency.barred(resident.name, time.monotonic()):
                raise _unavailable(resident, seconds)
        waiter = asyncio.get_running_loop().create_future()
        resident.waiting.add(waiter)
        try:
            await waiter
        finally:
            resident.waiting.discard(waiter)

    async def _decide_forever(self) -> None:
        while True:
            self._news.clear()
            try:
                next_at = self._decide()
                seconds = None if next_at is None else max(0.0, next_at - time.monotonic())
            except Exception:
                logger.exception("the keeper of models has a fault")
                seconds = GRACE_SECONDS
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._news.wait()

    def _decide(self) -> float | None:
        now = time.monotonic()
        given_back = 0
        if self._watch is not None:
            if (has := touched(self._awake)) != self._touched:  # what was free before is granted once
                self._touched = has
                self._watch.renew()
            host = self.residency.host = self._look(self._watch, now)
            if host is None or host.spare >= 0:
                self._sees_at = None
                if self._released and (host is None or host.spare >= host.floor):
                    release_pages(self._awake, 0)
                    self._released.clear()
            else:  # cached blocks that nobody uses go first, then pages; how much that is, the machine tells
                given_back = self._agree()
                goes = given_back > 0 and self._sees_at is None
                self._released &= {link for client in self._awake.values() for link in _links(client)}
                if not (goes or self._on_gpu) and now >= (self._sees_at or 0.0):
                    told = release_pages(self._awake, -host.spare, but=self._released)
                    goes = bool(told)
                    self._released |= told
                if goes:
                    self._sees_at = self._watch.next_at = now + GIVEN_BACK_SECONDS
                if self._sees_at is not None and now < self._sees_at:
                    self._watch.next_at = min(self._watch.next_at, self._sees_at)
                    return self._sees_at
            reserve = None if self._on_gpu else self._reserve  # that process is on no GPU
            if reserve is not None and host is not None and host.spare < 0:
                self._end_reserve()
                self._watch.freed(RESERVE_BYTES)
                reserve = None
            host = self._watch.look(now)
            if reserve is not None and host is not None:  # the next model may be loaded in that process
                host = replace(host, free=host.free + RESERVE_BYTES)
            self.residency.host = host
            self.residency.lent = self._touched if self._on_gpu else 0
        if self._around is not None:
            self.residency.around = self._around.look(now)
        decision = self.residency.decide(now)
        if not given_back:
            self._agree()
        for name, reason in decision.refused.items():
            self._fail(self._by_name[name], reason)
        for move in decision.moves:
            self._begin(move)
        for watch, host in ((self._watch, self.residency.host), (self._around, self.residency.around)):
            if watch is not None:
                self._tell(watch, host, decision, now)
                decision.look_at(watch.next_at)
        return decision.next_at

    @property
    def _awake(self) -> dict[str, EngineClient]:
        """Returns the clients of models that are awake and stay so."""
        return {
            one.name: one.client
            for one in self.residents
            if one.client is not None and self.state(one) == "awake" and self.residency.moving(one.name) is None
        }

    def _look(self, watch: Watch, now: float) -> HostMemory | None:
        """Looks at what is left, from which it is known how much models have taken that wake."""
        host = watch.look(now)
        if host is not None:  # caches of models that go to sleep have their memory until they do
            clients = {one.name: one.client for one in self.residents if one.client is not None}
            self.residency.saw(host.free + touched(clients))
        return host

    def _agree(self) -> int:
        """Lets KV caches have what no model holds for certain; returns the bytes that they are asked to give back."""
        host = self.residency.host
        spare = max(0, self.residency.memory - self.residency.held)
        if host is not None:
            left = host.spare - self.residency.waking
            if not (self._waiting and left < 0):  # of what models that wake have taken nothing is asked for again
                left = max(0, left - host.floor)  # as much again stays free, or they would give it back soon
            spare = max(0, min(spare, touched(self._awake) + left))
        return settle(self._awake, spare, needed_alone=host is not None and host.spare < 0)

    async def _until_given_back(self, resident: Resident) -> None:
        """Waits until KV caches have given back what a model takes that wakes, but not for long; then it takes it."""
        self._waiting += self._on_gpu  # elsewhere a wake begins only once there is memory beside caches
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GRACE_SECONDS):
                    while not self._have_given_back():
                        await asyncio.sleep(LOOK_SECONDS)
        finally:
            self._waiting -= self._on_gpu
        self.residency.takes(resident.name)

    def _have_given_back(self) -> bool:
        """Has KV caches give back what models take that wake; returns whether they have."""
        if self._on_gpu and self._watch is not None:
            self._watch.renew()
            self.residency.host = self._look(self._watch, time.monotonic())
        self._agree()
        has = taken(self._awake)
        if has > max(0, self.residency.memory - self.residency.held):
            return False
        host = self.residency.host if self._on_gpu else None
        growing = has - touched(self._awake)
        return host is None or host.spare - growing >= self.residency.waking

    def _tell(self, watch: Watch, host: HostMemory | None, decision: Decision, now: float) -> None:
        """Tells of models that make way because the machine, or the GPU, has little memory."""
        if host is None or host.spare >= 0:
            return
        relieving = [move for move in decision.moves if move.relieves]
        for move in relieving:
            self._by_name[move.name].figures.relieves()
        going = ", ".join(f"{move.name} becomes {move.state}" for move in relieving)
        if going or not any(self.residency.moving(name) for name in self._by_name):
            watch.warn(now, going or "no idle model can make way: end other programs, or lower models_memory")

    def _end_reserve(self) -> None:
        if self._reserve is not None:
            self._reserve.kill()
            self._reserve.forget()
            self._reserve = None

    def _begin(self, move: Move) -> None:
        task = asyncio.create_task(self._carry_out(move))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry_out(self, move: Move) -> None:
        resident = self._by_name[move.name]
        try:
            if move.state == "awake":
                await self._wake(resident)
            else:
                await self._rest(resident, move.state)
        except Exception:
            logger.exception("model %s did not become %s", resident.name, move.state)
        finally:
            for watch in filter(None, (self._watch, self._around)):
                watch.renew()
            self._news.set()
        host = None if self._on_gpu else self.residency.host
        spare = RESERVE_BYTES if host is None else host.spare
        if self._reserve is None and self._closed is None and "cold" in self.residency.states.values():
            self._reserve = EngineChild() if spare >= RESERVE_BYTES else None

    async def _wake(self, resident: Resident) -> None:
        began = time.monotonic()
        try:
            client = resident.made
            if client is None:
                self.residency.downloads(resident.name, True)
                loop = asyncio.get_running_loop()
                client = await loop.run_in_executor(self._makers, EngineClient, resident.model.engine)
                if (sized := resident.model.sized(client.folder)) is not resident.model:  # it was downloaded just now
                    resident.model = sized
                    client = await loop.run_in_executor(self._makers, EngineClient, sized.engine)
                resident.made = client
                self.residency.downloads(resident.name, False)
                client.replicas.wake = lambda: self.awake(resident)
                client.replicas.lost = lambda: self._lost(resident)
                client.replicas.cache_changed = self._news.set
                needed = resident.model.estimate(client.folder)
                if needed.awake > self.residency.footprint(resident.name).awake:  # it was downloaded just now
                    self.residency.postponed(resident.name, needed)
                    return
                began = time.monotonic()  # what a download took says nothing of later wakes
            await self._until_given_back(resident)
            slept = [*_links(client)] if self.state(resident) == "asleep" else None
            await self._start(client, again=resident.client is not None, slept=slept is not None)
            seconds = time.monotonic() - began
            if slept == [*_links(client)]:
                footprint = replace(self.residency.footprint(resident.name), wake_seconds=seconds)
            else:
                footprint = await self._measured(resident, client, seconds)
            if resident.client is None:
                self.known(client)
        except Exception as error:
            if not isinstance(error, KvernError):
                logger.exception("model %s cannot be woken", resident.name)
            try:
                if resident.made is not None:
                    await resident.made.rest()
            finally:
                self.residency.failed(resident.name, time.monotonic())
                self._fail(resident, str(error) if isinstance(error, KvernError) else in_a_line(error))
            return
        resident.client = client
        self.residency.moved(resident.name, time.monotonic(), footprint)
        resident.figures.woke(seconds, footprint.awake)
        for waiter in resident.waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def _measured(self, resident: Resident, client: EngineClient, seconds: float) -> Footprint:
        """Returns what a model takes that was loaded in so many seconds."""
        if (share := resident.model.gpu_bytes) is None:
            held = await asyncio.to_thread(memory_of, client)
            cache = sum(link.ready.least_cache_bytes for link in _links(client))
        else:
            held = max(link.ready.gpu_bytes for link in _links(client)) or share
            cache = min(held, resident.model.estimate(client.folder).cache)
        asleep = min(held // 2, ASLEEP_BYTES) if client.sleeps else None
        return Footprint(held, seconds, asleep, seconds / LOADS_TO_WAKES, cache)

    async def _start(self, client: EngineClient, again: bool, slept: bool) -> None:
        """Starts a model's engines, or wakes them if they `slept`.

        `again`: they have run before, so that one failure may have come from outside.
        """
        try:
            await client.start(None if slept else self._taken())
        except ConfigError as error:
            if not again:
                raise
            logger.warning("model %s is woken once more: %s", client.names[0], error)
            await client.start()

    async def _rest(self, resident: Resident, state: State) -> None:
        client = resident.client
        assert client is not None, "a model that is not cold has a client"
        client.replicas.resting = True  # requests that come now wait
        if self.state(resident) == "awake":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GRACE_SECONDS):
                    for replica in client.replicas:
                        await replica.workload.until_ended()
        held = 0
        reached: State = "cold"
        footprint = self.residency.footprint(resident.name)
        try:
            if state == "cold":
                await client.rest()
            elif await client.sleep():
                on_gpu = max(link.gpu_bytes for link in _links(client))
                held = on_gpu or await asyncio.to_thread(memory_of, client, asleep=True)
                reached = "asleep"
                footprint = replace(footprint, asleep=held)
        finally:
            self.residency.moved(resident.name, time.monotonic(), footprint, reached)
            resident.figures.rests(held)

    def _lost(self, resident: Resident) -> None:
        """A model's engine has ended in its sleep: the others end, too, and it is cold."""
        if (move := self.residency.lost(resident.name)) is not None:
            self._begin(move)

    def _fail(self, resident: Resident, reason: str) -> None:
        """Ends all that wait for a model that cannot be woken."""
        resident.trouble = reason
        seconds = self.residency.barred(resident.name, time.monotonic())
        logger.warning("model %s cannot be woken: %s", resident.name, reason)
        _end(resident, _unavailable(resident, seconds))
        if resident.client is not None:
            resident.client.replicas.fail(_unavailable(resident, seconds))

    def _taken(self) -> EngineProcess | None:
        """Returns the process that is kept in reserve, if it still runs."""
        process, self._reserve = self._reserve, None
        if process is not None and process.returncode is not None:
            process.forget()
            return None
        return process


def watch_for(models: Sequence[ServedModel]) -> Watch | None:
    """Returns what tells how much memory is left for several models, here or on their GPUs; None for one model."""
    if len(models) <= 1:
        return None
    gpu = models[0].gpu
    return Watch() if gpu is None else Watch(partial(card_memory, gpu.names))


def watch_around(models: Sequence[ServedModel]) -> Watch | None:
    """Returns what tells how much memory the machine around the GPUs of several models has left; None elsewhere."""
    return None if len(models) <= 1 or models[0].gpu is None else Watch(memory_around)


def _end(resident: Resident, error: KvernError) -> None:
    for waiter in resident.waiting:
        if not waiter.done():
            waiter.set_exception(error)


def _unavailable(resident: Resident, seconds: float) -> EngineUnavailable:
    return EngineUnavailable(f"model {resident.name} cannot be woken: {resident.trouble}", max(1.0, seconds))


def _links(client: EngineClient) -> Iterator[EngineLink]:
    return (replica.supervisor.link for replica in client.replicas)


def memory_of(client: EngineClient, *, asleep: bool = False) -> int:
    """Returns the bytes of memory of a model's engines with the least of their KV caches, used or not, but none if
    `asleep`."""
    return sum(link.process.memory() + (0 if asleep else link.ready.least_cache_bytes) for link in _links(client))
