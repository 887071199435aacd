"""Norms that ranks share through memory of each other: between processes that have it in common."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kvern.kernels.norm import add_rms_norm
from kvern.kernels.shared_norm import await_flags, shared_norm
from kvern.ranks.ranks import Ranks
from kvern.ranks.shared_norms import SharedNorms, memory_of
from kvern.runner.ranks.rank_sums import are_right
from tests.support.kernels.peer_memories import CPU, EPSILON, NONE_LOST, SECONDS, together

TURNS, ROWS = 4, 7
COUNTS = (7, 4, 1)
"""Rows of halves; of one some ranks have none."""


def launch(width: int, size: int, dtype: torch.dtype, gain: torch.dtype | None) -> object:
    """Launches for a card that is compiled for."""
    x, flags = torch.empty(8, width, dtype=dtype), torch.zeros(size, dtype=torch.int32)
    weight = None if gain is None else torch.empty(width, dtype=gain)
    sent, flagged = x.new_empty(size, 4, width), (flags, 7, NONE_LOST, 1)
    shared_norm(x, sent, x.clone(), x.clone(), range(4, 8), *flagged, weight, EPSILON)
    return await_flags(*flagged)


LAUNCHES = [
    lambda: launch(8192, 4, torch.bfloat16, torch.bfloat16),
    lambda: launch(5120, 2, torch.float16, torch.float32),
    lambda: launch(2048, 8, torch.bfloat16, None),
]


def run(rank: int, memories: list[torch.Tensor], xs: torch.Tensor, hidden: torch.Tensor, out: Any) -> None:
    """One rank's norms of both halves in turn, then all of the residual."""
    size, width = len(memories), xs.shape[-1]
    norms, weight = SharedNorms(memories, NONE_LOST, rank, ROWS, width, xs.dtype), torch.ones(width)
    residuals = hidden[rank]
    for turn in range(TURNS):
        count = COUNTS[turn % len(COUNTS)]
        x, residual = xs[turn, rank, :, :count], residuals[turn, :, :count]
        for half in range(2):
            norms.begin(half, x[half])
        for half in range(2):
            norms.norm(half, residual[half], weight, EPSILON)
        for half in range(2):
            out[rank, turn, half, :count] = norms.normal(half, count)
            most = -(-count // size)
            for row in range(count):
                if row // most != rank:
                    residual[half, row] = torch.nan  # nobody else keeps it
        for half in range(2):
            norms.begin(half, x[half])
            norms.make_whole(half, residual[half])


class Forgetting(SharedNorms):
    """On the last rank rows that others normalised for it come one turn late."""

    def normal(self, half: int, count: int) -> torch.Tensor:
        found = super().normal(half, count)
        late = getattr(self, f"late{half}", torch.zeros_like(found))
        setattr(self, f"late{half}", found.clone())
        return late if self._rank == self._size - 1 else found


class OfAStage(Ranks):
    """Whose other stages have no halves, and check nothing."""

    def least(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the stage behind does not listen")


def check(rank: int, folder: Path, memories: list[torch.Tensor], kind: type[SharedNorms], out: Any) -> None:
    """What one rank says of norms at a start."""
    ranks = OfAStage(rank, len(memories))
    ranks.connect(folder / "meeting", CPU, SECONDS)
    out[rank] = are_right(ranks, kind(memories, NONE_LOST, rank, ROWS, 64, torch.float16), CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted kernels share memory of processes")
@pytest.mark.parametrize("kind", [SharedNorms, Forgetting])
def test_a_start_finds_rows_that_are_not_what_was_sent(kind: type[SharedNorms], tmp_path: Path) -> None:
    words = memory_of(2, ROWS, 64, torch.float16)
    memories = [torch.full((words,), -1, dtype=torch.int64).share_memory_() for _ in range(2)]  # type: ignore[no-untyped-call]
    out: torch.Tensor = torch.full((2,), 7).share_memory_()  # type: ignore[no-untyped-call]
    together(check, 2, tmp_path, memories, kind, out)
    assert out.tolist() == [kind is SharedNorms] * 2, "all ranks say the same"


@pytest.mark.sample(1)
@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted kernels share memory of processes")
@pytest.mark.parametrize(("size", "width", "dtype"), [(2, 64, torch.float16), (3, 48, torch.float32)], ids=str)
def test_ranks_normalise_rows_for_each_other(size: int, width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    xs = torch.randn(TURNS, size, 2, ROWS, width, generator=generator).to(dtype)
    first = torch.randn(TURNS, 2, ROWS, width, generator=generator).to(dtype)
    hidden: torch.Tensor = first.expand(size, *first.shape).clone().share_memory_()  # type: ignore[no-untyped-call]
    words = memory_of(size, ROWS, width, dtype)
    memories = [torch.full((words,), -1, dtype=torch.int64).share_memory_() for _ in range(size)]  # type: ignore[no-untyped-call]
    out: torch.Tensor = torch.zeros(size, TURNS, 2, ROWS, width, dtype=dtype).share_memory_()  # type: ignore[no-untyped-call]
    together(run, size, memories, xs, hidden, out)
    for turn in range(TURNS):
        count = COUNTS[turn % len(COUNTS)]
        for half in range(2):
            total = xs[turn, 0, half, :count].float()
            for rank in range(1, size):
                total = total + xs[turn, rank, half, :count]
            residual = first[turn, half, :count].clone()
            normal = add_rms_norm(residual, total.to(dtype), torch.ones(width), EPSILON)
            whole = (residual.float() + total.to(dtype)).to(dtype)
            for rank in range(size):
                torch.testing.assert_close(out[rank, turn, half, :count], normal)
                assert torch.equal(hidden[rank, turn, half, :count], whole), "all have all rows again"
