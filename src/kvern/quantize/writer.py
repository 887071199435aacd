"""Writes a model's folder: safetensors shards as tensors come, and the other files of the old folder.

The files are written to a temporary folder in the same place, which is renamed at the end; after a failure nothing
remains.
"""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from kvern.errors import ConfigError
from kvern.io.files import reason
from kvern.models.checkpoint import DTYPES, INDEX_NAME, SINGLE_NAME

SHARD_BYTES = 5_000_000_000
MOST_OTHER_BYTES = 256 << 20
"""Limit of a copied file; larger ones are weights in another form."""

WEIGHT_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".nemo")
NAMES = {dtype: name for name, dtype in DTYPES.items()}
ENTRY_BYTES = 512
"""Room in a header for one tensor: its name, dtype, shape and offsets."""

ALIGNMENT = 8


class Shard:
    """A safetensors file that is written before all of it is known: its header has room for `tensors`."""

    def __init__(self, path: Path, tensors: int) -> None:
        self.path = path
        self._room = -(-tensors * ENTRY_BYTES // ALIGNMENT) * ALIGNMENT
        self._entries: dict[str, Any] = {}
        self._odd: list[tuple[str, Tensor]] = []
        self._stream: BinaryIO = path.open("wb")
        self._stream.seek(8 + self._room)
        self.nbytes = 0

    @property
    def full(self) -> bool:
        return (len(self._entries) + len(self._odd) + 1) * ENTRY_BYTES > self._room

    def add(self, name: str, tensor: Tensor) -> None:
        """Adds a tensor; those whose size would misalign the next tensor are written at the end."""
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes % ALIGNMENT:
            self._odd.append((name, tensor.clone()))
        else:
            self._write(name, tensor)

    def close(self) -> list[str]:
        """Writes the header; returns the names of the tensors."""
        for name, tensor in sorted(self._odd, key=lambda item: -item[1].element_size()):
            self._write(name, tensor)
        header = json.dumps({"__metadata__": {"format": "pt"}} | self._entries, separators=(",", ":")).encode()
        self._stream.seek(0)
        self._stream.write(self._room.to_bytes(8, "little") + header.ljust(self._room))
        self._stream.close()
        return list(self._entries)

    def abandon(self) -> None:
        self._stream.close()

    def _write(self, name: str, tensor: Tensor) -> None:
        flat = tensor.detach().cpu().contiguous().view(-1)
        data = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
        self._stream.write(data.data)
        offsets = [self.nbytes, self.nbytes + data.nbytes]
        self._entries[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        self.nbytes += data.nbytes


class Writer:
    """Takes tensors, then `finish` makes the folder. Use it within `writing`."""

    def __init__(self, folder: Path, tensors: int, shard_bytes: int = SHARD_BYTES) -> None:
        self.folder = folder
        self._left = tensors
        self._shard_bytes = shard_bytes
        self._shard: Shard | None = None
        self._shards: list[tuple[Path, list[str]]] = []
        self.nbytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """The next tensor, of any device."""
        nbytes = tensor.numel() * tensor.element_size()
        if self._shard is not None and (self._shard.nbytes + nbytes > self._shard_bytes or self._shard.full):
            self._close_shard()
        if self._shard is None:
            path = self.folder / f"part-{len(self._shards)}.safetensors"
            self._shard = Shard(path, min(max(self._left, 16), 4096))
        self._shard.add(name, tensor)
        self._left -= 1
        self.nbytes += nbytes

    def finish(
        self, config: Mapping[str, Any], report: Mapping[str, Any] | None, source: Path, report_name: str
    ) -> None:
        """Writes the files beside the weights."""
        self._close_shard()
        self._name_shards()
        for path in sorted(source.iterdir()):
            if path.name not in ("config.json", INDEX_NAME, report_name):
                copy_beside(path, self.folder)
        (self.folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        if report is not None:
            (self.folder / report_name).write_text(json.dumps(report, indent=1) + "\n")

    def abandon(self) -> None:
        if self._shard is not None:
            self._shard.abandon()

    def _close_shard(self) -> None:
        if self._shard is not None:
            self._shards.append((self._shard.path, self._shard.close()))
            self._shard = None

    def _name_shards(self) -> None:
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        for number, (path, names) in enumerate(self._shards, 1):
            new = SINGLE_NAME if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
            path.rename(self.folder / new)
            weight_map |= dict.fromkeys(names, new)
        if count > 1:
            index = {"metadata": {"total_size": self.nbytes}, "weight_map": weight_map}
            (self.folder / INDEX_NAME).write_text(json.dumps(index, indent=1) + "\n")


def copy_beside(path: Path, folder: Path) -> None:
    """Copy a file that is no weights, or a folder of templates, into a new model's folder."""
    if path.is_dir():
        if path.name == "additional_chat_templates":
            shutil.copytree(path, folder / path.name)
    elif path.is_file() and path.suffix not in WEIGHT_ENDINGS and path.stat().st_size <= MOST_OTHER_BYTES:
        shutil.copyfile(path, folder / path.name)


def check_target(out: Path, source: Path, overwrite: bool, nbytes: int) -> None:
    """Raises ConfigError if the new folder cannot be written, or must not be."""
    out, source = Path(os.path.abspath(out)), source.resolve()
    if out.resolve() == source or source.is_relative_to(out.resolve()):
        raise ConfigError(f"--out {out} holds the model itself: give another folder")
    if os.path.lexists(out):
        if not overwrite:
            raise ConfigError(f"--out {out} exists: give another folder, or --overwrite")
        if not out.is_dir() or out.is_symlink() or (any(out.iterdir()) and not (out / "config.json").is_file()):
            raise ConfigError(f"--out {out} is not a model's folder: --overwrite replaces no other")
    parent = next(folder for folder in out.parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"--out {out} cannot be written: {parent} is not a folder that you may write to")
    free = shutil.disk_usage(parent).free
    if nbytes > free:
        raise ConfigError(
            f"--out {out} takes {nbytes / 1e9:.2f} GB, and {parent} has {free / 1e9:.2f} GB free: make room, or give "
            "a folder on another disk"
        )


@contextlib.contextmanager
def writing(out: Path, tensors: int, shard_bytes: int = SHARD_BYTES) -> Iterator[Writer]:
    """A writer of the folder `out`, which is there, whole, once this ends well; else nothing is. Raises ConfigError.

    `tensors`: how many there will be.
    """
    with placing(out) as made:
        writer = Writer(made, tensors, shard_bytes)
        try:
            yield writer
        finally:
            writer.abandon()


@contextlib.contextmanager
def placing(out: Path) -> Iterator[Path]:
    """A new folder that replaces `out` when the block ends without an exception, and is removed otherwise.

    Raises ConfigError.
    """
    out = Path(os.path.abspath(out))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{out.name[:100]}.", dir=out.parent))
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {reason(error)}") from None
    try:
        yield made
        made.chmod(0o777 & ~_umask())
        if out.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{out.name[:100]}.", dir=out.parent))
            os.replace(out, old)
            os.replace(made, out)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.rename(made, out)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {reason(error)}") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
