"""Sums over ranks with the norm behind them: kernels of kvern's own beside NCCL, checked, then timed.

    python benchmarks/sums.py --size 2

Takes as many GPUs of one machine. Times are microseconds of one sum among many in a CUDA graph: medians, of the slowest
rank.
"""

import argparse
import multiprocessing
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvern.device.peer_memory import map_words
from kvern.device.process_group import Meeting
from kvern.kernels.norm import add_rms_norm
from kvern.kernels.peer_sum import PeerMemory, peer_sum, peer_sum_norm, row_words_of, words_of

ROWS = (1, 8, 32, 64, 128, 256, 512, 2048)
CHECKED_ROWS = (1, 8, 33, 132, 200)
WIDTHS = (4096, 8192)
MOST_BYTES = 1 << 28
"""Of one rank's words."""
CALLS, ROUNDS = 50, 7
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


class Sums:
    """One rank's sums of `rows` rows, through NCCL and through memory of the others."""

    def __init__(self, group: Any, peers: PeerMemory, rows: int, width: int) -> None:
        self.group, self.peers = group, peers
        self.device = device = peers.buffers.device
        self.x = torch.zeros(rows, width, dtype=DTYPE, device=device)
        self.hidden = torch.zeros_like(self.x)
        self.weight = torch.ones(width, dtype=DTYPE, device=device)

    def calls(self) -> dict[str, Callable[[], object]]:
        """All that is timed."""
        found: dict[str, Callable[[], object]] = {
            "NCCL": self.through_nccl,
            "norm": partial(add_rms_norm, self.hidden, self.x, self.weight, EPSILON),
            "NCCL + norm": self.through_nccl_with_norm,
        }
        if self.x.shape[0] <= self.peers.rows:
            found["peers"] = partial(peer_sum, self.x, self.peers)
            found["peers + norm"] = self.with_norm
        return found

    def through_nccl(self) -> None:
        self.group.allreduce([self.x]).wait()

    def through_nccl_with_norm(self) -> Tensor:
        self.through_nccl()
        return add_rms_norm(self.hidden, self.x, self.weight, EPSILON)

    def with_norm(self) -> Tensor:
        return peer_sum_norm(self.x, self.hidden, self.weight, EPSILON, self.peers)

    def check(self) -> list[str]:
        """Sums of fresh numbers, some ranks later than others, are those of float32 in rank order; else a line."""
        peers, x, hidden = self.peers, self.x, self.hidden
        own, common = (torch.Generator(self.device).manual_seed(seed) for seed in (peers.rank, 99))
        parts = list(torch.empty(peers.size, *x.shape, dtype=x.dtype, device=self.device).unbind())
        results: list[Tensor] = []
        graph = captured(lambda: results.__setitem__(slice(None), [peer_sum(x, peers), self.with_norm()]), 1)
        wrong = torch.zeros(3, dtype=torch.int64, device=self.device)
        for turn in range(CHECKED):
            x.normal_(generator=own)
            before = hidden.normal_(generator=common).clone()
            if turn % peers.size == peers.rank:
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
        return (
            [f"{len(x)} x {x.shape[1]}: of {CHECKED} sums, residuals, norms {counts} are wrong"] if any(counts) else []
        )


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
    graph = captured(call, CALLS)
    graph.replay()
    found: list[float] = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) * 1000 / CALLS)
    return statistics.median(found)


def run_rank(rank: int, size: int, place: str, results: Any) -> None:
    """Check and time as one of the ranks; what it found goes to `results`."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    meeting = Meeting(place, size, device, 60)
    group = meeting.group("sums", rank, size)
    found = Found([], {})
    with torch.inference_mode():
        for width in WIDTHS:
            row_words = row_words_of(width, DTYPE)
            rows = min(512, MOST_BYTES // (8 * words_of(size, 1, row_words)))
            own, addresses = map_words(meeting.store(f"{width}"), rank, size, device, words_of(size, rows, row_words))
            buffers, epochs = (
                torch.tensor(addresses, device=device),
                torch.zeros(rows, dtype=torch.int32, device=device),
            )
            peers = PeerMemory(own, buffers, epochs, rank, size, rows, row_words)
            for count in CHECKED_ROWS:
                found.wrong.extend(Sums(group, peers, count, width).check())
            for count in ROWS:
                calls = Sums(group, peers, count, width).calls()
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
    names = ("NCCL", "norm", "NCCL + norm", "peers", "peers + norm")
    print("rows  width  " + "  ".join(names))
    for (rows, width), times in found[0].times.items():
        slowest = {name: max(each.times[rows, width][name] for each in found) for name in times}
        cells = (f"{f'{slowest[name]:.1f}' if name in slowest else '-':>{len(name)}}" for name in names)
        print(f"{rows:>4}  {width:>5}  " + "  ".join(cells))


if __name__ == "__main__":
    main()
