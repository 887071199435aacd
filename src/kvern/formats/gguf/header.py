"""The header of a GGUF file: the settings of the model and its list of tensors. No torch is imported.

    "GGUF"  u32 version  u64 tensors  u64 values
    values:   string key   u32 kind   the value
    tensors:  string name  u32 dimensions  u64 length, ...  u32 type  u64 offset
    data, from the next multiple of the alignment on; a tensor's offset counts from there

A string is its number of bytes, u64, and UTF-8 text (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). Counts
and lengths are limited by the size of the file. Strings and arrays are decoded on demand, so that a vocabulary costs a
walk over its lengths. Types of tensors have the names and numbers of ggml's `ggml_type`.
"""

import math
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from kvern.errors import CorruptCheckpoint, KvernError, UnsupportedModel, shown
from kvern.io.files import as_size, open_regular, reason


class BlockType(NamedTuple):
    """`numbers` of a row, one after another, are stored in `size` bytes."""

    name: str
    numbers: int
    size: int


PLAIN = {0: BlockType("f32", 1, 4), 1: BlockType("f16", 1, 2), 30: BlockType("bf16", 1, 2)}
QUANTIZED = {
    2: BlockType("q4_0", 32, 18),
    3: BlockType("q4_1", 32, 20),
    6: BlockType("q5_0", 32, 22),
    7: BlockType("q5_1", 32, 24),
    8: BlockType("q8_0", 32, 34),
    10: BlockType("q2_k", 256, 84),
    11: BlockType("q3_k", 256, 110),
    12: BlockType("q4_k", 256, 144),
    13: BlockType("q5_k", 256, 176),
    14: BlockType("q6_k", 256, 210),
    20: BlockType("iq4_nl", 32, 18),
    23: BlockType("iq4_xs", 256, 136),
    39: BlockType("mxfp4", 32, 17),
}
TYPES = PLAIN | QUANTIZED
BY_NAME = {item.name: item for item in TYPES.values()}
REFUSED = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
}
"""Types that kvern cannot read."""


MOST_HEADER_BYTES = 128 << 20
MOST_VALUES = 1 << 16
MOST_TENSORS = 1 << 18
MOST_KEY_BYTES = 512
MOST_DIMENSIONS = 4
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_NUMBERS = {kind: struct.Struct(f"<{code}") for kind, code in _CODES.items()}
_U32, _U64 = _NUMBERS[4], _NUMBERS[10]


class TensorInfo(NamedTuple):
    """A tensor: `shape` with the longest stride first, `begin` the first of its `nbytes` bytes in `file`."""

    name: str
    shape: tuple[int, ...]
    type: BlockType
    file: Path
    begin: int
    nbytes: int


class _Array(NamedTuple):
    kind: int
    entries: int
    begin: int


@dataclass(frozen=True)
class Header:
    """The header of one file. `values` holds numbers and texts; `array` reads arrays."""

    file: Path
    values: Mapping[str, Any]
    tensors: tuple[TensorInfo, ...]

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """The value of a key, checked to be of a Python type; an array is a list. Raises CorruptCheckpoint."""
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, _Array):
            value = self._array(key, value)
        if kind is float and type(value) is int:
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise CorruptCheckpoint(f"{self.file}: {key} is {shown(value)}: it should be of another kind")
        return value

    @cached_property
    def by_name(self) -> dict[str, TensorInfo]:
        return {tensor.name: tensor for tensor in self.tensors}

    def _array(self, key: str, array: _Array) -> list[Any]:
        with _mapped(self.file) as data:
            try:
                if array.kind == STRING:
                    return _Walk(data, array.begin).strings(array.entries)
                number = _NUMBERS[array.kind]
                raw = data[array.begin : array.begin + number.size * array.entries]
                return [value for (value,) in number.iter_unpack(raw)]
            except (ValueError, struct.error) as error:
                raise CorruptCheckpoint(f"{self.file}: {key} cannot be read: {reason(error)}") from None


def read_gguf_header(file: Path) -> Header:
    """Reads the header of a file and checks that the file is long enough for it.

    Raises CorruptCheckpoint or UnsupportedModel, which name the fault.
    """
    with _mapped(file) as data:
        try:
            walk = _Walk(data, 4)
            tensors, values = _read_counts(walk, file)
            found = _read_values(walk, values)
            alignment = found.get("general.alignment", 32)
            if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
                raise ValueError(f"general.alignment is {shown(alignment)}: it should be a power of two")
            infos = _read_tensors(walk, file, tensors, alignment)
        except KvernError:
            raise
        except UnicodeDecodeError:
            raise CorruptCheckpoint(f"{file}: a name is not UTF-8 text; download it again") from None
        except (ValueError, struct.error, OverflowError) as error:
            raise CorruptCheckpoint(f"{file}: {reason(error)}; download it again") from None
    return Header(file, found, infos)


def _mapped(file: Path) -> mmap.mmap:
    try:
        with open_regular(file) as stream:
            if os.fstat(stream.fileno()).st_size < 24:
                raise ValueError("it is shorter than the header of a GGUF file")
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise CorruptCheckpoint(f"{file} cannot be read: {reason(error)}") from None


class _Walk:
    """Reads a map from `at` on, never beyond its end. Raises ValueError."""

    def __init__(self, data: mmap.mmap, at: int) -> None:
        self.data, self.at = data, at
        self.end = min(len(data), MOST_HEADER_BYTES)

    def number(self, form: struct.Struct) -> Any:
        at = self.skip(form.size)
        return form.unpack_from(self.data, at)[0]

    def skip(self, count: int) -> int:
        """Skips `count` bytes and returns the position where they begin."""
        at = self.at
        if count > self.end - at:
            raise ValueError(f"the header promises {count} bytes at byte {at}, and ends at byte {self.end}")
        self.at = at + count
        return at

    def text(self, most: int | None = None) -> str:
        count = self.number(_U64)
        if most is not None and count > most:
            raise ValueError(f"a name has {count} bytes at byte {self.at}: at most {most} are read")
        at = self.skip(count)
        return self.data[at : at + count].decode()

    def strings(self, count: int) -> list[str]:
        """Texts that were walked over before; bytes that are no UTF-8 become U+FFFD."""
        data = self.data
        at = self.at
        unpack = _U64.unpack_from
        found = []
        for _ in range(count):
            length = unpack(data, at)[0]
            found.append(data[at + 8 : at + 8 + length].decode(errors="replace"))
            at += 8 + length
        return found

    def skip_strings(self, count: int) -> None:
        at = self.at
        end = self.end
        data = self.data
        unpack = _U64.unpack_from
        for _ in range(count):
            if at + 8 > end:
                break
            at += 8 + unpack(data, at)[0]
        if at > end:
            raise ValueError(f"an array of {count} texts does not fit into the {end} bytes")
        self.at = at

    def count(self, least_bytes: int, most: int, what: str) -> int:
        """Reads a count of things that take at least `least_bytes` each."""
        count = int(self.number(_U64))
        if count > most or count * least_bytes > self.end - self.at:
            raise ValueError(f"the header promises {count} {what}: the file has no room for them")
        return count

    def value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            raise ValueError(f"a value is of the unknown kind {kind}")
        kind = self.number(_U32)
        if kind != STRING and kind not in _NUMBERS:
            raise ValueError(f"an array is of the kind {kind}: kvern reads arrays of numbers and texts")
        size = 8 if kind == STRING else _NUMBERS[kind].size
        count = self.count(size, MOST_HEADER_BYTES, "array entries")
        begin = self.at
        if kind == STRING:
            self.skip_strings(count)
        else:
            self.skip(size * count)
        return _Array(kind, count, begin)


def _read_counts(walk: _Walk, file: Path) -> tuple[int, int]:
    """The numbers of tensors and of values."""
    if walk.data[:4] != b"GGUF":
        raise ValueError(f"it begins with {walk.data[:4]!r}: a GGUF file begins with b'GGUF'")
    version = walk.number(_U32)
    if version not in VERSIONS:
        if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
            raise UnsupportedModel(f"{file}: the file is big-endian; kvern reads little-endian ones: convert it again")
        raise UnsupportedModel(f"{file}: it is of version {version}; kvern reads versions 2 and 3: convert it again")
    tensors = walk.count(24, MOST_TENSORS, "tensors")
    return tensors, walk.count(13, MOST_VALUES, "values")


def _read_values(walk: _Walk, count: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(count):
        key = walk.text(MOST_KEY_BYTES)
        if key in found:
            raise ValueError(f"the key {shown(key)} is there twice")
        found[key] = walk.value(walk.number(_U32))
    return found


def _read_tensors(walk: _Walk, file: Path, count: int, alignment: int) -> tuple[TensorInfo, ...]:
    infos = [_read_tensor(walk, file) for _ in range(count)]
    first = -(-walk.at // alignment) * alignment
    names: set[str] = set()
    end = first
    size = len(walk.data)
    tensors = []
    whole = first + max((info.begin + info.nbytes for info in infos), default=0)
    if whole > size:
        raise ValueError(f"it has {as_size(size)} of {as_size(whole)}: it is cut off")
    for info in sorted(infos, key=lambda info: info.begin):
        if info.name in names:
            raise ValueError(f"the tensor {shown(info.name)} is there twice")
        names.add(info.name)
        begin = first + info.begin
        if info.begin % alignment or begin < end:
            raise ValueError(
                f"the tensor {shown(info.name)} of {info.nbytes} bytes begins at byte {begin}: it lies over another"
            )
        end = begin + info.nbytes
        tensors.append(info._replace(begin=begin))
    return tuple(tensors)


def _read_tensor(walk: _Walk, file: Path) -> TensorInfo:
    name = walk.text(MOST_KEY_BYTES)
    if not name.isprintable():
        raise ValueError(f"a tensor's name is {shown(name)}: it should be printable")
    dimensions = walk.number(_U32)
    if not 1 <= dimensions <= MOST_DIMENSIONS:
        raise ValueError(f"the tensor {shown(name)} has {dimensions} dimensions: it may have {MOST_DIMENSIONS}")
    shape = tuple(walk.number(_U64) for _ in range(dimensions))[::-1]
    number, offset = walk.number(_U32), walk.number(_U64)
    block = TYPES.get(number)
    if block is None:
        known = REFUSED.get(number, f"unknown type {number}")
        raise UnsupportedModel(
            f"{file}: the tensor {shown(name)} is stored as {known}; kvern reads "
            f"{', '.join(item.name.upper() for item in TYPES.values())}: take a file with those"
        )
    if math.prod(shape) >> 62 or 0 in shape or shape[-1] % block.numbers:
        raise ValueError(
            f"the tensor {shown(name)} has the shape {shown(list(shape))}: {block.name.upper()} asks for rows of a "
            f"multiple of {block.numbers}"
        )
    return TensorInfo(name, shape, block, file, offset, math.prod(shape) // block.numbers * block.size)


MOST_FACTORS = 4096


@dataclass(frozen=True)
class GgufModel:
    """The header of a model's first file, the tensors of all, and its architecture's values by short name."""

    header: Header
    tensors: tuple[TensorInfo, ...]

    @property
    def architecture(self) -> str:
        return str(self.header.get("general.architecture", str, ""))

    def value(self, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        return self.header.get(f"{self.architecture}.{name}", kind, default)

    def needed(self, name: str, kind: type) -> Any:
        value = self.value(name, kind)
        if value is None:
            raise CorruptCheckpoint(f"{self.header.file}: {self.architecture}.{name} is missing; download it again")
        return value

    @property
    def layers(self) -> int:
        """The number of layers, without the last ones that only draft."""
        return int(self.needed("block_count", int) - self.value("nextn_predict_layers", int, 0))

    def tensor(self, name: str) -> TensorInfo | None:
        return next((tensor for tensor in self.tensors if tensor.name == name), None)

    def has(self, name: str) -> bool:
        """True if the model or one of its layers has a tensor of this name."""
        return any(tensor.name == name or tensor.name.endswith(f".{name}") for tensor in self.tensors)

    def rows(self, name: str, dim: int = -2) -> int:
        """The length of a dimension of the first layer's tensor of this name."""
        found = next((tensor for tensor in self.tensors if tensor.name.endswith(f".{name}")), None)
        if found is None or len(found.shape) < -dim:
            raise CorruptCheckpoint(f"{self.header.file}: there is no tensor {name} of two dimensions")
        return found.shape[dim]

    def floats(self, name: str) -> list[float] | None:
        """A short tensor of 32-bit numbers."""
        tensor = self.tensor(name)
        if tensor is None:
            return None
        if tensor.type.name != "f32" or math.prod(tensor.shape) > MOST_FACTORS:
            raise CorruptCheckpoint(f"{tensor.file}: the tensor {name} should hold a few 32-bit numbers")
        with tensor.file.open("rb") as stream:
            stream.seek(tensor.begin)
            return [value for (value,) in struct.iter_unpack("<f", stream.read(tensor.nbytes))]
