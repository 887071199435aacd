"""Reads the headers of files written by `torch.save`, whose tensors are stored as in safetensors."""

from pathlib import Path

import torch

from kvern.errors import CorruptCheckpoint
from kvern.io.files import open_regular, reason
from kvern.models.checkpoint import StoredTensor


def read_torch_file(file: Path) -> list[StoredTensor]:
    """The tensors of a PyTorch file, by position, without their data; no code in the file is run.

    Raises CorruptCheckpoint for anything but a dictionary of whole tensors, and for the format before PyTorch 1.6.
    """
    try:
        with open_regular(file) as stream:
            found = torch.load(stream, map_location="meta", weights_only=True)
    except Exception as error:  # whatever a damaged pickle makes of the reader
        raise CorruptCheckpoint(f"{file} cannot be read: {reason(error)}; download it again") from None
    if not isinstance(found, dict):
        raise CorruptCheckpoint(f"{file} holds a {type(found).__name__}, not a dictionary of tensors")
    tensors = [_stored(str(name), tensor, file) for name, tensor in found.items()]
    return sorted(tensors, key=lambda tensor: tensor.begin)


def _stored(name: str, tensor: object, file: Path) -> StoredTensor:
    if not isinstance(tensor, torch.Tensor) or not tensor.is_contiguous():
        raise CorruptCheckpoint(f"{name:.80} in {file} is no tensor that is stored row by row: save it contiguous")
    first: int | None = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    if first is None:
        raise CorruptCheckpoint(f"{file} is in the format from before PyTorch 1.6: save it again, as safetensors")
    begin = first + int(tensor.storage_offset()) * tensor.itemsize
    return StoredTensor(name, file, tensor.dtype, tuple(tensor.shape), begin)
