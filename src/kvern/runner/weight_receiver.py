"""The process that takes part in a process group and writes the weights that come to a file of safetensors.

    python -m kvern.runner.weight_receiver < job        a `ReceivingJob` as JSON; what is wrong goes to stdout

Names, shapes and dtypes are checked before it meets the others. It may be killed at any time: nothing but the file is
its own. A file instead of tensors lets all engines read them as they read others, also those that start later.
"""

import importlib
import json
import mmap
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import torch

from kvern.errors import InvalidWeights, KvernError, in_a_line
from kvern.io.sockets import address_towards, interface_of
from kvern.models.checkpoint import DTYPES, StoredTensor, read_header
from kvern.models.implementation import describe_model
from kvern.models.loader import read_config
from kvern.request.weights import GroupTensor, WeightGroup, WeightSource
from kvern.runner.new_weights import check_fitting

NAMES = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items()}
"""The names of dtypes in safetensors, by those of PyTorch."""
SENDER = 0
"""The rank that broadcasts."""


class ReceivingJob(msgspec.Struct, frozen=True):
    """The tensors to be received into a new file, for a model in a folder, as `describe_model` knows it."""

    group: WeightGroup
    file: str
    folder: str
    implementation: str


def receive(job: ReceivingJob) -> None:
    """Write the tensors of a group to a file. Raises KvernError."""
    file, folder = Path(job.file), Path(job.folder)
    stored = {tensor.name: tensor for tensor in _write_header(file, job.group.tensors)}
    spec = describe_model(folder, read_config(folder), job.implementation)
    check_fitting(folder, spec, [WeightSource(job.file)], has_come=False)
    with file.open("r+b") as stream:
        memory = mmap.mmap(stream.fileno(), 0)
    _receive([stored[tensor.name] for tensor in job.group.tensors], memory, job.group)
    memory.close()  # after an error the group's threads may still write to it: it goes with the process


def _write_header(file: Path, tensors: Sequence[GroupTensor]) -> list[StoredTensor]:
    """Makes a file with space for tensors. Raises InvalidWeights."""
    entries: dict[str, Any] = {}
    end = 0
    for tensor in tensors:
        if tensor.dtype not in NAMES:
            raise InvalidWeights(f"{tensor.name} is {tensor.dtype}: dtypes are {', '.join(sorted(NAMES))}")
        if tensor.name in entries:
            raise InvalidWeights(f"{tensor.name} is there twice: give each tensor once")
        begin, end = end, end + StoredTensor(tensor.name, file, DTYPES[NAMES[tensor.dtype]], tensor.shape, 0).nbytes
        offsets = (begin, end)
        entries[tensor.name] = {"dtype": NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": offsets}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    try:
        with file.open("wb") as stream:
            stream.write(len(header).to_bytes(8, "little") + header)
            stream.flush()
            os.posix_fallocate(stream.fileno(), 0, 8 + len(header) + end)
    except OSError as error:
        raise InvalidWeights(
            f"{file.parent} has no space for {end / 1e9:.2f} GB: {error.strerror}; set cache_dir"
        ) from None
    return read_header(file)


def _receive(tensors: Sequence[StoredTensor], memory: mmap.mmap, group: WeightGroup) -> None:
    """Has the sender's tensors written to memory, in their places in the file. Raises InvalidWeights."""
    distributed: Any = importlib.import_module("torch.distributed")
    wait, device = timedelta(seconds=group.timeout), torch.device("cuda" if group.backend == "nccl" else "cpu")
    try:
        interface = interface_of(address_towards(urlsplit(group.address).hostname or ""))
        os.environ.setdefault(f"{group.backend.upper()}_SOCKET_IFNAME", interface)
        distributed.init_process_group(
            group.backend, init_method=group.address, world_size=group.world_size, rank=group.rank, timeout=wait
        )
        for tensor in tensors:
            whole = torch.frombuffer(memory, dtype=torch.uint8, count=tensor.nbytes, offset=tensor.begin)
            if device.type == "cpu":
                distributed.broadcast(whole, SENDER)  # gloo knows not all dtypes, and sends bytes
            else:
                came = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                distributed.broadcast(came, SENDER)
                whole.copy_(came.contiguous().view(-1).view(torch.uint8))
        distributed.destroy_process_group()
    except (OSError, RuntimeError, ValueError) as error:
        raise InvalidWeights(
            f"the process group at {group.address} did not bring {len(tensors)} tensors: {in_a_line(error)}"
        ) from None


def main() -> int:
    """Read a job, and carry it out."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=ReceivingJob)
    try:
        receive(job)
    except BaseException as error:
        sys.stdout.write(str(error) if isinstance(error, KvernError) else f"weights cannot be received: {error!r}")
        sys.stdout.flush()
        os._exit(1)  # threads of a group that failed may never end
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
