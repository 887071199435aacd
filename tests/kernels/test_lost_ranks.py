"""What waits for ranks that have ended, or that say nothing any more, is freed."""

import multiprocessing
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

from kvern.device.lost_ranks import Release
from kvern.device.ranks import Ranks
from kvern.device.shared_norms import SharedNorms, memory_of
from kvern.kernels.peer_sum import peer_sum
from kvern.kernels.peer_words import PRESENT, row_words_of
from kvern.kernels.shared_norm import RELEASED
from kvern.worker.rank_processes import _End
from tests.kernels.test_peer_sum import PROGRAMS, SECONDS, absent, memory

ROWS, WIDTH = 3, 64


def wait_for_words(memories: list[torch.Tensor], out: torch.Tensor) -> None:
    """Two sums, of which no other rank sends anything."""
    peers = memory(memories, 0, ROWS, row_words_of(WIDTH, torch.float16), PROGRAMS)
    for turn in range(2):
        out[turn] = peer_sum(torch.ones(ROWS, WIDTH, dtype=torch.float16, device=out.device), peers)


def wait_for_rows(memories: list[torch.Tensor], out: torch.Tensor) -> None:
    """Two shared norms, of whose rows no other rank sends any."""
    norms, hidden = SharedNorms(memories, 0, ROWS, WIDTH, torch.float16), out[0].clone()
    for turn in range(2):
        norms.begin(0, torch.ones_like(hidden))
        norms.norm(0, hidden, torch.ones(WIDTH, dtype=torch.float16, device=out.device), 1e-5)
        out[turn] = norms.normal(0, ROWS)


def awaited(memories: list[torch.Tensor], *, rows: bool) -> Ranks:
    """The first of two ranks, whose kernels wait for what comes to its memory."""
    ranks = Ranks(0, 2)
    if rows:
        flags = SharedNorms(memories, 0, ROWS, WIDTH, torch.float16).flags
        ranks.awaited += [(each, RELEASED.value) for each in flags]
    else:
        ranks.awaited.append((memories[0], PRESENT))
    return ranks


def words(*, rows: bool, device: str = "cpu") -> list[torch.Tensor]:
    """Memory of both."""
    if rows:
        count = memory_of(2, ROWS, WIDTH, torch.float16)
        return [torch.full((count,), -1, dtype=torch.int64, device=device) for _ in range(2)]
    return [absent(2, ROWS, row_words_of(WIDTH, torch.float16), torch.device(device)) for _ in range(2)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted kernels share memory of processes")
@pytest.mark.parametrize("rows", [False, True])
def test_kernels_that_wait_for_another_rank_go_on(rows: bool) -> None:
    memories: list[Any] = [each.share_memory_() for each in words(rows=rows)]  # type: ignore[no-untyped-call]
    out: Any = torch.zeros(2, ROWS, WIDTH, dtype=torch.float16).share_memory_()  # type: ignore[no-untyped-call]
    context = multiprocessing.get_context("fork")
    process = context.Process(target=wait_for_rows if rows else wait_for_words, args=(memories, out), daemon=True)
    process.start()
    process.join(0.5)
    assert process.exitcode is None, "it waits"
    ranks, until = awaited(memories, rows=rows), time.monotonic() + SECONDS
    while process.exitcode is None and time.monotonic() < until:
        ranks.release()
        process.join(0.05)
    assert process.exitcode == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("rows", [False, True])
@torch.inference_mode()
def test_a_gpu_that_waits_for_another_rank_is_freed(rows: bool) -> None:
    device = torch.device("cuda", 0)
    memories = words(rows=rows, device="cuda")
    ranks = awaited(memories, rows=rows)
    torch.cuda.synchronize()
    (wait_for_rows if rows else wait_for_words)(
        memories, torch.zeros(2, ROWS, WIDTH, dtype=torch.float16, device=device)
    )
    assert not torch.cuda.default_stream().query(), "it waits"
    release = Release(ranks, device)
    release()
    assert torch.cuda.default_stream().query()
    release()


def test_ranks_that_say_nothing_any_more_are_ended() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    end = _End({1: process}, None, None, None, patience=60.0)
    end.awaited_since = time.monotonic() - 61.0
    assert end.noticed.wait(SECONDS)
    assert end.reason == "its other ranks, for which a step has waited 60 seconds"
    assert process.returncode is not None and process.stdin is not None
    process.stdin.close()
