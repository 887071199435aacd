"""Sums over ranks with the norm behind them: kernels of kvern's own beside NCCL, checked, then timed.

    python benchmarks/sums.py --size 2

Takes as many GPUs of one machine. Times are microseconds of one sum among many in a CUDA graph: medians, of the slowest
rank.
"""

import argparse
import itertools
import multiprocessing
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvern.device.timing import time_calls
from kvern.kernels.launch import processors
from kvern.kernels.norm import add_rms_norm
from kvern.kernels.peer_sum import peer_sum, peer_sum_norm
from kvern.kernels.peer_words import PeerMemory, memory_of, row_words_of
from kvern.ranks.peer_memory import map_words
from kvern.ranks.process_group import Meeting

ROWS = (1, 8, 32, 64, 128, 256, 512, 2048)
MOST_ROWS = 512
"""That are summed in kvern's own ways."""
CHECKED_ROWS = (1, 8, 33, 132, 200)
WIDTHS = (4096, 8192)
CALLS = 50
EPSILON = 1e-5
DTYPE = torch.bfloat16
CHECKED = 512
"""Sums of fresh numbers, for each size."""
DELAYS = 8
"""Ranks are late in turn, by so many different times."""


class Found(NamedTuple):
    """What a rank found: sizes whose results are wrong, and microseconds by what was timed, by rows and width."""

    wrong: list[str]
    times: dict[tuple[int, int], dict[str, float]]


class Way(NamedTuple):
    """How to sum `x`, for at most so many rows, and to add that to a residual and take the norm."""

    name: str
    rows: int
    sum: Callable[[Tensor], Tensor]
    sum_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]


def ways_of(meeting: Meeting, rank: int, size: int, width: int, device: torch.device) -> list[Way]:
    """Those of kvern's own, over memory that all ranks map now."""

    rows, row_words = MOST_ROWS, row_words_of(width, DTYPE)
    memories = map_words(meeting.store(f"{width}"), "sums", rank, size, device, memory_of(size, rows, row_words))
    buffers = torch.tensor([memory.data_ptr() for memory in memories], device=device)
    epochs = torch.zeros(rows, dtype=torch.int32, device=device)
    memory = PeerMemory(memories[rank], buffers, epochs, rank, size, rows, row_words, processors(device))
    return [
        Way(name, rows, partial(peer_sum, peers=memory, parts=parts), partial(peer_sum_norm, peers=memory, parts=parts))
        for name, parts in (("whole", False), ("parts", True))
    ]


class Sums:
    """One rank's sums of `rows` rows, through NCCL's `group` and in other ways."""

    def __init__(self, group: Any, rank: int, size: int, rows: int, width: int, device: torch.device) -> None:
        self.group, self.rank, self.size, self.device = group, rank, size, device
        self.x = torch.zeros(rows, width, dtype=DTYPE, device=device)
        self.hidden = torch.zeros_like(self.x)
        self.weight = torch.ones(width, dtype=DTYPE, device=device)

    def calls(self, ways: list[Way]) -> dict[str, Callable[[], object]]:
        """All that is timed."""
        given = self.x, self.hidden, self.weight, EPSILON
        found: dict[str, Callable[[], object]] = {
            "NCCL": self.through_nccl,
            "norm": partial(add_rms_norm, self.hidden, self.x, self.weight, EPSILON),
            "NCCL + norm": self.through_nccl_with_norm,
        }
        for way in ways:
            if self.x.shape[0] <= way.rows:
                found[way.name] = partial(way.sum, self.x)
                found[f"{way.name} + norm"] = partial(way.sum_norm, *given)
        return found

    def through_nccl(self) -> None:
        self.group.allreduce([self.x]).wait()

    def through_nccl_with_norm(self) -> Tensor:
        self.through_nccl()
        return add_rms_norm(self.hidden, self.x, self.weight, EPSILON)

    def check(self, way: Way) -> list[str]:
        """Sums of fresh numbers, some ranks later than others, are those of float32 in rank order; else a line."""
        x, hidden = self.x, self.hidden
        own, common = (torch.Generator(self.device).manual_seed(seed) for seed in (self.rank, 99))
        parts = list(torch.empty(self.size, *x.shape, dtype=x.dtype, device=self.device).unbind())
        results: list[Tensor] = []

        def both() -> None:
            results[:] = way.sum(x), way.sum_norm(x, hidden, self.weight, EPSILON)

        graph = captured(both, 1)
        wrong = torch.zeros(3, dtype=torch.int64, device=self.device)
        for turn in range(CHECKED):
            x.normal_(generator=own)
            before = hidden.normal_(generator=common).clone()
            if turn % self.size == self.rank:
                torch.cuda._sleep(20_000 * (turn % DELAYS))  # type: ignore[no-untyped-call]
            graph.replay()
            summed, normal = results
            self.group.allgather([parts], [x]).wait()
            expected = sum((part.float() for part in parts[1:]), parts[0].float()).to(x.dtype)
            norm = add_rms_norm(before, expected, self.weight, EPSILON).float()
            wrong[0] += (summed != expected).any()
            wrong[1] += (hidden != before).any()
            wrong[2] += ((normal.float() - norm).abs() > 0.01 * norm.abs() + 1e-3).any()
        for _ in range(CHECKED):  # nothing between these holds a rank back
            graph.replay()
        counts = wrong.tolist()
        line = f"{way.name}, {len(x)} x {x.shape[1]}: of {CHECKED} sums, residuals, norms {counts} are wrong"
        return [line] if any(counts) else []


def captured(call: Callable[[], object], calls: int) -> torch.cuda.CUDAGraph:
    """So many calls as a graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            call()
    return graph


def microseconds(call: Callable[[], object]) -> float:
    """Of one call, a median."""
    return 1e6 * time_calls([call] * CALLS)


def run_rank(rank: int, size: int, place: str, results: Any) -> None:
    """Check and time as one of the ranks; what it found goes to `results`."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    meeting = Meeting(place, size, device, 60)
    group = meeting.group("sums", rank, size)
    found = Found([], {})
    with torch.inference_mode():
        for width in WIDTHS:
            ways = ways_of(meeting, rank, size, width, device)
            made = partial(Sums, group, rank, size, width=width, device=device)
            for count, way in itertools.product(CHECKED_ROWS, ways):
                found.wrong.extend(made(rows=count).check(way))
            for count in ROWS:
                calls = made(rows=count).calls(ways)
                found.times[count, width] = {name: microseconds(call) for name, call in calls.items()}
        torch.cuda.synchronize()
    results.put(found)


def main() -> None:
    """Start the ranks, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=2, help="GPUs")
    size: int = parser.parse_args().size
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        given = size, str(Path(folder) / "meeting"), results
        ranks = [context.Process(target=run_rank, args=(rank, *given), daemon=True) for rank in range(size)]
        for process in ranks:
            process.start()
        found: list[Found] = [results.get(timeout=300) for _ in ranks]
        for process in ranks:
            process.join()
    wrong = sorted({line for each in found for line in each.wrong})
    print("\n".join([*wrong, f"{size} GPUs: {'WRONG' if wrong else 'all checks pass'}"]))
    names = ("NCCL", "norm", "NCCL + norm", "whole", "whole + norm", "parts", "parts + norm")
    print("rows  width  " + "  ".join(names))
    for (rows, width), times in found[0].times.items():
        slowest = {name: max(each.times[rows, width][name] for each in found) for name in times}
        cells = (f"{f'{slowest[name]:.1f}' if name in slowest else '-':>{len(name)}}" for name in names)
        print(f"{rows:>4}  {width:>5}  " + "  ".join(cells))


if __name__ == "__main__":
    main()
