"""Small tensors between host and device, without waiting. On "meta" they have a shape and no numbers."""

from collections.abc import Callable, Sequence

import numpy as np
import torch


def upload(values: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers of the host as a tensor [N] on the device, without waiting for it."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    if device.type == "meta":
        return torch.empty(len(values), dtype=dtype, device=device)
    pinned = torch.empty(len(values), dtype=dtype, pin_memory=True)  # PyTorch takes longer to make it of values
    return pinned.copy_(torch.tensor(values, dtype=dtype)).to(device, non_blocking=True)


def fetch(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host, which arrives when the device's work so far is done."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def reader(integers: torch.Tensor) -> Callable[[], list[int]]:
    """Reads integers [N] of the device as they are now, when it is called: it waits for what was asked for so far."""
    copy = fetch(integers)
    if integers.device.type == "cpu":
        return copy.tolist
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()

    def read() -> list[int]:
        done.synchronize()
        return copy.tolist()

    return read


def send(values: "np.ndarray[tuple[int], np.dtype[np.int32]]", device: torch.device) -> torch.Tensor:
    """A copy on the device, which is not waited for."""
    if device.type == "cpu":
        return torch.from_numpy(values)
    if device.type == "meta":
        return torch.empty(len(values), dtype=torch.int32, device=device)
    pinned = torch.empty(len(values), dtype=torch.int32, pin_memory=True)
    pinned.numpy()[:] = values
    return pinned.to(device, non_blocking=True)
