"""What a model thought, as text that a client keeps and sends back (`encrypted_content`).

It is packed, not secret: responses show the thinking beside it.
"""

import base64
import zlib

MARK = "kvern1."
MOST_BYTES = 4 << 20
"""Of all thinking that comes packed in one request."""
PART_BYTES = 1 << 18
"""Unpacked at once."""


def packed_reasoning(text: str) -> str:
    """A text that only `opened_reasoning` reads."""
    return MARK + base64.urlsafe_b64encode(zlib.compress(text.encode(errors="replace"))).decode()


def opened_reasoning(content: object, most: int) -> tuple[str | None, int]:
    """The thinking, and how many bytes it took to find it, whether it was found or not.

    None for what comes from elsewhere, is broken, or would have more than `most` bytes.
    """
    if not isinstance(content, str) or not content.startswith(MARK) or len(content) > 2 * most:
        return None, 0
    reader, parts, size = zlib.decompressobj(), [b""], 0
    try:
        packed = base64.urlsafe_b64decode(content[len(MARK) :])
        while size <= most and (part := reader.decompress(packed, PART_BYTES)):
            parts.append(part)
            size += len(part)
            packed = reader.unconsumed_tail
        return b"".join(parts).decode() if reader.eof and size <= most else None, size
    except (ValueError, zlib.error):
        return None, size + PART_BYTES
