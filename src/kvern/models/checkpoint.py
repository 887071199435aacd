"""Reads safetensors files: headers first, then tensors through a memory map, in runs of rows.

A file is `8 bytes: n`, `n bytes: JSON {name: {dtype, shape, data_offsets}}`, then the data that the offsets point into
(https://huggingface.co/docs/safetensors). Reading the headers ourselves lets every fault be found before any data is
touched, and dropping the pages of each run keeps resident memory at the size of the weights.
"""

import json
import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvern.errors import CorruptCheckpoint, ModelNotFound

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
RUN_BYTES = 32 << 20
MAX_HEADER_BYTES = 100 << 20

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
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: `begin` is its first byte there."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def runs(self, data: mmap.mmap, *, whole: bool = False) -> Iterator[tuple[int, Tensor]]:
        """Yield `(first_row, rows)` in order; each run is valid until the next is asked for."""
        row_bytes = self.nbytes // self.shape[0] if self.shape and self.shape[0] else 0
        rows = self.shape[0] if self.shape else 1
        step = rows if whole or not row_bytes else max(1, RUN_BYTES // row_bytes)
        for first in range(0, rows, max(step, 1)):
            count = min(step, rows - first)
            begin = self.begin + first * row_bytes
            shape = (count, *self.shape[1:]) if self.shape else ()
            flat = torch.frombuffer(data, dtype=self.dtype, count=math.prod(shape), offset=begin)
            yield first, flat.view(shape)
            _drop_pages(data, begin, flat.nbytes)


def _drop_pages(data: mmap.mmap, begin: int, nbytes: int) -> None:
    """Give the pages of a private, unmodified map back; a platform without madvise keeps them."""
    if hasattr(mmap, "MADV_DONTNEED"):
        first = begin - begin % mmap.PAGESIZE
        data.madvise(mmap.MADV_DONTNEED, first, begin + nbytes - first)


def open_map(file: Path) -> mmap.mmap:
    with file.open("rb") as stream:
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)


def read_headers(folder: Path) -> list[StoredTensor]:
    """Every tensor of a checkpoint, by file and position; each file is checked to be complete.

    Raises ModelNotFound if there is no safetensors file, CorruptCheckpoint if one is missing, truncated or unreadable.
    """
    tensors = [tensor for file in checkpoint_files(folder) for tensor in read_header(file)]
    names: dict[str, StoredTensor] = {}
    for tensor in tensors:
        if (other := names.setdefault(tensor.name, tensor)) is not tensor:
            raise CorruptCheckpoint(f"tensor {tensor.name} is in two files: {other.file} and {tensor.file}")
    return tensors


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files of a model: those of its index, the single one, or else all of them."""
    index = folder / INDEX_NAME
    if index.is_file():
        try:
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
            raise CorruptCheckpoint(f"{index} is not a safetensors index ({error}); download it again") from None
        missing = [name for name in files if not (folder / name).is_file()]
        if missing:
            raise CorruptCheckpoint(
                f"{index} names {len(files)} files, {len(missing)} of them missing: {', '.join(missing[:5])}"
            )
        return [folder / name for name in files]
    if (folder / SINGLE_NAME).is_file():
        return [folder / SINGLE_NAME]
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise ModelNotFound(f"{folder} holds no *.safetensors file; kvern reads weights in no other format")
    return found


def read_header(file: Path) -> list[StoredTensor]:
    """The tensors of one file, which is checked to be complete. Raises CorruptCheckpoint."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        if size < 8 or header_bytes > size - 8 or header_bytes > MAX_HEADER_BYTES:
            expected = f"at least {8 + header_bytes}" if size >= 8 and header_bytes <= MAX_HEADER_BYTES else "a header"
            raise CorruptCheckpoint(f"{file} has {size} bytes where {expected} is expected; download it again")
        raw = stream.read(header_bytes)
    try:
        entries = json.loads(raw)
        entries.pop("__metadata__", None)
        tensors = [_stored(file, name, entry, 8 + header_bytes) for name, entry in entries.items()]
        ends = [8 + header_bytes + entry["data_offsets"][1] for entry in entries.values()]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, UnicodeDecodeError) as error:
        raise CorruptCheckpoint(f"{file} has an unreadable safetensors header ({error}); download it again") from None
    expected_size = max(ends, default=8 + header_bytes)
    if size != expected_size:
        raise CorruptCheckpoint(f"{file} has {size} bytes, its header describes {expected_size}; download it again")
    return sorted(tensors, key=lambda tensor: tensor.begin)


def _stored(file: Path, name: str, entry: dict[str, Any], data_begin: int) -> StoredTensor:
    begin, end = entry["data_offsets"]
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"tensor {name} has the dtype {entry['dtype']}")
    tensor = StoredTensor(name, file, DTYPES[entry["dtype"]], tuple(entry["shape"]), data_begin + begin)
    if begin < 0 or end - begin != tensor.nbytes:
        raise ValueError(f"tensor {name} of {tensor.nbytes} bytes has offsets {begin} to {end}")
    return tensor
