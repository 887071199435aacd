"""The header of a safetensors file, without torch.

It is `8 bytes: n`, then `n bytes: JSON {name: {dtype, shape, data_offsets}}`, then the data. The offsets count from the
header's end (https://huggingface.co/docs/safetensors).
"""

import math
import os
from typing import Annotated, BinaryIO

import msgspec

from kvern.io.files import read_at, reason

MOST_HEADER_BYTES = 100 << 20
MOST_NAME_CHARACTERS = 512
_ITEMS = {
    8: ("F64", "I64"),
    4: ("F32", "I32"),
    2: ("F16", "BF16", "I16"),
    1: ("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"),
}
ITEM_BYTES = {dtype: size for size, dtypes in _ITEMS.items() for dtype in dtypes}

Natural = Annotated[int, msgspec.Meta(ge=0)]


class Entry(msgspec.Struct, frozen=True):
    """A tensor as the file describes it: `data_offsets` are its first byte and the byte after its last."""

    dtype: str
    shape: tuple[Natural, ...]
    data_offsets: tuple[Natural, Natural]


def read_entries(stream: BinaryIO, most_bytes: int = MOST_HEADER_BYTES) -> tuple[int, dict[str, Entry]]:
    """The position of a file's data, and its tensors by name, checked to fill the file.

    Raises ValueError, which names the fault, or OSError.
    """
    size = os.fstat(stream.fileno()).st_size
    count = int.from_bytes(read_at(stream, 0, 8), "little") if size >= 8 else 0
    if size < 8 or count > size - 8 or count > most_bytes:
        expected = f"at least {8 + count}" if size >= 8 and count <= most_bytes else "a header"
        raise ValueError(f"has {size} bytes where {expected} is expected")
    try:
        raw = msgspec.json.decode(read_at(stream, 8, count), type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(item, type=Entry) for name, item in raw.items()}
        for name, entry in entries.items():
            _check(name, entry)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"has an unreadable safetensors header ({reason(error).replace('`', '')})") from None
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        if entry.data_offsets[0] != end:
            raise ValueError(f"has tensor {name} at byte {entry.data_offsets[0]} of its data, where {end} is expected")
        end = entry.data_offsets[1]
    described = 8 + count + end
    if size != described:
        raise ValueError(f"has {size} bytes, its header describes {described}")
    return 8 + count, entries


def _check(name: str, entry: Entry) -> None:
    if len(name) > MOST_NAME_CHARACTERS or not name.isprintable():
        raise ValueError(f"a tensor's name is {name!r:.60}: it may have {MOST_NAME_CHARACTERS} printable characters")
    if entry.dtype not in ITEM_BYTES:
        raise ValueError(f"tensor {name} has the dtype {entry.dtype!r:.20}")
    if len(entry.shape) > 8 or any(length.bit_length() > 63 for length in entry.shape):
        raise ValueError(f"tensor {name} has the shape {list(entry.shape)!r:.80}")
    begin, end = entry.data_offsets
    count = math.prod(entry.shape) * ITEM_BYTES[entry.dtype]
    if end - begin != count:
        raise ValueError(f"tensor {name} of {count} bytes has offsets {begin} to {end}")
