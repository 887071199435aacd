"""PyTorch's profiler around steps of this thread, for `kvern profile` and for a running server's traces."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from kvern.cpu.library import recorded
from kvern.device import marks

HOST, DEVICE = ProfilerActivity.CPU, ProfilerActivity.CUDA


@contextmanager
def profiled(activities: Sequence[ProfilerActivity], *, parts: bool = False) -> Iterator[profile]:
    """Profiles what runs in the block, at whose end it waits for a GPU. Kernels of a CPU appear by name.

    With `parts` the trace has an event for each layer and part around its launches, except in steps that run as graphs.
    """
    ranges = _Ranges()
    listener = marks.Marks(ranges.begin) if parts else marks.listener()
    with recorded(), profile(activities=activities, acc_events=True) as profiler, marks.listened(listener):
        yield profiler
        ranges.end()
        if DEVICE in activities:
            torch.cuda.synchronize()


class _Ranges:
    """Has the profiler record each part of a step as an event, which the next mark ends."""

    def __init__(self) -> None:
        self._open: record_function | None = None

    def begin(self, code: int) -> None:
        self.end()
        layer, part = divmod(code, len(marks.PARTS))
        if part != marks.OTHER:
            name = f"layer {layer - 1} {marks.PARTS[part]}" if layer else marks.PARTS[part]
            self._open = record_function(name)
            self._open.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None
