"""Content keys: names of what blocks hold, the same in every process and on every machine that serves the same model.

A key is a BLAKE2b digest of 16 bytes over everything that the keys and values of a block depend on:

    key(root)  = H(identity + namespace)                 personalized "kvern kv root"
    key(block) = H(key(parent) + contents + digests)     personalized "kvern kv block"

`identity` says which model, dtype and layout (`model_identity`), 16 bytes; `namespace` is opaque. `contents` are the
block's tokens, each a little-endian int32. A position that stands for something else than a token, such as a part of an
image, is -1 there, and the digest of what it stands for, 16 bytes, is in `digests`, in the order of the positions. This
is a wire format: caches outside of the process find blocks by it.

Within the process a position's content is one integer: the token's id, or for a marked position the digest as a number,
with a bit above it that no token id has. Prefixes are compared as *edges*, the bytes of such integers in order: 4 of a
token, or 4 of ones and then the digest. As these are big-endian, edges sort as their integers do.
"""

import functools
import hashlib
import os
import struct
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kvern.io.files import open_regular, read_at, read_whole

KEY_BYTES = 16

MARK = 1 << 8 * KEY_BYTES
WORD_BYTES = 4
_MARKED = b"\xff" * WORD_BYTES
EDGES_AT_ONCE = 64
"""A prompt that differs early is not encoded whole."""
_NO_BLOCK = hashlib.blake2b(digest_size=KEY_BYTES, person=b"kvern kv block")
SAMPLES = 16
SAMPLE_BYTES = 4096


def digest(data: bytes) -> bytes:
    """Returns the digest, 16 bytes, of any bytes that a position stands for."""
    return hashlib.blake2b(data, digest_size=KEY_BYTES).digest()


def root_key(identity: bytes, namespace: bytes) -> bytes:
    """The key from which those of a namespace's blocks are derived."""
    return hashlib.blake2b(identity + namespace, digest_size=KEY_BYTES, person=b"kvern kv root").digest()


def block_key(parent: bytes, contents: Sequence[int]) -> bytes:
    """The content key of a block, made of its parent's key and its contents: token ids below 2^31, or marks
    (`contents_of`)."""
    try:
        data = _words(len(contents)).pack(*contents)
    except struct.error:
        marks = b"".join((item - MARK).to_bytes(KEY_BYTES, "little") for item in contents if item >= MARK)
        data = struct.pack(f"<{len(contents)}i", *(-1 if item >= MARK else item for item in contents)) + marks
    return _key(parent, data)


@functools.lru_cache
def _words(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}i")


def edge_key(parent: bytes, edge: bytes) -> bytes:
    """The content key of a block, made of its parent's key and its edge (`edge_of`)."""
    if _MARKED in edge:
        return block_key(parent, contents_in(edge))
    words = array("I", edge)
    words.byteswap()
    return _key(parent, words.tobytes())


def _key(parent: bytes, data: bytes) -> bytes:
    state = _NO_BLOCK.copy()  # sooner made than a new one
    state.update(parent + data)
    return state.digest()


def block_keys(parent: bytes, contents: Sequence[int], block_size: int) -> Iterator[bytes]:
    """The keys of the full blocks that follow `parent`, each made when it is asked for."""
    for start in range(0, len(contents) - block_size + 1, block_size):
        parent = block_key(parent, contents[start : start + block_size])
        yield parent


def edge_of(contents: Sequence[int]) -> bytes:
    """The edge of contents; see the top of this module."""
    try:
        words = array("I", contents)
    except OverflowError:
        return b"".join(
            _MARKED + item.to_bytes(KEY_BYTES + 1)[1:] if item >= MARK else edge_of([item]) for item in contents
        )
    if sys.byteorder == "little":
        words.byteswap()
    return words.tobytes()


def edges_of(contents: Sequence[int], size: int) -> Iterator[bytes]:
    """The edges of the full blocks of contents, some of them made at once."""
    if len(contents) == size:  # by far the most frequent case: an answer has filled a block
        yield edge_of(contents)
        return
    for first in range(0, len(contents), size * EDGES_AT_ONCE):
        part = contents[first : first + size * EDGES_AT_ONCE]
        edges, count = edge_of(part), len(part) // size
        if len(edges) == WORD_BYTES * len(part):
            yield from struct.unpack_from(f"{WORD_BYTES * size}s" * count, edges)
        else:
            yield from (edge_of(part[start : start + size]) for start in range(0, count * size, size))


def contents_in(edge: bytes) -> tuple[int, ...]:
    """The contents of an edge."""
    if _MARKED not in edge:
        return struct.unpack(f">{len(edge) // WORD_BYTES}I", edge)
    found, start = list[int](), 0
    while start < len(edge):
        end = start + WORD_BYTES
        item = edge[start:end]
        if item == _MARKED:
            start, end = end, end + KEY_BYTES
            item = b"\1" + edge[start:end]
        found.append(int.from_bytes(item))
        start = end
    return tuple(found)


def has_marks(edge: bytes) -> bool:
    """True if positions of an edge may stand for something else than tokens."""
    return _MARKED in edge


def length_of(edge: bytes) -> int:
    """The number of positions of an edge."""
    return len(contents_in(edge)) if _MARKED in edge else len(edge) // WORD_BYTES


def contents_of(token_ids: list[int], marks: Mapping[int, bytes]) -> list[int]:
    """The content of each position: `token_ids` themselves when there are no `marks` (by position: any bytes)."""
    if not marks:
        return token_ids
    contents = list(token_ids)
    for position, data in marks.items():
        contents[position] = MARK + int.from_bytes(digest(data), "little")
    return contents


def model_identity(folder: Path, *layout: object) -> bytes:
    """Returns the identity of a model's keys and values: 16 bytes, equal for equal files in any folder.

    Reads config.json, the description beside it, and of each file of weights the size, the header and SAMPLES pieces of
    the weights, which distinguish a model from another one trained from it. `layout` is whatever else makes blocks
    differ: dtypes, block size. Raises OSError, ValueError or CorruptCheckpoint.
    """
    state = hashlib.blake2b(digest_size=KEY_BYTES, person=b"kvern model")
    described = folder / "kvern_model.json"  # what kvern computes may depend on it (models/spec_file.py)
    parts = [repr(layout).encode(), read_whole(folder / "config.json")]
    for part in (*parts, *([read_whole(described)] if described.is_file() else [])):
        state.update(digest(part))
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("*.gguf")]):
        with open_regular(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            state.update(digest(file.name.encode()) + size.to_bytes(8, "little"))
            header = min(int.from_bytes(read_at(stream, 0, min(8, size)), "little") + 8, size)
            if file.suffix == ".gguf":
                header = 0  # config.json says what it does
            state.update(read_at(stream, 0, header))
            piece = min(SAMPLE_BYTES, size - header)
            for index in range(SAMPLES):
                state.update(read_at(stream, header + (size - header - piece) * index // (SAMPLES - 1), piece))
    return state.digest()
