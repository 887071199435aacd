"""The file in a client's part of a message, in the formats of all APIs and of Python."""

import base64
import binascii
import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvern.errors import InvalidRequest, shown

DATA_URL = re.compile(r"data:[\w.+/-]*(?:;[\w=.-]+)*;base64,(?P<data>.*)", re.DOTALL)


def bytes_of(part: Mapping[str, Any], place: str) -> bytes:
    """Returns the bytes of an image in OpenAI's or Anthropic's form, or as Python has it: a path, bytes or Pillow's.

    Raises InvalidRequest.
    """
    held = next((part[name] for name in ("image_url", "image", "source") if part.get(name) is not None), None)
    if isinstance(held, Mapping):
        held = held.get("url", held.get("data"))
    if isinstance(held, bytes):
        return held
    if isinstance(held, Path):
        try:
            return held.read_bytes()
        except OSError as error:
            raise InvalidRequest(f"{place}: {held} cannot be read: {error.strerror or error}") from None
    if held is not None and hasattr(held, "save") and hasattr(held, "mode"):  # Pillow's
        stream = io.BytesIO()
        held.save(stream, "PNG")
        return stream.getvalue()
    if not isinstance(held, str):
        raise InvalidRequest(f"{place}: the image is {shown(held)}: it must be a data URL, data:image/png;base64,...")
    found = DATA_URL.fullmatch(held)
    if found is None and re.match(r"\w+://", held):
        raise InvalidRequest(f"{place}: the image is {held:.60}: this server opens no addresses; send a data URL")
    try:
        return base64.b64decode(found["data"] if found else held, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(f"{place}: the image is no base64: {shown(held)}") from None
