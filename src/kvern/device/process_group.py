"""Groups of processes of one machine that exchange tensors: through gloo on CPUs, through NCCL on GPUs."""

import importlib
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

LOOPBACK = "127.0.0.1"


def connect(file: Path, rank: int, size: int, device: torch.device, seconds: float) -> Any:
    """PyTorch's group, once all `size` members are there, who name the same file, which does not exist before.

    It waits for them so long at most. Members on CPUs talk over the loopback interface, and wait so long each time.
    PyTorch's own description of groups lacks their methods.
    """
    distributed: Any = importlib.import_module("torch.distributed")
    store = distributed.FileStore(str(file), size)
    store.set_timeout(timedelta(seconds=seconds))
    if device.type == "cuda":
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # all are on one machine
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=seconds)
        return distributed.ProcessGroupNCCL(store, rank, size, options)
    gloo = distributed.ProcessGroupGloo
    gloo_options = gloo._Options()
    gloo_options._timeout = timedelta(seconds=seconds)
    gloo_options._devices = [gloo.create_device(hostname=LOOPBACK)]
    return gloo(store, rank, size, gloo_options)
