"""Which specialisations of kernels are launched: on a GPU each is compiled when it first comes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

from kvern.kernel_list import KERNELS, Inputs
from kvern.spec.model import ModelSpec

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


def listed(
    models: Sequence[tuple[ModelSpec, Inputs]], monkeypatch: pytest.MonkeyPatch
) -> dict[Specialisation, list[Any]]:
    """What a start launches."""
    with recorded(monkeypatch) as launched:
        for spec, inputs in models:
            if not spec.attends_to_latents:  # else of an H100, as in the engine
                inputs.processors = 1  # as the engine counts a CPU's
            for kernel in KERNELS:
                for arguments in kernel.launched(spec, inputs):
                    kernel.make(spec, inputs, *arguments).launch()
    return launched


def zeroed(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The same with zeros, for what kernels would have written."""

    def made(*sizes: Any, **options: Any) -> torch.Tensor:
        tensor = make(*sizes, **options)
        return tensor if tensor.is_meta else tensor.zero_()

    return made
