"""What waits for ranks that have ended, or that say nothing any more, is freed."""

import multiprocessing
import signal
import subprocess
import sys
from queue import SimpleQueue

import pytest
import torch

from kvern.kernels.peer_exchange import peer_gather, peer_sum_scattered
from kvern.kernels.peer_sum import peer_sum
from kvern.kernels.peer_words import row_words_of
from kvern.ranks.lost_ranks import Release
from kvern.ranks.ranks import Ranks
from kvern.ranks.shared_norms import SharedNorms, memory_of
from kvern.runner.ranks.rank_processes import _End
from tests.support.kernels.peer_memories import PROGRAMS, SECONDS, absent, memory

ROWS, WIDTH = 3, 64
WAYS = ["whole", "parts", "gathered", "scattered", "norms"]


def wait(way: str, lost: torch.Tensor, device: torch.device, out: torch.Tensor) -> None:
    """Twice, the first of three ranks, of which the others send nothing."""
    x = torch.ones(ROWS, WIDTH, dtype=torch.float16, device=device)
    if way == "norms":
        words = memory_of(3, ROWS, WIDTH, torch.float16)
        norms = SharedNorms(
            [torch.full((words,), -1, device=device) for _ in range(3)], lost, 0, ROWS, WIDTH, torch.float16
        )
    memories = [absent(3, ROWS, row_words_of(WIDTH, torch.float16), device) for _ in range(3)]
    peers = memory(memories, 0, ROWS, row_words_of(WIDTH, torch.float16), PROGRAMS, lost)
    for _ in range(2):
        if way == "norms":
            norms.begin(0, x)
            norms.norm(0, x.clone(), x[0], 1e-5)
            norms.normal(0, ROWS)
        elif way == "gathered":
            peer_gather(x, peers)
        elif way == "scattered":
            peer_sum_scattered(x, peers)
        else:
            peer_sum(x, peers, parts=way == "parts")
        out += 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted kernels share memory of processes")
@pytest.mark.parametrize("way", WAYS)
def test_kernels_that_wait_for_another_rank_go_on(way: str) -> None:
    out = torch.zeros(1, dtype=torch.int32)
    with torch.inference_mode():  # as ranks connect
        ranks = Ranks(0, 3)
    for shared in (ranks.lost, out):
        shared.share_memory_()  # type: ignore[no-untyped-call]
    given = way, ranks.lost, torch.device("cpu"), out
    process = multiprocessing.get_context("fork").Process(target=wait, args=given, daemon=True)
    process.start()
    process.join(0.3)
    assert process.exitcode is None and out.item() == 0, "it waits"
    ranks.release()
    process.join(SECONDS)
    assert process.exitcode == 0 and out.item() == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("way", WAYS)
def test_a_gpu_that_waits_for_another_rank_is_freed(way: str) -> None:
    device, ranks = torch.device("cuda", 0), Ranks(0, 3)
    with torch.inference_mode():  # as ranks connect
        ranks.lost = ranks.lost.pin_memory()
    release = Release(ranks, device, ranks)
    ranks.release()
    wait(way, ranks.lost, device, torch.zeros(1))  # a kernel that is loaded later waits for the device
    torch.cuda.synchronize()
    with torch.inference_mode():
        ranks.lost.zero_()
    wait(way, ranks.lost, device, torch.zeros(1))
    assert not torch.cuda.default_stream().query(), "it waits"
    release.finish()
    assert torch.cuda.default_stream().query()


def test_ranks_that_say_nothing_any_more_are_ended() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    codes = SimpleQueue[int]()
    end = _End({1: process}, None, codes.put, None, patience=0.5)
    end.call = object()
    assert codes.get(timeout=SECONDS) == -signal.SIGKILL and end.noticed.is_set()
    assert end.reason == "its other ranks, for which a step has waited 0.5 seconds"
    assert process.returncode is not None and process.stdin is not None
    process.stdin.close()
