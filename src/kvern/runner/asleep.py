"""The memory of an engine that falls asleep, on a CPU or a GPU."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from kvern.runner.memory import DeviceMemory


class MemoryAsleep(Protocol):
    """Memory that a process gives back and takes again. No step may run from `leave` until `enter` has ended."""

    size: int
    """The bytes of a GPU that go."""

    def leave(self) -> int:
        """Gives the memory back. Raises OSError if there is no place for the contents; then nothing was given back.

        Returns the bytes that this process still takes of its GPU; 0 on a CPU.
        """

    def enter(self) -> None:
        """Brings the contents back. Raises torch.OutOfMemoryError if another process has the memory of the GPU."""

    def forget(self, tensors: Sequence[Tensor]) -> None:
        """Leave the memory of tensors alone from now on, which may be freed."""


def memory_asleep(owner: object, memory: DeviceMemory, folder: Path, emptied: Sequence[Tensor] = ()) -> MemoryAsleep:
    """The memory of an engine that goes while it is asleep; on a GPU to be made before graphs are captured.

    `owner`: an object from which the tensors on the GPU are found. `memory`: of the engine's device. `folder`: where a
    CPU's memory waits. `emptied`: caches, which are empty then.
    """
    if memory.device.type == "cuda":
        from kvern.runner.device_asleep import DeviceMemoryAsleep

        return DeviceMemoryAsleep(owner, memory.device, emptied, memory.processes, memory.chunked)
    from kvern.cpu.asleep import SleepingMemory

    return SleepingMemory(folder, emptied)
