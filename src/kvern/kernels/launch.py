"""Launches of kernels: with few instructions of the host, overlapping on the device, within its shared memory.

On NVIDIA GPUs from compute capability 9.0 on, a kernel may be launched before its predecessor has finished
(programmatic dependent launch). It fetches what the predecessor does not write (weights), then waits. So the gap
between two launches, and the slow first fetch of each, disappear. Every kernel launched so must wait before it reads or
writes anything else.
"""

import functools
import os
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import is_cuda
from triton.runtime.jit import JITFunction

import kvern.kernels.compiler  # noqa: F401 (before kernels are defined)

__all__ = [
    "INTERPRETED",
    "Launcher",
    "Rows",
    "architecture",
    "capability",
    "cdiv",
    "ended",
    "gdc_launch_dependents",
    "gdc_wait",
    "has_ptx",
    "next_power_of_2",
    "overlaps",
    "processors",
    "rows_of",
    "shared_memory",
    "stages",
    "wait_for_previous",
]

SHARED_MEMORY: Mapping[int | str, int] = {
    80: 163,
    86: 99,
    87: 163,
    89: 99,
    90: 227,
    100: 227,
    103: 227,
    120: 99,
    121: 99,
    "gfx90a": 64,
    "gfx942": 64,
    "gfx950": 160,
}
"""KiB that one program may use, by `architecture`: of cards that are compiled for without one to ask, and of AMD's."""
AMD_SHARED_MEMORY = 64
"""KiB of AMD's cards that are not in the table."""
ASYNCHRONOUS = (90, 100, 103)
"""Compute capabilities whose products read tiles asynchronously, which takes one more stage of shared memory."""

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
"""True if Triton interprets kernels, which is read when they are defined: there is no assembly then."""


@triton.constexpr_function
def has_ptx() -> bool:
    """True where a kernel is compiled for a card of NVIDIA's, whose assembly it may have; others take a plain form."""
    return not INTERPRETED.value and bool(is_cuda())


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr):
    """Let the next kernel start, then wait until the previous one has written everything, if kernels overlap."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def ended(total):
    """The sums of a loop's products, once they are there: at a step's begin, before it makes weights in registers.

    Without it Triton (3.6) leaves products of the step before under way that still read such registers, and the step
    overwrites them (compute capability 9.0).
    """
    if has_ptx():
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [total], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return total


@functools.cache
def architecture(device: torch.device) -> int | str:
    """The compute capability as 90, of AMD's cards the name as "gfx942"; without a device that of the card that is
    compiled for. 0: there is none."""
    if device.type == "cuda":
        if torch.version.hip is not None:
            return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
        major, minor = torch.cuda.get_device_capability(device)
        return 10 * major + minor
    if os.environ.get("TRITON_INTERPRET") == "1":
        return 0
    target = triton.runtime.driver.active.get_current_target()
    return int(target.arch) if target.backend == "cuda" else str(target.arch)


def capability(device: torch.device) -> int:
    """The compute capability as 90; without a device that of the card that is compiled for. 0: there is none, or it is
    a card of AMD's."""
    found = architecture(device)
    return found if isinstance(found, int) else 0


def is_amd(device: torch.device) -> bool:
    """Returns whether the device, or without one the card that is compiled for, is one of AMD's."""
    return isinstance(architecture(device), str)


def eleven_bits(device: torch.device) -> str:
    """Returns the precision of products of float32 factors that keeps 11 bits of them at least, as Triton names it."""
    return "bf16x3" if is_amd(device) and architecture(device) != "gfx942" else "tf32"


@functools.cache
def processors(device: torch.device) -> int:
    """Returns the number of the device's processors; an H100's if a kernel is only compiled."""
    gpu = _gpu(device)
    return 132 if gpu is None else int(gpu.multi_processor_count)


def _gpu(device: torch.device) -> Any:
    """The properties of a GPU; of the current one for tensors without memory, which stand for its own. None: no GPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device)
    return torch.cuda.get_device_properties() if device.type == "meta" and torch.cuda.is_available() else None


def overlaps(device: torch.device) -> bool:
    """True if kernels on this device are launched before their predecessors end."""
    return capability(device) >= 90


@functools.cache
def stages(device: torch.device, wanted: int, tile_bytes: int, beside: int = 0) -> int:
    """Returns the most of `wanted` stages of `tile_bytes` that fit in the card's shared memory with `beside` other
    bytes."""
    limit = shared_memory(device)
    if limit is None:
        return wanted
    kept = (limit - beside) // tile_bytes
    return max(1, min(wanted, kept if architecture(device) in ASYNCHRONOUS else kept + 1))


@functools.cache
def shared_memory(device: torch.device) -> int | None:
    """Bytes of shared memory that one program may use on the card, or on that which is compiled for. None: no card."""
    known = architecture(device)
    if isinstance(known, str):
        return SHARED_MEMORY.get(known, AMD_SHARED_MEMORY) << 10
    if known == 0:
        return None
    gpu = _gpu(device)
    return SHARED_MEMORY[known] << 10 if gpu is None else int(gpu.shared_memory_per_block_optin)


def cdiv(dividend: int, divisor: int) -> int:
    """Divided and rounded up. Triton's function, which its kernels can call too, takes ten times as long."""
    return -(-dividend // divisor)


def next_power_of_2(number: int) -> int:
    """The least power of two that is not below; likewise."""
    return 1 << (number - 1).bit_length()


class Rows(NamedTuple):
    """A tensor whose rows may have gaps, as one argument of a kernel, which adds `row * stride` to the pointer.

    In the kernel the stride has 32 bits where it fits: a row that is multiplied by it has 64, unless there are few.
    """

    pointer: Any
    stride: Any


def rows_of(x: torch.Tensor) -> Rows:
    """Returns the rows of a tensor along its first dimension."""
    return Rows(x, x.stride(0))


class Launcher:
    """A kernel that is launched as Triton's are, in half the host's time: what was compiled before is looked up first.

    Its `tl.constexpr` parameters come last, and its first argument is a tensor, or tiles of one that TMA moves, or a
    tuple that begins with one. Where the last parameter is OVERLAP, callers leave it out: kernels on the device may
    start early, or not. Triton compiles for types, aligned pointers, integers that are 1 or multiples of 16,
    what is None, and the shape of tiles; so much of the arguments is in the key.

    Arguments that travel together are one NamedTuple, whose fields are specialised as arguments are: what a kernel does
    not specialise is in a tuple of its own, which `do_not_specialize` names. A `tl.constexpr` parameter may be a
    NamedTuple of numbers, whose fields are no sizes for `tl.zeros`, but for all else (`tl.full`). No field is named as
    a method of tuples (`count`, `index`), nor `values` or `type`. A tuple that a kernel makes holds no constants. Tiles
    that TMA moves are arguments of their own.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[tuple[Hashable, ...], Any] = {}
        self._variable = 0
        self._may_overlap = getattr(kernel, "arg_names", [])[-1:] == ["OVERLAP"]
        if isinstance(kernel, JITFunction):  # not the interpreter's
            constant = [parameter.is_constexpr for parameter in kernel.params]
            self._variable = constant.index(True) if True in constant else len(constant)
            assert all(constant[self._variable :]), f"{kernel} has constants before variables"

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        first = arguments[0]
        while isinstance(first, tuple):
            first = first[0]
        tensor = first if isinstance(first, torch.Tensor) else first.base
        if self._may_overlap:
            overlap = overlaps(tensor.device)
            arguments = (*arguments, overlap)
            if overlap:  # other cards of NVIDIA's leave it out, and AMD's know no such option
                options["launch_pdl"] = True
        device = tensor.get_device()
        if device < 0 or not self._variable:
            self._kernel[grid](*arguments, **options)
            return
        key = [device, arguments[self._variable :], *options.items()]
        _add_kinds(key, arguments[: self._variable])
        known = tuple(key)
        compiled = self._compiled.get(known)
        if compiled is None:
            self._compiled[known] = self._kernel[grid](*arguments, **options)
            return
        stream = torch._C._cuda_getCurrentRawStream(device)
        sizes = (*grid, 1, 1)[:3]
        compiled.run(
            *sizes, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments
        )  # no metadata and no hooks: nobody traces launches


def _add_kinds(key: list[Hashable], arguments: tuple[Any, ...]) -> None:
    """Adds to a key what Triton compiles for, of each argument and of each field of one that is a tuple."""
    for value in arguments:
        if isinstance(value, torch.Tensor):
            key.append(value.dtype if value.data_ptr() & 15 == 0 else (value.dtype,))
        elif isinstance(value, int):
            key.append((value == 1, value & 15 == 0, value >> 31))
        elif value is None:
            key.append(None)
        elif isinstance(value, tuple):
            key.append(len(value))
            _add_kinds(key, value)
        elif not isinstance(value, float):
            key.append((value.base.dtype, *value.block_shape, value.layout))
