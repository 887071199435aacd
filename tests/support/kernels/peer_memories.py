"""Peer memory of ranks that are processes of this machine."""

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch

from kvern.kernels.peer_words import PeerMemory, addresses_of, memory_of

ROWS, SLOTS, TURNS, PROGRAMS = 3, 4, 5, 2
EPSILON = 1e-5
SECONDS = 120.0
CPU = torch.device("cpu")
NONE_LOST = torch.zeros(1, dtype=torch.int32)
if torch.cuda.is_available():
    NONE_LOST = NONE_LOST.pin_memory()


def memory(
    memories: list[torch.Tensor],
    rank: int,
    slots: int,
    row_words: int,
    programs: int = 132,
    lost: torch.Tensor = NONE_LOST,
) -> PeerMemory:
    """The peer memory of a rank, in a process that sees the memory of all ranks."""
    device = memories[rank].device
    buffers = torch.tensor(addresses_of(memories, lost), device=device)
    epochs = torch.zeros(slots, dtype=torch.int32, device=device)
    return PeerMemory(memories[rank], buffers, epochs, rank, len(memories), slots, row_words, programs)


def absent(size: int, rows: int, row_words: int, device: torch.device = CPU) -> torch.Tensor:
    """The initial contents of a rank's memory."""
    return torch.full((memory_of(size, rows, row_words),), -1, dtype=torch.int64, device=device)


def together(target: Callable[..., None], size: int, *given: Any) -> None:
    """A process of each rank."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=target, args=(rank, *given), daemon=True) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS)
    assert [process.exitcode for process in processes] == [0] * size
