"""Compiles the launches of test modules for an H100/H200 (sm_90) on a machine without a GPU.

    python -m tests.kernels.compile_sm90 tests.kernels.test_norm ...

Triton's driver is replaced by one that names the target, and every launch becomes a compilation: what is compiled is
what the wrappers really launch, with their options. Exits with 1 and the first error if anything does not compile.
"""

import importlib
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction


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


def main(modules: list[str]) -> int:
    """Compile every launch; the number of kernels is printed."""
    triton.runtime.driver.set_active(TargetDriver())
    compiled = set()
    launch = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        compiled.add(kernel.hash)
        return kernel

    JITFunction.run = compile_only
    for name in modules:
        for index, start in enumerate(importlib.import_module(name).LAUNCHES):
            try:
                start()
            except Exception as error:
                print(f"{name} LAUNCHES[{index}] does not compile: {type(error).__name__}: {error}")
                return 1
    print(f"compiled {len(compiled)} kernels for sm_90")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
