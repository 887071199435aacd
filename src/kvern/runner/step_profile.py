"""PyTorch's profiler around steps of this thread, for `kvern profile` and for a running server's traces."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile

from kvern.cpu.library import recorded

HOST, DEVICE = ProfilerActivity.CPU, ProfilerActivity.CUDA


@contextmanager
def profiled(activities: Sequence[ProfilerActivity]) -> Iterator[profile]:
    """Records what runs in the block; at its end a GPU is waited for. On a CPU kernels have their names."""
    with recorded(), profile(activities=activities) as profiler:
        yield profiler
        if DEVICE in activities:
            torch.cuda.synchronize()
