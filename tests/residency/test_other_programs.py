"""A program takes memory of which a server of two models has enough for one, and gives it back."""

import asyncio
import contextlib
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvern.residency.keeper import Keeper, memory_of
from kvern.residency.policy import Terms
from kvern.residency.pressure import HostMemory, Watch
from tests.support.several_models import BODY, said, served, server_of, states

MB = 1_000_000
TAKEN = 130 * MB
"""More than the smallest model gives back in its sleep, and less than at its end."""
SPARE = 30 * MB


@contextlib.contextmanager
def program(size: int) -> Iterator[int]:
    """A process that takes so much memory until the block ends; its number."""
    command = [sys.executable, "-IS", "-c", f"taken = b'x' * {size}; print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        yield process.pid


class Machine:
    """A machine with so much memory that models, and a program, take."""

    def __init__(self) -> None:
        self.keeper: Keeper | None = None
        self.total: int | None = None
        self.program: int | None = None

    @property
    def taken(self) -> int:
        clients = [one.client for one in self.keeper.residents if one.client is not None] if self.keeper else []
        awake = [client for client in clients if client.replicas.ready is not None]
        pages = 0
        if self.program is not None:
            pages = int(Path(f"/proc/{self.program}/statm").read_text().split()[1])
        return sum(memory_of(client, asleep=True) for client in awake) + pages * 4096

    def read(self) -> HostMemory | None:
        return None if self.total is None else HostMemory(self.total - self.taken, self.total)


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="reads what a process of Linux takes")
def test_an_idle_model_makes_way_for_a_program_and_is_refused_until_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()

    async def run() -> None:
        models = [served("pinned", "kvern-1m", terms=Terms(pin=True)), served("idle", "kvern-1m")]
        async with server_of(models, watch=Watch(machine.read)) as (http, keeper):
            machine.keeper = keeper
            expected = await said(http, "idle")
            assert await said(http, "pinned") == expected
            floor = HostMemory(0, machine.taken).floor
            machine.total = machine.taken + floor + SPARE
            assert await states(http) == {"pinned": "awake", "idle": "awake"}
            with program(TAKEN) as machine.program:
                while (await states(http))["idle"] != "cold" or keeper.residency.moving("idle"):
                    await asyncio.sleep(0.01)
                assert await said(http, "pinned") == expected
                refused = await http.post("/v1/completions", json=BODY | {"model": "idle"})
                assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
                assert "GB are free" in refused.text and "end other programs" in refused.text
                found = machine.read()
                assert found is not None and found.spare >= 0
                figures = (await http.get("/metrics")).text
                assert 'kvern:model_pressure_moves_total{model_name="pinned"} 0.0' in figures
                assert 'kvern:model_pressure_moves_total{model_name="idle"} 0.0' not in figures
            machine.program = None
            machine.total += (
                512 * MB
            )  # pages that were shared with processes that have ended count as these models' own
            while (answer := await http.post("/v1/completions", json=BODY | {"model": "idle"})).status_code == 503:
                await asyncio.sleep(0.1)
            assert answer.json()["choices"][0]["text"] == expected

    with caplog.at_level(logging.WARNING, "kvern"):
        asyncio.run(run())
    assert len([record for record in caplog.records if "little memory is left" in record.getMessage()]) == 1
