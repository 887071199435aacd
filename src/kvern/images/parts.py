"""The file in a client's part of a message, in the formats of all APIs and of Python."""

import base64
import binascii
import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvern.errors import InvalidRequest, shown
from kvern.images.limits import LOW

DATA_URL = re.compile(r"data:[\w.+/-]*(?:;[\w=.-]+)*;base64,(?P<data>.*)", re.DOTALL)
ADDRESS = re.compile(r"(?!data:)[A-Za-z][A-Za-z0-9+.-]*:")
DETAILS = ("auto", "high", "low")


def held_by(part: Mapping[str, Any]) -> object:
    """Returns what a part has of its image: a file in any form, an address, or None if there is nothing."""
    held = next((part[name] for name in ("image_url", "image", "source") if part.get(name) is not None), None)
    return held.get("url", held.get("data")) if isinstance(held, Mapping) else held


def file_id_of(part: Mapping[str, Any]) -> object:
    """Returns the id of a file of the server, in OpenAI's or Anthropic's form; None if the part has none."""
    source = part.get("source")
    return part.get("file_id", source.get("file_id") if isinstance(source, Mapping) else None)


def bytes_of(part: Mapping[str, Any], place: str) -> bytes:
    """Returns the file in OpenAI's or Anthropic's form, or as Python has it: a path, bytes or Pillow's.

    It has the mark of low detail if the part asks for it. Raises InvalidRequest.
    """
    file = _file(part, place)
    return LOW + file if detail_of(part, place) == "low" else file


def detail_of(part: Mapping[str, Any], place: str) -> str:
    """Returns the detail in which a part's image is wanted. Raises InvalidRequest."""
    nested = part.get("image_url")
    detail = nested.get("detail") if isinstance(nested, Mapping) else part.get("detail")
    if detail is not None and detail not in DETAILS:
        raise InvalidRequest(f"{place}: detail is {shown(detail)}: it must be one of {', '.join(DETAILS)}")
    return detail or "auto"


def _file(part: Mapping[str, Any], place: str) -> bytes:
    held = held_by(part)
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
    if found is None and ADDRESS.match(held):
        raise InvalidRequest(f"{place}: the image is {held:.60}: this server opens no addresses; send a data URL")
    try:
        return base64.b64decode(found["data"] if found else held, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidRequest(f"{place}: the image is no base64: {shown(held)}") from None
