"""Reasoning that a client keeps and sends back (`encrypted_content`).

It is packed, not secret: responses show the reasoning beside it.
"""

import base64
import zlib

MARK = "kvern1."
MOST_BYTES = 4 << 20
"""The limit of all packed reasoning in one request."""
PART_BYTES = 1 << 18
"""The bytes that are unpacked at once."""


def packed_reasoning(text: str) -> str:
    """Returns a text in a form that only `opened_reasoning` reads."""
    return MARK + base64.urlsafe_b64encode(zlib.compress(text.encode(errors="replace"))).decode()


def opened_reasoning(content: object, most: int) -> tuple[str | None, int]:
    """Returns the reasoning, and the number of bytes that were unpacked.

    The reasoning is None if it comes from elsewhere, is broken, or has more than `most` bytes.
    """
    if not isinstance(content, str) or not content.startswith(MARK) or len(content) > 2 * most:
        return None, 0
    reader = zlib.decompressobj()
    parts = [b""]
    size = 0
    try:
        packed = base64.urlsafe_b64decode(content[len(MARK) :])
        while size <= most and (part := reader.decompress(packed, PART_BYTES)):
            parts.append(part)
            size += len(part)
            packed = reader.unconsumed_tail
        return b"".join(parts).decode() if reader.eof and size <= most else None, size
    except (ValueError, zlib.error):
        return None, size + PART_BYTES
