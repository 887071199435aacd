"""Engines that end while they read an adapter: another one reads it, and only files that end each are refused."""

import asyncio
from typing import Any, cast

import pytest

from kvern.adapters.names import AdapterNames
from kvern.errors import EngineDied, InvalidAdapter
from kvern.serving.client_adapters import ClientAdapters, EngineAdapters
from kvern.serving.supervisor import Supervisor
from kvern.serving.wire import AdapterRead, LoadAdapter, UnloadAdapter


class Mortal:
    """A supervisor whose engines end `deaths` times while they read; each time another one is ready at once."""

    is_ready, closed, unavailable = True, False, None

    def __init__(self, deaths: int) -> None:
        self.available = asyncio.Event()
        self.available.set()
        self.deaths = deaths
        self.adapters = EngineAdapters(cast("Supervisor", self))
        self.heard: list[Any] = []

    def send(self, message: LoadAdapter | UnloadAdapter) -> None:
        self.heard.append(message)
        if not isinstance(message, LoadAdapter):
            return
        loop = asyncio.get_running_loop()
        if self.deaths:
            self.deaths -= 1
            loop.call_soon(self.adapters.interrupt, EngineDied("the engine process ended with exit code -9"))
        else:
            loop.call_soon(self.adapters.hear, AdapterRead(message.key))


async def available() -> None:
    """There always is an engine."""


def load(*deaths: int) -> tuple[AdapterNames, list[Mortal]]:
    async def run() -> tuple[AdapterNames, list[Mortal]]:
        engines, names = [Mortal(number) for number in deaths], AdapterNames()
        adapters = ClientAdapters(names, lambda: [engine.adapters for engine in engines], lambda: set(), available)
        await adapters.load("one", "/adapters/one")
        return names, engines

    return asyncio.run(run())


@pytest.mark.parametrize("deaths", [(0,), (1,), (1, 0), (1, 1)])
def test_the_next_engine_reads_what_the_last_one_did_not_end_reading(deaths: tuple[int, ...]) -> None:
    names, engines = load(*deaths)
    [adapter] = names.all()
    assert all(engine.adapters.known == {None, adapter.key} for engine in engines)
    assert [len(engine.heard) for engine in engines] == [number + 1 for number in deaths]


def test_files_that_end_each_engine_are_refused_by_name() -> None:
    with pytest.raises(InvalidAdapter, match="/adapters/one: 2 engines in a row ended while they read it"):
        load(2)
