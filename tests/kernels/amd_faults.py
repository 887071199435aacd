"""Kernels that no card of AMD's runs: with foreign assembly, too many registers, and too much shared memory."""

import torch
import triton
import triton.language as tl


@triton.jit
def _foreign_kernel(x):
    tl.store(x, tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tl.load(x)], tl.float32, is_pure=True, pack=1))


@triton.jit
def _spilling_kernel(x):
    place = tl.arange(0, 32 * 1024)
    numbers = tl.load(x + place)
    tl.debug_barrier()
    tl.store(x + place, numbers / tl.sum(numbers, axis=0))


@triton.jit
def _large_kernel(x, y):
    outer = tl.arange(0, 64)
    inner = tl.arange(0, 128)
    total = tl.zeros((64, 64), tl.float32)
    for step in range(8):
        left = tl.load(x + outer[:, None] * 1024 + step * 128 + inner[None, :])
        right = tl.load(x + (step * 128 + inner)[:, None] * 64 + outer[None, :])
        total = tl.dot(left, right, total)
    tl.store(y + outer[:, None] * 64 + outer[None, :], total)


NUMBERS = torch.empty(1 << 15)
HALF = torch.empty(1 << 16, dtype=torch.float16)
LAUNCHES = [
    lambda: _foreign_kernel[(1,)](NUMBERS),
    lambda: _spilling_kernel[(1,)](NUMBERS, num_warps=1),
    lambda: _large_kernel[(1,)](HALF, NUMBERS, num_warps=8, num_stages=4),
]
