"""Compiles what a model launches, or a test module's launches, for an H100/H200 (sm_90) on a machine without a GPU.

    python -m tests.kernels.compile_sm90 llama
    python -m tests.kernels.compile_sm90 tests.kernels.test_moe

Triton's driver is replaced by one that names the target, and every launch becomes a compilation: what is compiled is
what the wrappers really launch, with their options. Exits with 1 and the first error if anything does not compile.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from kvern.kernel_list import KERNELS, Inputs
from tests.kernels.models import LARGE_MODELS, spec_of


class TargetDriver:
    """What Triton asks a driver for while it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def launches(name: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Those of the list for a model, on memory that nobody reads; or LAUNCHES of a module."""
    if name not in LARGE_MODELS:
        for index, launch in enumerate(importlib.import_module(name).LAUNCHES):
            yield f"{name} LAUNCHES[{index}]", launch
        return
    spec = spec_of(name, LARGE_MODELS)
    inputs = Inputs(torch.device("cpu"), torch.bfloat16, "empty", adapter_rank=64)
    for kernel in KERNELS:
        for arguments in (*kernel.launched(spec, inputs), *kernel.timed(spec, inputs)):
            yield f"{kernel.name} {arguments}", kernel.make(spec, inputs, *arguments).launch


def main(name: str) -> int:
    """Compile every launch; the number of kernels is printed."""
    triton.runtime.driver.set_active(TargetDriver())
    compiled = set()
    launch = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        compiled.add(kernel.hash)
        return kernel

    JITFunction.run = compile_only
    for label, start in launches(name):
        try:
            start()
        except Exception as error:
            print(f"{label} does not compile: {type(error).__name__}: {error}")
            return 1
    print(f"compiled {len(compiled)} kernels for sm_90")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
