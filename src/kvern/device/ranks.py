"""Ranks that compute one model together: processes of one machine, each with a device and a share of the weights."""

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvern.device.process_group import connect
from kvern.device.stages import WHOLE, Stage


class Share(NamedTuple):
    """What a rank holds of a dimension that has `whole` entries in a checkpoint."""

    held: range
    whole: int


class Ranks:
    """Rank `rank` of `size`, which share the layers of a `stage`.

    All of them call the same methods in the same order, on tensors of the same shapes.

    Tensors stay on the ranks' devices; on GPUs no method waits, and a CUDA graph may hold what it does. A method raises
    RuntimeError where another rank has ended, or on a CPU does not come within the time given to `connect`.
    """

    def __init__(self, rank: int = 0, size: int = 1, stage: Stage = WHOLE) -> None:
        self.rank, self.size, self.stage = rank, size, stage
        self._groups: list[Any] = []
        weakref.finalize(self, self._groups.clear)  # its threads cannot end any more once Python has

    def connect(self, file: Path, device: torch.device, seconds: float) -> None:
        """Meet the others, who name the same file, which does not exist before; wait for them so long at most.

        CPUs talk through gloo over the loopback interface, and wait so long each time; GPUs talk through NCCL.
        """
        if self.size > 1:
            self._groups.append(connect(_of(file, "stage", self.stage.index), self.rank, self.size, device, seconds))
        self.stage.connect(_of(file, "rank", self.rank), device, seconds)

    @property
    def processes(self) -> int:
        """How many compute the model, those of all stages."""
        return self.size * self.stage.count

    def share(self, count: int, copies: int = 1) -> Share:
        """This rank's of a dimension cut into parts of `count` entries; `copies` neighbours hold the same part."""
        first = self.rank // copies * count
        return Share(range(first, first + count), count * self.size // copies)

    def padded_share(self, whole: int) -> tuple[int, Share]:
        """Of a dimension cut into parts of one size, of which the last may hold less: that size, and the share."""
        count = -(-whole // self.size)
        first = min(self.rank * count, whole)
        return count, Share(range(first, min(first + count, whole)), whole)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of what all ranks have, on each of them, in the same order of additions; `x` may be overwritten."""
        x = x.contiguous()
        self._groups[0].allreduce([x]).wait()
        return x

    def beside(self, x: Tensor) -> Tensor:
        """`x [N, width]` of all ranks side by side, on each of them: `[N, size * width]`."""
        parts = list(x.new_empty(self.size, *x.shape).unbind())
        self._groups[0].allgather([parts], [x.contiguous()]).wait()
        return torch.cat(parts, -1)

    def first(self, x: Tensor) -> Tensor:
        """What the first rank has, on each of them; `x`, contiguous, is overwritten on the others."""
        self._groups[0].broadcast([x]).wait()
        return x


def _of(file: Path, kind: str, number: int) -> Path:
    return file.with_name(f"{file.name}-{kind}-{number}")


def ranks_of(number: int, size: int, layers: Sequence[range]) -> Ranks:
    """Process `number` of stages with these layers, each of `size` ranks."""
    index, rank = divmod(number, size)
    stage = Stage(index, len(layers), layers[index]) if len(layers) > 1 else WHOLE
    return Ranks(rank, size, stage)


ALONE = Ranks()
