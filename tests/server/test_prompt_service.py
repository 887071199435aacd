"""What servers say to each other about prompts: ends, reasons to refuse, and nothing that changes others' answers."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from kvern import EngineConfig
from kvern.engine.output import OutputProcessor
from kvern.errors import ConfigError
from kvern.observe.metrics import Metrics
from kvern.request.events import EngineStatistics, TokenEvent
from kvern.request.request import PromptInput, RequestSpec
from kvern.request.sampling_params import ResolvedParams
from kvern.request.store_figures import StoreFigures
from kvern.runner.plan import Layout
from kvern.serving import prompt_service
from kvern.serving.prefill_servers import PrefillServer, prompts_address
from kvern.serving.process import ready_with
from kvern.serving.prompt_service import PromptService
from kvern.serving.wire import (
    AdaptersKept,
    AddRequest,
    Busy,
    Events,
    Failed,
    Ready,
    Start,
    WireMessage,
    decode_for_server,
    encode,
)
from kvern.serving.workload import Generation, Turns
from kvern.spec.facts import ModelFacts
from kvern.text.tokenizer import Tokenizer
from kvern.tiers.remote_pages import PEER_KEY, Hello, connect, listen, peer_secret
from kvern.tiers.remote_pages import encode as encode_question
from kvern.version import __version__
from tests.support.ports import free_port

READY = Ready(100, 4, "", model=ModelFacts(vocab_size=100), pages="ab (-tp 1 -pp 1)")
START = Start({"version": __version__, "pages": READY.pages})
WORD_SECONDS = 30.0


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PEER_KEY, "a secret of all servers")
    monkeypatch.setattr(prompt_service, "BEAT_SECONDS", 0.01)


def prefilling(address: str) -> EngineConfig:
    return EngineConfig(model="kvern-1m", role="prefill", kv_tier_listen=address)


class Engines:
    """Engines that compute a prompt when they are told to."""

    def __init__(self) -> None:
        self.trouble: str | None = None
        self.may_end = asyncio.Event()
        self.computing = asyncio.Event()
        self.ended: list[str] = []
        self.adapters: dict[bytes, str] = {}
        self.adapter: str | None = None
        self.lacks = ""

    async def compute(self, spec: RequestSpec, adapter: str | None, stored: Callable[[int], Awaitable[None]]) -> str:
        self.adapter = adapter
        if spec.tells_parts:
            await stored(64)
        self.computing.set()
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise
        self.ended.append("computed")
        return self.lacks


class Peer:
    """Another server."""

    def __init__(self, kind: int, address: tuple[str, int]) -> None:
        self.socket = zmq.asyncio.Context.instance().socket(kind)
        connect(self.socket, address, peer_secret())

    async def say(self, message: WireMessage) -> None:
        await self.socket.send(encode(message))

    async def hears(self) -> WireMessage:
        """The next message that is no sign of life."""
        async with asyncio.timeout(WORD_SECONDS):
            message: WireMessage = Busy()
            while isinstance(message, Busy | AdaptersKept):
                message = decode_for_server(await self.socket.recv())
            return message


@asynccontextmanager
async def listening(engines: Engines) -> AsyncIterator[tuple[PromptService, Peer, tuple[str, int]]]:
    address = f"127.0.0.1:{free_port()}"
    service = PromptService(
        prefilling(address), lambda: READY, lambda: engines.trouble, engines.compute, lambda: engines.adapters
    )
    service.start()
    peer = Peer(zmq.DEALER, prompts_address(address))
    try:
        yield service, peer, prompts_address(address)
    finally:
        peer.socket.close()
        await service.stop()


def prompt(name: str) -> AddRequest:
    return AddRequest(RequestSpec(name, PromptInput([1, 2, 3]), ResolvedParams(), 1))


def test_messages_of_others_do_not_end_the_hearing(caplog: pytest.LogCaptureFixture) -> None:
    """A reader of pages that was given the port for prompts sends three parts."""

    async def run() -> None:
        engines = Engines()
        async with listening(engines) as (_, peer, address):
            stray = Peer(zmq.REQ, address)
            await stray.socket.send(encode_question(Hello()))
            await peer.say(START)
            assert isinstance(await peer.hears(), Ready)
            async with asyncio.timeout(WORD_SECONDS):
                while "has 2 parts" not in caplog.text:
                    await asyncio.sleep(0)
            engines.may_end.set()
            await peer.say(prompt("p"))
            ended = await peer.hears()
            assert isinstance(ended, Events) and ended.events[0].request_id == "p#0"
            stray.socket.close()

    asyncio.run(run())


def test_trouble_is_told_and_ends_prompts() -> None:
    async def run() -> None:
        engines = Engines()
        async with listening(engines) as (_, peer, _):
            await peer.say(START)
            assert isinstance(await peer.hears(), Ready)
            await peer.say(prompt("p"))
            await engines.computing.wait()
            engines.trouble = "the engine is being replaced"
            assert await peer.hears() == Failed("the engine is being replaced")
            await peer.say(START)
            assert await peer.hears() == Failed("the engine is being replaced")
            assert engines.ended == ["cancelled"]
            engines.trouble = None
            await peer.say(START)
            assert isinstance(await peer.hears(), Ready)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({"version": "0.0.1", "pages": READY.pages}, "and this one 0.0.1: they must be equal"),
        ({"version": __version__, "pages": "cd (-tp 1 -pp 1)"}, "those of ab (-tp 1 -pp 1), and those of this one are"),
        ({"version": __version__, "pages": "ab (-tp 2 -pp 1)"}, "are of ab (-tp 2 -pp 1): both need the same weights"),
        ({"version": __version__}, "are of no model"),
    ],
)
def test_servers_that_cannot_read_the_pages_are_refused(told: dict[str, str], reason: str) -> None:
    async def run() -> None:
        engines = Engines()
        async with listening(engines) as (_, peer, _):
            await peer.say(Start(told))
            refused = await peer.hears()
            assert isinstance(refused, Failed) and reason in refused.reason
            await peer.say(prompt("p"))  # nobody computes it
            await peer.say(START)
            assert isinstance(await peer.hears(), Ready) and not engines.computing.is_set()

    asyncio.run(run())


def test_a_start_that_failed_fails_again_and_then_listens() -> None:
    async def run() -> None:
        address = f"127.0.0.1:{free_port()}"
        service = PromptService(prefilling(address), lambda: READY, lambda: None, Engines().compute, dict)
        taken = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        host, port = prompts_address(address)
        taken.bind(f"tcp://{host}:{port}")
        for _ in range(2):
            with pytest.raises(ConfigError, match="and prompts: Address already in use"):
                service.start()
        endpoint = taken.getsockopt_string(zmq.LAST_ENDPOINT)
        taken.unbind(endpoint)
        taken.close()
        async with asyncio.timeout(WORD_SECONDS):
            while True:
                try:
                    service.start()
                    break
                except ConfigError:  # the port is free shortly after the socket was closed
                    await asyncio.sleep(0.01)
        peer = Peer(zmq.DEALER, prompts_address(address))
        await peer.say(START)
        assert isinstance(await peer.hears(), Ready)
        peer.socket.close()
        await service.stop()

    asyncio.run(run())


def test_a_prompt_that_cannot_be_computed_fails_with_the_reason() -> None:
    async def run() -> None:
        engines = Engines()

        async def broken(*_: object) -> str:
            raise RuntimeError("a fault of the test")

        async with listening(engines) as (service, peer, _):
            await peer.say(START)
            assert isinstance(await peer.hears(), Ready)
            long, strange = (
                AddRequest(RequestSpec(name, PromptInput(tokens), ResolvedParams(), 1))
                for name, tokens in (("long", [1] * 100), ("strange", [1, 100]))
            )
            service._compute = broken
            for asked, reason in (
                (long, "it has 100 tokens, and the context 100"),
                (strange, "outside of the vocabulary of 100"),
                (prompt("p"), "RuntimeError: a fault of the test"),
            ):
                await peer.say(asked)
                said = await peer.hears()
                assert isinstance(said, Events)
                [event] = said.events
                assert event.request_id == f"{asked.spec.request_id}#0" and event.finish_reason == "abort"
                assert reason in str(event.stop_reason)

    asyncio.run(run())


def test_what_no_store_has_of_a_prompt_is_told_to_the_other_server(tiny_model: Path) -> None:
    """Its explanation of the request says it; without a word nothing is lacking."""

    async def run() -> list[str]:
        engines, lacks = Engines(), list[str]()
        engines.may_end.set()
        outputs, computed = OutputProcessor(Tokenizer(tiny_model)), asyncio.Queue[Generation]()
        async with listening(engines) as (_, _, address):
            option = f"{address[0]}:{address[1] - 1}"
            stored = list[int]()
            server = PrefillServer(option, outputs, Turns(), Metrics("m"), lambda _: None, computed.put_nowait)
            server.workload.stored = lambda generation: stored.append(generation.stored_tokens)
            server.start(READY.pages)
            async with asyncio.timeout(WORD_SECONDS):
                while not server.is_ready:
                    await asyncio.sleep(0)
                for name, engines.lacks in (("1-1", ""), ("1-2", "no store has 64 of its tokens")):
                    spec = prompt(name).spec
                    generation = Generation(outputs.add(None, spec), spec, asyncio.Event(), 0.0, False)
                    generation.hand_over = lambda _, told: lacks.append(told)  # type: ignore[method-assign]
                    generation.hands_over = True
                    server.workload.take(generation)
                    assert await computed.get() is generation
                    assert stored.pop() == 64 and not stored, "so much was told while the prompt was computed"
            await server.stop()
        return lacks

    assert asyncio.run(run()) == ["", "it says 'no store has 64 of its tokens'"]


@pytest.mark.parametrize(("states", "pages"), [(0, "aa (by heads -pp 1)"), (8, "aa (-tp 2 -pp 1)")])
def test_pages_of_models_with_states_are_of_one_division(states: int, pages: str) -> None:
    config = EngineConfig("m", tensor_parallel_size=2, kv_tier=("host:1GB", "nixl://h:1"), kv_tier_heads=True)
    layout = Layout(160, 10, 16, 1, "float32", 4, 64, 1, {}, "cpu", (), states=states)
    core: Any = SimpleNamespace(sleeps=False, pages=b"\xaa")
    assert ready_with(config, layout, core, "", ModelFacts()).pages == pages


class PrefillingPeer:
    """A prefill server of which the test says what it says."""

    def __init__(self, address: str) -> None:
        self.socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        listen(self.socket, prompts_address(address), peer_secret())
        self.peer = b""

    async def greet(self) -> None:
        async with asyncio.timeout(WORD_SECONDS):
            self.peer, _ = await self.socket.recv_multipart()
        await self.say(READY)

    async def say(self, message: WireMessage) -> None:
        await self.socket.send_multipart([self.peer, encode(message)])


def test_a_prefill_server_changes_no_answers(tiny_model: Path) -> None:
    """It may end prompts that it was asked for, once each, and nothing else."""

    async def run() -> None:
        address = f"127.0.0.1:{free_port()}"
        peer = PrefillingPeer(address)
        outputs, computed = OutputProcessor(Tokenizer(tiny_model)), asyncio.Queue[Generation]()
        again: list[Generation] = []
        server = PrefillServer(address, outputs, Turns(), Metrics("m"), again.append, computed.put_nowait)
        server.start(READY.pages)
        await peer.greet()
        others, asked = (
            Generation(outputs.add(None, spec), spec, asyncio.Event(), 0.0, False)
            for spec in (prompt("1-1").spec, prompt("1-2").spec)
        )
        async with asyncio.timeout(WORD_SECONDS):
            while not server.is_ready:
                await asyncio.sleep(0)
        asked.hands_over = True
        server.workload.take(asked)
        told = [
            TokenEvent("1-1#0", [5], finish_reason="stop"),
            TokenEvent("1-1#0", [5], finish_reason="length"),
            TokenEvent("1-2#0", [5]),
            TokenEvent("1-2#0", [5], finish_reason="abort"),
            TokenEvent("1-2#0", [5], finish_reason="length"),
            TokenEvent("1-2#0", [5], finish_reason="length"),
        ]
        await peer.say(Events(told, EngineStatistics(), 0.0))
        async with asyncio.timeout(WORD_SECONDS):
            assert await computed.get() is asked
        for generation in (others, asked):
            assert [answer.token_ids for answer in generation.output.outputs] == [[]]
            assert not generation.output.finished and generation.error is None
        assert not server.workload.running and not again and computed.empty()
        await server.stop()
        peer.socket.close()

    asyncio.run(run())


def test_prompts_with_adapters_are_computed_where_the_same_files_are_loaded(tiny_model: Path) -> None:
    """Whatever key and name they have there; why another one is not handed over is said."""

    async def run() -> None:
        engines = Engines()
        engines.may_end.set()
        engines.adapters = {b"first": "one"}
        outputs, computed = OutputProcessor(Tokenizer(tiny_model)), asyncio.Queue[Generation]()
        again, digests = asyncio.Queue[Generation](), {None: b"", 7: b"first", 8: b"second"}

        def asked(name: str, adapter: int | None) -> Generation:
            spec = msgspec.structs.replace(prompt(name).spec, adapter=adapter)
            return Generation(outputs.add(None, spec), spec, asyncio.Event(), 0.0, False)

        async with listening(engines) as (_, _, address):
            option = f"{address[0]}:{address[1] - 1}"
            hooks = again.put_nowait, computed.put_nowait, digests.__getitem__
            server = PrefillServer(option, outputs, Turns(), Metrics("m"), *hooks)
            server.start(READY.pages, ("host:1GB", "nixl://a:1", f"nixl://{option}?optional"))
            plain, first, second = asked("1-1", None), asked("1-2", 7), asked("1-3", 8)
            assert not server.refuses(second), "it is gone, which /ready tells"
            async with asyncio.timeout(WORD_SECONDS):
                while not server.takes(first):
                    await asyncio.sleep(0)
                assert server.takes(plain) and not server.takes(second)
                assert server.refuses(second) == "it has not its adapter" and not server.refuses(first)
                off = {"nixl": StoreFigures(), "nixl-2": StoreFigures(is_on=False)}
                assert not server.takes(plain, off) and server.takes(plain, {"nixl": StoreFigures(is_on=False)})
                assert server.refuses(plain, off) == "its pages could not be read of late"
                for generation in (plain, first):
                    generation.hands_over = True
                    server.workload.take(generation)
                    assert await computed.get() is generation
                    assert engines.adapter == (None if generation is plain else "one")
                second.hands_over = True
                server.workload.take(second)  # it was unloaded meanwhile
                assert await again.get() is second and "its adapter is not loaded" in server.workload.fate
            await server.stop()

    asyncio.run(run())


def test_what_a_prefill_server_computed_and_failed_is_told(tiny_model: Path) -> None:
    async def run() -> None:
        address = f"127.0.0.1:{free_port()}"
        peer = PrefillingPeer(address)
        outputs, again = OutputProcessor(Tokenizer(tiny_model)), asyncio.Queue[Generation]()
        computed = asyncio.Queue[Generation]()
        server = PrefillServer(address, outputs, Turns(), Metrics("m"), again.put_nowait, computed.put_nowait)
        assert server.waits_for == server.state["reason"] == "it has not answered yet"
        server.start(READY.pages)
        await peer.greet()
        async with asyncio.timeout(WORD_SECONDS):
            while server.waits_for:
                await asyncio.sleep(0)
        generations = []
        for name in ("1-1", "1-2", "1-3"):
            spec = prompt(name).spec
            generations.append(Generation(outputs.add(None, spec), spec, asyncio.Event(), 0.0, False))
            generations[-1].hands_over = True
            server.workload.take(generations[-1])
        told = [
            TokenEvent("1-1#0", finish_reason="length"),
            TokenEvent("1-2#0", finish_reason="abort", stop_reason="its context is shorter"),
        ]
        await peer.say(Events(told, EngineStatistics(), 0.0))
        async with asyncio.timeout(WORD_SECONDS):
            assert await computed.get() is generations[0] and await again.get() is generations[1]
        del server.workload.running["1-2"]  # as whoever gives it to another engine does
        counts = {"computed_prompts": 1, "computed_tokens": 3, "failed_prompts": 1}
        assert server.state == {"prefill_server": address, "ready": True, "running": 1, **counts}
        assert server.workload.fate.endswith("did not compute its prompt: 'its context is shorter'")
        await peer.say(Failed("it ends, as valkey://me:secret@there says\nso"))
        async with asyncio.timeout(WORD_SECONDS):
            assert await again.get() is generations[2]
        reason = "it ends, as valkey://me:***@there says so"
        assert server.state["reason"] == reason and server.state["failed_prompts"] == 2
        assert server.waits_for.startswith(f"{reason}; it is tried again in ")
        await server.stop()
        peer.socket.close()

    asyncio.run(run())


def test_a_fault_in_a_connection_leaves_no_prompt_behind(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        address = f"127.0.0.1:{free_port()}"
        peer = PrefillingPeer(address)
        outputs, again = OutputProcessor(Tokenizer(tiny_model)), asyncio.Queue[Generation]()

        def computed(_: Generation) -> None:
            raise RuntimeError("a fault of the test")

        server = PrefillServer(address, outputs, Turns(), Metrics("m"), again.put_nowait, computed)
        server.start(READY.pages)
        await peer.greet()
        async with asyncio.timeout(WORD_SECONDS):
            while not server.is_ready:
                await asyncio.sleep(0)
        generations = []
        for name in ("1-1", "1-2"):
            spec = prompt(name).spec
            generations.append(Generation(outputs.add(None, spec), spec, asyncio.Event(), 0.0, False))
            generations[-1].hands_over = True
            server.workload.take(generations[-1])
        await peer.say(Events([TokenEvent("1-1#0", finish_reason="length")], EngineStatistics(), 0.0))
        async with asyncio.timeout(WORD_SECONDS):
            assert await again.get() is generations[1]
        assert "a fault of the test" in caplog.text
        await server.stop()
        peer.socket.close()

    asyncio.run(run())


def test_a_host_is_looked_up_whenever_it_is_asked(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A name that is not known yet, or of another machine later, ends nothing."""

    async def run() -> None:
        found: list[str] = []

        def look_up(host: str) -> str:
            if not found:
                raise OSError(f"no {host} yet")
            return found[-1]

        monkeypatch.setattr(socket, "gethostbyname", look_up)
        port = free_port()
        server = PrefillServer(
            f"other:{port}", OutputProcessor(Tokenizer(tiny_model)), Turns(), Metrics("m"), print, print
        )
        server.start(READY.pages)
        async with asyncio.timeout(WORD_SECONDS):
            while "the host other is not found: no other yet" not in caplog.text:
                await asyncio.sleep(0.01)
        found.append("127.0.0.1")
        peer = PrefillingPeer(f"127.0.0.1:{port}")
        await peer.greet()
        async with asyncio.timeout(WORD_SECONDS):
            while not server.is_ready:
                await asyncio.sleep(0)
        await server.stop()
        peer.socket.close()

    asyncio.run(run())
