"""Compiles the kernels that a model and its draft model need, in parallel, before weights are there; names the groups
that work.

Each is launched once on small inputs with the head sizes, widths and dtype of the model, in every form that a step can
take, so that what serving launches is compiled already. A kernel that does not compile or run is left to PyTorch, with
its group and a warning that names both, at every start.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from triton.compiler.errors import CompilationError

from kvern.kernel_list import Inputs, Kernel, kernels_of
from kvern.runner import ahead
from kvern.runner.kernel_processes import compile_in_processes
from kvern.spec.model import ModelSpec

logger = logging.getLogger("kvern")

THREADS = 8


def working_kernels(models: Sequence[tuple[ModelSpec, Inputs]]) -> list[frozenset[str]]:
    """Launch every kernel once and return, for each model, the groups all of whose kernels work on this device."""
    device = models[0][1].device
    if device.type == "cuda":
        ahead.finish()
        compile_in_processes(models)

    def launch(kernel: Kernel, spec: ModelSpec, inputs: Inputs, arguments: tuple[Any, ...]) -> None:
        call = kernel.make(spec, inputs, *arguments)
        # Launches of other threads lie between these, and some begin before their predecessors end: a kernel finds its
        # inputs made, and nobody gets their memory before it ended.
        _wait(device)
        call.launch()
        _wait(device)

    use = partial(torch.cuda.set_device, device) if device.type == "cuda" else None  # a thread begins at the first
    with ThreadPoolExecutor(THREADS, initializer=use) as pool:
        running = [
            [
                (kernel, pool.submit(launch, kernel, spec, inputs, arguments))
                for kernel in kernels_of(spec)
                for arguments in kernel.launched(spec, inputs)
            ]
            for spec, inputs in models
        ]
        broken = [_broken(launches) for launches in running]
    if device.type == "cuda":
        torch.cuda.empty_cache()
    first = {group: found for groups in reversed(broken) for group, found in groups.items()}
    for group, (names, error) in first.items():
        while isinstance(error, CompilationError) and error.__cause__ is not None:  # it says where, and that says why
            error = error.__cause__
        reason = (str(error) or type(error).__name__).splitlines()[0]
        logger.warning(
            "the kernels for %s do not work here (%s), PyTorch does their work: %s", group, ", ".join(names), reason
        )
    return [_known(*model) - frozenset(groups) for model, groups in zip(models, broken, strict=True)]


def _broken(launches: Sequence[tuple[Kernel, Future[None]]]) -> dict[str, tuple[list[str], BaseException]]:
    """The groups of those that fail, with their names and the first error of each group."""
    broken: dict[str, tuple[list[str], BaseException]] = {}
    for kernel, future in launches:
        error = future.exception()
        if error is not None:
            names, _ = broken.setdefault(kernel.group, ([], error))
            if kernel.name not in names:
                names.append(kernel.name)
    return broken


def _known(spec: ModelSpec, inputs: Inputs) -> frozenset[str]:
    """All groups that a model may launch on such a device."""
    groups = (kernel.group for kernel in kernels_of(spec))
    return frozenset(group for group in groups if inputs.hopper or not group.startswith("hopper"))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
