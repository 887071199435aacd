"""Ranks that compute one model together: processes, each with a device and a share of the weights."""

import importlib
import os
import socket
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch
from torch import Tensor

from kvern.sockets import address_towards, interface_of

LOOPBACK = "127.0.0.1"


class Share(NamedTuple):
    """What a rank holds of a dimension that has `whole` entries in a checkpoint."""

    held: range
    whole: int


class Ranks:
    """Rank `rank` of `size`. All of them call the same methods in the same order, on tensors of the same shapes.

    Tensors stay on the ranks' devices; on GPUs no method waits, and a CUDA graph may hold what it does. A method raises
    RuntimeError where another rank has ended, or on a CPU does not come within the time given to `connect`.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self._groups: list[Any] = []  # PyTorch's own description of it lacks these methods
        weakref.finalize(self, self._groups.clear)  # its threads cannot end any more once Python has

    def connect(
        self, meeting: Path | str, device: torch.device, seconds: float, listener: socket.socket | None = None
    ) -> None:
        """Meet the others, who name the same place; wait for them so long at most.

        That is a file, which does not exist before, of ranks on one machine, which talk over the loopback interface; or
        tcp://HOST:PORT, where the first rank has the `listener`, and all talk over the network that leads there. CPUs
        talk through gloo, and wait so long each time; GPUs talk through NCCL.
        """
        if self.size == 1:
            return
        distributed: Any = importlib.import_module("torch.distributed")
        own, place = LOOPBACK, urlsplit(str(meeting))
        if place.scheme == "tcp":
            own = address_towards(place.hostname or "")
            descriptor = None if listener is None else listener.detach()
            store = distributed.TCPStore(
                place.hostname,
                place.port,
                self.size,
                listener is not None,
                timedelta(seconds=seconds),
                wait_for_workers=False,
                master_listen_fd=descriptor,
            )
        else:
            store = distributed.FileStore(str(meeting), self.size)
        store.set_timeout(timedelta(seconds=seconds))
        if device.type == "cuda":
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo" if own == LOOPBACK else interface_of(own))
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=seconds)
            self._groups.append(distributed.ProcessGroupNCCL(store, self.rank, self.size, options))
            return
        gloo = distributed.ProcessGroupGloo
        gloo_options = gloo._Options()
        gloo_options._timeout = timedelta(seconds=seconds)
        gloo_options._devices = [gloo.create_device(hostname=own)]
        self._groups.append(gloo(store, self.rank, self.size, gloo_options))

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


ALONE = Ranks()
