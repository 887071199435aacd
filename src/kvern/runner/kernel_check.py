"""Compiles the kernels that a model and its draft model need, in parallel, before weights are there; names the groups
that work.

Dummy steps of the models say which these are (`recorded_kernels.py`). Each form is compiled and loaded, so that nothing
is compiled when a request comes. A kernel that does not compile is left to PyTorch, with its group and a warning that
names both, at every start.
"""

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from triton.compiler.errors import CompilationError

from kvern.errors import ConfigError
from kvern.kernels.groups import MODULES
from kvern.kernels.recording import Launch, Launches
from kvern.runner import ahead
from kvern.runner.kernel_processes import compile_in_processes

logger = logging.getLogger("kvern")

THREADS = 8


def broken_groups(models: Sequence[Launches], device: torch.device) -> list[frozenset[str]]:
    """Compile and load every kernel and return, for each model, the groups of which some kernel does not work.

    `models`: what each launches on this device. Raises ConfigError if a kernel of another package does not compile,
    whose work nothing else does.
    """
    if device.type == "cuda":
        ahead.finish()
        compile_in_processes(models)
    use = partial(torch.cuda.set_device, device) if device.type == "cuda" else None  # a thread begins at the first
    with ThreadPoolExecutor(THREADS, initializer=use) as pool:
        running = [[(launch, pool.submit(_load, launch)) for launch in launches.values()] for launches in models]
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


def _load(launch: Launch) -> None:
    """Compile a kernel, and load it on the current GPU: there it shows whether the card has room for its memory."""
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
