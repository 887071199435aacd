"""The time that work takes on a GPU."""

import statistics
from collections.abc import Callable, Sequence

import torch

ROUNDS = 3
LAUNCHES = 5
"""The launches of `time_launches` that wait in one queue."""


def time_calls(calls: Sequence[Callable[[], object]]) -> float:
    """Seconds that one of `calls` takes on average, when all are launched as one CUDA graph; a median."""
    for call in calls:
        call()  # compiles, and lets libraries choose
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Of this device: PyTorch's own for captures stays with the device that first had one.
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    # A capture that fails leaves the stream that it took as the current one: the outer context gives back what was.
    with (
        torch.cuda.stream(torch.cuda.current_stream()),
        torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
    ):
        for call in calls:
            call()
    graph.replay()
    seconds: list[float] = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1000 / len(calls))
    return statistics.median(seconds)


def time_launches(call: Callable[[], object]) -> float:
    """Seconds of one launch among several, queued behind a pause so that the host's speed does not count; a median."""
    call()
    torch.cuda.synchronize()
    seconds: list[float] = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(5_000_000)  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(LAUNCHES):
            call()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1000 / LAUNCHES)
    return statistics.median(seconds)
