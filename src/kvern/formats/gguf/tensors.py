"""The tensors of GGUF files, as a checkpoint's: under Llama's names, in Llama's order of rows."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from kvern.formats.gguf.config import layout_of
from kvern.formats.gguf.files import read_gguf
from kvern.formats.gguf.names import StoredPart, stored_parts
from kvern.models.checkpoint import StoredTensor

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def gguf_tensors(file: Path) -> list[StoredTensor]:
    """The tensors of a model whose only or first file is given. Raises CorruptCheckpoint or UnsupportedModel."""
    model = read_gguf(file)
    found = [_stored(part) for part in stored_parts(model.tensors, layout_of(model))]
    return sorted(found, key=lambda tensor: (tensor.file, tensor.begin))


def _stored(part: StoredPart) -> StoredTensor:
    """Blocks are `uint8 [rows, blocks of a row, bytes of a block]`."""
    block, shape = part.tensor.type, part.shape
    if block.name not in DTYPES:
        shape = (*shape[:-1], shape[-1] // block.numbers, block.size)
    change = _heads_unpaired(part.head_rows) if part.head_rows else _change(part)
    dtype = DTYPES.get(block.name, torch.uint8)
    return StoredTensor(part.name, part.tensor.file, dtype, shape, part.begin, change, max(part.head_rows, 1))


def _change(part: StoredPart) -> Callable[[Tensor], Tensor] | None:
    """The change of each row, if any."""
    return _less_one if part.plus_one else _logarithms if part.rates else None


def _heads_unpaired(head_rows: int) -> Callable[[Tensor], Tensor]:
    """Rows of heads, in which each two neighbours turn together: then the first of all pairs, then the second."""

    def unpaired(rows: Tensor) -> Tensor:
        return rows.view(-1, head_rows // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)

    return unpaired


def _less_one(rows: Tensor) -> Tensor:
    return rows - 1


def _logarithms(rates: Tensor) -> Tensor:
    return rates.neg().log()
