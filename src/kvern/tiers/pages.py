"""Pages: the KV cache of some tokens as bytes that any store can keep, with a header that says what they are.

    magic 4 | format version 2 | unused 2 | length of the payload 8 | XXH3 sum of the payload 8 | name 32 | unused 8

The numbers are little-endian. A page is right if its header is, its name is the one that was asked for, and the sum is
that of its payload. Anything else is a miss. The sum finds what was damaged on the way; it does not prove who wrote it.
"""

import hashlib
import struct

import xxhash

from kvern.tiers.store import NAME_BYTES

FORMAT_VERSION = 1

_HEADER = struct.Struct("<4sHHQQ32s8x")
_MAGIC = b"kvPG"
HEADER_BYTES = _HEADER.size


def page_name(identity: bytes, kind: bytes, key: bytes) -> bytes:
    """The name of a page: 32 bytes, of the content key of its last block, its kind, and the model's identity."""
    return hashlib.blake2b(
        len(kind).to_bytes(4, "little") + kind + key, digest_size=NAME_BYTES, key=identity, person=b"kvern kv page"
    ).digest()


def seal(page: memoryview, name: bytes) -> None:
    """Writes the header before a payload that is in its place, `page[HEADER_BYTES:]`."""
    payload = page[HEADER_BYTES:]
    page[:HEADER_BYTES] = _HEADER.pack(_MAGIC, FORMAT_VERSION, 0, len(payload), xxhash.xxh3_64_intdigest(payload), name)


def is_right(page: memoryview, name: bytes) -> bool:
    """True if a page came whole, and is the one of this name."""
    payload = page[HEADER_BYTES:]
    header = _HEADER.pack(_MAGIC, FORMAT_VERSION, 0, len(payload), xxhash.xxh3_64_intdigest(payload), name)
    return page[:HEADER_BYTES] == header
