"""Which specialisations of kernels are launched: on a GPU each is compiled when it first comes."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

Specialisation = tuple[str, str]
"""A kernel's name, and what of its arguments and options it is compiled for."""


@cache
def _binder(function: InterpretedFunction[Any]) -> Any:
    compiled: JITFunction[Any] = JITFunction(function.fn, **function.kwargs)
    return create_function_from_signature(compiled.signature, compiled.params, CUDABackend(GPUTarget("cuda", 90, 32)))


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[Specialisation, list[Any]]]:
    """What is launched inside, with the arguments of the first launch of each; nothing is run."""
    launched: dict[Specialisation, list[Any]] = {}

    def record(self: InterpretedFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        _, specialisation, rest = _binder(self)(*args, **options)
        launched.setdefault((self.fn.__name__, f"{specialisation} {rest}"), list(args))

    with monkeypatch.context() as patched:
        patched.setattr(InterpretedFunction, "run", record)
        yield launched
