"""Compiles the kernels that a model and its draft model need, before weights are there; names the groups that work.

Dummy steps of the models say which these are (`recorded_kernels.py`). Each form is compiled and loaded, so that nothing
is compiled when a request comes. A kernel that does not compile is left to PyTorch, with its group and a warning that
names both, at every start.

What is not in Triton's cache yet is compiled side by side in processes: threads would share Python's lock, which
Triton's compiler holds half of its time. A process of these never touches the device: its driver only names the target,
every launch ends with the compiled kernel, and the threads that load kernels here find it in the cache. A kernel that
ends the compiler's process is compiled nowhere else.
"""

import hashlib
import logging
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.errors import CompilationError
from triton.runtime.cache import triton_key

import kvern.kernels
from kvern.errors import ConfigError
from kvern.io.children import end_with_parent
from kvern.kernels.groups import MODULES
from kvern.kernels.recording import Launch, Launches
from kvern.runner import ahead

logger = logging.getLogger("kvern")

THREADS = 8
MOST_PROCESSES = 16
PATIENCE_SECONDS = 120.0
"""After that the rest is left to the launches."""
LONGEST = ("hopper", "attention", "sampling")
"""Groups of kernels that compile for seconds each, all others in less than one."""
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""Addresses of functions in descriptions, which differ from process to process."""


def broken_groups(models: Sequence[Launches], device: torch.device) -> list[frozenset[str]]:
    """Compile and load every kernel and return, for each model, the groups of which some kernel does not work.

    `models`: what each launches on this device. Raises ConfigError if a kernel of another package does not compile,
    whose work nothing else does.
    """
    died: dict[int, int] = {}
    if device.type == "cuda":
        ahead.finish()
        died = compile_in_processes(models)
    use = partial(torch.cuda.set_device, device) if device.type == "cuda" else None  # a thread begins at the first
    with ThreadPoolExecutor(THREADS, initializer=use) as pool:
        running = [
            [(launch, pool.submit(_load, launch, died.get(id(launch)))) for launch in launches.values()]
            for launches in models
        ]
        broken = [_broken(launches) for launches in running]
    first = {group: found for groups in reversed(broken) for group, found in groups.items()}
    for group, (names, error) in first.items():
        while isinstance(error, CompilationError) and error.__cause__ is not None:  # it says where, and that says why
            error = error.__cause__
        reason = (str(error) or type(error).__name__).splitlines()[0]
        if group not in MODULES:
            raise ConfigError(
                f"{', '.join(names)} of {group} does not compile here ({reason}), and nothing else does its work: "
                "choose a model whose weights are stored in another format"
            )
        logger.warning(
            "the kernels for %s do not work here (%s), PyTorch does their work: %s", group, ", ".join(names), reason
        )
    return [frozenset(groups) for groups in broken]


def _load(launch: Launch, died: int | None) -> None:
    """Compile a kernel, and load it on the current GPU: there it shows whether the card has room for its memory.

    `died`: the exit code of the process that compiled it, if the compiler ended that.
    """
    if died is not None:
        raise RuntimeError(f"the compiler of {launch.name} died with exit code {died}")
    _ = launch.compile().run


def _broken(launches: Iterable[tuple[Launch, Future[None]]]) -> dict[str, tuple[list[str], BaseException]]:
    """The groups of those that fail, with the kernels' names and the first error of each group."""
    broken: dict[str, tuple[list[str], BaseException]] = {}
    for launch, future in launches:
        error = future.exception()
        if error is not None:
            names, _ = broken.setdefault(launch.group, ([], error))
            if launch.name not in names:
                names.append(launch.name)
    return broken


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


def compile_in_processes(models: Sequence[Launches]) -> dict[int, int]:
    """Compile what models launch, if nobody has: then a launch finds it in Triton's cache.

    What does not compile is left for the launch to report. Returns the exit codes of processes that the compiler ended,
    by the id of the launch.
    """
    target = triton.runtime.driver.active.get_current_target()
    if "fork" not in multiprocessing.get_all_start_methods():
        return {}
    if multiprocessing.current_process().daemon:  # it may have no processes
        return {}
    missing = {mark: launches for launches in models if not (mark := _mark(launches, target)).exists()}
    forms = [launch for launches in missing.values() for launch in launches.values()]
    if not forms:
        return {}
    order = {group: place for place, group in enumerate(LONGEST)}
    launches = sorted(forms, key=lambda launch: order.get(launch.group, len(LONGEST)))
    context = multiprocessing.get_context("fork")
    following = context.Value("i", 0)
    end = time.monotonic() + PATIENCE_SECONDS
    died: dict[int, int] = {}
    whole = True
    while following.value < len(launches) and time.monotonic() < end:  # again if all have died
        count = min(MOST_PROCESSES, len(os.sched_getaffinity(0)), len(launches))
        current = context.Array("i", [-1] * count)
        arguments = target, launches, following, current
        processes = [context.Process(target=_compile, args=(*arguments, slot), daemon=True) for slot in range(count)]
        for process in processes:
            process.start()
        try:
            for process in processes:
                process.join(max(0.0, end - time.monotonic()))
            for index, process in zip(current[:], processes, strict=True):
                if index >= 0 and process.exitcode not in (None, -signal.SIGKILL):  # which is no fault of a compiler
                    died[id(launches[index])] = process.exitcode
        finally:  # also at Ctrl-C
            for process in processes:
                process.kill()
                process.join()
        whole = whole and not any(process.exitcode for process in processes)
    if whole:
        for mark in missing:
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
    return died


def _mark(launches: Launches, target: GPUTarget) -> Path:
    """The file that says that all of it is in the cache."""
    others = {sys.modules[launch.kernel.fn.__module__].__file__ for launch in launches.values()}  # also packages' own
    sources = sorted({*Path(kvern.kernels.__path__[0]).rglob("*.py"), *(Path(name) for name in others if name)})
    named = [ADDRESS.sub("", repr(form)) for form in launches]
    said = [*named, target, triton_key(), torch.__version__, *(source.read_bytes() for source in sources)]
    return Path(triton.knobs.cache.dir) / f"kvern-{hashlib.sha256(repr(said).encode()).hexdigest()}"


def _compile(target: GPUTarget, launches: Sequence[Launch], following: Any, current: Any, slot: int) -> None:
    """The work of a process: it compiles one kernel after another, and exits with 1 if one cannot be compiled.

    `current[slot]` is the one that it compiles now, -1 at the end.
    """
    end_with_parent()  # also when the engine is killed
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its processes
    from triton.backends.nvidia.driver import CudaLauncher

    torch.set_num_threads(1)
    triton.runtime.driver.set_active(TargetDriver(target))
    failed, known = False, set[str]()
    while True:
        with following.get_lock():
            index, following.value = following.value, following.value + 1
        current[slot] = index if index < len(launches) else -1
        if index >= len(launches):
            sys.exit(int(failed))
        try:
            kernel = launches[index].compile()
            if target.backend == "cuda" and kernel.hash not in known:
                known.add(kernel.hash)
                CudaLauncher(kernel.src, kernel.metadata)
        except Exception as error:
            logger.debug("a kernel does not compile: %s", error)
            failed = True
