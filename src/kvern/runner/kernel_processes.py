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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import triton_key

import kvern.kernels
from kvern.kernels.recording import Launch, Launches

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


def compile_in_processes(models: Sequence[Launches]) -> None:
    """Compile what models launch, if nobody has: then a launch finds it in Triton's cache.

    What does not compile is left for the launch to report.
    """
    target = triton.runtime.driver.active.get_current_target()
    if target.backend != "cuda" or "fork" not in multiprocessing.get_all_start_methods():
        return
    if multiprocessing.current_process().daemon:  # it may have no processes
        return
    missing = {mark: launches for launches in models if not (mark := _mark(launches, target)).exists()}
    forms = [launch for launches in missing.values() for launch in launches.values()]
    if not forms:
        return
    order = {group: place for place, group in enumerate(LONGEST)}
    launches = sorted(forms, key=lambda launch: order.get(launch.group, len(LONGEST)))
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
        for mark in missing:
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()


def _mark(launches: Launches, target: GPUTarget) -> Path:
    """The file that says that all of it is in the cache."""
    sources = sorted(Path(kvern.kernels.__path__[0]).glob("*.py"))
    named = [ADDRESS.sub("", repr(form)) for form in launches]
    said = [*named, target, triton_key(), torch.__version__, *(source.read_bytes() for source in sources)]
    return Path(triton.knobs.cache.dir) / f"kvern-{hashlib.sha256(repr(said).encode()).hexdigest()}"


def _compile(target: GPUTarget, launches: Sequence[Launch], following: Any) -> None:
    """What a process does: compile one kernel after another; it exits with 1 if one cannot be compiled."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # also when the engine is killed
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its processes
    from triton.backends.nvidia.driver import CudaLauncher

    torch.set_num_threads(1)
    triton.runtime.driver.set_active(TargetDriver(target))
    failed, known = False, set[str]()
    while True:
        with following.get_lock():
            index, following.value = following.value, following.value + 1
        if index >= len(launches):
            sys.exit(int(failed))
        try:
            kernel = launches[index].compile()
            if kernel.hash not in known:
                known.add(kernel.hash)
                CudaLauncher(kernel.src, kernel.metadata)
        except Exception as error:
            logger.debug("a kernel does not compile: %s", error)
            failed = True
