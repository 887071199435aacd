"""Groups of processes that exchange tensors: through gloo on CPUs, through NCCL on GPUs."""

import contextlib
import ctypes
import hashlib
import importlib
import os
import socket
import threading
import weakref
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from kvern.io.sockets import address_towards, interface_of

LOOPBACK = "127.0.0.1"
ATTEMPTS = 5
"""The most attempts to connect members on CPUs."""
MEETS = timedelta(seconds=10)
"""For which they wait for each other in one of them, once all are there."""
PROOF = 32
"""Bytes of a secret, and of what proves that a member knows it."""
OF_SCRIPTS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""A group that takes too long is no reason for PyTorch to kill the process, which may be anybody's script."""


class Meeting:
    """The meeting of the processes that compute one model; they wait for each other so many seconds at most.

    That is a file, which does not exist before, of processes of one machine, which talk over the loopback interface; or
    tcp://HOST:PORT, where one of them has the `listener`, and all talk over the network that leads there.
    """

    def __init__(
        self,
        place: Path | str,
        processes: int,
        device: torch.device,
        seconds: float,
        listener: socket.socket | None = None,
    ) -> None:
        self._device, self._waits = device, timedelta(seconds=seconds)
        self._distributed: Any = importlib.import_module("torch.distributed")
        self._own, url = LOOPBACK, urlsplit(str(place))
        self.on_one_machine = url.scheme != "tcp"
        if not self.on_one_machine:
            self._own = address_towards(url.hostname or "")
            self._store = self._distributed.TCPStore(
                url.hostname,
                url.port,
                processes,
                listener is not None,
                self._waits,
                wait_for_workers=False,
                master_listen_fd=None if listener is None else listener.detach(),
            )
        else:
            self._store = self._distributed.FileStore(str(place), processes)
        self._store.set_timeout(self._waits)

    def store(self, name: str) -> Any:
        """The store in which the members of a group of this name tell each other things."""
        return self._distributed.PrefixStore(name, self._store)

    def group(self, name: str, rank: int, size: int, device: torch.device | None = None) -> Any:
        """PyTorch's group for tensors on such devices, once all `size` members are there, which call it by this name.

        `device`: None: the processes' own.

        Members on CPUs wait so long for each other each time. PyTorch's own description of groups lacks their methods.
        """
        store = self.store(name)
        if (device or self._device).type == "cuda":
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo" if self._own == LOOPBACK else interface_of(self._own))
            os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")  # steps are in order
            options = self._distributed.ProcessGroupNCCL.Options()
            options._timeout = self._waits
            with _unless_set(OF_SCRIPTS):
                group = self._distributed.ProcessGroupNCCL(store, rank, size, options)
            group.eager_connect_single_device(device or self._device)  # else each pair has a connection of its own
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # see `end_with`
            return group
        return self._connected(name, rank, size)

    def _connected(self, name: str, rank: int, size: int) -> Any:
        """A group of CPUs. Any process of this machine may connect to the ports on which its members listen meanwhile.

        So each member proves to each other that it reads the same store, and all try again where one meets a stranger.
        """
        for attempt in range(ATTEMPTS):
            store = self.store(f"{name}-{attempt}")
            if rank == 0:
                store.set("secret", os.urandom(PROOF).hex())
            store.set(f"here-{rank}", "")
            for other in range(size):
                store.get(f"here-{other}")  # which waits for it
            group, failure = None, ""
            try:
                group = self._listening(store, rank, size)
                _check_members(group, store.get("secret"), rank, size)
            except RuntimeError as error:
                failure = str(error)[:500] or type(error).__name__
            store.set(f"met-{rank}", failure)
            failures = [found for other in range(size) if (found := store.get(f"met-{other}").decode())]
            if not failures:
                assert group is not None
                group._set_default_timeout(self._waits)
                return group
        raise RuntimeError(f"after {ATTEMPTS} attempts: {failures[0]}")

    def _listening(self, store: Any, rank: int, size: int) -> Any:
        """A group of CPUs whose members have connected to each other, or to others who came before them."""
        gloo = self._distributed.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = min(self._waits, MEETS)
        options._devices = [self._listener()]
        return gloo(store, rank, size, options)

    def _listener(self) -> Any:
        """A server that listens on a port of this process until the group ends."""
        return self._distributed.ProcessGroupGloo.create_device(hostname=self._own)


def _check_members(group: Any, secret: bytes, rank: int, size: int) -> None:
    """Raise RuntimeError unless each member of a group of CPUs knows the secret."""

    def proof(sender: int, receiver: int) -> list[int]:
        return list(hashlib.blake2b(f"{sender} {receiver}".encode(), key=secret, digest_size=PROOF).digest())

    mine = torch.tensor([proof(rank, other) for other in range(size)], dtype=torch.uint8)
    found = torch.zeros_like(mine)
    group.alltoall_base(found, mine, [], []).wait()
    if found.tolist() != [proof(other, rank) for other in range(size)]:
        raise RuntimeError("another process has connected in place of a rank")


@contextlib.contextmanager
def _unless_set(values: Mapping[str, str]) -> Iterator[None]:
    """The environment has these values, but of what has one."""
    missing = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            del os.environ[name]


def end_with(owner: object, groups: list[Any]) -> None:
    """Have groups that the `owner` talks through end when it does.

    Those of CPUs end before Python does, too: their threads could not any more. Those of GPUs wait for the end of each
    CUDA graph that holds a kernel of theirs, and graphs may have the same owner. So that happens in a thread, while
    they go, and not at all where the owner lives as long as the process.
    """
    weakref.finalize(owner, groups.clear)
    for group in groups:
        weakref.finalize(owner, abort, [group]).atexit = False


def abort(groups: list[Any], *, awaited: bool = True) -> list[threading.Thread]:
    """Let no GPU wait for others in these any more: threads that do so, for whose end Python's waits, if `awaited`."""
    of_gpus = [group for group in groups if group._get_backend_name() == "nccl"]
    threads = [threading.Thread(target=group.abort, name="abort-nccl", daemon=not awaited) for group in of_gpus]
    for thread in threads:
        thread.start()
    return threads
