"""Kernels that are not in Triton's cache yet, compiled side by side in processes.

Threads would share Python's lock, which Triton's compiler holds half of its time. A process of these never touches the
device: its driver only names the target, every launch ends with the compiled kernel, and what is compiled is found in
the cache by the launches that follow in this process.
"""

import ctypes
import hashlib
import logging
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITFunction

from kvern.kernel_list import Inputs, Kernel, kernels_of
from kvern.spec.model import ModelSpec

logger = logging.getLogger("kvern")

MOST_PROCESSES = 16
PATIENCE_SECONDS = 120.0
"""After that the rest is left to the launches."""
LONGEST = ("hopper", "attention", "sampling")
"""Groups of kernels that compile for seconds each, all others in less than one."""
PR_SET_PDEATHSIG = 1
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""Addresses of functions in descriptions, which differ from process to process."""


class TargetDriver:
    """The driver that Triton asks while it compiles."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def map_python_to_cpp_type(self, kind: str) -> str:
        from triton.backends.nvidia.driver import ty_to_cpp

        return str(ty_to_cpp(kind))

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def compile_in_processes(models: Sequence[tuple[ModelSpec, Inputs]]) -> None:
    """Compile what models launch on their inputs, of a GPU, if nobody has: then a launch finds it in Triton's cache.

    What does not compile is left for the launch to report.
    """
    target = triton.runtime.driver.active.get_current_target()
    if target.backend != "cuda" or "fork" not in multiprocessing.get_all_start_methods():
        return
    if multiprocessing.current_process().daemon:  # it may have no processes
        return
    forms: list[tuple[Kernel, Callable[[], None]]] = []
    marks = []
    for spec, inputs in models:
        launched = [(kernel, given) for kernel in kernels_of(spec) for given in kernel.launched(spec, inputs)]
        mark = _mark(spec, inputs, launched, target)
        if not mark.exists():
            marks.append(mark)
            host = inputs.without_device()
            forms += [(kernel, partial(_launch, kernel, spec, host, given)) for kernel, given in launched]
    if not forms:
        return
    order = {group: place for place, group in enumerate(LONGEST)}
    longest_first = sorted(forms, key=lambda form: order.get(form[0].group, len(LONGEST)))
    launches = [launch for _, launch in longest_first]
    context = multiprocessing.get_context("fork")
    following = context.Value("i", 0)
    count = min(MOST_PROCESSES, len(os.sched_getaffinity(0)), len(launches))
    arguments = target, launches, following
    processes = [context.Process(target=_compile, args=arguments, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    end = time.monotonic() + PATIENCE_SECONDS
    try:
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
    finally:  # also at Ctrl-C
        for process in processes:
            process.kill()
            process.join()
    if not any(process.exitcode for process in processes):
        for mark in marks:
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()


def _mark(spec: ModelSpec, inputs: Inputs, forms: Sequence[tuple[Kernel, tuple[Any, ...]]], target: GPUTarget) -> Path:
    """The file that says that all of it is in the cache."""
    sources = sorted(Path(__file__).parent.parent.glob("kernel*/*.py"))
    named = ADDRESS.sub("", repr((spec, [(kernel.name, given) for kernel, given in forms])))
    said = [
        *(named, target, inputs.processors, inputs.dtype, inputs.cache_dtype, inputs.block_size),
        *(inputs.adapter_rank, inputs.adapter_places),
        *(triton_key(), torch.__version__, *(source.read_bytes() for source in sources)),
    ]
    return Path(triton.knobs.cache.dir) / f"kvern-{hashlib.sha256(repr(said).encode()).hexdigest()}"


def _launch(kernel: Kernel, spec: ModelSpec, inputs: Inputs, given: tuple[Any, ...]) -> None:
    kernel.make(spec, inputs, *given).launch()


def _compile(target: GPUTarget, launches: Sequence[Callable[[], None]], following: Any) -> None:
    """Compile one launch after another, as a process; it exits with 1 if one cannot be compiled."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # also when the engine is killed
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its processes
    torch.set_num_threads(1)
    triton.runtime.driver.set_active(TargetDriver(target))
    JITFunction.run = _compile_only(JITFunction.run)
    failed = False
    while True:
        with following.get_lock():
            index, following.value = following.value, following.value + 1
        if index >= len(launches):
            sys.exit(int(failed))
        try:
            launches[index]()
        except Exception as error:
            logger.debug("a kernel does not compile: %s", error)
            failed = True


def _compile_only(run: Callable[..., Any]) -> Callable[..., Any]:
    """`JITFunction.run` that compiles a kernel and what launches it, and does not launch."""
    from triton.backends.nvidia.driver import CudaLauncher

    known = set()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        if kernel.hash not in known:
            known.add(kernel.hash)
            CudaLauncher(kernel.src, kernel.metadata)
        return kernel

    return compile_only
