"""Ranks that share a machine's memory: what they compute, and what they say where one is missing."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from kvern.config import EngineConfig
from kvern.cpu.capture import Memory, Program
from kvern.cpu.ranks import SharedMemory
from kvern.cpu.ready import working_groups
from kvern.cpu.rows import widened

pytestmark = pytest.mark.skipif(
    "cpu_ranks" not in working_groups(EngineConfig().cache_folder, 1), reason="no kernels for this CPU"
)


def of_ranks(folder: Path, compute: Callable[[SharedMemory, int], Any], seconds: float = 240.0) -> list[Any]:
    """What each of two ranks, which are threads here, computes."""

    def run(rank: int) -> Any:
        return compute(SharedMemory(folder / "meeting", rank, 2, seconds), rank)

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(run, range(2)))


def test_what_is_captured_is_said_each_time(tmp_path: Path) -> None:
    given = [torch.arange(6.0).view(2, 3) * (1 + 9 * rank) for rank in range(2)]

    def compute(ranks: SharedMemory, rank: int) -> list[torch.Tensor]:
        def stage() -> tuple[torch.Tensor, ...]:
            summed = ranks.sum(widened(given[rank]))
            return summed, ranks.beside(summed, 5)

        program = Program(Memory(), None, stage)
        found = []
        for _ in range(3):
            given[rank] += 1
            found += [item.clone() for item in program.run(0, 0)]
            ranks.check()
        return found

    begun = given[0] + given[1]
    for found in of_ranks(tmp_path, compute):
        for turn in range(3):
            expected = begun + 2 * (turn + 1)
            assert torch.equal(found[2 * turn], expected)
            assert torch.equal(found[2 * turn + 1], torch.cat((expected, expected), -1)[:, :5])
    assert not [*tmp_path.iterdir()], "nothing is left of the meeting"


def test_who_does_not_come_is_named_and_nobody_waits_for_it_again(tmp_path: Path) -> None:
    def compute(ranks: SharedMemory, rank: int) -> None:
        if rank == 1:
            return
        for _ in range(100):
            with pytest.raises(RuntimeError, match=r"rank 1 did not come within 1 s"):
                ranks.sum(torch.ones(3))

    of_ranks(tmp_path, compute, 1.0)


def test_ranks_that_compute_different_steps_are_told(tmp_path: Path) -> None:
    def compute(ranks: SharedMemory, rank: int) -> None:
        with pytest.raises(RuntimeError, match=f"rank {1 - rank} computes another step than this one"):
            ranks.sum(torch.ones(3 + rank))

    of_ranks(tmp_path, compute)


def test_a_first_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="rank 0 did not come within 0 s"):
        SharedMemory(tmp_path / "meeting", 1, 2, 0.0)
