"""What a model thought, as text that a client keeps and sends back (`encrypted_content`).

It is packed, not secret: responses show the thinking beside it.
"""

import base64
import binascii
import zlib

MARK = "kvern1."
MOST_CHARACTERS = 4 << 20
"""Of all thinking that comes packed in one request."""


def packed_reasoning(text: str) -> str:
    """A text that only `opened_reasoning` reads."""
    return MARK + base64.urlsafe_b64encode(zlib.compress(text.encode(errors="replace"))).decode()


def opened_reasoning(content: object, most: int) -> str | None:
    """The thinking; None for what comes from elsewhere, is broken, or would have more than `most` bytes."""
    if not isinstance(content, str) or not content.startswith(MARK):
        return None
    try:
        reader = zlib.decompressobj()
        data = reader.decompress(base64.urlsafe_b64decode(content[len(MARK) :]), most + 1)
        return None if len(data) > most or not reader.eof else data.decode()
    except (ValueError, binascii.Error, zlib.error):
        return None
