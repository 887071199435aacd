"""Compiles what models and test modules launch, for a card that is not there, within its shared memory.

    python -m tests.kernels.compile_for 90 llama tests.kernels.test_moe
    python -m tests.kernels.compile_for 120 qwen3_moe llama:int4_zero --dtype float16 --sample
    python -m tests.kernels.compile_for gfx942 llama

The first argument is the compute capability: 80 is an A100, 89 an L40S, 90 an H100; or a card of AMD's: gfx942 is an
MI300, gfx950 an MI350. For these each kernel is compiled in a process of its own, since assembly that is not theirs
kills the compiler, and one whose registers do not suffice is an error, too. Triton's driver is replaced by one
that names it, and every launch becomes a compilation: what is compiled is what the wrappers really launch, with their
options. With --sample only the last launch of each kernel of a model, and one form of each kernel in all. Behind a
colon: the launches of layers that are quantized so. Exits with 1 and the errors if anything does not compile, or is
compiled wrongly for Hopper (`overwritten.py`).
"""

import argparse
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from kvern.kernels.groups import NVIDIA_GROUPS, group_of
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


def compile_apart(make: Callable[[], Any]) -> Any:
    """What a process of its own has compiled for a card of AMD's: its hash, and the shared memory of a program.

    Raises what the compiler said, or that it died, or that registers are written to memory.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            kernel = make()
            assembly = kernel.asm["amdgcn"]
            [spilled], [scratch] = (
                re.findall(rf"\.{name}:\s+(\d+)", assembly)
                for name in ("vgpr_spill_count", "private_segment_fixed_size")
            )
            said = f"{kernel.hash} {kernel.metadata.shared} {spilled} {scratch}"
        except BaseException as error:  # also what ends a process
            said = f"{type(error).__name__}: {error.__cause__ or error}"
        os.write(writer, said[-4000:].encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answer:
        said = answer.read().decode()
    _, status = os.waitpid(child, 0)
    found = re.fullmatch(r"(\w+) (\d+) (\d+) (\d+)", said)
    if found is None:
        raise RuntimeError(said.strip() or f"it killed the compiler ({status})")
    digest, *numbers = found.groups()
    shared, spilled, scratch = map(int, numbers)
    if spilled or scratch:
        raise MemoryError(f"{spilled} registers are written to memory, {scratch} bytes of it")
    return SimpleNamespace(hash=digest, metadata=SimpleNamespace(shared=shared))


def _form(kernel: JITFunction, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """A kernel and what it is compiled for: no process begins for what is known."""
    *_, binder = kernel.device_caches[0]
    _, specialisation, rest = binder(*arguments, **options)
    return kernel, str(specialisation), str(rest)


def _is_nvidias(kernel: JITFunction) -> bool:
    group = group_of(kernel.fn.__module__, kernel.fn.__name__)
    return group.startswith("hopper") or group in NVIDIA_GROUPS or kernel.fn.__module__.endswith("_hopper")


def target_of(card: int | str) -> GPUTarget:
    """A card by its compute capability, or AMD's name."""
    return GPUTarget("cuda", card, 32) if isinstance(card, int) else GPUTarget("hip", card, 64)


def main() -> int:
    """Compile every launch; the number of kernels is printed, and each that fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "card", type=lambda name: int(name) if name.isdigit() else name, choices=sorted(SHARED_MEMORY, key=str)
    )
    parser.add_argument("launches", nargs="+", help="a model, or one with codes, or a module with LAUNCHES")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--sample", action="store_true")
    parser.add_argument("--every", type=int, default=1, help="of the kernels of a model, every so many")
    arguments = parser.parse_args()
    card = arguments.card
    amd = isinstance(card, str)
    triton.runtime.driver.set_active(TargetDriver(target_of(card)))
    limit = SHARED_MEMORY[card] << 10
    compiled: dict[str, Any] = {}
    forms: dict[Any, Any] = {}
    launch = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        form = self if arguments.sample or not amd else _form(self, args, options)
        if (arguments.sample or amd) and form in forms:
            return forms[form]
        forms[form] = None
        if amd and _is_nvidias(self):
            return None
        run = partial(launch, self, *args, grid=grid, warmup=True, **options)
        kernel = forms[form] = compile_apart(run) if amd else run()
        if kernel.hash in compiled:
            return kernel
        compiled[kernel.hash] = kernel
        wrong = overwritten(kernel.asm["ptx"], kernel.asm["cubin"]) if card == 90 else []
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
    print(f"compiled {len(compiled)} kernels for {card if amd else f'sm_{card}'}, {errors} errors")
    return int(errors > 0)


if __name__ == "__main__":
    sys.exit(main())
