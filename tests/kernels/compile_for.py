"""Compiles what models and test modules launch, for a card that is not there, within its shared memory.

    python -m tests.kernels.compile_for 90 llama tests.kernels.test_moe
    python -m tests.kernels.compile_for 120 qwen3_moe llama:int4_zero --dtype float16 --sample

The first argument is the compute capability: 80 is an A100, 89 an L40S, 90 an H100. Triton's driver is replaced by one
that names it, and every launch becomes a compilation: what is compiled is what the wrappers really launch, with their
options. With --sample only the last launch of each kernel of a model, and one form of each kernel in all. Behind a
colon: the launches of layers that are quantized so. Exits with 1 and the errors if anything does not compile, or is
compiled wrongly for Hopper (`overwritten.py`).
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from kvern.kernels.launch import SHARED_MEMORY
from kvern.runner.kernel_check import TargetDriver
from tests.kernels.models import LARGE_MODELS, spec_of
from tests.kernels.overwritten import overwritten
from tests.support.kernel_list import KERNELS, Inputs, codes, packed_experts, packed_hopper, quantized, ranks, rounding
from tests.support.kernel_list.quantized import kinds_of_forms

QUANTIZED = tuple(
    kernel for module in (quantized, codes, packed_hopper, packed_experts, rounding, ranks) for kernel in module.KERNELS
)


def launches(what: str, dtype: torch.dtype, sample: bool, every: int = 1) -> Iterator[tuple[str, Callable[[], object]]]:
    """Those of every so many kernels of the list for a model, on memory that nobody reads; or LAUNCHES of a module."""
    name, _, codes = what.partition(":")
    if name not in LARGE_MODELS:
        for index, launch in enumerate(importlib.import_module(name).LAUNCHES):
            yield f"{name} LAUNCHES[{index}]", launch
        return
    spec = spec_of(name, LARGE_MODELS)
    packed = kinds_of_forms(spec, dtype, (codes,) if codes else ())
    of_ranks: dict[str, Any] = {"ranks": (1, 2), "dp_attention": (1, 2)}
    inputs = Inputs(torch.device("cpu"), dtype, "empty", adapter_rank=64, packed=packed, **of_ranks)
    for kernel in (QUANTIZED if codes else KERNELS)[::every]:
        forms = [*kernel.launched(spec, inputs), *kernel.timed(spec, inputs)]
        for arguments in forms[-1:] if sample else forms:
            yield f"{what} {kernel.name} {arguments}", kernel.make(spec, inputs, *arguments).launch


def main() -> int:
    """Compile every launch; the number of kernels is printed, and each that fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("capability", type=int, choices=sorted(SHARED_MEMORY))
    parser.add_argument("launches", nargs="+", help="a model, or one with codes, or a module with LAUNCHES")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--sample", action="store_true")
    parser.add_argument("--every", type=int, default=1, help="of the kernels of a model, every so many")
    arguments = parser.parse_args()
    triton.runtime.driver.set_active(TargetDriver(GPUTarget("cuda", arguments.capability, 32)))
    limit = SHARED_MEMORY[arguments.capability] << 10
    compiled: dict[str, Any] = {}
    forms: dict[JITFunction, Any] = {}
    launch = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if arguments.sample and self in forms:
            return forms[self]
        kernel = forms[self] = launch(self, *args, grid=grid, warmup=True, **options)
        if kernel.hash in compiled:
            return kernel
        compiled[kernel.hash] = kernel
        wrong = overwritten(kernel.asm["ptx"], kernel.asm["cubin"]) if arguments.capability == 90 else []
        if wrong:
            raise RuntimeError(f"registers are overwritten under a product: {wrong[0]}")
        if kernel.metadata.shared > limit:
            raise MemoryError(f"{kernel.metadata.shared} bytes of shared memory, and the card has {limit}")
        return kernel

    JITFunction.run = compile_only
    errors = 0
    dtype = getattr(torch, arguments.dtype)
    for what in arguments.launches:
        for label, start in launches(what, dtype, arguments.sample, arguments.every):
            try:
                start()
            except Exception as error:
                errors += 1
                print(f"{label} does not compile: {type(error).__name__}: {error}")
    print(f"compiled {len(compiled)} kernels for sm_{arguments.capability}, {errors} errors")
    return int(errors > 0)


if __name__ == "__main__":
    sys.exit(main())
