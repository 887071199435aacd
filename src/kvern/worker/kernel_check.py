"""Compiles the kernels that a model needs, in parallel, before its weights are there; names the groups that work.

Each is launched once on small inputs with the head sizes, widths and dtype of the model, in every form that a step can
take, so that what serving launches is compiled already. A kernel that does not compile or run is left to PyTorch, with
a warning that names its group.
"""

import logging
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from kvern.kernel_list import Inputs, Kernel, kernels_of
from kvern.model_spec import ModelSpec
from kvern.worker import ahead
from kvern.worker.kernel_processes import compile_in_processes

logger = logging.getLogger("kvern")

THREADS = 8


def working_kernels(spec: ModelSpec, inputs: Inputs) -> frozenset[str]:
    """Launch every kernel once and return the groups all of whose kernels work on this device."""
    device = inputs.device
    if device.type == "cuda":
        ahead.finish()
        compile_in_processes(spec, inputs)

    def launch(kernel: Kernel, arguments: tuple[Any, ...]) -> None:
        call = kernel.make(spec, inputs, *arguments)
        # Launches of other threads lie between these, and some begin before their predecessors end: a kernel finds its
        # inputs made, and nobody gets their memory before it ended.
        _wait(device)
        call.launch()
        _wait(device)

    use = partial(torch.cuda.set_device, device) if device.type == "cuda" else None  # a thread begins at the first
    with ThreadPoolExecutor(THREADS, initializer=use) as pool:
        running = [
            (kernel.group, pool.submit(launch, kernel, arguments))
            for kernel in kernels_of(spec)
            for arguments in kernel.launched(spec, inputs)
        ]
        broken: dict[str, BaseException] = {}
        for group, future in running:
            error = future.exception()
            if error is not None:
                broken.setdefault(group, error)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    for name, error in broken.items():
        reason = (str(error) or type(error).__name__).splitlines()[0]
        logger.warning("the kernels for %s do not work here, PyTorch does their work: %s", name, reason)
    known = (kernel.group for kernel in kernels_of(spec))
    return frozenset(group for group in known if inputs.hopper or not group.startswith("hopper")) - frozenset(broken)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
