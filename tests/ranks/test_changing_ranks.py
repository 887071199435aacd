"""KV caches of several ranks that change: all have memory for as many blocks as the fullest GPU has room for."""

from types import SimpleNamespace
from typing import Any

import torch

from kvern.runner.ranks.rank_executors import RankedExecutor
from kvern.runner.ranks.rank_wire import Call


class Rank:
    """The memory of a rank for at most `room` blocks."""

    scratch, least = 64, 8

    def __init__(self, room: int) -> None:
        self.room = room
        self.blocks = 8
        self.forgotten: list[range] = []
        self.forget_blocks = self.forgotten.append
        self.caches = [torch.zeros(1)]

    def resize(self, blocks: int) -> int:
        self.blocks = min(blocks, self.room)
        return self.blocks


class First(RankedExecutor):
    """The first rank, with another one beside it that does what it is sent."""

    def __init__(self, own: Rank, other: Rank) -> None:
        self.calls: list[int] = []
        self.other = other
        self._others: Any = SimpleNamespace(send=self._send)
        self._ranks: Any = SimpleNamespace(least=lambda counts: counts.clamp(max=other.blocks))
        self._worker: Any = SimpleNamespace(memory=SimpleNamespace(chunked=own), runner=own)

    def _send(self, message: Call) -> None:
        assert message.method == "map_cache"
        [blocks] = message.arguments
        self.calls.append(blocks)
        self.other.resize(blocks)


def test_a_rank_without_memory_has_the_others_give_theirs_back() -> None:
    own, other = Rank(64), Rank(24)
    first = First(own, other)
    assert first.map_cache(16) == 16 and first.calls == [16]
    assert first.map_cache(40) == 24 == own.blocks == other.blocks
    assert first.calls == [16, 40, 24] and own.forgotten == [range(24, 64)]
    own.room, other.room = 32, 64
    assert first.map_cache(40) == 32 == own.blocks == other.blocks
    assert first.map_cache(8) == 8 == own.blocks == other.blocks
