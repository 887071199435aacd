"""Pages: the KV cache of some tokens as bytes that any store can keep, with a header that says what they are.

    magic 4 | format version 2 | unused 2 | length of the payload 8 | sum of the payload 8 | name 32 | unused 8

The numbers are little-endian. The sum is XXH3, or that of `kernels/page_copy.py` if a GPU copied the page; a model's
identity says which. That of a page with several heads is the XXH3 of its heads' sums. A page is right if its header is,
its name is the one that was asked for, and the sum is that of its payload. Anything else is a miss. The sum finds what
was damaged on the way; it does not prove who wrote it.
"""

import hashlib
import struct
from collections.abc import Callable, Sequence

import xxhash

from kvern.tiers.store import NAME_BYTES

FORMAT_VERSION = 1

_HEADER = struct.Struct("<4sHHQQ32s8x")
_MAGIC = b"kvPG"
HEADER_BYTES = _HEADER.size


def page_names(identity: bytes, kind: bytes) -> Callable[[bytes], bytes]:
    """Makes the names of pages of a kind, 32 bytes each, of the content keys of their last blocks.

    `identity`: the model's.
    """
    begun = hashlib.blake2b(
        len(kind).to_bytes(4, "little") + kind, digest_size=NAME_BYTES, key=identity, person=b"kvern kv page"
    )

    def name(key: bytes) -> bytes:
        state = begun.copy()
        state.update(key)
        return state.digest()

    return name


def header(name: bytes, payload_bytes: int, total: int) -> bytes:
    """The header of a page whose payload has this 64-bit sum."""
    return _HEADER.pack(_MAGIC, FORMAT_VERSION, 0, payload_bytes, total, name)


def sum_of(page: memoryview, name: bytes, payload_bytes: int) -> int | None:
    """The sum that a page's header gives for its payload; None: it is not the header of the page of this name."""
    fields = _HEADER.unpack(page[:HEADER_BYTES])
    total: int = fields[4]
    return total if page[:HEADER_BYTES] == header(name, payload_bytes, total) else None


def payload_sum(payload: memoryview) -> int:
    """The 64-bit sum of a payload in the host's memory: XXH3."""
    return xxhash.xxh3_64_intdigest(payload)


def total_of(sums: Sequence[int]) -> int:
    """The sum of a page whose heads have these sums."""
    return sums[0] if len(sums) == 1 else xxhash.xxh3_64_intdigest(struct.pack(f"<{len(sums)}Q", *sums))


def seal(page: memoryview, name: bytes) -> None:
    """Writes the header before a payload that is in its place, `page[HEADER_BYTES:]`."""
    payload = page[HEADER_BYTES:]
    page[:HEADER_BYTES] = header(name, len(payload), payload_sum(payload))
