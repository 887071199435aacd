"""Computes prompts for servers of other machines, which read the pages from this one's host memory."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

import msgspec
import zmq
import zmq.asyncio

from kvern.config import EngineConfig
from kvern.errors import ConfigError, InvalidRequest, KvernError, in_a_line
from kvern.request.events import EngineStatistics, TokenEvent
from kvern.request.request import RequestSpec
from kvern.serving.prefill_servers import prompts_address
from kvern.serving.wire import (
    AdaptersKept,
    AddRequest,
    Events,
    Failed,
    FinishRequests,
    Ready,
    Start,
    WireMessage,
    decode_for_engine,
    encode,
)
from kvern.serving.workload import generation_id
from kvern.tiers.remote_pages import listen, peer_secret, resolved
from kvern.version import __version__

logger = logging.getLogger("kvern")

BEAT_SECONDS = 1.0


class PromptService:
    """Listens behind `config.kv_tier_listen` if the server's role is prefill.

    `trouble` says why no engine takes prompts, if so. `compute` prepares a prompt, with the adapter of a name, waits
    until engines have computed it, and returns what no store has of it, for people; meanwhile it calls a function with
    the number of tokens of which a store has pages. `adapters`: the names of those that
    engines have read, by their digests.
    """

    def __init__(
        self,
        config: EngineConfig,
        ready: Callable[[], Ready],
        trouble: Callable[[], str | None],
        compute: Callable[[RequestSpec, str | None, Callable[[int], Awaitable[None]]], Awaitable[str]],
        adapters: Callable[[], Mapping[bytes, str]],
    ) -> None:
        self._config = config
        self._ready = ready
        self._trouble = trouble
        self._compute = compute
        self._adapters = adapters
        self._socket: zmq.asyncio.Socket | None = None
        self._peers: set[bytes] = set()
        self._task: asyncio.Task[None] | None = None
        self._prompts: dict[tuple[bytes, str], asyncio.Task[None]] = {}

    def start(self) -> None:
        """Listens, if it is to. Raises ConfigError."""
        if self._config.role != "prefill" or self._socket is not None:
            return
        socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        socket.set(zmq.ROUTER_MANDATORY, 1)
        try:
            listen(socket, resolved(prompts_address(self._config.kv_tier_listen or "")), peer_secret())
        except (ValueError, OSError, zmq.ZMQError) as error:
            socket.close()
            raise ConfigError(f"kv_tier_listen is {self._config.kv_tier_listen}, and prompts: {error}") from error
        self._socket = socket
        self._task = asyncio.create_task(self._serve(socket))

    async def stop(self) -> None:
        """Ends what is computed for others."""
        tasks = [*self._prompts.values()] if self._task is None else [self._task, *self._prompts.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def _serve(self, socket: zmq.asyncio.Socket) -> None:
        """Hears the others, and is silent when it does not."""
        beat = asyncio.create_task(self._beat())
        try:
            while True:
                peer, *frames = await socket.recv_multipart()
                try:
                    await self._hear(peer, frames)
                except Exception:
                    logger.exception("a message of another server about prompts is left out")
        except zmq.ZMQError as error:
            logger.error("prompts of other servers are heard no longer: %s", error)
        finally:
            beat.cancel()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            trouble = self._trouble()
            for peer in [*self._peers]:
                if trouble is None:
                    await self._send(peer, AdaptersKept([*self._adapters()]))
                else:
                    await self._refuse(peer, trouble)

    async def _send(self, peer: bytes, message: WireMessage) -> None:
        """Sends a message; a peer that is gone, or takes nothing, is forgotten with its prompts."""
        if self._socket is None:
            return
        try:
            await self._socket.send_multipart([peer, encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError:
            self._forget(peer)

    async def _refuse(self, peer: bytes, reason: str) -> None:
        """Has a peer compute its prompts itself, and ask again later."""
        await self._send(peer, Failed(reason))
        self._forget(peer)

    def _forget(self, peer: bytes) -> None:
        self._peers.discard(peer)
        for (of, _), task in self._prompts.items():
            if of == peer:
                task.cancel()

    async def _hear(self, peer: bytes, frames: list[bytes]) -> None:
        if len(frames) != 1:
            logger.warning(
                "a message at the port for prompts has %d parts, not 1, and is left out: prefill_server, and no "
                "kv_tier, leads there, with the port of kv_tier_listen, which is one less",
                len(frames),
            )
            return
        try:
            message = decode_for_engine(frames[0])
        except msgspec.DecodeError as error:
            await self._send(peer, Failed(f"it does not understand a message: {error}"))
            return
        if isinstance(message, Start):
            await self._greet(peer, message)
        elif isinstance(message, AddRequest) and peer in self._peers:
            place = peer, message.spec.request_id
            task = self._prompts[place] = asyncio.create_task(self._answer(*place, message))
            task.add_done_callback(lambda _: self._prompts.pop(place, None))
        elif isinstance(message, FinishRequests):
            for name in message.request_ids:
                if (asked := self._prompts.get((peer, generation_id(name)))) is not None:
                    asked.cancel()

    async def _greet(self, peer: bytes, start: Start) -> None:
        if (version := start.config.get("version")) != __version__:
            await self._send(peer, Failed(f"it is kvern {__version__}, and this one {version}: they must be equal"))
            return
        if (trouble := self._trouble()) is not None:
            await self._send(peer, Failed(trouble))
            return
        ready, pages = self._ready(), start.config.get("pages")
        if not pages or pages != ready.pages:
            reason = (
                f"its pages are those of {ready.pages or 'no model'}, and those of this one are of "
                f"{pages or 'no model'}: both need the same weights, formats of weights and keys, "
                "block size and numbers of ranks (with kv_tier_heads on both, of pipeline stages alone)"
            )
            await self._send(peer, Failed(reason))
            return
        self._peers.add(peer)
        await self._send(peer, ready)
        await self._send(peer, AdaptersKept([*self._adapters()]))

    def _check(self, spec: RequestSpec) -> None:
        """Raises InvalidRequest if engines here cannot compute a prompt."""
        ready = self._ready()
        if len(spec.prompt) >= ready.max_model_len:
            raise InvalidRequest(f"it has {len(spec.prompt)} tokens, and the context {ready.max_model_len}")
        if not all(0 <= token < ready.model.vocab_size for token in spec.prompt.token_ids):
            raise InvalidRequest(f"it has tokens outside of the vocabulary of {ready.model.vocab_size}")

    async def _answer(self, peer: bytes, name: str, asked: AddRequest) -> None:
        """Computes a prompt, and says how far stores have it, that it has been computed, or why not."""
        answer = f"{name}#0"

        async def stored(tokens: int) -> None:
            await self._tell(peer, TokenEvent(answer, stored_tokens=tokens))

        try:
            self._check(asked.spec)
            adapter = None if asked.adapter is None else self._adapters().get(asked.adapter)
            if asked.spec.adapter is not None and adapter is None:
                raise InvalidRequest("its adapter is not loaded")
            spec = asked.spec.prompt_alone(tells_parts=asked.spec.tells_parts)
            spec = msgspec.structs.replace(spec, request_id=f"{peer.hex()}-{name}")
            lacks = await self._compute(spec, adapter, stored) or None
            ended = TokenEvent(answer, finish_reason="length", stop_reason=lacks)
        except Exception as error:
            if not isinstance(error, KvernError):
                logger.exception("a prompt of another server meets a fault")
            reason = in_a_line(error)
            logger.warning("a prompt of another server is not computed: %s", reason)
            ended = TokenEvent(answer, finish_reason="abort", stop_reason=reason)
        await self._tell(peer, ended)

    async def _tell(self, peer: bytes, event: TokenEvent) -> None:
        await self._send(peer, Events([event], EngineStatistics(), 0.0))
