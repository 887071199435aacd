"""Kernels for GPUs, in Triton and Gluon, and nothing else: no layers, no requests.

Each belongs to a group (`groups.py`); `tests/support/kernel_list/` says what it returns. `launch.py` starts kernels.
Kernels must fit 99 KiB of shared memory, except those in files that end in `_hopper`, which need compute capability
9.0. Arguments that several kernels share are one NamedTuple (`Launcher`). Begin with `norm.py`, then
`attention_arguments.py` and `attention_decode.py`. Rules:

- A kernel may start before the kernel before it has ended (programmatic dependent launch): it calls `wait_for_previous`
  before it reads what that kernel writes.
- Addresses of a loop's next loads must not depend on loads of the same iteration.
- A loop whose products take weights out of registers calls `ended` (`launch.py`) first in each iteration.
"""
