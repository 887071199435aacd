"""What is said of a kernel in one place: which models launch it, on what, what it returns, and what it must move."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton

from kvern.model_spec import ModelSpec

Result = torch.Tensor | Sequence[torch.Tensor]


class Inputs:
    """Makes the tensors that kernels are launched on: random numbers, zeros, or memory that nobody reads.

    `dtype` and `block_size` are the model's and the cache's; `adapter_rank` is the highest, 0: there are no adapters.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        fill: Literal["random", "zeros", "empty"] = "random",
        *,
        block_size: int = 16,
        adapter_rank: int = 0,
    ) -> None:
        self.device, self.dtype, self.block_size, self.adapter_rank = device, dtype, block_size, adapter_rank
        self._fill = fill
        self._generator = torch.Generator(device).manual_seed(0)

    @property
    def processors(self) -> int:
        """Of the device; without one to ask, those of an H100."""
        on_gpu = self.device.type == "cuda"
        return torch.cuda.get_device_properties(self.device).multi_processor_count if on_gpu else 132

    @property
    def hopper(self) -> bool:
        """What is launched is compiled for a GPU of compute capability 9.0."""
        try:
            target = triton.runtime.driver.active.get_current_target()
        except RuntimeError:  # there is no driver
            return False
        return bool(target.backend == "cuda" and target.arch == 90)

    def numbers(self, *shape: int, dtype: torch.dtype | None = None, deviation: float = 1.0) -> torch.Tensor:
        """A tensor of the model's dtype, or another."""
        dtype = dtype or self.dtype
        if self._fill == "random":
            return torch.randn(shape, generator=self._generator, dtype=dtype, device=self.device) * deviation
        make = torch.empty if self._fill == "empty" else torch.zeros
        return make(shape, dtype=dtype, device=self.device)

    def integers(self, values: Iterable[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """These, on the device."""
        return torch.tensor(list(values), dtype=dtype, device=self.device)

    def permutation(self, count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """The numbers below `count`, in a mixed order."""
        order = torch.randperm(count, generator=torch.Generator().manual_seed(count))
        return order.to(self.device, dtype)

    def zeros(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Zeros, on the device."""
        return torch.zeros(shape, dtype=dtype, device=self.device)


@dataclass(frozen=True)
class Call:
    """A kernel with its inputs. `reference` says in float64 what `launch` is to return, and is called before it.

    `sizes` are shown; `bytes` and `operations` are what the launch moves and computes at least.
    """

    sizes: str
    launch: Callable[[], Result]
    reference: Callable[[], Result]
    bytes: float = 0
    operations: float = 0


def never(spec: ModelSpec, inputs: Inputs) -> Iterable[tuple[Any, ...]]:
    """The sizes of a kernel that is not timed."""
    return ()


@dataclass(frozen=True)
class Kernel:
    """A kernel and the calls that matter of it.

    `group` is what is left to PyTorch if the kernel does not work. `make(spec, inputs, *arguments)` is a call;
    `launched(spec, inputs)` gives the arguments of every form that a model launches, on small inputs, `timed` those of
    the sizes whose speed counts.
    """

    name: str
    group: str
    make: Callable[..., Call]
    launched: Callable[[ModelSpec, Inputs], Iterable[tuple[Any, ...]]]
    timed: Callable[[ModelSpec, Inputs], Iterable[tuple[Any, ...]]] = never
