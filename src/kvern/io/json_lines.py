"""JSON in one line, for streams and files, and decoding of JSON from others."""

import re
from collections.abc import Callable
from typing import Any

import msgspec

LINE_BREAKS = {"\x85": b"\\u0085", "\u2028": b"\\u2028", "\u2029": b"\\u2029"}
"""Characters that JSON allows and at which `str.splitlines` and similar functions break a line; msgspec escapes the
others."""
ESCAPES = tuple((character.encode(), escape) for character, escape in LINE_BREAKS.items())
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
WIDE_MARKS = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
HALF_AT_END = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}[^\\]{0,5}\Z")


def json_line(value: object, enc_hook: Callable[[Any], Any] | None = None) -> bytes:
    """Returns a value as JSON without any character that a client may take for a line break."""
    data = msgspec.json.encode(value, enc_hook=enc_hook)
    if not data.isascii():
        for character, escape in ESCAPES:
            data = data.replace(character, escape)
    return data


def as_json(value: object) -> msgspec.Raw:
    """Returns a value as encoded JSON, which is copied when it is part of another value."""
    return msgspec.Raw(msgspec.json.encode(value))


def read_json(data: bytes) -> Any:
    """Decodes a JSON text in UTF-8, with or without a byte order mark. Raises ValueError."""
    try:
        return msgspec.json.decode(data.removeprefix(BYTE_ORDER_MARK))
    except UnicodeDecodeError as error:
        raise ValueError(wide_encoding(data) or f"it is not UTF-8 text: {error.reason}") from error
    except msgspec.DecodeError as error:
        raise ValueError(wide_encoding(data) or _reason(str(error), data)) from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply: a few hundred levels are enough for any use") from error


def _reason(said: str, data: bytes) -> str:
    """Returns the reason of msgspec's error `said`; an incomplete surrogate pair at the end is named as such."""
    if "surrogate" in said or ("truncated" in said and HALF_AT_END.search(data, max(len(data) - 11, 0))):
        byte = re.search(r" \(byte \d+\)", said)
        return f"a text has half of a surrogate pair, which is no character{byte[0] if byte else ''}: send both halves"
    return said


def wide_encoding(data: bytes) -> str | None:
    """Returns an error message for data that begins like UTF-16 or UTF-32, else None."""
    name = next((name for mark, name in WIDE_MARKS.items() if data.startswith(mark)), None)
    if name is None and len(data) >= 2 and 0 in data[:2]:
        name = "UTF-16"
    return None if name is None else f"it is {name} text: write it as UTF-8"


MOST_WORK = 1_200_000
"""The limit of the work, about 50 ms: a value counts 1, a field of an object 4 more, a list or object 16."""
WORK = ((b",", 1), (b":", 4), (b"{", 16), (b"[", 16))


def is_too_much(data: bytes) -> bool:
    """True if decoding takes more than the limit. The content of texts costs nothing."""
    if _work(data) <= MOST_WORK:
        return False
    # the counted characters may be inside of texts
    pieces = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    return pieces.count(b'"') > MOST_WORK // 2 or _work(b"".join(pieces.split(b'"')[::2])) > MOST_WORK


def _work(data: bytes) -> int:
    return sum(cost * data.count(character) for character, cost in WORK)
