"""Reads safetensors and GGUF files: headers first, then tensors through a memory map, in runs of rows.

Reading the headers ourselves lets every fault be found before any data is touched, and dropping the pages of each run
keeps resident memory at the size of the weights.
"""

import math
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from kvern.errors import CorruptCheckpoint, ModelNotFound
from kvern.io.files import open_regular, read_object, reason
from kvern.models.header import read_entries
from kvern.plugins import imported

RUN_BYTES = 32 << 20


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: `begin` is its first byte there. `change` makes the model's rows of `together` of its own."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    change: Callable[[Tensor], Tensor] | None = None
    together: int = 1

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def runs(self, data: mmap.mmap, *, whole: bool = False) -> Iterator[tuple[int, Tensor]]:
        """Yield `(first_row, rows)` in order; each run is valid until the next is asked for."""
        row_bytes = self.nbytes // self.shape[0] if self.shape and self.shape[0] else 0
        rows = self.shape[0] if self.shape else 1
        step = rows if whole or not row_bytes else max(1, RUN_BYTES // row_bytes // self.together) * self.together
        for first in range(0, rows, max(step, 1)):
            count = min(step, rows - first)
            begin = self.begin + first * row_bytes
            shape = (count, *self.shape[1:]) if self.shape else ()
            flat = torch.frombuffer(data, dtype=self.dtype, count=math.prod(shape), offset=begin)
            yield first, flat.view(shape) if self.change is None else self.change(flat.view(shape))
            _drop_pages(data, begin, flat.nbytes)


def is_equal(one: StoredTensor, other: StoredTensor) -> bool:
    """True if two tensors hold the same numbers. Raises CorruptCheckpoint if a file cannot be read."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    runs = zip(one.runs(open_map(one.file)), other.runs(open_map(other.file)), strict=True)
    return all(torch.equal(rows.view(torch.uint8), others.view(torch.uint8)) for (_, rows), (_, others) in runs)


def _drop_pages(data: mmap.mmap, begin: int, nbytes: int) -> None:
    """Give the pages of a private, unmodified map back; a platform without madvise keeps them."""
    if hasattr(mmap, "MADV_DONTNEED"):
        first = begin - begin % mmap.PAGESIZE
        data.madvise(mmap.MADV_DONTNEED, first, begin + nbytes - first)


def open_map(file: Path) -> mmap.mmap:
    """The whole file, mapped. Raises CorruptCheckpoint."""
    try:
        with open_regular(file) as stream:
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise CorruptCheckpoint(f"{file} cannot be read: {reason(error)}") from None


INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


def read_headers(folder: Path) -> list[StoredTensor]:
    """Every tensor of a checkpoint, by file and position; each file is checked to be complete.

    A tensor in several files is read from the file that the index names. Raises ModelNotFound if there is no file of
    weights, CorruptCheckpoint if one is missing, truncated or unreadable, UnsupportedModel for unsupported contents of
    GGUF files.
    """
    if (file := gguf_file(folder)) is not None:
        return cast("list[StoredTensor]", imported("kvern.formats.gguf.method:gguf_tensors")(file))
    tensors = [tensor for file in checkpoint_files(folder) for tensor in read_header(file)]
    assigned = shard_names(folder) or {}
    names: dict[str, StoredTensor] = {}
    for tensor in tensors:
        other = names.setdefault(tensor.name, tensor)
        if other is tensor or other.file.name == assigned.get(tensor.name):
            continue
        if tensor.file.name != assigned.get(tensor.name):
            raise CorruptCheckpoint(f"tensor {tensor.name} is in two files: {other.file} and {tensor.file}")
        names[tensor.name] = tensor
    return [tensor for tensor in tensors if names[tensor.name] is tensor]


def gguf_file(folder: Path) -> Path | None:
    """The GGUF file, or the first of them, of a folder without safetensors."""
    found = sorted(folder.glob("*.gguf"))
    return found[0] if found and not any(folder.glob("*.safetensors*")) else None


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files of a model: those of its index, the single one, or else all of them."""
    index = folder / INDEX_NAME
    if (named := shard_names(folder)) is not None:
        files = sorted(set(named.values()))
        outside = [name for name in files if Path(name).name != name or "\0" in name or len(name) > 255]
        if outside:
            raise CorruptCheckpoint(f"{index} names {outside[0]!r:.80}: weights are read from the folder itself alone")
        missing = [name for name in files if not (folder / name).is_file()]
        if missing:
            shown = ", ".join(name[:80] for name in missing[:5])
            raise CorruptCheckpoint(f"{index} names {len(files)} files, {len(missing)} of them missing: {shown}")
        return [folder / name for name in files]
    if (folder / SINGLE_NAME).is_file():
        return [folder / SINGLE_NAME]
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise ModelNotFound(f"{folder} holds no *.safetensors or *.gguf file; kvern reads weights in no other format")
    return found


def shard_names(folder: Path) -> dict[str, str] | None:
    """The file of each tensor by the folder's index; None without an index. Raises CorruptCheckpoint."""
    index = folder / INDEX_NAME
    if not os.path.lexists(index):
        return None
    named = read_object(index).get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
        raise CorruptCheckpoint(f"{index} is not a safetensors index (no weight_map of names); download it again")
    return named


def read_header(file: Path) -> list[StoredTensor]:
    """The tensors of one file, which is checked to be complete. Raises CorruptCheckpoint."""
    try:
        with open_regular(file) as stream:
            data_begin, entries = read_entries(stream)
    except OSError as error:
        raise CorruptCheckpoint(f"{file} cannot be read: {reason(error)}") from None
    except ValueError as error:
        raise CorruptCheckpoint(f"{file} {error}; download it again") from None
    tensors = [
        StoredTensor(name, file, DTYPES[entry.dtype], entry.shape, data_begin + entry.data_offsets[0])
        for name, entry in entries.items()
    ]
    return sorted(tensors, key=lambda tensor: tensor.begin)
