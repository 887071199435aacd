"""Keeps an engine process: starts it, hands on what it says, and starts another when it dies, for as long as it takes.

launch --> listen --> death --> owner learns of it --> launch ...
   ^                                 |
   `------- wait 1, 2, 4 .. s <------'   after deaths from which nothing was learnt, and starts that failed

Between `sleep` and `start` nobody hears the engine, which has given its memory back; if it ends it is not replaced.
"""

import asyncio
import dataclasses
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvern.config import OPTIONAL, EngineConfig
from kvern.errors import ConfigError, EngineClosed, EngineDied, EngineUnavailable, without_passwords
from kvern.serving.child import EngineProcess
from kvern.serving.link import EngineLink
from kvern.serving.places import Place
from kvern.serving.probation import Cause
from kvern.serving.wire import FinishRequests, Heard, Sleep, Slept, Wake, WireMessage, Woken, encode
from kvern.tiers.arena import HOST, OwnedArena

logger = logging.getLogger("kvern")

LONGEST_WAIT = 60.0
MOST_DOUBLINGS = 6
"""The deaths after which the wait grows no more."""
LOOK_SECONDS = 0.5
"""The interval at which those that wait for an engine check whether to go on waiting."""
PATIENCE = 2
"""The number of deaths and failed starts in a row without a known cause, after which new requests are refused."""
LONG_LIFE = 60.0
"""Seconds after which an engine is not one of those that die at once."""

FAULTS = frozenset(
    {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGSYS, signal.SIGTRAP}
)
"""Signals that a process gets for what it does itself. Others are sent to it, as the kernel does when memory ends."""


def cause_of(returncode: int | None) -> Cause:
    """Why a process ended, by its exit code, negative: by which signal."""
    return "fault" if returncode is None or returncode >= 0 or -returncode in FAULTS else "outside"


@dataclass(frozen=True)
class Death:
    """Why an engine ended, and the requests of its last steps."""

    reason: EngineDied
    running: Sequence[str]
    cause: Cause
    lived: float
    """Seconds in which it took requests."""


class Owner(Protocol):
    """The owner of an engine. Exceptions of these methods are logged, and the engine is replaced."""

    def hear(self, message: Heard) -> None: ...

    def died(self, death: Death) -> bool:
        """The engine has ended; returns whether that taught which request may be the cause."""

    async def prepare(self, link: EngineLink, *, woken: bool = False) -> None:
        """A new engine is ready, or one was woken: what must be there before requests. Raises EngineDied."""

    def resume(self) -> None:
        """The new engine takes requests."""

    def lost(self) -> None:
        """The engine has ended while it was asleep, or when it was to wake."""

    def given_up(self) -> None:
        """Engines keep dying, or do not start, without a request to blame; they are tried further on."""


class Supervisor:
    """Start with `start`, end with `stop`."""

    def __init__(self, config: EngineConfig, owner: Owner, place: Place, first: EngineProcess | None = None) -> None:
        """`place`: where its engines run. `first`: a process for the first engine, that runs already."""
        self._config = config
        self._place = place
        self._owner = owner
        self._first = first
        kinds = {option.removesuffix(OPTIONAL).partition(":")[0] for option in config.kv_tier}
        has_arena = HOST in kinds and config.prefix_cache and place.shares_memory
        self._arena = OwnedArena(config.model or "") if has_arena else None
        self._link: EngineLink | None = None
        self._began = 0.0
        self._fruitless = 0
        self._next_launch = 0.0
        self._trouble = ""
        self._task: asyncio.Task[None] | None = None
        self._asleep = False
        self._falling: asyncio.Future[None] | None = None
        self.available = asyncio.Event()
        """An engine takes requests, or there will be none any more."""
        self.closed = False

    @property
    def link(self) -> EngineLink:
        """The link to the engine that runs, or to the last one."""
        assert self._link is not None, "no engine was started"
        return self._link

    @property
    def is_ready(self) -> bool:
        """An engine takes requests."""
        return self.available.is_set() and not self.closed

    @property
    def sequences(self) -> int:
        """The most sequences that run in it at the same time."""
        return self.link.ready.sequences

    @property
    def unavailable(self) -> EngineUnavailable | None:
        """Engines keep dying, or do not start, without a request to blame: why, and when to come again."""
        if self.available.is_set() or self._fruitless <= PATIENCE:
            return None
        seconds = max(1.0, self._next_launch - time.monotonic())
        return EngineUnavailable(f"the engine does not stay alive: {self._trouble}", seconds)

    @property
    def waits_for(self) -> str:
        """Returns what has to come before an engine takes requests, for people; empty: one does."""
        if self.is_ready:
            return ""
        seconds = self._next_launch - time.monotonic()
        if seconds <= 0:
            return "another one loads the model"
        return without_passwords(f"{' '.join(self._trouble.split())}; another one is started in {seconds:.0f} s")

    async def start(self, process: EngineProcess | None = None) -> None:
        """Start an engine, the first one or after a rest, in `process` if it runs already; or wake the one that sleeps.

        Raises ConfigError with its reason; then there is none, and it can be started again.
        """
        self._first = process or self._first
        try:
            if not (self._asleep and await self._woken()):
                await self._launch()
        except BaseException:
            await self._end()
            raise
        self._task = asyncio.create_task(self._forever())

    async def sleep(self, unanswered: Sequence[str]) -> None:
        """Have the engine give its memory back until `start`, and these answers up, which the owner keeps.

        Raises EngineDied if it ends, or cannot: then `rest` is to follow.
        """
        if not self.is_ready:
            raise EngineDied("the engine is being replaced")
        if not self.link.ready.sleeps:
            raise EngineDied("engines with DP attention do not sleep, nor do those on a GPU without enable_sleep")
        self.available.clear()
        self._falling = asyncio.get_running_loop().create_future()
        self.link.socket.send(encode(FinishRequests([*unanswered])))
        self.link.socket.send(encode(Sleep()))
        try:
            await self._falling  # until then answers grow, none of whose tokens may be missed
        finally:
            self._falling = None

    def _fallen(self, error: EngineDied | None) -> None:
        """The engine sleeps, or has ended or cannot."""
        if self._falling is not None and not self._falling.done():
            if error is None:
                self._asleep = True
                self._falling.set_result(None)
            else:
                self._falling.set_exception(error)

    async def _until_lost(self) -> None:
        link = self.link
        await link.process.wait()
        if not self._asleep:
            return
        await link.stop()
        logger.warning("an engine ended with exit code %s while it slept", link.process.returncode)
        self._asleep = False
        self._owner.lost()

    async def _woken(self) -> bool:
        """Wake the engine that sleeps; False: it has ended, or does now."""
        await self._end_task()
        link, self._asleep = self.link, False
        link.socket.send(encode(Wake()))
        try:
            await _until_woken(link.messages())
            await self._owner.prepare(link, woken=True)
        except EngineDied as error:
            logger.warning("%s when it was to wake; another engine is started", error)
            await link.stop()
            self._owner.lost()
            return False
        self._begin()
        return True

    async def rest(self) -> None:
        """End the engine until `start` is called again. The owner keeps its requests.

        The next one takes requests as long as this one did, and as many, or does not start.
        """
        if self._link is not None:
            ready = self._link.ready
            self._config = dataclasses.replace(
                self._config, max_model_len=ready.max_model_len, max_batch_requests=ready.max_batch_requests
            )
        self.available.clear()
        self._fruitless = 0
        await self._end()

    def cease(self) -> None:
        """Hear nothing more of the engine from now on; `stop` is to follow."""
        self.closed = True
        if self._task is not None:
            self._task.cancel()

    async def stop(self) -> None:
        """End the engine and all attempts to have one."""
        self.cease()
        await self._end()
        if self._arena is not None:
            self._arena.close()
        self.available.set()

    async def _end_task(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None

    async def _end(self) -> None:
        await self._end_task()
        self._asleep = False
        if self._link is not None:
            await self._link.stop()
            self._link.process.forget()

    def send(self, message: WireMessage) -> None:
        """Sends a message to the engine if one takes requests; a later engine gets what it needs from the owner."""
        if self.is_ready:
            self.link.socket.send(encode(message))

    async def _forever(self) -> None:
        alive = True
        while True:
            try:
                if alive:
                    if (death := await self._listen()) is None:
                        return await self._until_lost()
                    self._bury(death)
                    alive = False
                alive = await self._relaunch()
                if self.unavailable is not None:
                    self._owner.given_up()
            except Exception:
                logger.exception("the supervisor of the engine has a fault; it goes on with another engine")
                alive = False
                self.available.clear()
                if self._falling is not None:  # nobody wants another one: the model is cold
                    self._fallen(EngineDied("the supervisor of the engine has a fault, which the log tells"))
                    await self.link.stop()
                    return None
                self._wait_longer("the supervisor of the engine has a fault, which the log tells")

    async def _listen(self) -> Death | None:
        """Hand on what the engine says until it ends; None: until it sleeps, or ends instead."""
        try:
            async for message in self.link.messages():
                if isinstance(message, Heard):
                    self._owner.hear(message)
                elif isinstance(message, Slept):
                    self.link.gpu_bytes = message.gpu_bytes
                    self._fallen(None if message.error is None else EngineDied(message.error))
                    return None
        except EngineDied as error:
            self.available.clear()
            await self.link.stop()
            if self._falling is not None:
                self._fallen(error)
                return None
            cause: Cause = "silence" if self.link.silent else cause_of(self.link.process.returncode)
            return Death(error, self.link.process.last_requests(), cause, time.monotonic() - self._began)
        raise AssertionError("the engine's messages end with its death")

    def _bury(self, death: Death) -> None:
        learnt = self._owner.died(death)
        if learnt or death.lived > LONG_LIFE:
            self._fruitless = 0
        if not learnt:
            self._wait_longer(str(death.reason))

    async def _relaunch(self) -> bool:
        """Start another engine when it is time; whether one runs. Failing is a death from which nothing is learnt."""
        await asyncio.sleep(max(0.0, self._next_launch - time.monotonic()))
        if self._link is not None:
            await self._link.stop()
        try:
            await self._launch()
        except (ConfigError, EngineDied) as error:
            self._wait_longer(str(error))
            return False
        return True

    def _wait_longer(self, trouble: str) -> None:
        """Nothing explains what happened: wait, the longer the oftener."""
        self._trouble = trouble
        self._fruitless += 1
        wait = min(LONGEST_WAIT, 2.0 ** min(self._fruitless - 2, MOST_DOUBLINGS)) if self._fruitless > 1 else 0.0
        self._next_launch = time.monotonic() + wait
        logger.warning("%s; another engine is started in %g s", trouble, wait)

    async def _launch(self) -> None:
        if self._link is not None:
            self._link.process.forget()
        process, self._first = self._first or self._place.launch(), None
        process.bind(self._place.processors)
        self._link = await EngineLink.start(self._config, process, self._arena)
        await self._owner.prepare(self._link)
        self._begin()

    def _begin(self) -> None:
        self._began = time.monotonic()
        self.available.set()
        self._owner.resume()


async def _until_woken(messages: AsyncIterator[object]) -> None:
    async for message in messages:
        if isinstance(message, Woken):
            return


async def until_one_is_available(
    supervisors: Callable[[], Sequence[Supervisor]], given_up: Callable[[], bool] = lambda: False
) -> None:
    """Wait for one of those that there are meanwhile to have an engine, unless `given_up`.

    Raises EngineUnavailable or EngineClosed.
    """
    while not given_up() and not any(supervisor.available.is_set() for supervisor in supervisors()):
        present = supervisors()
        troubles = [trouble for supervisor in present if (trouble := supervisor.unavailable) is not None]
        if len(troubles) == len(present):
            raise min(troubles, key=lambda trouble: trouble.seconds)
        waiting = [asyncio.create_task(supervisor.available.wait()) for supervisor in present]
        try:
            await asyncio.wait(waiting, timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
    if any(supervisor.closed for supervisor in supervisors()):
        raise EngineClosed("the engine is closed")
