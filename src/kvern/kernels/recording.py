"""Launches of kernels that are noted and not made: what a model launches is known without a GPU and without weights.

Tensors are on PyTorch's device "meta": they have shapes, strides and dtypes, and no memory. So a recorded launch can be
compiled by any process, and on a GPU that has no memory left.
"""

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton
from triton.runtime.jit import JITFunction

from kvern.kernels.groups import group_of

Specialisation = tuple[str, str]
"""The full name of a kernel, and what of its arguments and options it is compiled for."""


class Launch(NamedTuple):
    """One form of a kernel, with the arguments of the first launch that needs it."""

    kernel: Any
    arguments: tuple[Any, ...]
    grid: Any
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """The kernel's name."""
        name: str = self.kernel.fn.__name__
        return name

    @property
    def group(self) -> str:
        """The kernel's group."""
        return group_of(self.kernel.fn.__module__, self.name)

    def compile(self) -> Any:
        """Return the compiled kernel, from Triton's cache if it is there. Raises what Triton's compiler raises."""
        return self.kernel.run(*self.arguments, grid=self.grid, warmup=True, **self.options)


Launches = dict[Specialisation, Launch]


@contextmanager
def recording() -> Iterator[Launches]:
    """Have this thread's launches of kernels noted, each form once, and not made. Other threads launch as before."""
    launches: Launches = {}
    known: set[Hashable] = set()
    launch, thread = JITFunction.run, threading.get_ident()

    def record(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if threading.get_ident() != thread:
            return launch(self, *arguments, grid=grid, warmup=warmup, **options)
        device = triton.runtime.driver.active.get_current_device()
        *_, binder = self.device_caches[device]
        with torch._C.DisableTorchFunction():  # no mode is asked for each tensor's address
            _, specialisation, rest = binder(*arguments, **options)
        # Cheaper than a text; numbers and truth values that are equal are different forms.
        key = id(self), tuple(specialisation), *(type(value) for _, value in specialisation), *rest.items()
        if key not in known:
            known.add(key)
            launches[self._fn_name, f"{specialisation} {rest}"] = Launch(self, arguments, grid, options)
        return None

    JITFunction.run = record
    try:
        yield launches
    finally:
        JITFunction.run = launch
