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

import kvern.attention.triton
from kvern.config import EngineConfig
from kvern.runner.loaded_model import Stored
from kvern.runner.recorded_kernels import record_launches

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


def recorded_at_start(
    models: Sequence[tuple[EngineConfig, torch.dtype, Stored, bool]], monkeypatch: pytest.MonkeyPatch
) -> dict[Specialisation, list[Any]]:
    """What a start compiles for models: with these options, of a dtype, and whether some drafts are verified."""
    with recorded(monkeypatch) as launched, monkeypatch.context() as patched:
        patched.setattr(kvern.attention.triton, "processors", lambda _: 1)  # as the engine counts a CPU's
        for config, dtype, model, drafts in models:
            record_launches(config, dtype, model, drafts=drafts)
    return launched


def zeroed(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The same with zeros, for what kernels would have written."""

    def made(*sizes: Any, **options: Any) -> torch.Tensor:
        tensor = make(*sizes, **options)
        return tensor if tensor.is_meta else tensor.zero_()

    return made
