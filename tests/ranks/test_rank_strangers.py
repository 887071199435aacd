"""Ranks that talk through gloo meet whoever else connects to the ports of the loopback interface meanwhile."""

import os
import socket
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from kvern.ranks.process_group import LOOPBACK, Meeting

pytestmark = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="finds ports as Linux tells them")
LISTENS = "0A"


def own_ports() -> set[int]:
    """On which this process listens."""
    links = (os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
    own = {link[8:-1] for link in links if link.startswith("socket:[")}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].partition(":")[2], 16) for row in rows if row[3] == LISTENS and row[9] in own}


class Attacked(Meeting):
    """A rank to which strangers connect first, `attack` being what each does then."""

    attack: Callable[[socket.socket], object] | None = None

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.strangers: list[socket.socket] = []

    def _listener(self) -> Any:
        before = own_ports()
        device = super()._listener()
        if self.attack is not None:
            for port in own_ports() - before:
                for number in range(4):
                    stranger = socket.create_connection((LOOPBACK, port))
                    stranger.sendall(struct.pack("<Q", number))  # as connections of gloo begin
                    self.attack(stranger)
                    self.strangers.append(stranger)
            self.attack = None
        return device


def silence(stranger: socket.socket) -> None:
    pass


def rubbish(stranger: socket.socket) -> None:
    stranger.sendall(bytes(range(256)) * 16)


@pytest.mark.parametrize("attack", [silence, rubbish, socket.socket.close])
def test_ranks_meet_though_strangers_take_their_places(
    attack: Callable[[socket.socket], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvern.ranks.process_group.MEETS", timedelta(seconds=1))
    meetings = [kind(tmp_path / "place", 2, torch.device("cpu"), 60) for kind in (Attacked, Meeting)]
    meetings[0].attack = attack  # type: ignore[attr-defined]
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda rank: meetings[rank].group("ranks", rank, 2), range(2)))
        found = [torch.full((3,), rank + 1.0) for rank in range(2)]
        list(pool.map(lambda rank: groups[rank].allreduce([found[rank]]).wait(), range(2)))
    assert [values.tolist() for values in found] == [[3.0] * 3] * 2
    assert meetings[0].attack is None  # type: ignore[attr-defined]
    for stranger in meetings[0].strangers:  # type: ignore[attr-defined]
        stranger.close()


def test_ranks_that_meet_nobody_else_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_device(meeting: Meeting) -> Any:
        raise RuntimeError("no address")

    monkeypatch.setattr(Meeting, "_listener", no_device)
    meetings = [Meeting(tmp_path / "place", 2, torch.device("cpu"), 60) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        met = [pool.submit(meetings[rank].group, "ranks", rank, 2) for rank in range(2)]
    assert [str(item.exception()) for item in met] == ["after 5 attempts: no address"] * 2
