"""The keeper's moves with clients that start and rest as told: faults and orders that come in the middle of a move."""

import asyncio
import contextlib
import logging
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvern import EngineConfig
from kvern.cpu.cores import total_memory
from kvern.errors import EngineClosed, EngineUnavailable
from kvern.residency.gpus import AROUND_FREE, GpuMemory, card_memory
from kvern.residency.keeper import RESERVE_BYTES, Keeper, Resident, watch_around, watch_for
from kvern.residency.options import ServedModel
from kvern.residency.policy import Terms
from kvern.residency.pressure import LEAST_FREE, HostMemory, Watch
from kvern.serving.child import EngineChild, EngineProcess
from kvern.serving.client import EngineClient
from tests.support.nvml import Driver

PLAIN = Terms()
STEPS = 200
"""Turns of the event loop in which everything that can go on has."""


class Engines(list[object]):
    """The engines of a client: none."""

    resting = False
    wake: Callable[[], Awaitable[None]] | None = None

    def fail(self, error: EngineUnavailable) -> None:
        """Ends all requests: there are none."""


class Names:
    """No adapters."""

    def __init__(self) -> None:
        self.names = self

    def all(self) -> list[object]:
        return []


class Client:
    """A client whose engines start when `may_start` is set."""

    def __init__(self, config: EngineConfig) -> None:
        self.names, self.folder = config.model_names, Path()
        self.replicas, self.adapters = Engines(), Names()
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.rests = 0

    sleeps = False

    async def start(self, process: EngineProcess | None = None) -> None:
        await self.may_start.wait()
        self.replicas.resting = False

    async def rest(self) -> None:
        self.rests += 1
        self.replicas.resting = True

    async def __aexit__(self, *error: object) -> None:
        pass


@pytest.fixture(autouse=True)
def _clients_without_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvern.residency.keeper.EngineClient", Client)
    monkeypatch.setattr("kvern.residency.keeper.EngineChild", lambda: None)
    monkeypatch.setattr("kvern.residency.keeper.LOOK_SECONDS", 0.0)


def keeper_of(*names: str, terms: Terms = PLAIN, watch: Watch | None = None, around: Watch | None = None) -> Keeper:
    engines = (EngineConfig("kvern-1m", served_model_name=(name,), device="cpu") for name in names)
    return Keeper([ServedModel(engine, terms) for engine in engines], 1 << 40, None, watch, around)


def client_of(resident: Resident) -> Client:
    made: object = resident.made
    assert isinstance(made, Client)
    return made


async def settle() -> None:
    for _ in range(STEPS):
        await asyncio.sleep(0)


def test_a_fault_after_the_start_of_engines_is_a_wake_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(client: object) -> int:
        raise UnicodeDecodeError("utf-8", b"\xc3", 0, 1, "unexpected end of data")

    monkeypatch.setattr("kvern.residency.keeper.memory_of", unreadable)

    async def run() -> None:
        async with keeper_of("one") as keeper:
            [one] = keeper.residents
            with pytest.raises(EngineUnavailable, match="unexpected end of data"):
                await asyncio.wait_for(keeper.meet(one), 10)
            assert keeper.state(one) == "cold" and keeper.residency.moving("one") is None
            assert client_of(one).rests == 1

    asyncio.run(run())


def test_those_that_wait_for_a_model_are_told_that_the_server_ends() -> None:
    async def run() -> None:
        async with keeper_of("one") as keeper:
            [one] = keeper.residents
            await keeper.meet(one)
            client_of(one).may_start.clear()
            assert await keeper.dismiss(one, "cold", 10.0) == "cold"
            waiting = asyncio.create_task(used(keeper, one))
            await settle()
            keeper.close(EngineClosed("the server ends"))
            for task in (waiting, asyncio.create_task(used(keeper, one))):
                with pytest.raises(EngineClosed, match="the server ends"):
                    await asyncio.wait_for(task, 10)

    async def used(keeper: Keeper, resident: Resident) -> None:
        with keeper.use(resident):
            await keeper.awake(resident)

    asyncio.run(run())


def test_a_request_that_waits_for_a_replaced_engine_learns_that_its_model_cannot_be_woken() -> None:
    async def refuse() -> None:
        raise EngineUnavailable("it cannot be woken", 1.0)

    async def run() -> None:
        client = EngineClient(EngineConfig("kvern-1m", device="cpu"))
        client.replicas.wake = refuse
        waiting = asyncio.create_task(client.replicas.until_available())
        await settle()
        assert not waiting.done()
        await client.rest()
        with pytest.raises(EngineUnavailable, match="it cannot be woken"):
            await asyncio.wait_for(waiting, 10)
        await client.__aexit__()

    asyncio.run(run())


def test_memory_is_read_beside_a_process_whose_name_is_cut_within_a_character() -> None:
    """Linux cuts the name of a process after 15 bytes, wherever a character ends."""
    rename = "open('/proc/self/comm', 'wb').write('kvern-ééééé'.encode()); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-IS", "-c", rename], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None and other.stdout.readline()
        assert b"\xc3)" in Path(f"/proc/{other.pid}/stat").read_bytes()
        child = EngineChild()
        try:
            assert child.memory() > 0
        finally:
            child.kill()
            child.forget()


def test_several_models_watch_the_memory_where_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    here = ServedModel(EngineConfig("kvern-1m"))
    there = ServedModel(EngineConfig("kvern-1m"), gpu=GpuMemory(1 << 40, 1 << 40, ("GPU-ab", "1")))
    assert watch_for([here]) is None and watch_for([there]) is None
    for models, total in (([here, here], total_memory()), ([there, there], 200 << 30)):
        cards = ("GPU-ab12", 100 << 30, 99 << 30), ("GPU-cd34", 200 << 30, 50 << 30)
        monkeypatch.setitem(sys.modules, "pynvml", Driver(*cards))  # type: ignore[arg-type]
        watch = watch_for(models)
        assert watch is not None
        found = watch.look(0.0)
        assert found is not None and found.total == total
    assert found.free == 50 << 30 and found.spare == found.free - LEAST_FREE
    assert card_memory(["7"]) is None
    assert watch_around([there]) is None and watch_around([here, here]) is None
    around = watch_around([there, there])
    assert around is not None and (left := around.look(0.0)) is not None
    assert left.total == total_memory() and left.floor == min(HostMemory(0, left.total).floor, AROUND_FREE)


def test_idle_models_end_while_the_machine_around_gpus_has_little_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvern.residency.keeper.memory_of", lambda client, asleep=False: 1)
    monkeypatch.setattr("kvern.residency.pressure.LOOK_SECONDS", 0.001)
    around = HostMemory(1 << 40, 1 << 40)

    async def run() -> None:
        nonlocal around
        async with keeper_of("one", "two", around=Watch(lambda: around)) as keeper:
            for each in keeper.residents:
                await keeper.meet(each)
            around = HostMemory(0, 1 << 40)
            while [keeper.state(each) for each in keeper.residents] != ["cold", "cold"]:
                await asyncio.sleep(0.001)
            [one, _] = keeper.residents
            moved = one.figures.registry.get_sample_value("kvern:model_pressure_moves_total", {"model_name": "one"})
            assert moved == 1
            reason = r"to be loaded, .* of the machine 0.00 GB of 1099.51 GB are"
            with pytest.raises(EngineUnavailable, match=reason), keeper.use(one):
                await keeper.awake(one)

    with caplog.at_level(logging.WARNING, "kvern"):
        asyncio.run(run())
    [said] = [record.getMessage() for record in caplog.records if "little memory" in record.getMessage()]
    assert said.endswith(("shall stay so: one becomes cold", "shall stay so: two becomes cold"))


class Reserve:
    """A process in reserve."""

    returncode = None

    def __init__(self) -> None:
        self.calls: list[str] = []

    def kill(self) -> None:
        self.calls.append("kill")

    def forget(self) -> None:
        self.calls.append("forget")


def test_a_machine_with_little_memory_gets_the_reserve_back_and_idle_models_and_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing but the time that passes makes the keeper look."""
    monkeypatch.setattr("kvern.residency.pressure.LOOK_SECONDS", 0.001)
    reserves: list[Reserve] = []

    def start() -> Reserve:
        reserves.append(Reserve())
        return reserves[-1]

    monkeypatch.setattr("kvern.residency.keeper.EngineChild", start)
    host = HostMemory(1 << 40, 1 << 30)

    def read() -> HostMemory:
        looks.append(host)
        back = sum(RESERVE_BYTES for reserve in reserves if reserve.calls)
        return replace(host, free=host.free + back)

    looks: list[HostMemory] = []

    async def run() -> None:
        nonlocal host
        async with keeper_of("one", "two", watch=Watch(read)) as keeper:
            [one, two] = keeper.residents
            await keeper.meet(one)
            await settle()
            assert [reserve.calls for reserve in reserves] == [[]], "two is cold"
            host = HostMemory(host.floor - RESERVE_BYTES // 2, 1 << 30)
            while not reserves[0].calls:
                await asyncio.sleep(0.001)
            seen = len(looks)
            while len(looks) < seen + 3:
                await asyncio.sleep(0.001)
            assert keeper.state(one) == "awake" and not keeper.residency.moving("one"), "the reserve was enough"
            host = HostMemory(0, 1 << 30)
            reserves[0].calls.clear()
            while keeper.state(one) != "cold" or keeper.residency.moving("one"):
                await asyncio.sleep(0.001)
            assert len(reserves) == 1
            for _ in range(20):
                await asyncio.sleep(0.001)
            moved = one.figures.registry.get_sample_value("kvern:model_pressure_moves_total", {"model_name": "one"})
            assert moved == 1
            with pytest.raises(EngineUnavailable, match=r"model two cannot be woken: .* 0.00 GB of 1.07 GB are free"):
                await keeper.meet(two)
            host = HostMemory(1 << 40, 1 << 30)
            while keeper.state(two) != "awake":
                with contextlib.suppress(EngineUnavailable):
                    await keeper.meet(two)
                await asyncio.sleep(0.001)

    with caplog.at_level(logging.WARNING, "kvern"):
        asyncio.run(run())
    [said] = [record.getMessage() for record in caplog.records if "little memory" in record.getMessage()]
    assert said.endswith("shall stay so: one becomes cold")


def test_models_that_are_downloaded_leave_the_threads_of_the_server_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are more of them than asyncio has threads for all work that would block."""
    may_end, names = threading.Event(), [f"m{number}" for number in range(40)]
    began: list[Client] = []

    class Downloaded(Client):
        def __init__(self, config: EngineConfig) -> None:
            began.append(self)
            assert may_end.wait(60)
            super().__init__(config)

    monkeypatch.setattr("kvern.residency.keeper.EngineClient", Downloaded)
    monkeypatch.setattr("kvern.residency.keeper.memory_of", lambda client, asleep=False: 1)

    async def run() -> None:
        async with keeper_of(*names) as keeper:
            try:
                asking = [asyncio.create_task(keeper.meet(one)) for one in keeper.residents]
                await settle()
                assert await asyncio.wait_for(asyncio.to_thread(lambda: len(began)), 10) <= len(names)
            finally:
                may_end.set()
            await asyncio.gather(*asking)
            assert len(began) == len(names)

    asyncio.run(run())
