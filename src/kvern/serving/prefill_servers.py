"""Servers of other machines that compute long prompts for this one's engines, which load the pages from there."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import zmq
import zmq.asyncio

from kvern.config import OPTIONAL
from kvern.engine.output import OutputProcessor
from kvern.errors import KvernError, in_a_line, shown, without_passwords
from kvern.observe.metrics import Metrics
from kvern.request.events import TokenEvent
from kvern.request.store_figures import StoreFigures
from kvern.serving.prefix_index import EnginePrefixes, PrefixIndex
from kvern.serving.probation import Probation
from kvern.serving.wire import (
    AdaptersKept,
    AddRequest,
    Events,
    Failed,
    Ready,
    Start,
    WireMessage,
    decode_for_server,
    encode,
)
from kvern.serving.workload import Generation, Turns, Workload, generation_id
from kvern.tiers.remote_pages import connect, peer_secret, read_address, resolved
from kvern.version import __version__

logger = logging.getLogger("kvern")

SILENCE_SECONDS = 5.0
"""Seconds without a word, after which the other is gone: it says something every second."""
LONGEST_WAIT = 60.0
NO_STORES: Mapping[str, StoreFigures] = MappingProxyType({})


def prompts_address(option: str) -> tuple[str, int]:
    """The address for prompts of the server whose kv_tier_listen this is: the port behind it. Raises ValueError."""
    host, port = read_address(option)
    return host, port + 1


class PrefillServer:
    """The connection to one of them, which is made again whenever it is lost, and the prompts that it computes.

    `again` gives a prompt to another engine, if the connection is lost; `computed` one that is computed. `digest`: of
    an adapter, by its key.
    """

    def __init__(
        self,
        option: str,
        outputs: OutputProcessor,
        turns: Turns,
        metrics: Metrics,
        again: Callable[[Generation], None],
        computed: Callable[[Generation], None],
        digest: Callable[[int | None], bytes] = lambda _: b"",
    ) -> None:
        """`option`: HOST:PORT. Raises ValueError."""
        self.name = option
        self._address = prompts_address(option)
        self._secret = peer_secret()
        self._pages = ""
        self._store = ""
        """The name of the store with its pages in engines here."""
        self._again = again
        self._digest = digest
        self._adapters: frozenset[bytes] = frozenset()
        self._socket: zmq.asyncio.Socket | None = None
        self._ready: Ready | None = None
        self._task: asyncio.Task[None] | None = None
        self._reason = "it has not answered yet"
        self._next_try = 0.0
        self._prompts = 0
        self._tokens = 0
        self._failed = 0
        self.workload = Workload(self, outputs, Probation(), turns, metrics, EnginePrefixes(PrefixIndex(), -1))
        self.workload.engine = option
        self.workload.handed_over = computed
        self.workload.stored = lambda _: None

    @property
    def is_ready(self) -> bool:
        """It takes prompts."""
        return self._ready is not None

    @property
    def waits_for(self) -> str:
        """Returns what has to come before it takes prompts, for people; empty: it does."""
        if self.is_ready:
            return ""
        seconds = self._next_try - time.monotonic()
        return f"{self._reason}{f'; it is tried again in {seconds:.0f} s' if seconds > 0 else ''}"

    @property
    def state(self) -> dict[str, object]:
        """Its address, whether it takes prompts, else why not, and what became of those that it got, for people.

        `computed_tokens` are those of the prompts that it computed, cached ones, too; prompts that it `failed` were
        given to engines here.
        """
        return {
            "prefill_server": self.name,
            "ready": self.is_ready,
            **({} if self.is_ready else {"reason": self._reason}),
            "running": len(self.workload.running),
            "computed_prompts": self._prompts,
            "computed_tokens": self._tokens,
            "failed_prompts": self._failed,
        }

    @property
    def sequences(self) -> int:
        """The most prompts that it computes at the same time."""
        return 0 if self._ready is None else self._ready.sequences

    def takes(self, generation: Generation, stores: Mapping[str, StoreFigures] = NO_STORES) -> bool:
        """Returns whether it may compute a prompt for an engine with these stores."""
        return self._ready is not None and generation.may_hand_over and not self.refuses(generation, stores)

    def refuses(self, generation: Generation, stores: Mapping[str, StoreFigures] = NO_STORES) -> str:
        """Returns why it does not compute a prompt that is to be handed over; empty: it does, or is gone.

        It may have a shorter context, and lack its adapter; the engine may have found that it cannot read its pages.
        """
        if self._ready is None:
            return ""
        if generation.spec.prompt_length >= self._ready.max_model_len:
            return f"it has a context of {self._ready.max_model_len} tokens"
        if self._lacks_adapter(generation):
            return "it has not its adapter"
        figures = stores.get(self._store)
        return "" if figures is None or figures.is_on else "its pages could not be read of late"

    def _lacks_adapter(self, generation: Generation) -> bool:
        key = generation.spec.adapter
        return key is not None and self._digest(key) not in self._adapters

    def send(self, message: WireMessage) -> None:
        """Sends a message, if there is somebody to hear it."""
        if self._socket is not None:
            if isinstance(message, AddRequest):
                message.adapter = self._digest(message.spec.adapter) or None
            self._socket.send(encode(message))

    def start(self, pages: str, stores: Sequence[str] = ()) -> None:
        """Connects, now or when there is such a server. `pages`: what engines here say of theirs; `stores`: their
        options, of which one reads its pages."""
        self._pages = pages
        readers = [option.removesuffix(OPTIONAL) for option in stores if option.startswith("nixl:")]
        place = readers.index(f"nixl://{self.name}") if f"nixl://{self.name}" in readers else 0
        self._store = f"nixl-{place + 1}" if place else "nixl"
        if self._task is None:
            self._task = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        """Ends the connection."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._ready = None

    async def _keep(self) -> None:
        wait = 1.0
        while True:
            reason = "it does not answer"
            try:
                await self._talk()
            except (KvernError, zmq.ZMQError, OSError, ValueError) as error:
                reason = str(error)
            except Exception as error:
                logger.exception("the connection to the prefill server %s has a fault", self.name)
                reason = in_a_line(error)
            finally:
                if self._socket is not None:
                    self._socket.close()
                self._socket = None
            wait = 1.0 if self.is_ready else min(LONGEST_WAIT, 2 * wait)
            self._ready = None
            self._reason = without_passwords(" ".join(reason.split()))
            self._next_try = time.monotonic() + wait
            logger.warning("the prefill server %s is gone: %s; it is tried again in %g s", self.name, reason, wait)
            for generation in list(self.workload.running.values()):
                self._give_back(generation, "is gone")
            await asyncio.sleep(wait)

    async def _talk(self) -> None:
        """Hears what it says until it is silent. Raises KvernError with its reason to refuse, or OSError."""
        address = await asyncio.to_thread(resolved, self._address)
        self._socket = socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        socket.set(zmq.SNDHWM, 0)  # what is sent is bounded by what is asked
        connect(socket, address, self._secret)
        self.send(Start({"version": __version__, "pages": self._pages}))
        while await socket.poll(int(SILENCE_SECONDS * 1000)):
            message = decode_for_server(await socket.recv())
            if isinstance(message, Ready):
                self._ready = message
                logger.info("the prefill server %s takes prompts", self.name)
            elif isinstance(message, AdaptersKept):
                self._adapters = frozenset(message.digests)
            elif isinstance(message, Failed):
                raise KvernError(message.reason)
            elif isinstance(message, Events):
                self._computed(message.events)

    def _give_back(self, generation: Generation, why: str) -> None:
        self._failed += 1
        self.workload.fate = f"the prefill server {self.name} {why}"
        self._again(generation)

    def _computed(self, events: Sequence[TokenEvent]) -> None:
        """Has answers begin whose prompts were asked there and have ended, or failed with a reason, and pages loaded of
        those that it still computes; nothing else that it says is of use."""
        for event in events:
            name = generation_id(event.request_id)
            if (generation := self.workload.running.get(name)) is None:
                continue
            if event.stored_tokens:
                self.workload.deliver([event])
            elif event.finish_reason == "length":
                self._prompts += 1
                self._tokens += generation.spec.prompt_length
                lacks = f"it says {shown(event.stop_reason)}" if isinstance(event.stop_reason, str) else None
                self.workload.deliver([TokenEvent(f"{name}#0", finish_reason="length", stop_reason=lacks)])
            elif event.finish_reason == "abort" and isinstance(event.stop_reason, str):
                self._give_back(generation, f"did not compute its prompt: {shown(event.stop_reason)}")
